"""What convolutions and poolings share: where windows lie, and the products of their taps."""
