"""`nkw serve`: its options and its entry."""
