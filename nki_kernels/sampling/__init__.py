"""The parts of `sample` and of the largest logits: two-stage top-k, penalties, candidates and the draw."""
