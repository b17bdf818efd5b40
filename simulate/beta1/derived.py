"""Instructions of Beta 1 that are derived from the instruction book by a table, one row for each.

A row says what differs from NKI 0.6. A derived function takes parameters of the planner of its name, with the
planner's defaults, and `mask=`, `dtype=` and `name=`. It has no `dst` if it returns its result as a tile. Other
keywords are options of the compiler and are ignored. An issuer, of type `Run`, is the function that issues a row's
instruction.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from simulate.beta1.elementwise import elementwise, issue_once
from simulate.beta1.masks import no_mask
from simulate.beta1.operators import translate_operator
from simulate.beta1.program import current, issue
from simulate.beta1.reductions import reduce
from simulate.beta1.tile import Tile, read_operand
from simulate.isa.book import INSTRUCTIONS, CallError
from simulate.isa.enums import ReduceCmd
from simulate.memory import NkiTensor

_REQUIRED = inspect.Parameter.empty
_STATISTICS, _MEAN_AND_VARIANCE, _SLOTS = 6, 2, 8

Values = dict[str, Any]
Run = Callable[[str, Values, Any, Any], Any]


@dataclass(frozen=True)
class Row:
    """Row of the table: how a Beta 1 instruction differs from the planner of the instruction book.

    parameters: names, those after `*` by keyword only. run: gets the planner's name, the values of all parameters,
    mask and dtype; returns the result. defaults: defaults that differ from the planner's. common: parameters that
    Beta 1 adds. planner: the name in the book if it differs.
    """

    parameters: str
    run: Run
    defaults: Mapping[str, Any] = field(default_factory=dict)
    common: str = "mask dtype name"
    planner: str = ""


def _issue_streamed(tiles: str, columns: str = "") -> Run:
    """Return an issuer whose result has one element for each element of its tiles.

    Args:
        tiles: Names of the parameters that are tiles.
        columns: Names of the parameters that are numbers or (P, 1) tiles.
    """

    def run(instruction: str, values: Values, mask: Any, dtype: Any) -> Tile:
        streams, rows = ({name: values.pop(name) for name in names.split()} for names in (tiles, columns))
        return elementwise(instruction, streams, rows, values, dtype, mask)

    return run


def _issue_whole(
    tiles: str, shape: Callable[[Values], tuple[int, ...]], result_dtype: str | None = None
) -> Run:
    """Return an issuer on whole tiles, which refuses masks.

    Args:
        tiles: Names of the parameters that are tiles, or None.
        shape: Returns the shape of the result from the values of the parameters.
        result_dtype: The dtype of the result without `dtype=`; None is that of the first tile.
    """

    def run(instruction: str, values: Values, mask: Any, dtype: Any) -> Tile:
        no_mask(instruction, mask)
        operands = {name: values[name] for name in tiles.split()}
        attributes = {name: value for name, value in values.items() if name not in operands}
        return issue_once(instruction, operands, attributes, lambda: shape(values), result_dtype, dtype)

    return run


def _issue_into_dst(returns_dst: bool) -> Run:
    """Return an issuer that writes to the tile passed as `dst`, and refuses masks.

    Args:
        returns_dst: Whether the instruction returns `dst`; otherwise it returns None.
    """

    def run(instruction: str, values: Values, mask: Any, dtype: Any) -> Tile | None:
        current().settle()
        no_mask(instruction, mask)
        issue(instruction, **{name: _convert_operand(name, value) for name, value in values.items()})
        return values["dst"] if returns_dst else None

    return run


def _issue_cumulative(instruction: str, values: Values, mask: Any, dtype: Any) -> None:
    """Issue tensor_scalar_cumulative into `dst`; imm1 is ignored unless reduce_cmd is load_reduce.

    Public examples always pass imm1.
    """
    if values["reduce_cmd"] is not ReduceCmd.load_reduce:
        values["imm1"] = None
    _issue_into_dst(returns_dst=False)(instruction, values, mask, dtype)


def _convert_operand(name: str, value: Any) -> Any:
    """Return the value of a parameter as the instruction book takes it: a tensor for a tile, other values unchanged."""
    if name in ("dst", "reduce_res") and value is not None:
        return value.tensor
    return _view_flags(value) if name == "predicate" else read_operand(value)


def _view_flags(predicate: Tile) -> NkiTensor:
    """Return a predicate as the instruction book takes it: bytes of a boolean tile as uint8, others unchanged."""
    tensor = predicate.operand
    return tensor.view("uint8") if tensor.dtype == "bool_" else tensor


def _build_shape_function(tile: str, *free: int) -> Callable[[Values], tuple[int, ...]]:
    """Return a shape function: the partitions of the parameter `tile`, then the sizes `free`."""
    return lambda values: (values[tile].shape[0], *free)


def _compute_gathered_shape(values: Values) -> tuple[int, ...]:
    """Return local_gather's shape: (partitions, indices), and the elements per index as a third dim if above 1."""
    partitions, index, per_index = values["src_buffer"].shape[0], values["index"], values["num_elem_per_idx"]
    count = values["num_valid_indices"]
    if count is None:
        count = index.size // max(index.shape[0] // 16, 1)
    return (partitions, count) if per_index == 1 else (partitions, count, per_index)


def _compute_bounds_shape(values: Values) -> tuple[int, ...]:
    """Return the shape of sequence_bounds' result: (partitions, 2, segment ids per partition)."""
    segments = values["segment_ids"]
    return (segments.shape[0], 2, segments.size // segments.shape[0])


_ROWS = {
    "activation": Row(
        "op data * bias scale reduce_op reduce_res reduce_cmd",
        _issue_streamed("data", "bias scale reduce_res"),
    ),
    "activation_reduce": Row(
        "op data * reduce_op reduce_res bias scale",
        _issue_streamed("data", "bias scale reduce_res"),
        {"reduce_op": None, "reduce_res": None},
    ),
    "tensor_tensor": Row("data1 data2 op * engine", _issue_streamed("data1 data2")),
    "tensor_scalar": Row(
        "data op0 operand0 reverse0 op1 operand1 reverse1 * engine",
        _issue_streamed("data", "operand0 operand1"),
    ),
    "scalar_tensor_tensor": Row(
        "* data op0 operand0 op1 operand1 reverse0 reverse1", _issue_streamed("data operand1", "operand0")
    ),
    "tensor_scalar_reduce": Row(
        "* data op0 operand0 reduce_op reduce_res reverse0",
        _issue_streamed("data", "operand0 reduce_res"),
        {"reduce_res": _REQUIRED},
    ),
    "tensor_reduce": Row(
        "op data axis * negate keepdims",
        lambda _, values, mask, dtype: reduce(**values, mask=mask, dtype=dtype),
    ),
    "tensor_copy": Row("src * engine", _issue_streamed("src")),
    "reciprocal": Row("data *", _issue_streamed("data")),
    "dropout": Row("data prob *", _issue_streamed("data", "prob")),
    "tensor_tensor_scan": Row(
        "data0 data1 initial op0 op1 reverse0 reverse1 *", _issue_streamed("data0 data1", "initial")
    ),
    # Beta 1's reduce_cmd was idle by default, whatever its tests expect; as in 0.6 it is reset_reduce here, which
    # differs only in what reduce_res gets.
    "range_select": Row(
        "* on_true_tile comp_op0 comp_op1 bound0 bound1 reduce_cmd reduce_res reduce_op range_start on_false_value",
        _issue_streamed("on_true_tile", "bound0 bound1 reduce_res"),
    ),
    "tensor_partition_reduce": Row(
        "op data *", _issue_whole("data", lambda values: (1, *values["data"].shape[1:]))
    ),
    "bn_stats": Row("data *", _issue_whole("data", _build_shape_function("data", _STATISTICS))),
    "bn_aggr": Row("data *", _issue_whole("data", _build_shape_function("data", _MEAN_AND_VARIANCE))),
    "max8": Row("* src", _issue_whole("src", _build_shape_function("src", _SLOTS))),
    "nc_find_index8": Row(
        "* data vals", _issue_whole("data vals", _build_shape_function("data", _SLOTS), "uint32")
    ),
    "nc_match_replace8": Row(
        "* data vals imm dst_idx", _issue_whole("data vals dst_idx", lambda values: values["data"].shape)
    ),
    "local_gather": Row(
        "src_buffer index num_elem_per_idx num_valid_indices *",
        _issue_whole("src_buffer index", _compute_gathered_shape),
        common="mask name",
    ),
    "sequence_bounds": Row(
        "* segment_ids", _issue_whole("segment_ids", _compute_bounds_shape), common="dtype name"
    ),
    "nc_stream_shuffle": Row(
        "src dst shuffle_mask *", _issue_into_dst(returns_dst=False), common="mask name"
    ),
    "tensor_scalar_cumulative": Row(
        "* src dst op0 op1 imm0 imm1 reduce_cmd", _issue_cumulative, common="mask name"
    ),
    "tensor_copy_predicated": Row(
        "* src dst predicate reverse_pred", _issue_into_dst(returns_dst=True), common="mask name"
    ),
    "select_reduce": Row(
        "* dst predicate on_true on_false reduce_res reduce_cmd reduce_op reverse_pred",
        _issue_into_dst(returns_dst=True),
        common="mask name",
    ),
}


def _build_function(name: str, row: Row) -> Callable[..., Any]:
    """Return the function of a row under its name; a call that does not fit its signature raises CallError."""
    planner = INSTRUCTIONS[row.planner or name]
    planned = inspect.signature(planner).parameters
    positional, keywords = (words.split() for words in row.parameters.split("*"))
    names, common = (*positional, *keywords), row.common.split()
    defaults = {p: row.defaults.get(p, planned[p].default) for p in names} | dict.fromkeys(common)
    required = [p for p, default in defaults.items() if default is _REQUIRED]
    # The op of an activation is a function of the Scalar engine and no ALU operator.
    operators = [
        p for p in names if p.rstrip("01").endswith("op") and (p != "op" or "activation" not in name)
    ]

    def function(*args: Any, **kwargs: Any) -> Any:
        values = {**defaults, **dict(zip(positional, args))}
        for p, value in kwargs.items():
            if p in values:
                values[p] = value
        twice = args and not kwargs.keys().isdisjoint(positional[: len(args)])
        if twice or len(args) > len(positional) or any(values[p] is _REQUIRED for p in required):
            _refuse(name, signature, args, kwargs)
        for p in operators:
            values[p] = translate_operator(values[p])
        mask, dtype = values.pop("mask", None), values.pop("dtype", None)
        return row.run(planner.__name__, values, mask, dtype)

    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [
            inspect.Parameter(
                p, by_position if p in positional else inspect.Parameter.KEYWORD_ONLY, default=default
            )
            for p, default in defaults.items()
        ]
        + [inspect.Parameter("_", inspect.Parameter.VAR_KEYWORD)]
    )
    function.__name__ = function.__qualname__ = name
    function.__doc__ = (
        f"{name} of Beta 1; in terms of NKI 0.6, where the result is an operand:\n\n{planner.__doc__}"
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _refuse(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Values) -> NoReturn:
    """Raise CallError for a call that does not fit the signature; the message lists the parameters."""
    parameters = ", ".join(p for p in signature.parameters if p != "_")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as mismatch:
        raise CallError("NKW-CALL", f"{name}: {mismatch}; its parameters are {parameters}") from None
    raise AssertionError("a call that fits its signature was refused")


DERIVED: dict[str, Callable[..., Any]] = {name: _build_function(name, row) for name, row in _ROWS.items()}
"""Every derived function by its name."""

gather_flattened = _build_function(
    "gather_flattened",
    Row(
        "data indices *",
        _issue_whole("data indices", lambda values: values["indices"].shape),
        common="mask dtype",
        planner="nc_n_gather",
    ),
)
"""Of `nki.language`."""
