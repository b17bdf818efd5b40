"""The parts of `attention_decode` and `attention_block_decode`: tile sizes, tokens, caches, products, softmax."""
