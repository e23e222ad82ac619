"""A process group: lines, deadlines and what ranks decide together."""
