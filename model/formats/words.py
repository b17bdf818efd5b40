"""Containers whose weights are integers packed in int32 words: GPTQ along the inputs, and AWQ along the outputs.

A weight [out, in] of a module has `qweight`, the unsigned elements q; `scales` [groups, out] of 16 or 32 bits; and
`qzeros` [groups, words of outputs], the zero points z, packed along the outputs. Its numbers are (q - z) * scale. GPTQ
has `qweight` [words of inputs, out], the first element in the lowest bits, and `g_idx` int32 [in], the group of each
input. Version 1 of GPTQ stores z - 1, modulo 2^bits, and version 2 stores z. AWQ has `qweight` [in, words of outputs]
of 4 bits; the nibbles of its words, the lowest first, are the outputs 0 2 4 6 1 3 5 7 of eight.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from model.errors import ModelError
from model.formats.affine import ZEROS, Affine
from model.formats.format import (
    ELEMENTS,
    SCALES,
    ConfigFields,
    Container,
    Format,
    QuantisedWeight,
    Shape,
    slice_blocks,
)
from model.formats.groups import CLASSES, PATTERN, Group, Groups, read_skipped_modules
from model.formats.int4 import Int4
from model.formats.scaled import INT8, Scaled, check_scales

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each nibble of a word of AWQ, the lowest nibble first."""
_WORD = np.dtype(np.int32)
_SCALE_DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
_INT4_GROUPS = (None, 32, 64, 128)
"""Groups of inputs that `Int4` reads; other weights are `Affine`."""
_QWEIGHT, _QZEROS, _GROUP_SCALES, _G_IDX = "qweight", "qzeros", "scales", "g_idx"


@dataclass(frozen=True)
class WordPacking:
    """Packing of GPTQ and AWQ (`format.Packing`).

    bits           bits of an element, 4 or 8
    group          inputs that share a scale and a zero point; None for all inputs of an output
    packs_outputs  whether words of `qweight` have elements of eight outputs, as in AWQ, instead of inputs
    zero_offset    what is added to stored zero points, 1 in version 1 of GPTQ
    """

    bits: int
    group: int | None
    packs_outputs: bool = False
    zero_offset: int = 0

    @property
    def per_word(self) -> int:
        """Elements of a word."""
        return 32 // self.bits

    def unpack(
        self, format: Format, tensors: Mapping[str, np.ndarray], shape: Shape, rows: range, columns: range
    ) -> dict[str, np.ndarray]:
        """Return the stored tensors of `format` for the elements [rows, columns], see `format.Packing`."""
        elements = self._unpack_elements(tensors[_QWEIGHT], rows, columns)
        groups: Any = tensors[_G_IDX][columns.start : columns.stop]
        if not isinstance(format, Affine):
            groups = slice_blocks(columns, self.group or shape[1])
        scales = tensors[_GROUP_SCALES][groups, rows.start : rows.stop].T.astype(np.float32)
        zeros = self.unpack_zeros(tensors[_QZEROS], rows)[groups].T
        if isinstance(format, Int4):
            return format.store_nibbles(elements, scales, zeros)
        if isinstance(format, Scaled):
            return {ELEMENTS: (elements ^ np.uint8(128)).view(INT8), SCALES: scales}
        return {ELEMENTS: elements, SCALES: scales, ZEROS: zeros}

    def _unpack_elements(self, words: np.ndarray, rows: range, columns: range) -> np.ndarray:
        """Return the unsigned elements [rows, columns], uint8, of `qweight`."""
        if self.packs_outputs:
            return self._unpack(words[columns.start : columns.stop], rows).T
        return self._unpack(words.T[rows.start : rows.stop], columns)

    def unpack_zeros(self, words: np.ndarray, rows: range) -> np.ndarray:
        """Return the zero points of all groups, uint8 [groups, rows], of `qzeros`."""
        return self._unpack(words, rows) + np.uint8(self.zero_offset) & np.uint8(2**self.bits - 1)

    def _unpack(self, words: np.ndarray, positions: range) -> np.ndarray:
        """Return elements, uint8 [n, positions], of words [n, all words] that are packed along the last axis."""
        first, end = positions.start // self.per_word, -(-positions.stop // self.per_word)
        cut = words[:, first:end].view(np.uint32)
        numbers = np.empty((cut.shape[0], self.per_word * cut.shape[1]), np.uint8)
        order = AWQ_ORDER if self.packs_outputs else range(self.per_word)
        for index, position in enumerate(order):
            numbers[:, position :: self.per_word] = cut >> np.uint32(index * self.bits) & np.uint32(
                2**self.bits - 1
            )
        offset = positions.start - first * self.per_word
        return numbers[:, offset : offset + len(positions)]

    def count_words(self, elements: int) -> int:
        """Return the number of words of so many elements."""
        return -(-elements // self.per_word)


@dataclass(frozen=True, kw_only=True)
class Words(Groups):
    """Container of GPTQ or AWQ; the tensors of a module decide whether it is quantised.

    packing          packing of all quantised weights
    is_symmetric     whether config.json says that zero points are in the middle
    orders_inputs    whether config.json says that inputs were quantised in an order by activations, `desc_act`
    """

    packing: WordPacking
    is_symmetric: bool = True
    orders_inputs: bool = False

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> Container | None:
        """Return the container of `quant_method` gptq or awq; None if its elements have other sizes than 4 or 8 bits.

        Other packings are recorded as unsupported.

        Raises:
            ModelError: A field has a wrong type.
        """
        is_awq = quantization_config.get("quant_method", None) == "awq"
        return (_read_awq if is_awq else _read_gptq)(quantization_config)

    def from_checkpoint(
        self, name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape, dtype: np.dtype
    ) -> QuantisedWeight | None:
        """Remove `qweight` and the other tensors of a weight's module from `tensors` and return the weight.

        It is None, and nothing is removed, if there is no `qweight`.

        Raises:
            ModelError: A tensor is missing or has a wrong shape or dtype; a scale is not a finite number above 0; or an
                input has no group.
        """
        module = name.removesuffix(".weight")
        if f"{module}.{_QWEIGHT}" not in tensors or len(shape) != 2:
            return None
        stored = self._take_tensors(module, tensors, shape)
        check_scales(f"{module}.{_GROUP_SCALES}", stored[_GROUP_SCALES].astype(np.float32), name)
        packing, middle = self.packing, 2 ** (self.packing.bits - 1)
        zeros = packing.unpack_zeros(stored[_QZEROS], range(shape[0]))
        if self.is_symmetric and (zeros == middle + packing.zero_offset).all():
            packing = replace(packing, zero_offset=0)  # some writers of version 2 name no version
            zeros = np.full_like(zeros, middle)
        is_symmetric = self.is_symmetric and bool((zeros == middle).all())
        in_order = np.arange(shape[1], dtype=np.int32) // (packing.group or shape[1])
        is_ordered = not np.array_equal(stored[_G_IDX], in_order)
        has_part = packing.group is not None and shape[1] % packing.group > 0
        format = _choose_format(self.method, packing, is_symmetric, is_ordered, has_part)
        weight = QuantisedWeight.from_tensors(format, stored, shape, dtype)
        return replace(weight, packing=packing)

    def _take_tensors(
        self, module: str, tensors: MutableMapping[str, np.ndarray], shape: Shape
    ) -> dict[str, np.ndarray]:
        """Remove the tensors of a module from `tensors` and return them, with a `g_idx` of neighbours if it has none.

        Raises:
            ModelError: A tensor is missing or has a wrong shape or dtype, or an input has no group.
        """
        packing, (rows, columns) = self.packing, shape
        group = packing.group or columns
        groups = -(-columns // group)
        inputs_outputs = (columns, packing.count_words(rows))
        if not packing.packs_outputs:
            inputs_outputs = (packing.count_words(columns), rows)
        expected: dict[str, tuple[Shape, tuple[np.dtype, ...]]] = {
            _QWEIGHT: (inputs_outputs, (_WORD,)),
            _QZEROS: ((groups, packing.count_words(rows)), (_WORD,)),
            _GROUP_SCALES: ((groups, rows), _SCALE_DTYPES),
            _G_IDX: ((columns,), (_WORD,)),
        }
        stored: dict[str, np.ndarray] = {}
        for tensor, (tensor_shape, dtypes) in expected.items():
            tensor_name = f"{module}.{tensor}"
            if tensor_name not in tensors:
                if tensor == _G_IDX and not self.orders_inputs:
                    stored[tensor] = np.arange(columns, dtype=_WORD) // group
                    continue
                raise ModelError(
                    f"tensor {tensor_name} is missing; {self.method} stores it beside {_QWEIGHT}"
                )
            array = tensors[tensor_name]
            if array.shape != tensor_shape or array.dtype not in dtypes:
                raise ModelError(
                    f"{tensor_name} is {array.dtype} {array.shape}; a weight {shape} of {packing.bits} bits in groups "
                    f"of {group} has {dtypes[0]} {tensor_shape}"
                )
            stored[tensor] = array
        indices = stored[_G_IDX]
        if len(indices) and not 0 <= indices.min() <= indices.max() < groups:
            wrong = indices.min() if indices.min() < 0 else indices.max()
            raise ModelError(f"{module}.{_G_IDX} contains {wrong}; groups of {module} are 0 to {groups - 1}")
        for tensor in expected:
            tensors.pop(f"{module}.{tensor}", None)
        return stored


def _choose_format(
    method: str, packing: WordPacking, is_symmetric: bool, is_ordered: bool, has_part: bool = False
) -> Format:
    """Return the format of weights: one that kernels may read if there is one, else `Affine`, which is widened.

    Args:
        method: `quant_method` of config.json.
        packing: The packing of the weights.
        is_symmetric: Whether all zero points are in the middle of the elements.
        is_ordered: Whether the groups of inputs are not runs of neighbours.
        has_part: Whether the last group has fewer inputs than the others.
    """
    if not is_ordered and not has_part and packing.bits == 4 and packing.group in _INT4_GROUPS:
        return Int4(method, packing.group, is_symmetric)
    if not is_ordered and packing.bits == 8 and is_symmetric:
        return Scaled(method, 1, packing.group, INT8)
    return Affine(method, is_ordered)


def _read_gptq(fields: ConfigFields) -> Words | None:
    """Return the container of GPTQ, see `Words.from_config`."""
    for name, known in (("checkpoint_format", ("gptq", "gptq_v2")), ("pack_dtype", ("int32",))):
        if fields.get(name, known[0]) not in known:
            fields.unsupported(name, f"{fields.get(name, None)!r:.60}; known are {', '.join(known)}")
    if fields.get("dynamic", None):
        fields.unsupported("dynamic", "sizes of elements that differ between modules are not read")
    offset = 0 if fields.get("checkpoint_format", None) == "gptq_v2" else 1
    packing = _read_packing(fields, (4, 8), ("bits",), ("group_size",), zero_offset=offset)
    if packing is None:
        return None
    listed = fields.get("modules_in_block_to_quantize", None)
    modules = [module for block in listed for module in block] if _is_list_of_names(listed) else []
    targets = tuple(f"{PATTERN}.*{module}$" for module in modules) or CLASSES
    skipped = read_skipped_modules(fields, head=fields.get("lm_head", False) is not True)
    return _build(
        "gptq",
        packing,
        targets,
        skipped,
        fields.get("sym", True) is True,
        bool(fields.get("desc_act", False)),
    )


def _read_awq(fields: ConfigFields) -> Words | None:
    """Return the container of AWQ, see `Words.from_config`."""
    version = fields.get("version", fields.get("format", "gemm"))
    if str(version).lower() != "gemm":
        fields.unsupported("version", f"{version!r:.60}; known is gemm")
    packing = _read_packing(
        fields, (4,), ("bits", "w_bit"), ("group_size", "q_group_size"), packs_outputs=True
    )
    if packing is None:
        return None
    skipped = read_skipped_modules(fields, "modules_to_not_convert")
    return _build("awq", packing, CLASSES, skipped, fields.get("zero_point", True) is False, False)


def _build(
    method: str,
    packing: WordPacking,
    targets: tuple[str, ...],
    skipped: tuple[str, ...],
    is_symmetric: bool,
    orders_inputs: bool,
) -> Words:
    """Return a container with one group of weights, which has the `targets` and is named like the method."""
    format = _choose_format(method, packing, is_symmetric, orders_inputs and packing.group is not None)
    return Words(
        method,
        (Group(method, targets, format),),
        skipped,
        packing=packing,
        is_symmetric=is_symmetric,
        orders_inputs=orders_inputs,
    )


def _read_packing(
    fields: ConfigFields,
    known_bits: tuple[int, ...],
    bits_names: tuple[str, ...],
    group_names: tuple[str, ...],
    **options: Any,
) -> WordPacking | None:
    """Return the packing of elements of `known_bits` bits; None, and a recorded message, for other sizes.

    Args:
        fields: Fields of `quantization_config`.
        known_bits: Sizes of elements that are read.
        bits_names: Names of the field with the size of an element, of which the first present one is read.
        group_names: Names of the field with the size of a group; -1 means one group for all inputs.
        options: Further fields of `WordPacking`.

    Raises:
        ModelError: A group size is neither -1 nor a positive integer.
    """
    bits_name = next((name for name in bits_names if name in fields), bits_names[0])
    group_name = next((name for name in group_names if name in fields), group_names[0])
    bits = fields.get(bits_name, 4)
    if type(bits) is not int or bits not in known_bits:
        fields.unsupported(bits_name, f"{bits!r:.60}; elements have {' or '.join(map(str, known_bits))} bits")
        return None
    group = None if fields.get(group_name, 128) == -1 else fields.count(group_name, 128)
    return WordPacking(bits, group, **options)


def _is_list_of_names(modules: object) -> bool:
    """Return whether a value is a list of lists of strings."""
    return isinstance(modules, list) and all(
        isinstance(block, list) and all(isinstance(module, str) for module in block) for block in modules
    )
