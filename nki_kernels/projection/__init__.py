"""Steps around the products of projections, MLPs and heads: loads of rows and weights, norms, and sums over ranks."""
