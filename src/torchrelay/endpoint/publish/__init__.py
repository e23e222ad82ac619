"""From a live state to a step that its server shows."""
