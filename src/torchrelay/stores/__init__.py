"""Places that keep states: a directory, a bucket; and the seam to torch's checkpoint planners."""
