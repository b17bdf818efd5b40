"""Model folder on disk: checkpoint, weights of ranks, tokenizer, chat template, shipped models."""
