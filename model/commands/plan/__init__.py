"""`nkw plan`: plans a model from its config.json."""
