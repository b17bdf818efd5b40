"""`nkw bundle FOLDER`: a model's kernel launches, of one layer or of a generation, as a bundle for a chip."""
