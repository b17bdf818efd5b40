"""Folders of bitsandbytes (LLM.int8) and of modelopt (fp8), and files of theirs that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.errors import ModelError
from model.families import load_config, read_config
from model.formats import QuantisedWeight, Scaled
from model.formats.scaled import ELEMENT
from model.loading.checkpoint import open_checkpoint
from tests.model.containers import Tensors, check_generates, check_numbers, configure, save, write_container

MODULE = "model.layers.0.mlp.down_proj"
LLM_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.mlp.gate*"]}


def draw_llm_int8(
    module: str, shape: tuple[int, int], random: np.random.Generator
) -> tuple[Tensors, np.ndarray]:
    """Return int8 elements with the largest magnitude of each row; row 2 is all zeros."""
    elements = random.integers(-127, 128, shape, np.int8)
    largest = random.uniform(0.05, 0.2, shape[0]).astype(np.float32)
    elements[2], largest[2] = 0, 0
    stored = {"weight": elements, "SCB": largest, "weight_format": np.zeros((), np.uint8)}
    numbers = elements.astype(np.float64) * largest[:, None] / 127
    return {f"{module}.{name}": array for name, array in stored.items()}, numbers.astype(np.float32)


def draw_fp8(module: str, shape: tuple[int, int], random: np.random.Generator) -> Any:
    """Return fp8 elements from 2^-5 on with one scale, and a scale of inputs; gates are plain."""
    if "gate" in module:
        return None
    magnitudes = np.ldexp(1 + random.integers(0, 8, shape) / 8, random.integers(-5, 3, shape))
    elements = (magnitudes * random.choice([-1, 1], shape)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.float32(random.uniform(0.04, 0.06))
    stored = {"weight": elements, "weight_scale": np.array(scale), "input_scale": np.array(np.float32(0.5))}
    tensors = {f"{module}.{name}": array for name, array in stored.items()}
    if module.endswith(("k_proj", "v_proj")):
        tensors[f"{module}.{module[-6]}_scale"] = np.array(np.float32(0.25))
    return tensors, elements.astype(np.float32) * scale


def refuse(folder: Path) -> str:
    """Return the refusal of a folder, without the path of a file."""
    with pytest.raises(ModelError) as refused:
        open_checkpoint(folder, load_config(folder))
    return str(refused.value).partition(": ")[2]


@pytest.mark.filterwarnings("ignore:LLM.int8 rounds inputs below")
def test_weights_of_llm_int8_compute_their_numbers_on_one_and_two_ranks(tmp_path: Path) -> None:
    """Scale and product are rounded once each."""
    _, numbers = write_container(tmp_path / "m", LLM_INT8, draw_llm_int8)
    check_numbers(tmp_path / "m", numbers, 2.0**-22)
    assert check_generates(tmp_path / "m", numbers) == {"float32", "int8"}


@pytest.mark.filterwarnings("ignore:LLM.int8 rounds inputs below")
def test_files_of_llm_int8_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder, scale_name = tmp_path / "m", f"{MODULE}.SCB"
    tensors, numbers = write_container(folder, LLM_INT8, draw_llm_int8)
    largest = tensors[scale_name]
    with pytest.warns(
        UserWarning, match=r"LLM.int8 rounds inputs below llm_int8_threshold to 8 bits; kernels multiply"
    ):
        check_numbers(folder, numbers, 2.0**-22)
    for number, row in ((0, 3), (-1, 3), (np.inf, 3), (np.nan, 2)):
        wrong = largest.copy()
        wrong[row] = number
        save(folder, tensors | {scale_name: wrong})
        assert refuse(folder) == (
            f"{scale_name} contains {float(number)}; largest magnitudes are finite and above 0: quantise "
            f"{MODULE}.weight again"
        )
    save(folder, tensors | {scale_name: largest[:-1]})
    assert refuse(folder) == f"{scale_name} is float32 (63,); a weight (64, 128) has float32 (64,)"
    save(folder, tensors | {scale_name: largest.astype(np.float16)})
    assert refuse(folder) == f"{scale_name} is float16 (64,); a weight (64, 128) has float32 (64,)"
    save(folder, {name: tensor for name, tensor in tensors.items() if name != scale_name})
    assert refuse(folder) == f"{MODULE}.weight is int8 and has no scales; tensor {scale_name} is missing"
    save(folder, tensors | {f"{MODULE}.weight_format": np.ones((), np.uint8)})
    assert refuse(folder).startswith(f"{MODULE}.weight_format is not 0; only weights row by row are read")
    save(folder, {name: tensor for name, tensor in tensors.items() if not name.endswith("weight_format")})
    check_numbers(folder, numbers, 2.0**-22)


def test_four_bits_of_bitsandbytes_are_refused(tmp_path: Path) -> None:
    write_container(tmp_path / "m", LLM_INT8, draw_llm_int8)
    assert read_config(tmp_path / "m" / "config.json").refusals == ()
    configure(tmp_path / "m", load_in_8bit=False, load_in_4bit=True)
    with pytest.raises(
        ModelError, match="load_in_8bit: not true; of bitsandbytes only weights of 8 bits are read"
    ):
        load_config(tmp_path / "m")


def write_modelopt(folder: Path, is_in_config: bool) -> tuple[Tensors, Tensors]:
    """Write a folder of modelopt, described in config.json or in hf_quant_config.json."""
    config = FP8 | {"quant_method": "modelopt"}
    tensors, numbers = write_container(folder, config, draw_fp8)
    if not is_in_config:
        fields = json.loads((folder / "config.json").read_text())
        del fields["quantization_config"]
        (folder / "config.json").write_text(json.dumps(fields))
        described = {"producer": {"name": "modelopt"}, "quantization": FP8}
        (folder / "hf_quant_config.json").write_text(json.dumps(described))
    return tensors, numbers


@pytest.mark.filterwarnings("ignore:config.json quantises input rows of linear layers")
@pytest.mark.parametrize("is_in_config", [True, False])
def test_weights_of_modelopt_have_their_numbers_and_scales_of_rows(
    tmp_path: Path, is_in_config: bool
) -> None:
    folder = tmp_path / "m"
    _, numbers = write_modelopt(folder, is_in_config)
    check_numbers(folder, numbers)
    config = load_config(folder)
    assert config.quant_method == "modelopt" and config.weight_format is not None
    assert config.weight_format.formats == (Scaled("modelopt", None, None, ELEMENT, True, True),)
    assert config.weight_format.find_format("model.layers.0.mlp.gate_proj.weight") is None
    assert config.weight_format.find_format("model.layers.0.mlp.up_proj.weight") is not None
    weight = open_checkpoint(folder, config)[f"{MODULE}.weight"]
    assert isinstance(weight, QuantisedWeight) and weight.input_scale == 0.5


def test_another_algorithm_and_a_damaged_description_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_modelopt(folder, False)
    path = folder / "hf_quant_config.json"
    with pytest.warns(
        UserWarning, match="input rows of linear layers to fp8 .input_scale.; mlp does so, with the static"
    ):
        open_checkpoint(folder, load_config(folder))
    path.write_text(json.dumps({"quantization": FP8 | {"quant_algo": "NVFP4"}}))
    with pytest.raises(
        ModelError, match=r"quantization_config.quant_algo: 'NVFP4'; of modelopt, FP8 is read"
    ):
        load_config(folder)
    path.write_text(json.dumps({"quantization": 8}))
    with pytest.raises(ModelError, match=r"hf_quant_config.json: quantization: 8 is not an object"):
        load_config(folder)
