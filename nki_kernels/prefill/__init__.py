"""The parts of `attention_prefill`: its plan, its operands, its masks, its steps and their order."""
