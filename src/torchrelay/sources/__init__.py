"""Where states come from: the seam, and what makes a URL or a store into a source."""
