"""What route `memory` is made of: processes of one machine, shared buffers, the path of a chunk."""
