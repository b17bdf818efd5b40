"""MXFP4 and MXFP8 weights: blocks of 32 elements of 4 or 8 bits that share a power of two.

Scales are exponents with a bias of 127, uint8 [out, in / 32]; 255 means NaN (OCP Microscaling Formats, 1.0). bfloat16
represents every product exactly, except products of 2^128 and more, which are infinite. MXFP4 has two elements in a
byte, the lower bits first. gpt-oss stores a weight [in, out] of an expert as `…_blocks` [out, in / 32, 16] and
`…_scales`; compressed-tensors stores a weight [out, in] as `…_packed` [out, in / 2] and `…_scale`, and in MXFP8 as
float8_e4m3fn elements.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import ml_dtypes
import numpy as np

from model.errors import ModelError
from model.formats.format import (
    ELEMENTS,
    SCALES,
    ChipLimits,
    ConfigFields,
    Format,
    QuantisedWeight,
    Shape,
    TensorSpec,
)

BLOCK = 32
"""Elements that share a scale."""
PACKED = 4
"""Elements of an integer that kernels read."""
DTYPE = np.dtype(ml_dtypes.bfloat16)
"""Dtype to which elements are widened."""

_COMPRESSED = "compressed-tensors"
_SUFFIXES = {ELEMENTS: "_blocks", SCALES: "_scales"}
_BYTE = np.dtype(np.uint8)
_E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)
_NUMBERS = np.arange(256, dtype=np.uint8).view(_E4M3FN).astype(np.float32)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN_SCALE = 127, 255
_FILLED, _TILE_ROWS, _PANEL = 128, 128, 512
"""In the order of kernels: inputs up to a multiple of which zeros follow; packed rows of a tile; outputs of a panel."""
_LARGEST_EXPONENT = 2
"""Largest exponent of an element of MXFP4: 6 is 1.5 * 2^2."""
_LARGEST_EXPONENT_E4M3 = 8
"""Largest exponent of an element of MXFP8: 448 is 1.75 * 2^8."""


class _Microscaled(Format):
    """Formats of blocks that share a power of two.

    With `is_computed`, kernels of a chip that multiplies MX formats read packed elements: four inputs in an integer,
    the first in its lowest bits. Otherwise kernels get the widened weight, and a note says so.
    """

    number: ClassVar[str]
    kernel_element: ClassVar[np.dtype]

    @property
    @abstractmethod
    def is_computed(self) -> bool:
        """Whether kernels read stored weights and round rows to MXFP8."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentence on which weights are widened, on this chip."""
        if self.is_computed:
            return (
                f"Weights in {self.number} of dense MLPs are multiplied as stored, by rows that are rounded to MXFP8; "
                "all others are widened to 16 bits or more when they are loaded.",
            )
        return (
            f"Weights in {self.number} are widened to 16 bits or more when they are loaded: only trn3 multiplies "
            f"{self.number}.",
        )

    @property
    def depends_on_chip(self) -> bool:
        """True: not all chips multiply MX formats."""
        return True

    @property
    def kernel_tensors(self) -> tuple[str, ...]:
        """Elements and scales if kernels read them, else none."""
        return (ELEMENTS, SCALES) if self.is_computed else ()

    @property
    def kernels(self) -> tuple[str, ...]:
        """`mlp` alone: `quantises_rows` of other kernels rounds rows with one scale each."""
        return ("mlp",)

    @property
    def row_dtype(self) -> np.dtype | None:
        """Dtype float8_e4m3fn of the elements of rows in MXFP8, or None if weights are widened."""
        return _E4M3FN if self.is_computed else None

    @property
    def row_block(self) -> int:
        """Number of elements of a row in MXFP8 that share a scale, 32."""
        return BLOCK

    def describe_kernel_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return descriptions of packed elements [out, in / 4] and of scales [out, in / 32] uint8."""
        rows, columns = shape
        return {
            ELEMENTS: TensorSpec((rows, columns // PACKED), self.kernel_element, (1, PACKED)),
            SCALES: TensorSpec((rows, columns // BLOCK), _BYTE, (1, BLOCK)),
        }

    def pass_to_kernels(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the elements, four in an integer each, and the scales."""
        octets = np.ascontiguousarray(tensors[ELEMENTS]).view(_BYTE).reshape(len(tensors[ELEMENTS]), -1)
        return {ELEMENTS: octets.view(self.kernel_element), SCALES: tensors[SCALES]}

    def arrange(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return a rank's part of a kernel tensor in the order of kernels, filled with zeros up to 128 inputs.

        Scales [in / 32, out] keep their order. Elements [in / 4, out] lie in panels of 512 outputs, one after the
        other. Of each panel, row t * 128 + p of the full tiles of 512 inputs lies at index [p, t]; remaining rows
        follow.
        """
        padded = np.zeros(self.arrange_shape(name, array.shape), array.dtype)
        padded[: len(array)] = array
        if name != ELEMENTS:
            return padded
        arranged, full = np.empty_like(padded).reshape(-1), len(padded) - len(padded) % _TILE_ROWS
        for first in range(0, padded.shape[1], _PANEL):
            panel = padded[:, first : first + _PANEL]
            tiles = panel[:full].reshape(-1, _TILE_ROWS, panel.shape[1]).swapaxes(0, 1)
            stored = arranged[first * len(padded) :][: panel.size]
            stored[: tiles.size] = tiles.reshape(-1)
            stored[tiles.size :] = panel[full:].reshape(-1)
        return arranged.reshape(padded.shape)

    def arrange_shape(self, name: str, shape: Shape) -> Shape:
        """Return the shape of what `arrange` returns for an array of a shape."""
        multiple = _FILLED // (PACKED if name == ELEMENTS else BLOCK)
        return (-(-shape[0] // multiple) * multiple, *shape[1:])


@dataclass(frozen=True)
class Mx(_Microscaled):
    """MXFP4 format of gpt-oss or of compressed-tensors; as a container it is read only in families that use it.

    `method` is "mxfp4" for the tensor names and the order of axes of gpt-oss, or "compressed-tensors".
    """

    is_general: ClassVar[bool] = False
    number: ClassVar[str] = "MXFP4"
    kernel_element: ClassVar[np.dtype] = np.dtype(np.uint16)
    method: str = "mxfp4"
    is_computed: bool = False

    def adapt_to_chip(self, chip: ChipLimits) -> Mx:
        """Return the format whose weights are computed if the chip multiplies MX formats, and widened otherwise."""
        return replace(self, is_computed=chip.mx)

    @property
    def name(self) -> str:
        """Name of the container that has the weights, "mxfp4" or "compressed-tensors"."""
        return self.method

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> Mx | None:
        """Return the format of gpt-oss, which has no parameters; `quantization_config` is not read."""
        return cls()

    def describe_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return descriptions of elements [out, in / 32, 16] and scales [out, in / 32], uint8 each, for [out, in]."""
        blocks = shape[0], -(-shape[1] // BLOCK)
        return {
            ELEMENTS: TensorSpec((*blocks, BLOCK // 2), _BYTE, (1, BLOCK)),
            SCALES: TensorSpec(blocks, _BYTE, (1, BLOCK)),
        }

    def from_checkpoint(
        self, name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape, dtype: np.dtype
    ) -> QuantisedWeight | None:
        """Remove elements and scales of the weight `name` from `tensors` and return the weight, or None.

        It is None, and nothing is removed, if `tensors` has the plain weight `name` or neither of the two. A weight of
        gpt-oss has the shape [in, out] and widens to bfloat16; `dtype` is ignored for it.

        Raises:
            ModelError: One of the two tensors is missing, or one has a wrong shape or dtype, or a scale of
                compressed-tensors is NaN.
        """
        if self.method == _COMPRESSED:
            return self._from_compressed(name, tensors, shape, dtype)
        names = {tensor: name + suffix for tensor, suffix in _SUFFIXES.items()}
        if name in tensors or not any(stored_name in tensors for stored_name in names.values()):
            return None
        missing = [stored_name for stored_name in names.values() if stored_name not in tensors]
        if missing:
            raise ModelError(f"tensor {missing[0]} is missing")
        stored = {tensor: tensors.pop(stored_name) for tensor, stored_name in names.items()}
        stored_shape = shape[::-1]
        for tensor, spec in self.describe_tensors(stored_shape).items():
            if stored[tensor].shape != spec.shape or shape[0] % BLOCK:
                raise ModelError(
                    f"{names[tensor]} has shape {stored[tensor].shape}; a weight {shape} has {spec.shape}"
                )
            if stored[tensor].dtype != spec.dtype:
                raise ModelError(f"{names[tensor]} has dtype {stored[tensor].dtype}, not {spec.dtype}")
        return QuantisedWeight.from_tensors(self, stored, stored_shape, DTYPE).T

    def _from_compressed(
        self, name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape, dtype: np.dtype
    ) -> QuantisedWeight | None:
        """Return the weight [out, in] in `<name>_packed` and `<name>_scale` as `from_checkpoint` does."""
        packed = f"{name}_packed"
        if packed not in tensors or len(shape) != 2:
            return None
        _check_tensor(packed, tensors[packed], (shape[0], shape[1] // 2), _BYTE, shape)
        scales = _take_scales(name, tensors, shape)
        elements = tensors.pop(packed).reshape(shape[0], -1, BLOCK // 2)
        return QuantisedWeight.from_tensors(self, {ELEMENTS: elements, SCALES: scales}, shape, dtype)

    def widen(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return each element times its block's power of two, float32 [out, in]; NaN in a block with scale 255."""
        scales = tensors[SCALES]
        indices = scales[:, :, None].astype(np.uint16) << 8 | tensors[ELEMENTS]
        return np.take(_list_pairs(), indices, axis=0).reshape(len(scales), -1)

    def pack(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return the stored elements and scales, uint8, of numbers [out, in]; `in` must be a multiple of 32.

        A block's scale makes its largest element at least 4 and below 8. Elements above 6 become 6, as in OCP
        Microscaling Formats 1.0, 6.3; ties go to the even code.
        """
        blocks = array.astype(np.float32).reshape(len(array), -1, BLOCK)
        exponents = _choose_exponents(blocks, _LARGEST_EXPONENT)
        scaled = np.abs(blocks) / np.exp2(exponents)[:, :, None]
        codes = _round_to_even_code(np.minimum(scaled, _MAGNITUDES[-1]))
        codes |= np.signbit(blocks).astype(np.uint8) << 3
        stored = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
        return {ELEMENTS: stored, SCALES: (exponents + _BIAS).astype(np.uint8)}


@dataclass(frozen=True)
class Mx8(_Microscaled):
    """MXFP8 format of compressed-tensors: float8_e4m3fn elements, 32 of which share a power of two."""

    number: ClassVar[str] = "MXFP8"
    kernel_element: ClassVar[np.dtype] = np.dtype(np.uint32)
    is_computed: bool = False

    def adapt_to_chip(self, chip: ChipLimits) -> Mx8:
        """Return the format whose weights are computed if the chip multiplies MX formats, and widened otherwise."""
        return replace(self, is_computed=chip.mx)

    @property
    def name(self) -> str:
        """Name of the container that has the weights, "compressed-tensors"."""
        return _COMPRESSED

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> Mx8 | None:
        """Return None: groups of compressed-tensors choose this format."""
        return None

    def describe_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return descriptions of elements [out, in] float8_e4m3fn and scales [out, in / 32] uint8."""
        scales = TensorSpec((shape[0], -(-shape[1] // BLOCK)), _BYTE, (1, BLOCK))
        return {ELEMENTS: TensorSpec(shape, _E4M3FN), SCALES: scales}

    def from_checkpoint(
        self, name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape, dtype: np.dtype
    ) -> QuantisedWeight | None:
        """Remove `name` and `<name>_scale` from `tensors` and return the weight; None unless `name` is float8_e4m3fn.

        Raises:
            ModelError: The scales are missing, have a wrong shape or dtype, or one is NaN.
        """
        elements = tensors.get(name)
        if elements is None or elements.dtype != _E4M3FN or elements.shape != shape or len(shape) != 2:
            return None
        stored = {SCALES: _take_scales(name, tensors, shape), ELEMENTS: tensors.pop(name)}
        return QuantisedWeight.from_tensors(self, stored, shape, dtype)

    def widen(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return each element times its block's power of two, float32 [out, in]; NaN in a block with scale 255."""
        elements = _NUMBERS[tensors[ELEMENTS].view(np.uint8)]
        exponents = np.repeat(tensors[SCALES].astype(np.int32) - _BIAS, BLOCK, axis=1)[:, : elements.shape[1]]
        wide = np.ldexp(elements, exponents)
        wide[exponents == _NAN_SCALE - _BIAS] = np.nan
        return wide

    def pack(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return the stored elements and scales of numbers [out, in]; `in` must be a multiple of 32.

        A block's scale makes its largest element at least 256 and below 512. Elements above 448 become 448.
        """
        blocks = array.astype(np.float32).reshape(len(array), -1, BLOCK)
        exponents = _choose_exponents(blocks, _LARGEST_EXPONENT_E4M3)
        scaled = np.clip(blocks / np.exp2(exponents)[:, :, None], -_NUMBERS[126], _NUMBERS[126])
        return {
            ELEMENTS: scaled.astype(_E4M3FN).reshape(array.shape),
            SCALES: (exponents + _BIAS).astype(np.uint8),
        }


def _choose_exponents(blocks: np.ndarray, largest: int) -> np.ndarray:
    """Return the exponent of each block's scale, float32 [out, blocks], of numbers [out, blocks, 32].

    The exponent of the largest magnitude in a block, minus that of the format's largest element, `largest`.
    """
    most = np.abs(blocks).max(axis=2)
    exponents = np.where(most > 0, np.floor(np.log2(np.where(most > 0, most, 1))), -_BIAS)
    return np.clip(exponents - largest, -_BIAS, _BIAS)


def _take_scales(name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """Remove the scales `<name>_scale`, uint8 [out, in / 32], of compressed-tensors from `tensors` and return them.

    Raises:
        ModelError: The scales are missing, have a wrong shape or dtype, or one is NaN.
    """
    scale_name = f"{name}_scale"
    if scale_name not in tensors:
        raise ModelError(f"{name} is quantised and has no scales; tensor {scale_name} is missing")
    scales = tensors[scale_name]
    _check_tensor(scale_name, scales, (shape[0], shape[1] // BLOCK), _BYTE, shape)
    if (scales == _NAN_SCALE).any():
        raise ModelError(
            f"{scale_name} contains 255, which is NaN; scales are 0 to 254: quantise {name} again"
        )
    return tensors.pop(scale_name)


def _check_tensor(
    name: str, tensor: np.ndarray, expected: Shape, dtype: np.dtype, weight_shape: Shape
) -> None:
    """Raise ModelError unless a stored tensor has the expected shape and dtype, and rows are whole blocks of 32."""
    if weight_shape[1] % BLOCK:
        raise ModelError(
            f"{name}: rows of {weight_shape[1]} elements; MX formats have blocks of {BLOCK} elements"
        )
    if tensor.shape != expected or tensor.dtype != dtype:
        raise ModelError(
            f"{name} is {tensor.dtype} {tensor.shape}; a weight {weight_shape} has {dtype} {expected}"
        )


def _round_to_even_code(magnitudes: np.ndarray) -> np.ndarray:
    """Return the indices in `_MAGNITUDES`, uint8, of the nearest magnitudes from 0 to 6; ties go to the even index."""
    middles = np.add(_MAGNITUDES[1:], _MAGNITUDES[:-1]) / 2
    below, above = (np.searchsorted(middles, magnitudes, side) for side in ("left", "right"))
    return np.where(below % 2 == 0, below, above).astype(np.uint8)


@lru_cache(maxsize=1)
def _list_pairs() -> np.ndarray:
    """Return a table, float32 [65536, 2]: row 256 * scale + byte has the byte's two elements times 2^(scale - 127)."""
    half = np.array([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)], np.float32)
    codes = np.arange(256)
    elements = np.stack([half[codes & 15], half[codes >> 4]], axis=1)
    exponents = np.arange(256, dtype=np.int32) - _BIAS
    with np.errstate(over="ignore"):
        pairs = np.ldexp(elements, exponents[:, None, None])
    pairs[_NAN_SCALE] = np.nan
    return pairs.reshape(-1, 2)
