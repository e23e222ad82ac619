"""Child processes without torch: how they start, their messages, and their end."""
