"""Host memory for buffers and staged copies."""
