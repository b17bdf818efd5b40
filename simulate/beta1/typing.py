"""`neuronxcc.nki.typing`: annotations for kernel parameters."""

from simulate.nki.typing import mutable_tensor, tensor

__all__ = ["mutable_tensor", "tensor"]
