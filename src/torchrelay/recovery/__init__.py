"""Which source a state is recovered from, and what to do where that fails."""
