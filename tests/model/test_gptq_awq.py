"""Folders of GPTQ and AWQ: every size of elements, zero points, groups and orders, and files that do not fit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model import LLM, SamplingParams
from model.errors import ModelError
from model.families import load_config, read_config
from model.formats import Affine, QuantisedWeight, Scaled
from model.formats.int4 import Int4
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from nkw.commands import main
from tests.deep import deep_except
from tests.model.containers import (
    Tensors,
    check_generates,
    check_generates_in_bfloat16,
    check_numbers,
    configure,
    save,
    write_container,
)

MODULE = "model.layers.0.mlp.down_proj"


def pack_words(elements: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Return elements [rows, n] as int32 words [rows, n * bits / 32]; the i-th bits have element order[i]."""
    per_word = 32 // bits
    words = np.zeros((elements.shape[0], elements.shape[1] // per_word), np.int64)
    for index in range(per_word):
        position = index if order is None else order[index]
        words |= elements[:, position::per_word].astype(np.int64) << index * bits
    return words.astype(np.uint32).view(np.int32)


class Draw:
    """Draws weights of GPTQ or AWQ with uniform elements, zero points and scales."""

    def __init__(self, bits: int = 4, group: int | None = 32, symmetric: bool = True, **options: Any) -> None:
        """Take the config's values; options are `version` (1, 2, or "awq"), `ordered`, and `has_indices`."""
        self.bits, self.group, self.symmetric = bits, group, symmetric
        self.version = options.get("version", 1)
        self.ordered, self.has_indices = options.get("ordered", False), options.get("has_indices", True)

    def __call__(
        self, module: str, shape: tuple[int, int], random: np.random.Generator
    ) -> tuple[Tensors, np.ndarray]:
        """Return the tensors of a module and its numbers."""
        (rows, columns), group = shape, self.group or shape[1]
        elements = random.integers(0, 2**self.bits, shape)
        groups = -(-columns // group)
        zeros = random.integers(0, 2**self.bits, (rows, groups))
        if self.symmetric:
            zeros[:] = 2 ** (self.bits - 1)
        scales = (random.uniform(0.5, 2, (rows, groups)) / (16 * 2**self.bits)).astype(np.float16)
        indices = np.arange(columns, dtype=np.int32) // group
        if self.ordered:
            random.shuffle(indices)
        numbers = (elements - zeros[:, indices]) * scales.astype(np.float64)[:, indices]
        if self.version == "awq":
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            words = pack_words(elements.T, 4, order), pack_words(zeros.T, 4, order)
        else:
            stored_zeros = zeros - 1 & 2**self.bits - 1 if self.version == 1 else zeros
            words = pack_words(elements, self.bits).T, pack_words(stored_zeros.T, self.bits)
        stored = dict(zip(("qweight", "qzeros", "scales", "g_idx"), (*words, scales.T, indices)))
        if not self.has_indices or self.version == "awq":
            del stored["g_idx"]
        return {f"{module}.{name}": array for name, array in stored.items()}, numbers.astype(np.float32)


def describe(draw: Draw, **changes: Any) -> dict[str, Any]:
    """Return the `quantization_config` of what `draw` draws."""
    group = -1 if draw.group is None else draw.group
    config: dict[str, Any] = dict(bits=draw.bits, group_size=group)
    if draw.version == "awq":
        return config | dict(quant_method="awq", version="gemm", zero_point=not draw.symmetric) | changes
    config |= dict(quant_method="gptq", desc_act=draw.ordered, sym=draw.symmetric)
    return config | ({} if draw.version == 1 else dict(checkpoint_format="gptq_v2")) | changes


def int4(method: str, group: int | None, symmetric: bool) -> Int4:
    return Int4(method, group, symmetric)


CASES: dict[str, tuple[Draw, Any]] = {
    "gptq of 4 bits": (Draw(), int4("gptq", 32, True)),
    "gptq of 4 bits per output": (Draw(group=None), int4("gptq", None, True)),
    "gptq v1 with zero points": (Draw(symmetric=False), int4("gptq", 32, False)),
    "gptq per output with zero points": (Draw(group=None, symmetric=False), int4("gptq", None, False)),
    "gptq v2 with zero points": (Draw(symmetric=False, version=2), int4("gptq", 32, False)),
    "gptq in activation order": (Draw(ordered=True), Affine("gptq", True)),
    "gptq in activation order with zero points": (Draw(ordered=True, symmetric=False), Affine("gptq", True)),
    "gptq without g_idx": (Draw(has_indices=False), int4("gptq", 32, True)),
    "gptq of a group that kernels lack": (Draw(group=16), Affine("gptq")),
    "gptq of 8 bits": (Draw(bits=8), Scaled("gptq", 1, 32, np.dtype(np.int8))),
    "gptq of 8 bits per output": (Draw(bits=8, group=None), Scaled("gptq", 1, None, np.dtype(np.int8))),
    "gptq of 8 bits with zero points": (Draw(bits=8, symmetric=False), Affine("gptq")),
    "awq": (Draw(version="awq", symmetric=False), int4("awq", 32, False)),
    "awq without zero points": (Draw(version="awq"), int4("awq", 32, True)),
}


@pytest.mark.filterwarnings("ignore:Weights in activation order")
@pytest.mark.parametrize("case", CASES)
def test_widened_numbers_and_parts_of_them_are_those_that_were_packed(tmp_path: Path, case: str) -> None:
    """(q - z) * scale is exact in float32 but for one rounding."""
    draw, format = CASES[case]
    _, numbers = write_container(tmp_path / "m", describe(draw), draw)
    check_numbers(tmp_path / "m", numbers, 2.0**-23)
    config = load_config(tmp_path / "m")
    assert config.weight_format is not None and config.weight_format.formats == (format,)
    assert config.weight_format.find_format("lm_head.weight") is None
    weight = open_checkpoint(tmp_path / "m", config)[f"{MODULE}.weight"]
    assert isinstance(weight, QuantisedWeight) and weight.format == format
    wide, random = np.asarray(weight), np.random.default_rng(4)
    for _ in range(12):
        slices = tuple(slice(*sorted(random.integers(0, size + 1, 2).tolist())) for size in wide.shape)
        assert np.array_equal(np.asarray(weight[slices]), wide[slices])
        assert np.array_equal(np.asarray(weight.T[slices[::-1]]), wide[slices].T)


@pytest.mark.filterwarnings("ignore:Weights in activation order")
@pytest.mark.parametrize(
    "case",
    [
        "gptq of 4 bits",
        "gptq in activation order",
        "gptq of 8 bits per output",
        "gptq per output with zero points",
        "awq",
    ],
)
def test_a_folder_computes_its_numbers_on_one_and_two_ranks(tmp_path: Path, case: str) -> None:
    """Kernels read elements of 4 bits as they are stored, and those of 8 bits with one scale for each output."""
    draw, _ = CASES[case]
    _, numbers = write_container(tmp_path / "m", describe(draw), draw)
    stored = {"int8"} if "8 bits" in case else set() if "order" in case else {"uint8"}
    assert check_generates(tmp_path / "m", numbers) == {"float32"} | stored


@pytest.mark.slow
@pytest.mark.parametrize(("group", "inner"), [(32, 512), (128, 512), (128, 384)])
@pytest.mark.parametrize("version", [1, "awq"])
def test_groups_are_computed_in_bfloat16_on_one_and_two_ranks(
    tmp_path: Path, version: Any, group: int, inner: int
) -> None:
    """Rows are so few that their sums are scaled. Two ranks cut inside a group of `down_proj` of 384 inputs.

    They widen it, and compute with the nibbles of the other projections.
    """
    draw = Draw(version=version, group=group, symmetric=False)
    sizes = dict(hidden_size=128, intermediate_size=inner)
    _, numbers = write_container(tmp_path / "m", describe(draw), draw, **sizes)
    config = load_config(tmp_path / "m")
    rank, _ = shard_weights(config, open_checkpoint(tmp_path / "m", config), 2)
    widened = rank.arrays["layers.0.mlp.w_down"].dtype != np.uint8
    assert widened == (inner == 384) and rank.arrays["layers.0.mlp.w_up"].dtype == np.uint8
    check_generates_in_bfloat16(tmp_path / "m", numbers)


def test_activation_order_is_widened_and_a_warning_says_so(tmp_path: Path) -> None:
    """`desc_act` false with an order in `g_idx` is such a weight too; with neighbours it is none."""
    draw = Draw(ordered=True)
    _, numbers = write_container(tmp_path / "m", describe(draw, desc_act=False), draw)
    with pytest.warns(
        UserWarning, match=r"Weights in activation order \(desc_act\) are widened when they are loaded"
    ):
        check_numbers(tmp_path / "m", numbers, 2.0**-23)
    draw = Draw()
    _, numbers = write_container(tmp_path / "neighbours", describe(draw), draw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_numbers(tmp_path / "neighbours", numbers, 2.0**-23)


@pytest.mark.filterwarnings("ignore:Weights in activation order")
@pytest.mark.parametrize("ordered", [False, True])
def test_symmetric_zero_points_decide_their_version(tmp_path: Path, ordered: bool) -> None:
    """Some published folders store zero points of version 2 and say checkpoint_format gptq (vLLM's PR 38966)."""
    draw = Draw(version=2, ordered=ordered)
    _, numbers = write_container(tmp_path / "m", describe(draw, checkpoint_format="gptq"), draw)
    check_numbers(tmp_path / "m", numbers, 2.0**-23)


def test_biases_of_zeros_that_no_layer_reads_are_no_surplus(tmp_path: Path) -> None:
    """Writers of GPTQ add them to layers without biases."""
    tensors, numbers = write_container(tmp_path / "m", describe(Draw()), Draw())
    save(tmp_path / "m", tensors | {f"{MODULE}.bias": np.zeros(64, np.float16)})
    check_numbers(tmp_path / "m", numbers, 2.0**-23)
    save(tmp_path / "m", tensors | {f"{MODULE}.bias": np.ones(64, np.float16)})
    assert refuse(tmp_path / "m") == f"{MODULE}.bias is not a tensor of LlamaForCausalLM"


def refuse(folder: Path) -> str:
    """Return the refusal of a folder, without the path of a file."""
    with pytest.raises(ModelError) as refused:
        open_checkpoint(folder, load_config(folder))
    return str(refused.value).partition(": ")[2]


@pytest.mark.filterwarnings("ignore:Weights in activation order")
@pytest.mark.parametrize("version", [1, "awq"])
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, version: Any) -> None:
    folder, draw = tmp_path / "m", Draw(version=version, ordered=version == 1)
    tensors, numbers = write_container(folder, describe(draw), draw)
    check_numbers(folder, numbers, 2.0**-23)
    method = "awq" if version == "awq" else "gptq"
    for name in ("qweight", "qzeros", "scales", "g_idx")[: 3 if version == "awq" else 4]:
        full_name = f"{MODULE}.{name}"
        array = tensors[full_name]
        save(folder, {key: tensor for key, tensor in tensors.items() if key != full_name})
        sentence = f"tensor {full_name} is missing; {method} stores it beside qweight"
        if name == "qweight":
            sentence = (
                f"tensor {MODULE}.weight is missing; a LlamaForCausalLM has it: download the checkpoint again"
            )
        assert refuse(folder) == sentence
        save(folder, tensors | {full_name: array[:-1]})
        assert refuse(folder).startswith(
            f"{full_name} is {array.dtype} {array[:-1].shape}; a weight (64, 128) of 4 bits"
        )
        save(folder, tensors | {full_name: array.astype(np.int8)})
        assert refuse(folder).startswith(
            f"{full_name} is int8 {array.shape}; a weight (64, 128) of 4 bits in groups of"
        )
    scales = tensors[f"{MODULE}.scales"]
    for number in (0, -1, np.inf, np.nan):
        wrong = scales.copy()
        wrong[1, 3] = number
        save(folder, tensors | {f"{MODULE}.scales": wrong})
        assert refuse(folder).startswith(
            f"{MODULE}.scales contains {float(number)}; scales are finite and above 0: "
        )
    save(folder, tensors)
    check_numbers(folder, numbers, 2.0**-23)
    configure(folder, group_size=64)
    sentence = ".qzeros is int32 (2, 8); a weight (64, 64) of 4 bits in groups of 64 has int32 (1, 8)"
    assert refuse(folder).endswith(sentence)


@pytest.mark.filterwarnings("ignore:Weights in activation order")
@pytest.mark.parametrize("index", [-1, 4])
def test_an_input_without_a_group_is_refused(tmp_path: Path, index: int) -> None:
    draw = Draw(ordered=True)
    tensors, numbers = write_container(tmp_path / "m", describe(draw), draw)
    check_numbers(tmp_path / "m", numbers, 2.0**-23)
    tensors[f"{MODULE}.g_idx"][5] = index
    save(tmp_path / "m", tensors)
    assert refuse(tmp_path / "m") == f"{MODULE}.g_idx contains {index}; groups of {MODULE} are 0 to 3"


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("gptq", dict(bits=3), "bits: 3; elements have 4 or 8 bits"),
        ("gptq", dict(bits=True), "bits: True; elements have 4 or 8 bits"),
        ("gptq", dict(bits=8), None),
        ("gptq", dict(group_size=0), "group_size: 0 is not a positive whole number"),
        ("gptq", dict(group_size=-1), None),
        ("gptq", dict(checkpoint_format="marlin"), "checkpoint_format: 'marlin'; known are gptq, gptq_v2"),
        ("gptq", dict(checkpoint_format="gptq_v2"), None),
        ("gptq", dict(pack_dtype="int16"), "pack_dtype: 'int16'; known are int32"),
        (
            "gptq",
            dict(dynamic={"+:.*up.*": {"bits": 8}}),
            "dynamic: sizes of elements that differ between modules",
        ),
        ("awq", dict(bits=8), "bits: 8; elements have 4 bits"),
        ("awq", dict(version="gemv"), "version: 'gemv'; known is gemm"),
        ("awq", dict(version="GEMM"), None),
        ("awq", dict(modules_to_not_convert="gate"), "modules_to_not_convert: 'gate' is not a list of names"),
        ("awq", dict(modules_to_not_convert=["gate"]), None),
    ],
)
def test_other_packings_are_refused(
    tmp_path: Path, method: str, change: dict[str, Any], message: str | None
) -> None:
    draw = Draw(version="awq" if method == "awq" else 1)
    write_container(tmp_path / "m", describe(draw, **change), lambda *_: None)
    try:
        refusals: tuple[str, ...] = read_config(tmp_path / "m" / "config.json").refusals
    except ModelError as error:
        refusals = (str(error),)
    assert [message in refusal for refusal in refusals] == [True] if message else refusals == ()


def test_modules_that_config_leaves_plain_are_planned_so(tmp_path: Path) -> None:
    draw = Draw(version="awq")
    config = describe(draw, modules_to_not_convert=["k_proj"])
    write_container(tmp_path / "awq", config, draw)
    container = load_config(tmp_path / "awq").weight_format
    assert container is not None and container.find_format("model.layers.0.self_attn.k_proj.weight") is None
    assert container.find_format("model.layers.0.self_attn.q_proj.weight") == container.formats[0]
    modules = [["self_attn.q_proj"], ["mlp.up_proj", "mlp.down_proj"]]
    write_container(
        tmp_path / "gptq", describe(Draw(), modules_in_block_to_quantize=modules, lm_head=True), Draw()
    )
    container = load_config(tmp_path / "gptq").weight_format
    assert container is not None and container.find_format("model.layers.0.mlp.gate_proj.weight") is None
    assert container.find_format("model.layers.0.self_attn.q_proj.weight") == container.formats[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", deep_except(["awq", "gptq of 8 bits per output"], ["awq"]))
def test_plans_and_engines_take_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """The engine is that of `serve`, on two ranks."""
    folder, (draw, _) = tmp_path / "m", CASES[case]
    write_container(folder, describe(draw), draw)
    assert main(["plan", str(folder)]) == 0
    method = "gptq" if "gptq" in case else "awq"
    planned = " ".join(capsys.readouterr().out.split())
    assert f"weights quantised by {method}" in planned or f"Weights quantised by {method} are" in planned
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (output,) = LLM(model=str(folder), tensor_parallel_size=2, dtype="float32").generate(["Tom had"], params)
    assert len(output.outputs[0].token_ids) == 4
