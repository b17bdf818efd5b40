"""A Llama read from a Hugging Face folder, run by NKI kernels or by plain numpy. Importing this imports nothing."""
