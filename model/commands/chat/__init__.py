"""`nkw chat`: a conversation in the terminal."""
