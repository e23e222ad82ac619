"""What a rank writes of a step: which boxes, to which files, and the record of it."""
