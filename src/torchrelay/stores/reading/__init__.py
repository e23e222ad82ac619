"""Reads of committed steps: from boxes of tensors to byte ranges of files, and into memory."""
