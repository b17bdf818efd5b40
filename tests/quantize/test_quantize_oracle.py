"""Quantised folders in transformers with compressed-tensors: equal weights, and equal logits of weight schemes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from model.families import compose, load_config
from model.quantize.linears import select_linears
from model.quantize.schemes import SCHEMES
from model.quantize.step_times import StepTimes
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.model.folders import write_folder
from tests.quantize.quantised import widen_all

torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
transformers = pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is an extra of development (dev)")

COMPRESSED = [name for name in SCHEMES if name != "llm-int8"]
TEXT = "\n<|endoftext|>\n".join(
    f"Once upon a time there were {number} cats. They ran." for number in range(6)
)
IDS = [1, 40, 77, 130, 250, 9, 31, 200]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the predicted steps out."""
    steps = StepTimes(64, 1, "bfloat16", (), "left out")
    monkeypatch.setattr("model.commands.quantize.command.predict_steps", lambda *arguments: steps)


@pytest.mark.parametrize("name", COMPRESSED)
def test_transformers_has_the_same_weights_and_logits(tmp_path: Path, name: str) -> None:
    """MX is loaded in bfloat16, the dtype in which compressed-tensors widens it."""
    dtype = np.dtype(ml_dtypes.bfloat16)
    model = write_folder(tmp_path / "model", dtype=dtype, intermediate_size=64, torch_dtype="bfloat16")
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)
    words = ["--calibration", str(text), "--out", str(out)]
    assert main(["quantize", str(model), "--scheme", name, *words]) == 0
    expected = widen_all(model, name, text)
    torch_dtype = torch.bfloat16 if name.startswith("mx") else torch.float32
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch_dtype)
    with torch.no_grad():
        logits = loaded(torch.tensor([IDS])).logits[0, -1].float().numpy()
    tensors = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    quantised = [linear.name for linear in select_linears(compose(load_config(model))).linears]
    for key in quantised:
        wide = tensors[key].detach().float().numpy()
        rounded = expected[key].astype(dtype).astype(np.float32) if name.startswith("mx") else expected[key]
        assert np.array_equal(wide, rounded), key
    if SCHEMES[name].activations is None and not name.startswith("mx"):
        config = load_config(model)
        reference = ReferenceModel(config, expected)
        expected_logits = reference.prefill([IDS])[0].logits
        assert np.abs(expected_logits - logits).max() < 1e-4 * np.abs(expected_logits).max()
