"""Numbers alone: strides, boxes, runs and chunks."""

DIGEST_BYTES = 16  # of a chunk: its XXH3-128. Here for processes that have no numpy
