"""The record of a step: its schema, its bytes, and whether it is valid."""
