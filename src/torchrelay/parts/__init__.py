"""Parts of volumes: the byte runs that a reader needs, and the stream of them. No torch."""
