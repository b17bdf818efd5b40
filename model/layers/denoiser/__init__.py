"""Layers of denoisers: patches, conditions, and attention and feed-forward blocks modulated by them."""
