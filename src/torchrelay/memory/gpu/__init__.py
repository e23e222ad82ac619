"""Memory of a GPU, and the way to it: kernels, streams, spare copies, pinned buffers."""
