"""Parts of volumes: the byte runs that a reader needs, and the stream of what changed in them. No
torch."""
