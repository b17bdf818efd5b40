"""Containers against compressed-tensors and bitsandbytes: their stored outputs, and the packages where installed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from model.config import Fields
from model.families import load_config
from model.formats import read_format
from model.loading.checkpoint import open_checkpoint
from model.runners.reference import ReferenceModel
from tests.model.container_oracles import CONFIGS, MODULE, SHAPE, Case, make_case, read_cases
from tests.model.containers import PREFILL, write_container
from tests.model.test_compressed_tensors import STORAGES, describe

CASES = read_cases()
TOLERANCE = {"llm.int8": 2.0**-11 + 2.0**-22}
"""Largest relative difference, where numbers are not equal: bitsandbytes rounds them to float16."""


def read_numbers(folder: Path, name: str, case: Case) -> np.ndarray:
    """Return the numbers, float32, that the container of a case makes of its tensors; none must remain."""
    path = folder / "config.json"
    path.write_text(json.dumps({"quantization_config": CONFIGS[name]}))
    fields = Fields(path)
    container = read_format(fields)
    assert container is not None and fields.refusals == []
    tensors = dict(case[0])
    weight = container.from_checkpoint(f"{MODULE}.weight", tensors, SHAPE, np.dtype(np.float32))
    assert weight is not None and tensors == {}
    return np.asarray(weight)


@pytest.mark.parametrize("name", CONFIGS)
def test_widened_numbers_are_those_of_the_package(tmp_path: Path, name: str) -> None:
    widened, expected = read_numbers(tmp_path, name, CASES[name]), CASES[name][1]
    assert widened.shape == expected.shape == SHAPE and expected.any()
    assert (np.abs(widened - expected) <= TOLERANCE.get(name, 0.0) * np.abs(expected)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_installed_package_stores_and_widens_as_recorded(tmp_path: Path, name: str) -> None:
    package = "bitsandbytes" if name == "llm.int8" else "compressed_tensors"
    pytest.importorskip(package, reason=f"{package} is not installed")
    tensors, numbers = make_case(name)
    stored, expected = CASES[name]
    assert tensors.keys() == stored.keys()
    for key, tensor in tensors.items():
        assert tensor.dtype == stored[key].dtype and tensor.tobytes() == stored[key].tobytes(), key
    assert np.array_equal(numbers, expected)
    assert np.array_equal(
        read_numbers(tmp_path, name, (tensors, numbers)), read_numbers(tmp_path, name, CASES[name])
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("storage", [storage for storage in STORAGES if storage != "int-quantized"])
def test_a_folder_has_the_logits_of_transformers(tmp_path: Path, storage: str) -> None:
    """Transformers reads the folder through compressed-tensors; both compute in float32, in other orders of sums."""
    pytest.importorskip("compressed_tensors", reason="compressed_tensors is not installed")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    weights, draw, _ = STORAGES[storage]
    folder = tmp_path / "m"
    config = describe(storage, weights) | {"quantization_status": "compressed"}
    write_container(folder, config, draw)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    ).float()
    with torch.no_grad():
        expected = model(torch.tensor([PREFILL])).logits[0, -1].numpy()
    loaded = load_config(folder)
    (output,) = ReferenceModel(loaded, open_checkpoint(folder, loaded)).prefill([PREFILL])
    assert np.abs(output.logits - expected).max() <= 2.0**-14 * np.abs(expected).max()
