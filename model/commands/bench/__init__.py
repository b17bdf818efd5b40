"""`nkw bench`: measures servers."""
