"""`nkw generate`: prompts through a backend, each token checked against plain numpy, with predicted times."""
