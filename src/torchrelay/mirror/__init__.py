"""A second place for the steps of a job: committed steps are copied there."""
