"""Losses of the shipped story model in every scheme of `nkw quantize`, against stored ones."""
