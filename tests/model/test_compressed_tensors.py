"""Folders of compressed-tensors: storage formats, groups, targets and `ignore`, and config.json against tensors."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import load_config, read_config
from model.formats import QuantisedWeight
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from tests.model.containers import (
    Tensors,
    check_generates,
    check_generates_in_bfloat16,
    check_numbers,
    configure,
    save,
    write_container,
)

E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)
METHOD = "compressed-tensors"
MLP, ATTENTION = "model.layers.0.mlp", "model.layers.0.self_attn"
UP = f"{MLP}.up_proj"


def describe(storage: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    """Return a `quantization_config` with one group of all linear layers but the head."""
    return {
        "quant_method": METHOD,
        "format": storage,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **group}},
        "ignore": ["lm_head"],
    }


def draw_scales(shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    return random.uniform(0.5, 2, shape).astype(np.float32) / np.float32(1024)


def draw_int8(module: str, shape: tuple[int, int], random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """Return a weight of int8 elements with a scale for each row."""
    elements, scales = random.integers(-128, 128, shape, np.int8), draw_scales((shape[0], 1), random)
    stored = {f"{module}.weight": elements, f"{module}.weight_scale": scales}
    return stored, elements.astype(np.float32) * scales


def draw_fp8(module: str, shape: tuple[int, int], random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """Return a weight of fp8 elements from 2^-5 on, which e4m3 of the chips has too, with a scale for each row."""
    magnitudes = np.ldexp(1 + random.integers(0, 8, shape) / 8, random.integers(-5, 3, shape))
    elements = (magnitudes * random.choice([-1, 1], shape)).astype(E4M3FN)
    scales = draw_scales((shape[0], 1), random) * np.float32(64)
    stored = {f"{module}.weight": elements, f"{module}.weight_scale": scales}
    return stored, elements.astype(np.float32) * scales


def draw_int4(
    module: str, shape: tuple[int, int], random: np.random.Generator, group: int = 32
) -> tuple[Tensors, np.ndarray]:
    """Return a weight of nibbles with a scale and a zero point for each group of inputs, packed eight in a word."""
    (rows, columns), shifts = shape, 4 * np.arange(8)
    nibbles, zeros = random.integers(0, 16, shape), random.integers(0, 16, (rows, columns // group))
    scales = draw_scales(zeros.shape, random) * np.float32(16)
    numbers = (nibbles - np.repeat(zeros, group, axis=1)) * np.repeat(
        scales.astype(np.float64), group, axis=1
    )
    words = (nibbles.reshape(rows, -1, 8) << shifts).sum(axis=2)
    zero_words = (zeros.reshape(-1, 8, zeros.shape[1]) << shifts[:, None]).sum(axis=1)
    stored = {
        "weight_packed": words.astype(np.uint32).view(np.int32),
        "weight_scale": scales,
        "weight_zero_point": zero_words.astype(np.uint32).view(np.int32),
        "weight_shape": np.array(shape),
    }
    return {f"{module}.{name}": array for name, array in stored.items()}, numbers.astype(np.float32)


def draw_mxfp4(
    module: str, shape: tuple[int, int], random: np.random.Generator
) -> tuple[Tensors, np.ndarray]:
    """Return a weight of MXFP4: a code has a sign, two bits of exponent (bias 1) and one of mantissa."""
    codes = random.integers(0, 16, shape, np.uint8)
    exponents, mantissas = codes >> 1 & 3, codes & 1
    magnitudes = np.where(exponents == 0, mantissas / 2, (1 + mantissas / 2) * 2.0 ** (exponents - 1.0))
    scales = random.integers(119, 122, (shape[0], shape[1] // 32), np.uint8)
    numbers = np.where(codes & 8, -magnitudes, magnitudes) * np.repeat(2.0 ** (scales - 127.0), 32, axis=1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return {f"{module}.weight_packed": packed, f"{module}.weight_scale": scales}, numbers.astype(np.float32)


def draw_mxfp8(
    module: str, shape: tuple[int, int], random: np.random.Generator
) -> tuple[Tensors, np.ndarray]:
    """Return a weight of MXFP8 with elements of all sizes."""
    codes = random.integers(0, 127, shape, np.uint8) | random.integers(0, 2, shape, np.uint8) << 7
    elements = codes.view(E4M3FN)
    scales = random.integers(114, 118, (shape[0], shape[1] // 32), np.uint8)
    numbers = elements.astype(np.float32) * np.repeat(2.0 ** (scales - 127.0), 32, axis=1)
    return {f"{module}.weight": elements, f"{module}.weight_scale": scales}, numbers.astype(np.float32)


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
MX: dict[str, Any] = {
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": "torch.uint8",
}
STORAGES: dict[str, tuple[dict[str, Any], Callable[..., tuple[Tensors, np.ndarray]], str]] = {
    "naive-quantized": (FP8, draw_fp8, "float8_e4m3"),
    "int-quantized": (INT8, draw_int8, "int8"),
    "pack-quantized": (INT4, draw_int4, "uint8"),
    "mxfp4-pack-quantized": (MX | {"num_bits": 4}, draw_mxfp4, ""),
    "mxfp8-quantized": (MX | {"num_bits": 8}, draw_mxfp8, ""),
}


@pytest.mark.filterwarnings("ignore:Weights in MXFP")
@pytest.mark.parametrize("storage", STORAGES)
def test_a_folder_of_each_storage_computes_its_numbers_on_one_and_two_ranks(
    tmp_path: Path, storage: str
) -> None:
    weights, draw, dtype = STORAGES[storage]
    _, numbers = write_container(tmp_path / "m", describe(storage, weights), draw)
    check_numbers(tmp_path / "m", numbers)
    assert check_generates(tmp_path / "m", numbers) == {"float32"} | ({dtype} if dtype else set())


@pytest.mark.slow
@pytest.mark.parametrize("group", [32, 128])
def test_groups_are_computed_in_bfloat16_on_one_and_two_ranks(tmp_path: Path, group: int) -> None:
    """Ranks have groups of the inputs of `down_proj`; rows are so few that their sums are scaled."""
    config, draw = describe("pack-quantized", INT4 | {"group_size": group}), partial(draw_int4, group=group)
    _, numbers = write_container(tmp_path / "m", config, draw, hidden_size=128, intermediate_size=512)
    check_generates_in_bfloat16(tmp_path / "m", numbers)


def refuse(folder: Path) -> str:
    """Return the refusal of a folder, without the path of a file."""
    with pytest.raises(ModelError) as refused:
        open_checkpoint(folder, load_config(folder))
    return str(refused.value).partition(": ")[2]


def mixed(**changes: Any) -> dict[str, Any]:
    """Return a config whose attention has int8 weights and whose MLP has MXFP4 weights, without `o_proj`."""
    groups = {
        "attention": {"targets": ["re:.*self_attn.*"], "weights": INT8},
        "rest": {"targets": ["Linear"], "weights": MX | {"num_bits": 4}, "format": "mxfp4-pack-quantized"},
        "exact": {"targets": [f"{MLP}.down_proj"], "weights": FP8},
    }
    ignore = ["lm_head", "re:.*o_proj$"]
    config = {
        "quant_method": METHOD,
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ignore,
    }
    return config | changes


def draw_mixed(module: str, shape: tuple[int, int], random: np.random.Generator) -> Any:
    if module.endswith("o_proj"):
        return None
    draw = draw_fp8 if module.endswith("down_proj") else draw_int8 if "attn" in module else draw_mxfp4
    return draw(module, shape, random)


@pytest.mark.filterwarnings("ignore:Weights in MXFP")
def test_groups_have_formats_of_their_own_and_names_go_before_patterns_and_classes(tmp_path: Path) -> None:
    """`kv_cache_scheme` and its scales are no reason to refuse a folder."""
    folder = tmp_path / "m"
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    tensors, numbers = write_container(folder, mixed(kv_cache_scheme=scheme), draw_mixed)
    save(folder, tensors | {f"{ATTENTION}.{name}_scale": np.ones(1, np.float32) for name in "kv"})
    check_numbers(folder, numbers)
    check_generates(folder, numbers)
    container = load_config(folder).weight_format
    assert container is not None and len(container.formats) == 3
    assert container.find_format(f"{ATTENTION}.o_proj.weight") is None
    assert container.find_format("lm_head.weight") is None
    checkpoint = open_checkpoint(folder, load_config(folder))
    for name, weight in checkpoint.items():
        format = weight.format if isinstance(weight, QuantisedWeight) else None
        assert format is None or container.find_format(name) == format


@pytest.mark.filterwarnings("ignore:Weights in MXFP")
def test_config_against_tensors_is_refused_with_the_name_of_the_layer(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    tensors, numbers = write_container(folder, mixed(), draw_mixed)
    check_numbers(folder, numbers)
    groups = mixed()["config_groups"]
    configure(folder, ignore=["lm_head", "re:.*o_proj$", UP])
    assert refuse(folder) == (
        f"{UP} is in ignore of quantization_config, so its weight is plain; but the file has {UP}.weight_packed: "
        "correct quantization_config"
    )
    configure(
        folder, ignore=["lm_head"], config_groups={name: groups[name] for name in ("attention", "exact")}
    )
    assert refuse(folder).startswith(
        f"{MLP}.gate_proj is in the targets of no group of quantization_config, so its"
    )
    configure(folder, **mixed())
    plain = {name: array for name, array in tensors.items() if not name.startswith(f"{MLP}.down_proj")}
    save(folder, plain | {f"{MLP}.down_proj.weight": numbers[f"{MLP}.down_proj.weight"]})
    assert refuse(folder) == (
        f"{MLP}.down_proj is in the targets of exact of quantization_config, and its weight is plain: quantise it, or "
        'add its name to "ignore"'
    )
    save(folder, tensors)
    check_numbers(folder, numbers)
    configure(folder, config_groups=groups | {"none": {"targets": ["re:.*vision.*"], "weights": INT8}})
    assert refuse(folder) == (
        "quantization_config: none has the target 're:.*vision.*', which matches no weight: correct the target or "
        "remove it"
    )


def test_a_plain_layer_among_quantised_ones_of_its_name_is_refused(tmp_path: Path) -> None:
    """The class Linear targets every matrix; names that no quantised layer has, such as a router's, may be plain."""
    folder = tmp_path / "m"

    def draw_first(module: str, shape: tuple[int, int], random: np.random.Generator) -> Any:
        return None if module == f"{ATTENTION}.k_proj" else draw_int8(module, shape, random)

    config = describe("int-quantized", INT8)
    _, numbers = write_container(folder, config, draw_first, num_hidden_layers=2)
    sentence = (
        f"{ATTENTION}.k_proj is in the targets of group_0 of quantization_config, and its weight is plain: "
    )
    assert refuse(folder).startswith(sentence)
    configure(folder, ignore=["lm_head", f"{ATTENTION}.k_proj"])
    check_numbers(folder, numbers)
    configure(folder, ignore=["lm_head", "re:.*k_proj"])
    second = f"{ATTENTION}.k_proj".replace(".0.", ".1.")
    assert refuse(folder) == (
        f"{second} is in ignore of quantization_config, so its weight is plain; but the file has "
        f"{second}.weight_scale: correct quantization_config"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(ignore=[UP, "lm_head"]), f"'{UP}' is a target of exact and in ignore: keep one"),
        (dict(ignore=["re:.*up_proj"]), f"'{UP}' is a target of exact and in ignore: keep one"),
        (dict(ignore=["re:.*down_proj"]), None),
        (dict(ignore=["re:*"]), "'re:*' is not a regular expression"),
        (dict(ignore=[3]), "ignore: [3] is not a list of names"),
    ],
)
def test_lists_that_contradict_each_other_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str | None
) -> None:
    groups = {
        "exact": {"targets": [UP], "weights": FP8},
        "other": {"targets": ["Linear"], "weights": INT8},
    }
    config = {"quant_method": METHOD, "config_groups": groups, "ignore": ["lm_head"]}
    write_container(tmp_path / "m", config | change, lambda *_: None)
    refusals = read_config(tmp_path / "m" / "config.json").refusals
    assert [message in refusal for refusal in refusals] == [True] if message else refusals == ()


def test_scales_of_inputs_are_kept_and_a_warning_says_which_kernel_uses_them(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config = describe("float-quantized", FP8, input_activations=inputs)
    tensors, numbers = write_container(folder, config, draw_fp8)
    modules = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    tensors |= {f"{module}.input_scale": np.array([0.25], ml_dtypes.bfloat16) for module in modules}
    save(folder, tensors)
    sentence = (
        r"config.json quantises input rows of linear layers to fp8 \(input_activations\); mlp does so, with the static "
        "scales of the checkpoint, and other kernels multiply them in the dtype of activations"
    )
    with pytest.warns(UserWarning, match=sentence):
        checkpoint = open_checkpoint(folder, load_config(folder))
    weight = checkpoint[f"{UP}.weight"]
    assert isinstance(weight, QuantisedWeight) and weight.input_scale == weight.T[1:].input_scale == 0.25
    for scale, message in (
        (np.zeros(1, np.float32), "contains 0.0; scales are finite and above 0: quantise"),
        (np.full(1, np.nan, np.float32), "contains nan; scales are finite and above 0: quantise"),
        (np.ones(2, np.float32), "is float32 (2,); a static scale of rows is one number, of F32, F16, BF16"),
        (np.ones(1, np.int8), "is int8 (1,); a static scale of rows is one number, of F32, F16, BF16"),
    ):
        save(folder, tensors | {f"{UP}.input_scale": scale})
        assert refuse(folder).startswith(f"{UP}.input_scale {message}")
    save(folder, tensors)
    configure(folder, **describe("float-quantized", FP8))
    plain_rows = open_checkpoint(folder, load_config(folder))[f"{UP}.weight"]
    assert isinstance(plain_rows, QuantisedWeight) and plain_rows.input_scale is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_numbers(folder, numbers)


@pytest.mark.filterwarnings("ignore:config.json quantises input rows")
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_become_integers_before_mlp_multiplies_int8_weights(tmp_path: Path, ranks: int) -> None:
    """Logits of a prompt and a step are those of the reference, which rounds rows; plain rows give others.

    In float32 no integer is on the other side of a boundary for these numbers, so that sums differ by their order.
    """
    folder = tmp_path / "m"
    rows = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    _, numbers = write_container(folder, describe("int-quantized", INT8, input_activations=rows), draw_int8)
    config = load_config(folder)
    checkpoint = open_checkpoint(folder, config)
    shards = shard_weights(config, checkpoint, ranks, dtype="float32")
    assert shards[0].arrays["layers.0.mlp.w_up"].dtype == np.int8
    kernels = KernelModel(config, shards, SimulatedDevice("trn2", ranks), 128)
    reference = ReferenceModel(config, checkpoint, "float32", ranks=ranks)
    plain = ReferenceModel(config, numbers, "float32", ranks=ranks)
    for run in (lambda model: model.prefill([[5, 3, 9, 1]])[0], lambda model: model.decode([7], [4])[0]):
        output, expected, unrounded = (run(model).logits for model in (kernels, reference, plain))
        most = np.abs(expected).max()
        assert np.abs(output - expected).max() <= 2.0**-12 * most
        assert np.abs(unrounded - expected).max() > 2.0**-10 * most


@pytest.mark.filterwarnings("ignore:Weights in MXFP")
@pytest.mark.parametrize("storage", ["mxfp4-pack-quantized", "mxfp8-quantized"])
def test_blocks_that_do_not_fit_are_refused(tmp_path: Path, storage: str) -> None:
    folder = tmp_path / "m"
    weights, draw, _ = STORAGES[storage]
    tensors, numbers = write_container(folder, describe(storage, weights), draw)
    check_numbers(folder, numbers)
    name = f"{UP}.weight_packed" if "4" in storage else f"{UP}.weight"
    scales = tensors[f"{UP}.weight_scale"]
    for change, message in (
        (
            {f"{UP}.weight_scale": scales[:, :-1]},
            f"{UP}.weight_scale is uint8 (128, 1); a weight (128, 64) has uint8",
        ),
        (
            {f"{UP}.weight_scale": scales.astype(np.float32)},
            f"{UP}.weight_scale is float32 (128, 2); a weight",
        ),
        (
            {f"{UP}.weight_scale": scales | np.uint8(255)},
            f"{UP}.weight_scale contains 255, which is NaN; scales are",
        ),
        ({name: tensors[name][:, :-1]}, f"{name} "),
    ):
        save(folder, tensors | change)
        assert refuse(folder).startswith(message)
    save(folder, {key: array for key, array in tensors.items() if key != f"{UP}.weight_scale"})
    assert (
        refuse(folder) == f"{UP}.weight is quantised and has no scales; tensor {UP}.weight_scale is missing"
    )
    save(folder, tensors)
    with pytest.warns(
        UserWarning, match=re.escape(f"Weights in {storage[:5].upper()} are widened to 16 bits")
    ):
        check_numbers(folder, numbers)


@pytest.mark.parametrize("group_size", [32, 64])
def test_packed_nibbles_that_do_not_fit_are_refused(tmp_path: Path, group_size: int) -> None:
    """The tensors have groups of 32; a config with groups of 64 is one of the faults."""
    folder = tmp_path / "m"
    tensors, numbers = write_container(folder, describe("pack-quantized", INT4), draw_int4)
    check_numbers(folder, numbers, 2.0**-23)
    if group_size == 64:
        groups = describe("pack-quantized", INT4 | {"group_size": 64})["config_groups"]
        configure(folder, config_groups=groups)
        name = f"{ATTENTION}.q_proj.weight"
        assert refuse(folder) == (
            f"{name}_scale is float32 (64, 2); a weight (64, 64) of 4 bits has float32 or float16 or bfloat16 (64, 1)"
        )
        return
    name = f"{UP}.weight"
    packed, scales, zeros = (tensors[f"{name}_{tensor}"] for tensor in ("packed", "scale", "zero_point"))
    wrong = {number: scales.copy() for number in (0.0, -1.0, np.inf, np.nan)}
    for number, array in wrong.items():
        array[3, 1] = number
    for change, message in (
        (
            {f"{name}_packed": packed[:, :-1]},
            f"{name}_packed is int32 (128, 7); a weight (128, 64) of 4 bits has int32",
        ),
        (
            {f"{name}_packed": packed.astype(np.int64)},
            f"{name}_packed is int64 (128, 8); a weight (128, 64) of 4 bits",
        ),
        (
            {f"{name}_scale": scales.T},
            f"{name}_scale is float32 (2, 128); a weight (128, 64) of 4 bits has float32",
        ),
        (
            {f"{name}_scale": scales.astype(np.int32)},
            f"{name}_scale is int32 (128, 2); a weight (128, 64) of 4 bits",
        ),
        (
            {f"{name}_zero_point": zeros[:-1]},
            f"{name}_zero_point is int32 (15, 2); a weight (128, 64) of 4 bits has",
        ),
        (
            {f"{name}_shape": np.array([64, 128])},
            f"{name}_shape contains (64, 128); config.json asks for (128, 64)",
        ),
        *(
            (
                {f"{name}_scale": array},
                f"{name}_scale contains {number}; scales are finite and above 0: quantise",
            )
            for number, array in wrong.items()
        ),
    ):
        save(folder, tensors | change)
        assert refuse(folder).startswith(message)
    for tensor in ("scale", "zero_point"):
        save(folder, {key: array for key, array in tensors.items() if key != f"{name}_{tensor}"})
        assert refuse(folder) == f"tensor {name}_{tensor} of a weight (128, 64) of 4 bits is missing"
