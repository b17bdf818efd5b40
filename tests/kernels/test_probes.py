"""The probes give one outcome where a guess holds and another one where it does not, and can be bundled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nki_kernels.probes import examples, subnormals, word_chains
from nkw.commands import main as nkw
from simulate.bundle.manifest import load_bundle
from simulate.hardware import Hardware, hardware
from simulate.run import Launch, Mode
from simulate.run.launch import unwrap_kernel
from simulate.timing import schedule
from simulate.world import launch
from tests.isa.tiles import TARGETS

CODES = np.arange(16, dtype=np.uint8).reshape(1, 16)


def contradict(target: str, name: str, fact: Any) -> Hardware:
    """Return the record of a chip on which a guess does not hold."""
    record = hardware(target)
    return record.with_numbers(**{name: replace(record.provenance[name], value=fact)})


def run(kernel: Callable[..., Any], array: np.ndarray, chip: Hardware, mode: Mode = Mode.eager) -> Launch:
    """Launch a kernel of one argument on a chip."""
    return launch(unwrap_kernel(kernel), [((array,), {})], chip, mode=mode)


@pytest.mark.parametrize("target", TARGETS)
def test_products_tell_whether_subnormals_are_kept(target: str) -> None:
    kept = run(subnormals.multiply_subnormals, CODES, hardware(target)).outputs[0]
    np.testing.assert_array_equal(kept, subnormals.multiply_subnormals_reference(CODES))
    flushing = contradict(target, "matmul_keeps_fp8_subnormals", False)
    flushed = run(subnormals.multiply_subnormals, CODES, flushing).outputs[0]
    normal = np.where(CODES < 8, 0, CODES)
    np.testing.assert_array_equal(flushed, subnormals.multiply_subnormals_reference(normal))
    assert ((kept != flushed).sum(axis=(1, 2)) == [7 * 16, 7 * 16, 15 * 15 - 8 * 8]).all()


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_sums_of_pairs_tell_the_same_of_double_row(target: str) -> None:
    kept = run(subnormals.multiply_subnormal_pairs, CODES, hardware(target)).outputs[0]
    np.testing.assert_array_equal(kept, subnormals.multiply_subnormal_pairs_reference(CODES))
    flushing = contradict(target, "matmul_keeps_fp8_subnormals", False)
    flushed = run(subnormals.multiply_subnormal_pairs, CODES, flushing).outputs[0]
    assert (kept != flushed).sum() == 15 * 15 - 8 * 8


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 3)])
def test_chains_return_what_their_references_do(target: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(36)
    words = rng.integers(-(2**31), 2**31, shape).astype(np.int32)
    numbers = rng.standard_normal(shape).astype(np.float32)
    for kernel, reference, rows in (
        (word_chains.stream_bits, word_chains.stream_bits_reference, words),
        (word_chains.stream_products, word_chains.stream_products_reference, numbers),
        (word_chains.stream_copies, word_chains.stream_copies_reference, words),
    ):
        returned = run(kernel, rows, hardware(target)).outputs[0]
        np.testing.assert_array_equal(returned, reference(rows))
        assert returned.dtype == rows.dtype


def predict(kernel: Callable[..., Any], words: np.ndarray, chip: Hardware) -> float:
    """Return the predicted length of a launch in ns."""
    done = run(kernel, words, chip, Mode.dry)
    return float(schedule(done.streams, done.hardware).length_ns)


@pytest.mark.parametrize(("target", "pace", "ratio"), [("trn2", 2, 1), ("trn2", 1, 1.83), ("trn3", 1, 1.83)])
def test_times_of_chains_tell_the_pace_of_bit_operations(target: str, pace: float, ratio: float) -> None:
    words = np.zeros((128, 2048), np.int32)
    chip = contradict(target, "vector_bitwise_32bit_elements_per_cycle", float(pace))
    bits, copies = (predict(k, words, chip) for k in (word_chains.stream_bits, word_chains.stream_copies))
    products = predict(word_chains.stream_products, words.astype(np.float32), chip)
    assert (bits - copies) / (products - copies) == pytest.approx(ratio, rel=0.01)


def test_a_catalogue_bundles_every_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    folder = tmp_path / "probes"
    assert nkw(["bundle", "nki_kernels.probes", "--catalogue", "--target", "trn2", "--out", str(folder)]) == 0
    cases = {case.name: case for case in load_bundle(folder).cases}
    assert list(cases) == [name.partition(":")[2] for name in examples.EXAMPLES]
    for case in cases.values():
        assert not case.findings
        tolerance = case.outputs[0].tolerance
        assert tolerance is not None
        if case.name.startswith("multiply"):
            assert tolerance.bound < 2.0**-18, "the smallest product of two subnormals"
