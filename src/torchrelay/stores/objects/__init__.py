"""Steps in object storage. No torch."""
