"""Every field of `quantization_config` with every value that does not belong there: read, or refused in a sentence."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from model.errors import ModelError
from model.families import load_config, read_config
from model.loading.checkpoint import open_checkpoint
from tests.deep import deep_except
from tests.hostile.fields import OTHERS, ROPE, spoilt
from tests.model.container_oracles import CONFIGS
from tests.model.containers import write_container
from tests.model.test_compressed_tensors import mixed
from tests.model.test_gptq_awq import Draw, describe

SOUND: dict[str, dict[str, Any]] = CONFIGS | {
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": ["a"],
    },
    "gptq": describe(
        Draw(), checkpoint_format="gptq", modules_in_block_to_quantize=[["q_proj"]], dynamic=None
    ),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    "several groups": mixed(sparsity_config={"format": "dense"}, kv_cache_scheme={"num_bits": 8}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", deep_except(list(SOUND), ["gptq", "modelopt", "int4 in groups"]))
def test_every_wrong_field_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    """The folder has plain weights, which lenient containers accept."""
    folder = tmp_path / "m"
    write_container(folder, SOUND[name], lambda *_: None)
    fields = json.loads((folder / "config.json").read_text())
    outcomes = set()
    for label, config in spoilt(SOUND[name]):
        if label.split(" = ")[0].rpartition(".")[2] in (*OTHERS, *ROPE):
            continue
        (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
        refusal = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _ = read_config(folder / "config.json").refusals
                open_checkpoint(folder, load_config(folder))
        except ModelError as error:
            refusal = str(error)
            assert refusal.isprintable() and len(refusal) <= 1000, (label, refusal)
        except Exception as error:
            raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error
        outcomes.add(bool(refusal))
    assert True in outcomes
