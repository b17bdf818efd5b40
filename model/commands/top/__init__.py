"""`nkw top`: the metrics of a server in a terminal."""
