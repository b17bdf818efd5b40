"""`nkw traffic`: its options and its entry."""
