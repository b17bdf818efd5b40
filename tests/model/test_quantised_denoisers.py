"""Denoisers whose linear layers are quantised on loading: kernels and numpy model, what stays, plans and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from model.device import SimulatedDevice
from model.errors import ModelError
from model.families.tasks import DENOISER
from model.formats import QuantisedWeight
from model.loading.component import LoadedComponent
from model.runners.component import KernelComponent, ReferenceComponent
from nkw.commands import main
from tests.model.denoiser_oracles import CASES
from tests.model.pipeline_folders import edit
from tests.model.test_denoise import folders  # noqa: F401
from tests.model.test_denoisers import UNIT, bound_error, open_case
from tests.model.test_plan_images import configs  # noqa: F401

WEIGHTS_ONLY = ("fp8", "int8", "int4")
EPS = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3).eps)
LEVELS = {"int8": 127, "int4": 7}
"""Steps from 0 to the largest weight of a column, or of a group of its rows."""


def list_quantised(model: LoadedComponent) -> dict[str, QuantisedWeight]:
    """Return the quantised tensors of a component by name."""
    assert model.checkpoint is not None
    return {name: weight for name, weight in model.checkpoint.items() if isinstance(weight, QuantisedWeight)}


def bound_change(model: LoadedComponent, scheme: str, output: np.ndarray) -> float:
    """Return a bound of what rounding the operands of linear layers changes in an output.

    Operands: rounding is off by up to half a step either way, so by step / sqrt(12) in the mean square. Numbers of e4m3
    with a scale for each row are at most eps = 1/8 of themselves apart; those below the normal range, 2^-14 of the
    row's largest, add nothing. A step of integers is largest / levels, where the largest of K normal weights is
    sqrt(2 ln K) times their mean square root.

    Products: the errors of K summed products are independent, as the products are, so both sums grow by sqrt(K): the
    relative error is that of one product, from the weight and, with fp8-dynamic, from the row.

    Networks: errors of n matrices add up in squares, at most as if each reached the output whole. The largest of N
    normal errors is sqrt(2 ln N) times their mean square root.
    """
    quantised = list_quantised(model).values()
    terms = max(weight.shape[1] for weight in quantised)
    step = EPS if scheme not in LEVELS else math.sqrt(2 * math.log(terms)) / LEVELS[scheme]
    operands = 2 if scheme == "fp8-dynamic" else 1
    relative = step * math.sqrt(operands * len(quantised) / 12)
    return math.sqrt(2 * math.log(output.size)) * relative * float(np.sqrt(np.square(output).mean()))


@pytest.mark.parametrize("name", ["pixart", "flux with guidance", "sd3", "dit"])
@pytest.mark.parametrize("scheme", [*WEIGHTS_ONLY, "fp8-dynamic"])
def test_kernels_compute_what_the_numpy_model_does(name: str, scheme: str, tmp_path: Path) -> None:
    """Weights alone change no rounding of rows, so kernels differ from the numpy model as without quantisation.

    An element of a row of fp8 moves by a step if a sum in another order takes it across a boundary, and then other
    elements after it do. If all moved, rows would be rounded twice independently: errors of two roundings of a row,
    which are as large as those of a row and a weight in `bound_change`. But an element is so near a boundary only if
    2^-22, an error of float32, reaches it: of K = 128 elements in each of 30 products, one row in a hundred or so has
    one. So fewer than a quarter of the distance to rows that are not rounded is left in the mean.
    """
    case = CASES[name]
    plain = open_case(case, tmp_path)
    model, inputs = plain.quantise(scheme, "trn2"), case.draw_inputs()
    images = KernelComponent(model, SimulatedDevice("trn2", 1), len(case.timesteps)).run(inputs)["x"]
    expected, unquantised = (ReferenceComponent(opened).run(inputs)["x"] for opened in (model, plain))
    bound, most = bound_error(expected, UNIT, case), bound_change(model, scheme, unquantised)
    assert 2 * bound < np.abs(expected - unquantised).max() <= most
    if scheme in WEIGHTS_ONLY:
        np.testing.assert_allclose(images, expected, rtol=0, atol=bound)
        return
    np.testing.assert_allclose(images, expected, rtol=0, atol=bound + most)
    unrounded = ReferenceComponent(plain.quantise("fp8", "trn2")).run(inputs)["x"]
    assert np.abs(images - expected).mean() < np.abs(images - unrounded).mean() / 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_round_rows_of_their_columns(ranks: int, tmp_path: Path) -> None:
    """Few rows are rounded otherwise, as in the test above; with scales of other columns all would be."""
    case = CASES["pixart"]
    model, inputs = open_case(case, tmp_path).quantise("fp8-dynamic", "trn2"), case.draw_inputs()
    images = KernelComponent(model, SimulatedDevice("trn2", ranks), 2).run(inputs)["x"]
    same_ranks, other_ranks = (
        ReferenceComponent(model, count).run(inputs)["x"] for count in (ranks, 3 - ranks)
    )
    assert np.abs(images - same_ranks).mean() < np.abs(images - other_ranks).mean() / 4


def test_layers_outside_the_blocks_and_modulation_stay(tmp_path: Path) -> None:
    model = open_case(CASES["pixart"], tmp_path).quantise("fp8", "trn2")
    quantised = list_quantised(model).keys()
    linears = [
        f"attn{index}.{name}.weight" for index in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")
    ]
    linears += ["ff.net.0.proj.weight", "ff.net.2.weight"]
    layers = range(int(json.loads((tmp_path / "config.json").read_text())["num_layers"]))
    assert quantised == {f"transformer_blocks.{layer}.{name}" for layer in layers for name in linears}


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("w8a8", "products of rows of int8 take no gates of residuals"),
        (
            "int3",
            "quantization is 'int3', and the weights are not quantised; weights are quantised on loading by",
        ),
    ],
)
def test_refuses_schemes_that_denoisers_do_not_compute(scheme: str, message: str, tmp_path: Path) -> None:
    model = open_case(CASES["pixart"], tmp_path)
    assert model.quantise(None, "trn2") is model
    with pytest.raises(ModelError, match=message):
        model.quantise(scheme, "trn2")


@pytest.mark.parametrize("method", ["torchao", "quanto", "gguf"])
def test_refuses_folders_whose_quantisation_is_not_read(method: str, tmp_path: Path) -> None:
    open_case(CASES["pixart"], tmp_path)
    edit(tmp_path / "config.json", quantization_config={"quant_method": method})
    with pytest.raises(ModelError, match=f"quantization_config: weights quantised by {method}"):
        LoadedComponent.open(tmp_path, DENOISER)


def test_the_commands_quantise_the_denoiser(
    folders: dict[str, Path],  # noqa: F811
    configs: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawing, plan = tmp_path / "images.json", tmp_path / "plan.json"
    words = ["--quantization", "fp8-dynamic", "--dtype", "bfloat16", "--steps", "2"]
    assert (
        main(["imagine", "a red circle", "--model", str(folders["flow"]), *words, "--json", str(drawing)])
        == 0
    )
    contents = json.loads(drawing.read_text())
    assert contents["quantization"] == "fp8-dynamic" and contents["difference"]["latents"] > 0
    weight_bytes = []
    for options in (["--dtype", "bfloat16"], words[:4]):
        assert main(["plan", str(configs), *options, "--json", str(plan)]) == 0
        weight_bytes.append(json.loads(plan.read_text())["weight_bytes"])
    assert weight_bytes[1] < weight_bytes[0]
    assert main(["plan", str(configs), "--quantization", "w8a8"]) == 2
    assert "take no gates of residuals" in capsys.readouterr().err
