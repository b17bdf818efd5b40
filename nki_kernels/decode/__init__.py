"""The parts of `attention_decode`: tile sizes, new tokens, caches, products, softmax, and their pipeline."""
