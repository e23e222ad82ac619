"""Which records are valid. Everything that later steps rely on is checked here, once."""
