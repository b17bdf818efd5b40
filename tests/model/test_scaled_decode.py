"""Decode steps of models with weights of 8 bits: one launch for each layer, which reads all matrices as stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from model.device import SimulatedDevice
from nkw.commands import main
from tests.model.folders import byte_tokenizer
from tests.model.oracle import random_model
from tests.model.test_scaled_weights import quantise
from tests.model.tiny_families import COMMON, TINY

SCALES = {f"{name}_scales" for name in ("w_qkv", "w_o", "w_gate", "w_up", "w_down")}


@pytest.mark.parametrize(
    ("scheme", "ranks", "caches"),
    [
        ("compressed, channel", "2", "auto"),
        *(
            pytest.param(scheme, ranks, caches, marks=pytest.mark.slow)
            for scheme, ranks, caches in (
                ("compressed, channel", "1", "auto"),
                ("compressed, channel", "1", "fp8"),
                ("int-quantized", "1", "auto"),
                ("int-quantized", "2", "auto"),
            )
        ),
    ],
)
def test_a_layer_of_a_decode_step_is_one_launch_with_all_scales(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    ranks: str,
    caches: str,
) -> None:
    """The tokens are those of the reference, which computes with the numbers that the folder stands for."""
    random_model("Qwen3", {**COMMON, **TINY["qwen3"][1], "vocab_size": 300}, 6).save_pretrained(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    quantise(tmp_path, scheme)
    launches: list[tuple[str, set[str]]] = []
    run = SimulatedDevice.run

    def record(
        self: SimulatedDevice, kernel: str, arguments: Sequence[Mapping[str, Any]], *options: Any
    ) -> list[Any]:
        launches.append((kernel, {name for name, argument in arguments[0].items() if argument is not None}))
        return run(self, kernel, arguments, *options)

    monkeypatch.setattr(SimulatedDevice, "run", record)
    flags = ["--tp", ranks, "--dtype", "bfloat16", "--kv-cache-dtype", caches]
    arguments = ["--model", str(tmp_path), "--prompt", "Tom had", "--max-new-tokens", "4", *flags]
    assert main(["generate", *arguments]) == 0
    assert "4 of 4" in capsys.readouterr().out
    layers = [names for kernel, names in launches if kernel == "decoder_layer_decode"]
    assert len(layers) >= 3 and all(names >= SCALES for names in layers)
    assert not {"attention_decode", "attention_block_decode"} & {kernel for kernel, _ in launches}
