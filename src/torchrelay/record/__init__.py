"""Everything about a state but its bytes: records, their validation and their encodings."""
