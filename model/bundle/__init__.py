"""`nkw bundle FOLDER --layer N`: the kernel launches of a layer of a model, as a bundle that travels to a chip."""
