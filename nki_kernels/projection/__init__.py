"""The parts of projections, MLP and head: rows and their norms, products, and what follows them."""
