"""The states of several live ranks, put together: who has which bytes, and what is read of each."""
