"""Every cache format: contiguous caches and pages give the tokens of its definition in numpy, and hold its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import nki_kernels
import simulate
from model import LLM, SamplingParams
from model.config.heads import HeadLayout
from model.device import SimulatedDevice, chip
from model.errors import ModelError
from model.families import load_config
from model.layers.attention import Attention
from model.layers.cache import create_cache, create_encoder_cache, create_latent_cache
from model.layers.cache_formats import CACHE_FORMATS, E4M3FN, CacheScales, choose_cache_format
from model.layers.launch import FLOAT32, Phase, StepShape, WeightDtypes
from model.layers.shard import Shard
from model.llm.loaded import LoadedModel
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel

PROMPT = [3, 9, 27, 5, 60, 11, 8, 40, 2, 33]
NEW_TOKENS = 6
HEADS = HeadLayout(4, 2, 1)
STEP = StepShape(Phase.decode, 2, 2, 128, 128, 1, FLOAT32, WeightDtypes(FLOAT32))
FILE_SCALES = {
    f"model.layers.{layer}.self_attn.{letter}_scale": np.float32([0.008, 0.011])[: 2 - layer]
    for layer in range(2)
    for letter in "kv"
}
"""Scales for float8_e4m3fn as a checkpoint has them: of each head of the first layer, and one for the second."""
LARGEST = {"fp8": 224, "fp8_e4m3": 224, "int8": 127, E4M3FN: 448}
"""Stored number of a format for the 448 of float8_e4m3fn."""
formats = pytest.mark.parametrize(
    "name", [name for name, format in CACHE_FORMATS.items() if not format.packs_pages]
)
"""Formats that store all positions alike; `tests/engine/test_packed_pages.py` has the others."""


def stored_and_used(name: str, array: str, rows: np.ndarray) -> np.ndarray:
    """Return rows [heads, tokens, dim] after a cache of a format has stored and read them."""
    format = CACHE_FORMATS[name]
    if format.dtype is None:
        return rows
    _, layer, _, rows_name = array.split(".")
    scales = np.ones((1, 1, 1), np.float32)
    if name in LARGEST:
        scales = FILE_SCALES[f"model.layers.{layer}.self_attn.{rows_name[0]}_scale"].reshape(-1, 1, 1)
        scales = scales * np.float32(448 / LARGEST[name])
    limits = (np.iinfo if format.dtype.kind == "i" else ml_dtypes.finfo)(format.dtype)
    numbers = np.clip(rows / scales, float(limits.min), float(limits.max))
    numbers = np.rint(numbers) if format.dtype.kind == "i" else numbers
    return numbers.astype(format.dtype).astype(np.float32) * scales


@pytest.fixture
def model(write_model, random_weights, byte_tokenizer):
    """Write a model whose keys and values have random weights and return its folder."""
    folder = write_model()
    safetensors.numpy.save_file(random_weights() | FILE_SCALES, folder / "model.safetensors")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def generate(backend: KernelModel | ReferenceModel) -> tuple[list[int], list[np.ndarray]]:
    """Return the likeliest tokens after the prompt, and their logits."""
    outputs = backend.prefill([PROMPT])
    tokens: list[int] = []
    logits: list[np.ndarray] = []
    for position in range(len(PROMPT), len(PROMPT) + NEW_TOKENS):
        logits.append(outputs[0].logits)
        tokens.append(int(np.argmax(logits[-1])))
        outputs = backend.decode([tokens[-1]], [position])
    return tokens, logits


@pytest.mark.slow
@formats
@pytest.mark.parametrize("ranks", [1, 2])
def test_caches_and_pages_give_the_tokens_of_the_definition(model, monkeypatch, name, ranks) -> None:
    target = "trn3" if name == E4M3FN else "trn2"
    config = load_config(model)
    loaded = LoadedModel.open(model, config=config, target=target)
    scales = loaded.choose_cache_scales(name, None)
    shards = shard_weights(config, loaded.checkpoint, ranks)
    device = SimulatedDevice(target, ranks)
    kernels = KernelModel(config, shards, device, 128, kv_cache_dtype=name, cache_scales=scales)
    tokens, logits = generate(kernels)
    paged = LLM(
        model,
        tensor_parallel_size=ranks,
        kv_cache_dtype="fp8" if name == E4M3FN else name,
        target=target,
        block_size=4,
        max_num_batched_tokens=5,
        max_num_seqs=2,
    )
    params = SamplingParams(n=2, temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for cached in (0, 8):  # two samples share the last page of the prompt, so one of them gets a copy
        output = paged.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0]
        assert [list(sample.token_ids) for sample in output.outputs] == [tokens, tokens]
        assert output.metrics.num_cached_tokens == cached

    rounded = generate(loaded.create_reference(kv_cache_dtype=name, cache_scales=scales))
    see = Attention._append_to_cache

    def seen(self: Attention, new: Sequence[np.ndarray], states, numpy):
        names = (f"{self.name}.keys", f"{self.name}.values")
        rows = [stored_and_used(name, array, rows) for array, rows in zip(names, new)]
        return see(self, rows, states, numpy)

    monkeypatch.setattr(Attention, "_append_to_cache", seen)
    expected, exact = generate(ReferenceModel(config, loaded.checkpoint))
    assert tokens == expected == rounded[0]
    assert np.array_equal(rounded[1], exact)
    # Two layers of some sixteen roundings each; a stored number that is its neighbour costs a thousand times as much.
    bound = 32 * np.spacing(np.abs(exact).max())
    assert max(np.abs(one - two).max() for one, two in zip(logits, exact)) <= bound


@formats
@pytest.mark.parametrize("paged", [False, True])
def test_a_page_has_the_bytes_of_its_elements(name, paged) -> None:
    step = (
        replace(STEP, pages=9, block_size=16, cache_dtype=name) if paged else replace(STEP, cache_dtype=name)
    )
    cache = create_cache("a", HEADS, 8, step)
    dtype = CACHE_FORMATS[name].dtype or step.activations
    assert {array.dtype for array in cache.arrays} == {dtype}
    assert cache.page_bytes == 2 * 2 * 8 * (16 if paged else 128) * dtype.itemsize


@formats
def test_scales_are_launch_arguments_and_constants_of_each_rank(name) -> None:
    format, heads = CACHE_FORMATS[name], HeadLayout(6, 3, 2)
    full_scales = {"a.keys": np.float32([2, 3, 4]), "a.values": np.float32([5])}
    step = replace(STEP, ranks=2, cache_dtype=name, cache_scales=CacheScales(full_scales))
    cache = create_cache("a", heads, 8, step)
    names = {"k_scale": "a.keys.scale", "v_scale": "a.values.scale"} if format.dtype else {}
    scales = {parameter: value for parameter, value in cache.arguments.items() if parameter.endswith("scale")}
    assert {parameter: value.name for parameter, value in scales.items()} == names
    assert set(cache.constants) == set(names.values())
    for value in scales.values():
        first, last = (cache.constants[value.name](Shard(rank, 2)) for rank in range(2))
        assert first.shape == last.shape == value.shape == (1, 2)
        full_scale = np.broadcast_to(full_scales[value.name.removesuffix(".scale")], 3)
        assert np.array_equal(np.concatenate([first, last], axis=1)[0], [*full_scale, 1])


@formats
def test_copied_pages_hold_the_same_bytes(name) -> None:
    cache = create_cache("a", HEADS, 8, replace(STEP, pages=5, block_size=16, cache_dtype=name))
    launch = cache.copy(2)
    random = np.random.default_rng(5)
    arrays = [
        random.integers(0, 100, array.nbytes).astype(np.uint8).view(array.dtype).reshape(array.shape)
        for array in cache.arrays
    ]
    numbers = np.int32([[3], [0]]), np.int32([[1], [4]])
    before = [array.copy() for array in arrays]
    kernel = getattr(nki_kernels, launch.kernel)
    outputs = simulate.World("trn2").launch(kernel, [((*arrays, *numbers), {})]).outputs[0]
    for array, output in zip(before, outputs):
        assert output.tobytes() == array[[0, 3, 2, 3, 0]].tobytes()


@formats
def test_rows_of_latents_and_keys_of_encoders_have_the_format(name) -> None:
    format = CACHE_FORMATS[name]
    scales = CacheScales(
        {"a.rows": np.float32([2, 3]), "a.keys": np.float32([2]), "a.values": np.float32([3])}
    )
    step = replace(STEP, cache_dtype=name, cache_scales=scales)
    latents, encoded = create_latent_cache("a", 24, step), create_encoder_cache("a", HEADS, 8, 30, step)
    itemsize = (format.dtype or step.activations).itemsize
    assert (latents.page_bytes, encoded.page_bytes) == (24 * 128 * itemsize, 2 * 2 * 8 * 30 * itemsize)
    constants = {
        array: scale(Shard(0, 1)).tolist()
        for array, scale in {**latents.constants, **encoded.constants}.items()
    }
    expected = {"a.rows.scale": [[2, 3]], "a.keys.scale": [[2, 2]], "a.values.scale": [[3, 3]]}
    assert constants == (expected if format.dtype else {})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ModelError, match=r"kv_cache_dtype is 'int3'; it is one of .*auto, .*int8"):
        LLM(kv_cache_dtype="int3")


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", E4M3FN])
def test_a_chip_stores_the_fp8_that_it_multiplies(name: str) -> None:
    *earlier_chips, trn3 = map(chip, ("trn1", "inf2", "trn2", "trn3"))
    assert choose_cache_format(name, trn3) == E4M3FN
    for record in earlier_chips:
        if name == E4M3FN:
            with pytest.raises(
                ModelError, match="'fp8_e4m3fn', and this chip multiplies float8_e4m3: use fp8"
            ):
                choose_cache_format(name, record)
        else:
            assert choose_cache_format(name, record) == name
    for unchanged in ("auto", "int8", "fp8_e5m2", "bfloat16"):
        assert {choose_cache_format(unchanged, record) for record in (*earlier_chips, trn3)} == {unchanged}
