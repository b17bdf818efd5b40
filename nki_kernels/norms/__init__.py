"""Norms of rows: the record that kernels pass on, and one file for each layout that rows have in SBUF."""
