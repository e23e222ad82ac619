"""HTTP: connections, requests and who may ask. Knows nothing of steps. No torch."""
