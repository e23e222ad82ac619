"""The two sides of a transfer as pure state machines, and what they speak of."""
