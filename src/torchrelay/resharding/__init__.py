"""A state that several live ranks have parts of, cut anew for another rank."""
