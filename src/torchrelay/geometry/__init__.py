"""Numbers alone: strides, boxes, runs and chunks."""
