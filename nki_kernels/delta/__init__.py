"""The parts of the gated delta rule: `gated_delta` for prompts, `gated_delta_step` for one token of each sequence."""
