"""Where states come from: the interface, and what makes a URL or a store into a source."""
