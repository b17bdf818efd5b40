"""SBUF, PSUM and HBM: allocations as bytes with validity, and the tensors that view them."""

from simulate.memory.objects import NKIObject
from simulate.memory.regions import MemoryRegion
from simulate.memory.storage import Storage
from simulate.memory.tensor import Dynamic, NkiTensor

__all__ = ["Dynamic", "MemoryRegion", "NKIObject", "NkiTensor", "Storage"]
