"""Weight sync: workers that follow the steps that a trainer publishes."""
