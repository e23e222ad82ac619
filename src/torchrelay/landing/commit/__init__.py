"""How every landing ends: told, written, handed over, or taken back."""
