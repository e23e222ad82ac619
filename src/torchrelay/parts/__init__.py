"""Parts of published volumes, as they travel to subscribers: runs, changes, streams. No torch."""
