"""A state whose parts are on several live ranks: put together, planned, fetched, resharded."""
