"""Layers of networks over images: convolutions, group norms, and blocks of them."""
