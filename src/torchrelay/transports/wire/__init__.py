"""The bytes of the live protocol, without any I/O: messages, frames, the handshake."""
