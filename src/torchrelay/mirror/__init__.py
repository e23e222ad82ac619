"""A second home for the steps of a job: committed steps are copied there."""
