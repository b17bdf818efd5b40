"""The parts of `experts_decode` and `experts_prefill`: weights at run-time addresses, products, places of rows."""
