"""What a state is but for its bytes: records, their validation and their encodings."""
