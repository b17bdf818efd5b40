"""`nkw top`: shows the metrics of a server in a terminal."""
