"""`nkw bundle FOLDER`: kernel launches of a layer or of a generation, as a bundle for a chip."""
