"""Multiply two tiles element by element."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def multiply(a, b):
    product = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=nl.load(a), data2=nl.load(b), op=nl.multiply)
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, product)
    return out


a, b = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
np.testing.assert_array_equal(multiply(a, b), a * b)
