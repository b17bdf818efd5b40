"""The command `nkw`."""
