"""Weights of eight bits with scales: every code, cuts, folders as they are published, and files that do not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from model.device import SimulatedDevice, chip
from model.errors import ModelError
from model.families import load_config, read_config
from model.formats import QuantisedWeight, Scaled
from model.formats.scaled import ELEMENT, INT8
from model.layers.arithmetic import Arithmetic
from model.layers.launch import WeightDtypes
from model.layers.shard import Shard, by_kv_heads, by_query_heads
from model.layers.weight import Tensor, Weight
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.deep import deep_except
from tests.model.folders import byte_tokenizer
from tests.model.oracle import Oracle, random_model
from tests.model.test_dense_families import CACHE, IDS, PROMPT, assert_equal
from tests.model.tiny_families import COMMON, TINY, tiny_model, write_tiny

torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

FILE = "model.safetensors"
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def element(code: int) -> float:
    """Decode a code by its fields: a sign, four bits of exponent (bias 7), three of mantissa; 127 is NaN."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return np.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def spread(scales: np.ndarray, rows: int, columns: int, shape: tuple[int, int]) -> np.ndarray:
    """Return the scale of every element of a tensor [out, in]."""
    return np.kron(scales, np.ones((rows, columns)))[: shape[0], : shape[1]]


def coded(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Return random numbers of eight bits."""
    codes = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    codes[codes & 127 == 127] = 0
    return codes.view(ELEMENT)


def scales_of(shape: tuple[int, int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(1e-3, 3e-3, shape).astype(np.float32)


def weight_of(
    elements: np.ndarray, scales: np.ndarray, format: Scaled, dtype: np.dtype = FLOAT32
) -> QuantisedWeight:
    """Return a weight of stored tensors."""
    tensors = {"elements": elements, "scales": scales}
    return QuantisedWeight.from_tensors(format, tensors, elements.shape, dtype)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, np.dtype(np.float16)])
def test_every_code_with_scales_of_every_size(dtype: np.dtype) -> None:
    """Powers of two keep products exact in float32, so that they are rounded once."""
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8), (40, 256)).copy()
    scales = np.exp2(np.arange(-30, 10, dtype=np.float32))[:, None]
    widened = np.asarray(weight_of(codes.view(ELEMENT), scales, Scaled("fp8", 1, None), dtype))
    exact = np.array([element(code) for code in range(256)]) * scales.astype(np.float64)
    with np.errstate(over="ignore"):
        wanted = exact.astype(np.float32).astype(dtype)
    assert widened.dtype == dtype and np.array_equal(
        widened.astype(np.float32), wanted.astype(np.float32), equal_nan=True
    )


def test_kernels_get_half_of_every_code_and_twice_the_scales() -> None:
    """Only the odd multiples of 2^-9 below 2^-5 change."""
    codes = np.arange(256, dtype=np.uint8)[:, None]
    scales = np.full((256, 1), 0.75, np.float32)
    passed = Scaled("fp8", 1, None).pass_to_kernels({"elements": codes.view(ELEMENT), "scales": scales})
    exact = np.array([element(code) for code in range(256)])[:, None]
    finite = np.isfinite(exact)
    numbers = passed["elements"].astype(np.float64) * passed["scales"]
    changed_codes = finite & (numbers != exact * 0.75)
    assert finite.sum() == 254 and changed_codes.sum() == 16
    assert np.isnan(numbers[~finite]).all() and np.abs(exact[changed_codes]).max() < 2**-5
    assert np.abs(numbers - exact * 0.75)[changed_codes].max() == 0.75 * 2**-9
    for rows in (None, 1):
        shapes = Scaled("fp8", rows, None).describe_kernel_tensors((256, 1))
        assert {name: spec.shape for name, spec in shapes.items()} == {
            "elements": (256, 1),
            "scales": (256, 1),
        }
    tensor_wide = {"elements": codes.view(ELEMENT), "scales": scales[:1]}
    assert same(
        Scaled("fp8", None, None).pass_to_kernels(tensor_wide)["scales"].copy(), passed["scales"].copy()
    )
    assert Scaled("fp8", 16, 24).kernel_tensors == ()


@pytest.mark.parametrize("sizes", [(128, 128), (256, 128), (128, 384)])
@pytest.mark.parametrize("shape", [(127, 129), (128, 128), (300, 520)])
def test_kernels_get_a_scale_for_each_128_rows_and_columns(
    sizes: tuple[int, int], shape: tuple[int, int]
) -> None:
    rows, columns = sizes
    format = Scaled("compressed-tensors", rows, columns, INT8)
    elements = np.random.default_rng(8).integers(-127, 128, shape, np.int8)
    scales = scales_of(format.describe_tensors(shape)["scales"].shape, 9)
    passed = format.pass_to_kernels({"elements": elements, "scales": scales})
    specs = format.describe_kernel_tensors(shape)
    assert {name: array.shape for name, array in passed.items()} == {n: s.shape for n, s in specs.items()}
    wide = elements * spread(passed["block_scales"], 128, 128, shape)
    assert np.array_equal(wide, elements * spread(scales, rows, columns, shape))
    for refused in ((64, 128), (128, 200), (1, 128)):
        assert Scaled("fp8", *refused).kernel_tensors == ()


@pytest.mark.parametrize("sizes", [(128, 128), (1, 300), (129, 300), (64, 40)])
@pytest.mark.parametrize("shape", [(127, 129), (128, 128), (129, 127), (300, 260)])
def test_blocks_at_the_ends_may_be_short(shape: tuple[int, int], sizes: tuple[int, int]) -> None:
    rows, columns = sizes
    format = Scaled("fp8", rows, columns)
    scales = scales_of(format.describe_tensors(shape)["scales"].shape, 3)
    elements = coded(shape, 4)
    weight = weight_of(elements, scales, format)
    wide = spread(scales, rows, columns, shape).astype(np.float32)
    wanted = elements.astype(np.float32) * wide
    assert weight.shape == shape == np.asarray(weight).shape
    assert np.array_equal(np.asarray(weight), wanted)
    assert np.array_equal(np.asarray(weight.T), wanted.T)
    assert np.array_equal(weight.reshape(-1), wanted.reshape(-1))
    assert np.array_equal(np.asarray(weight.astype(BFLOAT16)), wanted.astype(BFLOAT16))
    random = np.random.default_rng(5)
    for _ in range(20):
        slices = tuple(slice(*sorted(random.integers(0, size + 1, 2).tolist())) for size in shape)
        assert np.array_equal(np.asarray(weight[slices]), wanted[slices])
        assert np.array_equal(np.array(weight[slices[0]]), wanted[slices[0]])
        assert np.array_equal(np.asarray(weight.T[slices[1], slices[0]]), wanted.T[slices[1], slices[0]])
        assert np.array_equal(np.asarray(weight[slices][1:, 2:].T), wanted[slices][1:, 2:].T)


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
def test_a_tensor_is_widened_as_transformers_does(dtype_name: str) -> None:
    """Use whole blocks of scales only, since transformers widens no others."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    elements, scales = coded((384, 256), 6), scales_of((3, 2), 7)
    bits = torch.from_numpy(elements.view(np.uint8)).view(torch.float8_e4m3fn)
    wanted = Fp8Dequantize(None)._dequantize_one(bits, torch.from_numpy(scales), getattr(torch, dtype_name))
    weight = weight_of(
        elements, scales, Scaled("fp8", 128, 128), FLOAT32 if dtype_name == "float32" else BFLOAT16
    )
    assert np.array_equal(np.asarray(weight).astype(np.float32), wanted.float().numpy())


SCHEMES: dict[str, tuple[dict[str, Any], Scaled, str]] = {
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 24], "fmt": "e4m3"},
        Scaled("fp8", 16, 24),
        "_scale_inv",
    ),
    "blocks of 128": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        Scaled("fp8", 128, 128),
        "_scale_inv",
    ),
    "a scale for each tensor": (
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        Scaled("fp8", None, None),
        "_scale",
    ),
    **{
        f"compressed, {strategy}": (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {
                            "type": "float",
                            "num_bits": 8,
                            "symmetric": True,
                            "strategy": strategy,
                            "block_structure": structure,
                        }
                    }
                },
            },
            Scaled("compressed-tensors", *block),
            "_scale",
        )
        for strategy, structure, block in (
            ("tensor", None, (None, None)),
            ("channel", None, (1, None)),
            ("block", [9, 11], (9, 11)),
        )
    },
}  # fmt: skip
INT8_WEIGHTS = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"}
for storage in ("int-quantized", "pack-quantized"):
    SCHEMES[storage] = (
        {
            "quant_method": "compressed-tensors",
            "format": storage,
            "config_groups": {"group_0": {"weights": INT8_WEIGHTS}},
        },
        Scaled("compressed-tensors", 1, None, INT8),
        "_scale",
    )


PROJECTIONS = tuple(
    f"{name}.weight" for name in ("proj", "proj_with_mqa", "qkvz", "c_attn", ".w1", ".w2", ".w3")
)
"""Ends of the names of tensors that `quantised` quantises."""


def packed(elements: np.ndarray) -> np.ndarray:
    """Return int8 elements [out, in] as int32 [out, in / 4]: element 4 j + i plus 128 in byte i of word j."""
    padded = np.pad(elements.astype(np.int64) + 128, ((0, 0), (0, -elements.shape[1] % 4)))
    words = sum(padded[:, byte::4] << (8 * byte) for byte in range(4))
    return words.astype(np.uint32).view(np.int32)


def quantised(
    tensors: dict[str, np.ndarray],
    scheme: str,
    plain_dtype: np.dtype,
    scale_dtype: np.dtype,
    endings: tuple[str, ...] = PROJECTIONS,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return tensors, those with names with some endings in eight bits, and the numbers that they stand for."""
    _, block, suffix = SCHEMES[scheme]
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if not name.endswith(endings) or tensor.ndim != 2:
            kept = tensor.astype(np.float32 if name.endswith("e_score_correction_bias") else plain_dtype)
            stored[name] = plain[name] = kept
            continue
        shape = tensor.shape
        rows, columns = block.rows or shape[0], block.columns or shape[1]
        counts = -(-shape[0] // rows), -(-shape[1] // columns)
        most = np.zeros(counts)
        for row, column in np.ndindex(counts):
            tile = tensor[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
            most[row, column] = np.abs(tile).max()
        largest = 127 if block.element == INT8 else 448
        scales = (most / largest).astype(scale_dtype)
        wide = spread(scales.astype(np.float32), rows, columns, shape).astype(np.float32)
        quotients = (tensor.astype(np.float32) / wide).clip(-largest, largest)
        elements = (np.rint(quotients) if block.element == INT8 else quotients).astype(block.element)
        if scheme == "pack-quantized":
            stored[f"{name}_packed"] = packed(elements)
            stored[f"{name}_shape"] = np.array(shape, np.int64)
        else:
            stored[name] = elements
        stored[name + suffix] = scales.reshape(()) if scheme == "a scale for each tensor" else scales
        if suffix == "_scale":
            stored[name.removesuffix(".weight") + ".input_scale"] = np.ones(1, np.float32)
        plain[name] = (elements.astype(np.float32) * wide).astype(plain_dtype)
    return stored, plain


def write(
    folder: Path, name: str, scheme: str = "blocks", scale_dtype: np.dtype = FLOAT32
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Write a quantised folder of a tiny model; return its tensors and the numbers that they stand for."""
    write_tiny(folder, name)
    return quantise(folder, scheme, scale_dtype)


def quantise(
    folder: Path,
    scheme: str = "blocks",
    scale_dtype: np.dtype = FLOAT32,
    endings: tuple[str, ...] = PROJECTIONS,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Replace a folder's weights by quantised ones; return its tensors and the numbers they stand for."""
    tensors = safetensors.numpy.load_file(folder / FILE)
    stored, plain = quantised(tensors, scheme, BFLOAT16, scale_dtype, endings)
    save(folder, stored)
    configure(folder, dtype="bfloat16", quantization_config=SCHEMES[scheme][0])
    return stored, plain


def configure(folder: Path, **changes: Any) -> None:
    """Set fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(array) if array.ndim else array for name, array in tensors.items()},
        folder / FILE,
    )


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def check_halves(elements: np.ndarray, scales: np.ndarray, wide: np.ndarray) -> None:
    """Check that kernels' elements and scales stand for a weight [in, out], up to what e4m3 lacks of e4m3fn.

    Half of an odd multiple of 2^-9 is rounded by 2^-10, which counts twice: by 2^-10 of the scales, which are doubled.
    """
    assert elements.dtype in (np.dtype(ml_dtypes.float8_e4m3), INT8) and scales.dtype == FLOAT32
    error = np.abs(elements.astype(np.float64) * scales - wide.astype(np.float64))
    unit = 0.0 if wide.dtype == FLOAT32 else 2.0**-8  # the widened weight was rounded to bfloat16
    exact = np.abs(wide.astype(np.float64))
    assert (error <= 2.0**-10 * scales + (unit + 2.0**-22) * exact).all(), (error - unit * exact).max()


@pytest.mark.parametrize(
    ("name", "scheme"),
    deep_except(
        [
            *((name, "blocks") for name in TINY),
            *((name, scheme) for name in ("qwen3", "deepseek v3", "gpt2") for scheme in list(SCHEMES)[2:]),
        ],
        4,
    ),
)
@pytest.mark.filterwarnings("ignore:config.json quantises input rows")
def test_every_family_holds_what_a_plain_folder_would(tmp_path: Path, name: str, scheme: str) -> None:
    """Tensors, and what each of two ranks holds in either dtype of activations."""
    scale_dtype = BFLOAT16 if scheme == "compressed, block" else FLOAT32
    stored, plain = write(tmp_path, name, scheme, scale_dtype)
    config = load_config(tmp_path)
    checkpoint = open_checkpoint(tmp_path, config)
    wide = {
        name: np.asarray(weight) for name, weight in checkpoint.items() if name in plain
    }  # those of stacks have other names
    assert all(same(array, plain[name]) for name, array in wide.items())
    assert any(array.dtype in (ELEMENT, INT8, np.int32) for array in stored.values())
    for dtype in ("float32", "bfloat16"):
        rank_weights = shard_weights(config, checkpoint, 2, dtype=dtype)
        wanted = shard_weights(config, dict(checkpoint) | wide, 2, dtype=dtype)
        for one, other in zip(rank_weights, wanted, strict=True):
            names = {name for name in one.arrays if f"{name}_scales" in one.arrays}
            assert (names != set()) == ("block" not in scheme) or name == "gpt2"
            stored_scales = {f"{name}{suffix}" for name in names for suffix in ("_scales", "_input_scale")}
            assert one.arrays.keys() - stored_scales == other.arrays.keys()
            plain_names = other.arrays.keys() - names
            assert [name for name in plain_names if not same(one.arrays[name], other.arrays[name])] == []
            for name in names:
                check_halves(one.arrays[name], one.arrays[f"{name}_scales"], other.arrays[name])


@pytest.mark.parametrize("scales", [None, 1, 128], ids=["of a tensor", "of rows", "of blocks"])
def test_a_chip_with_e4m3fn_gets_all_codes_and_scales_as_they_are(scales: int | None) -> None:
    """Other chips get halves and twice the scales; integers are the same on all chips."""
    columns = 128 if scales == 128 else None
    format = Scaled("fp8", scales, columns)
    elements = np.arange(256, dtype=np.uint8).reshape(2, 128).view(ELEMENT)
    specs = format.describe_tensors((2, 128))
    stored = {"elements": elements, "scales": np.full(specs["scales"].shape, 0.75, np.float32)}
    fn, halved = (format.adapt_to_chip(chip(target)) for target in ("trn3", "trn2"))
    passed = fn.pass_to_kernels(stored)
    for name, spec in fn.describe_kernel_tensors((2, 128)).items():
        assert (passed[name].shape, passed[name].dtype) == (spec.shape, spec.dtype)
    assert passed["elements"].tobytes() == elements.tobytes()
    assert (passed["block_scales" if columns else "scales"] == 0.75).all()
    halves = halved.pass_to_kernels(stored)
    assert halves["elements"].dtype == ml_dtypes.float8_e4m3
    assert (halves["block_scales" if columns else "scales"] == 1.5).all()
    integers = Scaled("compressed-tensors", 1, None, INT8)
    assert format.depends_on_chip and not integers.depends_on_chip
    assert integers.adapt_to_chip(chip("trn3")).kernel_element == INT8


@pytest.mark.parametrize("scales", [None, 1], ids=["of a tensor", "of rows"])
@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 2, 1), (8, 2, 4), (14, 2, 5), (6, 3, 2)])
def test_ranks_cut_heads_of_stored_weights(scales: int | None, heads: int, kv_heads: int, ranks: int) -> None:
    """Some ranks hold copies of a key/value head, and padding; scales of q, k and v differ."""
    format, divided, size = Scaled("fp8", scales, None), (heads, kv_heads), 6
    cuts = (by_query_heads(*divided), by_kv_heads(*divided), by_kv_heads(*divided))
    shapes = [(count * size, 20) for count in (heads, kv_heads, kv_heads)]
    w_qkv = Weight("w", [Tensor(name, shape, cut) for name, shape, cut in zip("qkv", shapes, cuts)])
    w_o = Weight("w", [Tensor("o", (20, heads * size), by_query_heads(*divided, axis=1))])
    shapes.append((20, heads * size))
    checkpoint = {
        name: weight_of(
            coded(shape, seed), scales_of(format.describe_tensors(shape)["scales"].shape, seed), format
        )
        for seed, (name, shape) in enumerate(zip("qkvo", shapes))
    }
    for weight in (w_qkv, w_o):
        for shard in (Shard(rank, ranks) for rank in range(ranks)):
            stored = weight.take_stored(checkpoint, shard, format)
            dtypes = WeightDtypes(FLOAT32, formats=frozenset({("w", format)}))
            described = {name: (array.shape, array.dtype) for name, array in stored.items()}
            assert described == weight.describe(shard, dtypes)
            check_halves(stored["w"], stored["w_scales"], weight.take(checkpoint, shard))


def test_a_fused_weight_with_a_plain_member_is_widened(tmp_path: Path) -> None:
    stored, plain = write(tmp_path, "qwen3", "compressed, channel")
    name = "model.layers.0.self_attn.k_proj.weight"
    stored[name] = plain[name]
    del stored[f"{name}_scale"], stored[name.replace(".weight", ".input_scale")]
    save(tmp_path, stored)
    ignore = [name.removesuffix(".weight")]
    configure(tmp_path, quantization_config=SCHEMES["compressed, channel"][0] | {"ignore": ignore})
    config = load_config(tmp_path)
    checkpoint = open_checkpoint(tmp_path, config)
    (rank,) = shard_weights(config, checkpoint, 1, dtype="bfloat16")
    (wide,) = shard_weights(config, dict(checkpoint) | plain, 1, dtype="bfloat16")
    assert same(rank.arrays["layers.0.attention.w_qkv"], wide.arrays["layers.0.attention.w_qkv"])
    scales = {name for name in rank.arrays if name.startswith("layers.0.") and name.endswith("_scales")}
    assert scales == {
        "layers.0.attention.w_o_scales",
        *(f"layers.0.mlp.w_{matrix}_scales" for matrix in MATRICES),
    }
    assert "layers.1.attention.w_qkv_scales" in rank.arrays


@pytest.mark.parametrize(
    ("name", "most"), [("llama with biases", 1), ("phi3", 1), ("qwen3", 1), ("deepseek v3", 2)]
)
def test_ranks_widen_their_own_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    """Together the ranks widen each element once; what all hold whole, and keys and values of one tensor, twice."""
    write(tmp_path, name)
    config = load_config(tmp_path)
    checkpoint = open_checkpoint(tmp_path, config)
    elements = sum(weight.size for weight in checkpoint.values() if isinstance(weight, QuantisedWeight))
    counts: list[int] = []
    widen = Scaled.widen

    def counted(self: Scaled, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        counts.append(tensors["elements"].size)
        return widen(self, tensors)

    monkeypatch.setattr(Scaled, "widen", counted)
    shard_weights(config, checkpoint, 2)
    assert 0 < elements <= sum(counts) <= most * elements


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek v3", "qwen3"])
def test_a_published_folder_has_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    """DeepSeek-V3 with the layer that predicts a second token, and the choice's bias in float32 beside bfloat16."""
    stored, plain = write(tmp_path, name)
    if name == "deepseek v3":
        configure(tmp_path, num_nextn_predict_layers=1)
        last = {
            name.replace("layers.2.", "layers.3."): stored[name] for name in stored if "layers.2." in name
        }
        save(tmp_path, stored | last | {"model.layers.3.eh_proj.weight": np.zeros((36, 72), BFLOAT16)})
    folder = tmp_path / "plain"
    tiny_model(name).config.save_pretrained(folder)
    save(folder, {name: tensor.astype(np.float32) for name, tensor in plain.items()})
    model = type(tiny_model(name)).from_pretrained(folder, dtype=torch.float32, **EAGER)
    oracle = Oracle(model, IDS, PROMPT)
    config = load_config(tmp_path)
    weights = open_checkpoint(tmp_path, config)
    assert_equal(ReferenceModel(config, weights), oracle)
    shards = shard_weights(config, weights, 2)
    if name == "deepseek v3":
        exact = {name for name, array in shards[1].arrays.items() if array.dtype != BFLOAT16}
        assert exact == {f"layers.{layer}.experts.b_choice" for layer in (1, 2)}
    assert_equal(KernelModel(config, shards, SimulatedDevice("trn2", 2), CACHE), oracle)


@pytest.mark.slow
def test_text_is_generated_as_the_reference_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_model("DeepseekV3", {**COMMON, **TINY["deepseek v3"][1], "vocab_size": 300}, 6).save_pretrained(
        tmp_path
    )
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    quantise(tmp_path)
    arguments = ["--model", str(tmp_path), "--prompt", "Tom had", "--max-new-tokens", "4", "--tp", "2"]
    assert main(["generate", *arguments]) == 0
    assert "4 of 4" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", ["a scale for each tensor", "compressed, channel", "int-quantized", "pack-quantized"]
)
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_projections_compute_with_the_weights_as_they_are_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str, ranks: str
) -> None:
    """A Llama whose intermediate size two ranks divide; bfloat16 rows meet elements of fp8 in the Tensor engine."""
    random_model("Llama", {**COMMON, **TINY["llama with biases"][1], "vocab_size": 300}, 6).save_pretrained(
        tmp_path
    )
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    quantise(tmp_path, scheme)
    config = load_config(tmp_path)
    for rank in shard_weights(config, open_checkpoint(tmp_path, config), int(ranks), dtype="bfloat16"):
        names = {name for name, array in rank.arrays.items() if array.dtype.itemsize == 1}
        layers = {name.rpartition(".mlp.")[0] for name in rank.arrays if ".mlp." in name}
        matrices = ("attention.w_qkv", "attention.w_o", *(f"mlp.w_{matrix}" for matrix in MATRICES))
        assert names == {f"{layer}.{matrix}" for layer in layers for matrix in matrices}
    arguments = ["--model", str(tmp_path), "--prompt", "Tom had", "--max-new-tokens", "4", "--tp", ranks]
    assert main(["generate", *arguments, "--dtype", "bfloat16"]) == 0
    assert "4 of 4" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_latent_attention_projects_with_weights_as_they_are_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: str
) -> None:
    """In float32, in which no choice of an expert is a near tie; the expansion of latents stays widened."""
    random_model("DeepseekV3", {**COMMON, **TINY["deepseek v3"][1], "vocab_size": 300}, 6).save_pretrained(
        tmp_path
    )
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    quantise(tmp_path, "compressed, channel")
    config = load_config(tmp_path)
    for rank in shard_weights(config, open_checkpoint(tmp_path, config), int(ranks)):
        stored = {name for name in rank.arrays if ".0.attention." in name and f"{name}_scales" in rank.arrays}
        assert stored == {f"layers.0.attention.{name}" for name in ("w_q_a", "w_q", "w_kv", "w_o")}
    arguments = ["--model", str(tmp_path), "--prompt", "Tom had", "--max-new-tokens", "4", "--tp", ranks]
    assert main(["generate", *arguments]) == 0
    assert "4 of 4" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_head_of_eight_bits_finds_the_tokens_of_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: str
) -> None:
    fields = {**COMMON, **TINY["llama with biases"][1], "vocab_size": 301, "tie_word_embeddings": False}
    random_model("Llama", fields, 6).save_pretrained(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    quantise(tmp_path, "int-quantized", endings=("lm_head.weight",))
    config = load_config(tmp_path)
    for rank in shard_weights(config, open_checkpoint(tmp_path, config), int(ranks), dtype="bfloat16"):
        assert {name for name, array in rank.arrays.items() if array.dtype == INT8} == {"head.w_head"}
    arguments = ["--model", str(tmp_path), "--prompt", "Tom had", "--max-new-tokens", "4", "--tp", ranks]
    assert main(["generate", *arguments, "--dtype", "bfloat16"]) == 0
    assert "4 of 4" in capsys.readouterr().out


@pytest.mark.slow
def test_the_bias_of_a_choice_stays_float32_beside_bfloat16(tmp_path: Path) -> None:
    """Rounded it would change choices; so the reference reads it unrounded as well."""
    _, plain = write(tmp_path, "deepseek v3")
    config = load_config(tmp_path)
    checkpoint = open_checkpoint(tmp_path, config)
    name = next(name for name in plain if name.endswith("e_score_correction_bias"))
    assert (plain[name] != plain[name].astype(BFLOAT16).astype(np.float32)).any()
    (rank,) = shard_weights(config, checkpoint, 1, dtype="bfloat16")
    biases = {name: array.dtype for name, array in rank.arrays.items() if array.dtype != BFLOAT16}
    assert set(biases) == {f"layers.{layer}.experts.b_choice" for layer in (1, 2)}
    assert set(biases.values()) == {FLOAT32}
    numpy = Arithmetic(checkpoint, BFLOAT16, 0, exact={name})
    assert same(numpy.load_tensor(name), plain[name])
    rounded = np.asarray(checkpoint[PROJECTION]).astype(BFLOAT16).astype(np.float32)
    assert same(numpy.load_tensor(PROJECTION), rounded)


MATRICES = ("gate", "up", "down")
PROJECTION = "model.layers.1.self_attn.o_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


def changed(change: Callable[[dict[str, np.ndarray]], object], folder: Path) -> str:
    """Return the refusal of a folder whose tensors are changed."""
    tensors, _ = write(folder, "llama with longrope")
    open_checkpoint(folder, load_config(folder))
    change(tensors)
    save(folder, tensors)
    with pytest.raises(ModelError) as refused:
        open_checkpoint(folder, load_config(folder))
    return str(refused.value).removeprefix(f"{folder / FILE}: ")


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    name, scales = PROJECTION, PROJECTION + "_scale_inv"

    def describe_refusal(change: Callable[[dict[str, np.ndarray]], object]) -> str:
        return changed(change, tmp_path)

    def narrower(tensors: dict[str, np.ndarray]) -> None:
        tensors[scales] = tensors[scales][:, :-1]

    def turned(tensors: dict[str, np.ndarray]) -> None:
        tensors[scales] = tensors[scales].T

    assert (
        describe_refusal(lambda tensors: tensors.pop(scales))
        == f"{name} has eight bits and no scales; tensor {scales} is missing"
    )
    for change in (narrower, turned):
        sentence = describe_refusal(change)
        assert sentence.startswith(f"{scales} has shape (") and "; blocks of 16 by 24 in (" in sentence
    assert describe_refusal(lambda tensors: tensors.update({scales: tensors[scales].astype(np.uint8)})) == (
        f"{scales} has dtype uint8; known are F32, F16, BF16"
    )
    assert describe_refusal(lambda tensors: tensors.update({NORM: tensors[NORM].astype(ELEMENT)})) == (
        f"{NORM} has dtype 'F8_E4M3'; known are F32, F16, BF16"
    )
    assert describe_refusal(lambda tensors: tensors.update({name: tensors[name][:-1]})).startswith(
        f"{name} has shape ("
    )
    surplus = f"{scales.removesuffix('_inv')} is not a tensor of LlamaForCausalLM"
    assert (
        describe_refusal(lambda tensors: tensors.update({scales.removesuffix("_inv"): tensors[scales]}))
        == surplus
    )
    for number in (0.0, -1.0, np.inf, np.nan):

        def spoil(tensors: dict[str, np.ndarray], number: float = number) -> None:
            tensors[scales][0, 0] = number

        assert describe_refusal(spoil) == (
            f"{scales} contains {number}; scales are finite and above 0: quantise {name} again"
        )
    plain = f"{scales} is not a tensor of LlamaForCausalLM"
    assert describe_refusal(lambda tensors: tensors.update({name: tensors[name].astype(BFLOAT16)})) == plain


def test_packed_integers_of_another_size_are_refused(tmp_path: Path) -> None:
    tensors, _ = write(tmp_path, "qwen3", "pack-quantized")
    name = next(name for name in tensors if name.endswith("mlp.up_proj.weight_packed"))
    open_checkpoint(tmp_path, load_config(tmp_path))
    for change in (tensors[name][:, :-1], tensors[name].astype(np.int64)):
        save(tmp_path, tensors | {name: change})
        with pytest.raises(
            ModelError, match=re.escape(f"{name} is {change.dtype} {change.shape}; int8 elements")
        ):
            open_checkpoint(tmp_path, load_config(tmp_path))


def test_packed_integers_are_not_copied_and_their_shape_must_be_that_of_the_layer(tmp_path: Path) -> None:
    tensors, _ = write(tmp_path, "qwen3", "pack-quantized")
    name = "model.layers.0.mlp.up_proj.weight"
    weight = open_checkpoint(tmp_path, load_config(tmp_path))[name]
    assert isinstance(weight, QuantisedWeight) and not weight.tensors["elements"].flags.writeable
    for listed in ((36, 50), (50,), (50, 36, 1)):
        save(tmp_path, tensors | {f"{name}_shape": np.array(listed)})
        message = f"{name}_shape contains {listed}; config.json asks for (50, 36)"
        with pytest.raises(ModelError, match=re.escape(message)):
            open_checkpoint(tmp_path, load_config(tmp_path))


def test_eight_bits_without_a_quantisation_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen3")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["quantization_config"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="has dtype 'F8_E4M3'; known are F32, F16, BF16"):
        open_checkpoint(tmp_path, load_config(tmp_path))


def compressed(**changes: Any) -> dict[str, Any]:
    weights = SCHEMES["compressed, channel"][0]["config_groups"]["group_0"]["weights"]
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights | changes}},
    }


@pytest.mark.parametrize(
    ("quantization_config", "message"),
    [
        ({"quant_method": "hqq"}, "weights quantised by hqq; fp8, compressed-tensors, "),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: 'e5m2'; weights of eight bits are widened from e4m3"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size: [128] is not two positive whole numbers",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 128]},
            "weight_block_size: [0, 128] is not two positive whole numbers",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 2**31]},
            "weight_block_size: [128, 2147483648] is not two positive whole numbers",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": 128},
            "weight_block_size: 128 is not two positive whole numbers",
        ),
        (compressed(type="uint"), "weights.num_bits: 8 with type 'uint'; known are "),
        (compressed(num_bits=6), "weights.num_bits: 6 with type 'float'; known are "),
        (compressed(symmetric=False), "weights.symmetric: False; floats have no zero points"),
        (compressed(strategy="token"), "weights.strategy: 'token'; known are tensor, channel, group, block"),
        (compressed(strategy="group"), "weights.group_size: missing"),
        (compressed(strategy="block"), "weights.block_structure: None is not two positive whole numbers"),
        (compressed() | {"format": "marlin-24"}, "format: 'marlin-24'; known are dense, float-quantized"),
        (
            compressed() | {"sparsity_config": {"format": "sparse-24"}},
            "sparsity_config: {'format': 'sparse-24'",
        ),
        (compressed() | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config: {'config_g"),
        (compressed() | {"ignore": "lm_head"}, "ignore: 'lm_head' is not a list of names"),
        (compressed() | {"ignore": ["re:("]}, "config_groups: 're:(' is not a regular expression"),
        (
            compressed() | {"ignore": ["Linear"]},
            "config_groups: 'Linear' is a target of group_0 and in ignore",
        ),
        (compressed() | {"config_groups": {}}, "config_groups: no group has weights; a quantised model has"),
        (
            compressed()
            | {"config_groups": {"a": compressed()["config_groups"]["group_0"], "b": {"weights": {}}}},
            "config_groups: 'Linear' is a target of a and of b, whose formats differ",
        ),
    ],
)
def test_other_quantisations_are_refused(
    tmp_path: Path, quantization_config: dict[str, Any], message: str
) -> None:
    write(tmp_path, "qwen3", "compressed, channel")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "quantization_config": quantization_config}))
    try:
        refusals = read_config(path).refusals
    except ModelError as error:
        refusals = (str(error),)
    assert any(message in refusal for refusal in refusals)
    with pytest.raises(ModelError):
        load_config(tmp_path)
    path.write_text(json.dumps({**fields, "quantization_config": compressed()}))
    config = load_config(tmp_path)
    assert config.weight_format.formats == (Scaled("compressed-tensors", 1, None),)
    most = {"quant_method": "fp8", "weight_block_size": [2**31 - 1, 1]}
    path.write_text(json.dumps({**fields, "quantization_config": most}))
    config = load_config(tmp_path)
    assert config.weight_format.formats == (Scaled("fp8", 2**31 - 1, 1),)


@pytest.mark.slow
def test_layers_of_multi_token_prediction_are_those_that_the_config_counts(tmp_path: Path) -> None:
    """A checkpoint may hold them or not; one more is a surplus."""
    tensors, _ = write(tmp_path, "deepseek v3")
    count = len(load_config(tmp_path).blocks)
    for behind, number, fits in (
        (0, count, False),
        (1, count, True),
        (1, count + 1, False),
        (2, count + 1, True),
    ):
        configure(tmp_path, num_nextn_predict_layers=behind)
        config = load_config(tmp_path)
        save(tmp_path, tensors)
        assert open_checkpoint(tmp_path, config)
        surplus = f"model.layers.{number}.eh_proj.weight"
        save(tmp_path, tensors | {surplus: np.zeros((3, 5), ELEMENT)})
        if fits:
            assert surplus not in open_checkpoint(tmp_path, config)
            continue
        with pytest.raises(ModelError, match=f"{surplus} is not a tensor of DeepseekV3ForCausalLM"):
            open_checkpoint(tmp_path, config)
