"""A state whose parts are on several live ranks, resharded for another rank."""
