"""`nkw generate`: continues prompts on a backend, checks each token against plain numpy, and predicts times."""
