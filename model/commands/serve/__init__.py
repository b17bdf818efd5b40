"""`nkw serve`: serves a model by HTTP."""
