"""A check of the cluster that a job will run on: `python -m torchrelay.check` on every rank.

Probes collect facts (`machine`, `links`, `routes`, `folder`, `bucket`, `survival`), pure functions
next to them judge the facts, and `report` prints one table.
"""
