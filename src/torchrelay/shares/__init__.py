"""One rank's share of a step: its boxes, its files, and the record of them."""
