"""`nkw plan`: its options and its entry."""
