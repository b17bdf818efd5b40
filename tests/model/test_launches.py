"""The launch list: what it states of shapes, dtypes and work is what a device is given, and gives back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import nki.language as nl
import numpy as np
import pytest

import nki_kernels
from model.device import DryDevice
from model.device.binding import bind_arguments, find_parameter_indices
from model.errors import ModelError
from model.execution.launch_list import list_launches
from model.families import compose, load_config
from model.layers.joint import join_launches
from model.layers.launch import Launch, Phase, StepShape, Value, WeightDtypes
from model.layers.layer import list_states
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.mesh import Mesh
from model.runners.contiguous import KernelModel
from tests.deep import deep_except
from tests.model.shapes import SHARDED

CUT = [
    (changes, ranks, cuts) for changes, ranks in SHARDED for cuts in (False, True) if ranks > 1 or not cuts
]
"""The same, and whether the ranks cut the rows of prompts."""

FLOAT32 = np.dtype(np.float32)
PROMPT = 9


class Recorded(DryDevice):
    """A device that keeps what every rank was given and returned."""

    def __init__(self, target: str, ranks: int) -> None:
        super().__init__(target, ranks)
        self.calls: list[tuple[str, Sequence[Mapping[str, Any]], list[Any]]] = []

    def run(self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Any = ()) -> list[Any]:
        outputs = super().run(kernel, arguments, written)
        self.calls.append((kernel, arguments, outputs))
        return outputs


@dataclass
class Loaded:
    model: KernelModel
    device: Recorded
    launches: dict[Phase, list[Launch]]


def loaded(folder, ranks: int, dtype: str = "float32", cuts: bool = False) -> Loaded:
    config = load_config(folder)
    weights = shard_weights(config, dict(open_checkpoint(folder, config)), ranks, dtype=dtype)
    device = Recorded("trn2", ranks)
    decoder = compose(config)
    weight_dtype = weights[0].arrays["head.w_head"].dtype
    mesh = Mesh(ranks, sequence=cuts)
    tokens, dtypes = mesh.pad_length(PROMPT, 1), (weights[0].dtype, weight_dtype)
    step = StepShape(
        *(Phase.prefill, tokens, 1, 128, config.context, ranks, dtypes[0], WeightDtypes(dtypes[1])),
        cuts_sequence=cuts,
    )
    lists = {
        phase_step.phase: [
            launch for section in decoder.sections for launch in list_launches(section, phase_step)
        ]
        for phase_step in (step, replace(step, phase=Phase.decode, tokens=1))
    }
    return Loaded(KernelModel(config, weights, device, 128, mesh=mesh), device, lists)


@pytest.mark.parametrize(
    ("changes", "ranks", "cuts", "dtype"),
    deep_except([(*cut, dtype) for cut in CUT for dtype in ("float32", "bfloat16")], 5),
)
def test_a_device_is_given_the_list_in_its_order_shapes_and_dtypes(
    write_model, changes, ranks, cuts, dtype
) -> None:
    case = loaded(write_model(**changes), ranks, dtype, cuts)
    case.model.prefill([list(range(3, 3 + PROMPT))])
    case.model.decode([5], [PROMPT])
    listed = [*case.launches[Phase.prefill], *case.launches[Phase.decode]]
    assert [kernel for kernel, _, _ in case.device.calls] == [launch.kernel for launch in listed]
    for launch, (_, arguments, outputs) in zip(listed, case.device.calls):
        first, returned = arguments[0], outputs[0]
        assert first.keys() == launch.arguments.keys()
        for parameter, stated in launch.arguments.items():
            array = first[parameter]
            if isinstance(stated, Value):
                assert (launch.kernel, array.shape, array.dtype) == (
                    launch.kernel,
                    stated.shape,
                    stated.dtype,
                )
            else:
                assert not isinstance(array, np.ndarray)
        count = len(returned) if isinstance(returned, tuple) else 1
        assert count == len(launch.results)


@pytest.mark.parametrize(("changes", "ranks", "cuts"), CUT)
def test_what_a_launch_returns_is_what_later_launches_read(write_model, changes, ranks, cuts) -> None:
    """A name is read only after something returned it, or where it is a weight, a state, a constant or the step's."""
    case = loaded(write_model(**changes), ranks, cuts=cuts)
    decoder = compose(load_config(write_model(name="again", **changes)))
    step = StepShape(Phase.decode, 1, 1, 128, 64, ranks, FLOAT32, WeightDtypes(FLOAT32))
    known = {
        "ids",
        "positions",
        *(["logits_indices"] if cuts else []),
        *(weight.name for weight in decoder.weights),
    }
    for layer in decoder.layers:
        known |= {state.name for state in list_states(layer, step)} | set(layer.constants(step))
    for launches in case.launches.values():
        available = set(known)
        for launch in launches:
            read = {value.name for value in launch.values}
            assert read <= available, f"{launch.kernel} reads {read - available}"
            available |= set(launch.results)
        assert {"logits", "values", "tokens"} <= available


def test_the_least_work_of_a_product_is_every_weight_once(write_model) -> None:
    """Bytes of a prompt's products are the weights but for norms and table; two operations a weight and row."""
    folder = write_model()
    launches = loaded(folder, 1).launches[Phase.prefill]
    names = ("qkv_projection", "output_projection", "mlp", "lm_head")
    products = [launch.work for launch in launches if launch.kernel in names]
    shapes = {
        tensor.name: prod(tensor.shape)
        for weight in compose(load_config(folder)).weights
        for tensor in weight.tensors
        if len(tensor.shape) == 2 and "embed" not in tensor.name
    }
    assert sum(work.bytes for work in products) == 4 * sum(shapes.values())
    rows = {name: 1 if name == "lm_head" else PROMPT for name in names}
    by_rows = sum(
        launch.work.operations / rows[launch.kernel] for launch in launches if launch.kernel in names
    )
    assert by_rows == 2 * sum(shapes.values())


def test_the_least_work_of_a_decode_step_is_every_weight_and_the_cache_once(write_model) -> None:
    """Of attention: w_qkv and w_o, both caches, and four operations for an element of a query and a position."""
    decoder = compose(load_config(write_model()))
    step = StepShape(Phase.decode, 3, 3, 128, 64, 1, FLOAT32, WeightDtypes(FLOAT32))
    layer = decoder.blocks[0][0]
    (launch,) = layer.launches(step)
    products = [prod(weight.shape(step.shard)) for weight in (layer.w_qkv, layer.w_o)]
    assert launch.work.bytes == 4 * sum(products) + sum(state.nbytes for state in list_states(layer, step))
    queries = layer.w_o.shape(step.shard)[0]
    assert launch.work.operations == 3 * (2 * sum(products) + 4 * queries * 128)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_work_and_sums_over_them_move_nothing_through_hbm(write_model, ranks) -> None:
    one, many = (loaded(write_model(name=f"model{index}"), count) for index, count in enumerate((1, ranks)))
    for name in ("mlp", "output_projection"):
        (alone, *_), (shared, *_) = (
            [launch.work for launch in case.launches[Phase.prefill] if launch.kernel == name]
            for case in (one, many)
        )
        assert (shared.bytes, shared.operations) == (alone.bytes / ranks, alone.operations / ranks)


def test_ranks_that_cut_the_sequence_hold_their_rows_of_a_prompt_and_decode_as_without(write_model) -> None:
    """Of 9 tokens, padded to 12, each of 4 ranks has 3 rows of x; queries, keys and values are of all."""
    uncut, cut = (loaded(write_model(name=str(cuts)), 4, cuts=cuts).launches for cuts in (False, True))
    assert cut[Phase.decode] == uncut[Phase.decode]
    rows = {
        (value.name, value.shape[0])
        for launch in cut[Phase.prefill][:-1]
        for value in launch.values
        if value.name in ("ids", "x", "q", "o", "positions")
    }
    assert rows == {("ids", 3), ("x", 3), ("q", 12), ("o", 12), ("positions", 12)}


def test_views_are_rows_from_the_end() -> None:
    array = np.arange(12).reshape(4, 3)
    value = Value("x", (4, 3), array.dtype)
    assert value.take_view(array) is array
    assert np.array_equal(value.take_last(1).take_view(array), array[3:])
    assert np.array_equal(value.take_last(3).take_view(array), array[1:])
    assert value.take_last(4).takes_last_rows


@pytest.mark.parametrize(
    ("batch", "chunks"), [(127, [(127, 1)]), (128, [(128, 1)]), (300, [(128, 2), (44, 1)])]
)
def test_a_step_of_many_sequences_lists_rows_and_repeats(write_model, batch, chunks) -> None:
    """Up to 128 sequences a decoder layer is one launch; of more the MLP reads its weights once for all."""
    decoder = compose(load_config(write_model()))
    step = StepShape(Phase.decode, batch, batch, 128, 64, 1, FLOAT32, WeightDtypes(FLOAT32))
    first, *remaining = list_launches(decoder.blocks[0], step)
    attend = [first, *remaining[:-1]]
    name = "decoder_layer_decode" if batch <= 128 else "attention_block_decode"
    assert {launch.kernel for launch in attend} == {name}
    assert [launch.kernel for launch in remaining[-1:]] == ([] if batch <= 128 else ["mlp"])
    assert [(launch.rows, launch.repeat) for launch in attend] == chunks
    assert [(launch.rows, launch.repeat) for launch in decoder.sections[-1][0].launches(step)] == chunks


def test_a_joint_launch_is_its_parts_and_only_what_the_kernel_takes_is_joined(write_model) -> None:
    layers = compose(load_config(write_model())).blocks[0]
    step = StepShape(Phase.decode, 3, 3, 128, 64, 2, FLOAT32, WeightDtypes(FLOAT32))
    block, mlp = [launch for layer in layers for launch in layer.launches(step)]
    assert join_launches([block, mlp], lnc=2) == [block, mlp]
    (layer,) = join_launches([block, mlp])
    assert (layer.fused, layer.results) == ((block, mlp), block.results)
    assert layer.work.operations == block.work.operations + mlp.work.operations
    assert layer.work.bytes == block.work.bytes + mlp.work.bytes
    parameters = inspect.signature(nki_kernels.decoder_layer_decode.func).parameters
    assert layer.arguments.keys() <= parameters.keys()
    for launch, in_layer in ((block, {}), (mlp, {"norm_weight": "mlp_norm_weight"})):
        for name, argument in launch.arguments.items():
            if name not in ("norm_bias", "norm_offset", "residual", "sequence_ranks", "row_gate"):
                assert layer.arguments[in_layer.get(name, name)] == argument
    weight = mlp.arguments["norm_weight"]
    for changed in (
        {"eps": 1e-3},
        {"norm_bias": weight},
        {"norm_offset": 1.0},
        {"residual": False},
        {"row_gate": weight},
        {"norm_weight": None},
        {"w_up_block_scales": weight},
    ):
        launches = [block, replace(mlp, arguments={**mlp.arguments, **changed})]
        assert join_launches(launches) == launches
    for launches in ([block, replace(mlp, rows=4)], [mlp, block]):
        assert join_launches(launches) == launches
    gelu = {**mlp.arguments, "activation": "gelu", "b_up": weight, "w_up_scales": weight}
    scaled_block = replace(block, arguments={**block.arguments, "w_o_scales": weight})
    (layer,) = join_launches([scaled_block, replace(mlp, arguments=gelu)])
    arguments = layer.arguments
    assert (arguments["activation"], arguments["b_up"], arguments["sinks"]) == ("gelu", weight, None)
    assert (arguments["w_up_scales"], arguments["w_o_scales"]) == (weight, weight)
    assert layer.arguments.keys() <= parameters.keys()


def test_an_argument_is_bound_by_its_name_and_one_that_the_kernel_lacks_is_refused() -> None:
    """What is left out has its default, so a launch that gives a default equals one that leaves it out."""
    arguments = {"table": 2, "ids": 1, "scale": 3.0}
    assert bind_arguments("embedding", arguments) == (1, 2, nl.float32, 3.0, None, None, None, None)
    assert bind_arguments("embedding", {**arguments, "positions": None}) == bind_arguments(
        "embedding", arguments
    )
    assert find_parameter_indices("embedding", ["table", None, "ids"]) == (1, None, 0)
    with pytest.raises(ModelError, match=r"^embedding: no parameter tables, no argument for table$"):
        bind_arguments("embedding", {"ids": 1, "tables": 2})


@pytest.mark.parametrize("window", [None, 7])
def test_a_network_names_every_array_that_its_steps_read(write_model, window) -> None:
    """Values of launches are weights, states, constants, results of earlier launches, or inputs of the network."""
    changes = {} if window is None else {"model_type": "mistral", "sliding_window": window}
    architectures = {} if window is None else {"architectures": ["MistralForCausalLM"]}
    network = compose(load_config(write_model(**changes, **architectures)))
    pages = {"pages": 9, "block_size": 16, "padded": True, "cache_length": 128}
    step = StepShape(Phase.decode, 2, 2, 128, 64, 1, FLOAT32, WeightDtypes(FLOAT32))
    step = replace(step, **pages, window_pages=() if window is None else ((window, 5),))
    network_arrays = {
        name for weight in network.weights for name in weight.describe(step.shard, step.weights)
    }
    for layer in network.layers:
        network_arrays |= {*layer.constants(step), *(state.name for state in list_states(layer, step))}
    read = set()
    for section in network.sections:
        for launch in list_launches(section, step):
            read |= {value.name for value in launch.values} - network_arrays
            network_arrays |= set(launch.results)
    assert read <= set(network.inputs)
    assert {name for name in read if name.startswith("slot_mapping")} == {
        "slot_mapping" if window is None else f"slot_mapping.{window}"
    }
