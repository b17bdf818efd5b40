"""The table "Where a change goes" of CONTRIBUTING.md: copies of the project get a toy addition of every row.

An addition creates and edits the files that its row lists, and no others. Then the checks that run over everything of
its kind pass in the copy of several additions. An edit replaces one text of a file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FORMAT_PAGE = (ROOT / "docs/weight-formats.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (a\w? [\w -]+?) \| (.+) \|$", CONTRIBUTING, re.MULTILINE))
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")


@dataclass(frozen=True)
class Addition:
    """What a row's toy consists of, the commands that its row names, and the checks that then pass."""

    name: str
    files: dict[str, str]
    checks: tuple[str, ...]
    edits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)


INSTRUCTION = Addition(
    "toy_negate",
    {
        "simulate/isa/instructions/toy_negate.py": '''"""toy_negate: -data on the Vector engine."""

from __future__ import annotations

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.memory import NkiTensor


@instruction
def toy_negate(hardware: Hardware, dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Plan:
    """dst = -data in float32 on the Vector engine.

    dst, data: [P, ...] @ SBUF or PSUM, any dtype; same partitions and elements per partition.

    Raises RuleViolation. Cost: one element per cycle.
    """
    rules.check_tile(hardware, "dst", dst)
    rules.check_tile(hardware, "data", data)
    rules.same_elements("dst", dst, "data", data)
    rules.not_packed("dst", dst)
    rules.not_packed("data", data)
    return Plan(
        engine=Engine.vector,
        reads=(data,),
        writes=(dst,),
        domain=Domain.float32,
        compute=_negated,
        cost=costs.vector(hardware, data.free_size),
        name=name,
    )


def _negated(values: np.ndarray) -> tuple[np.ndarray]:
    return (-values,)
''',
        "tests/isa/test_toy_negate.py": '''"""toy_negate: values, and what it refuses."""

from __future__ import annotations

import numpy as np

from tests.isa.tiles import Fresh, execute, plan, refuses, tile


def test_negates() -> None:
    data = np.arange(-6, 6, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(execute("trn2", "toy_negate", dst=Fresh((3, 4)), data=data)["dst"], -data)


def test_refuses_tiles_of_different_sizes_and_accepts_equal_ones() -> None:
    refuses("NKW-ELEMENTS-AGREE", "trn2", "toy_negate", dst=tile((8, 4)), data=tile((8, 5)))
    plan("trn2", "toy_negate", dst=tile((8, 5)), data=tile((8, 5)))
''',
        "docs/instructions/examples/toy_negate.py": '''"""Negate a tile."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def negate(x):
    tile = nl.load(x)
    nisa.toy_negate(dst=tile, data=tile)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


x = np.arange(12, dtype=np.float32).reshape(3, 4)
np.testing.assert_array_equal(negate(x), -x)
''',
        "tests/oracle/instructions/toy_negate.py": '''"""toy_negate, and how its operands are drawn."""

from __future__ import annotations

from tests.oracle.draw import Draw
from tests.oracle.machine import Core, Operand
from tests.oracle.streams import common


def toy_negate(core: Core, dst: Operand, data: Operand) -> None:
    """dst = -data."""
    core.write(dst, -core.matrix(data))


def _drawn(d: Draw) -> common.Arguments:
    p, f = d.size()
    data = d.source(p, f, d.dtype(), d.buffer())
    return {"dst": common.destination(d, p, f, (data,)), "data": data}


common.DRAWS["toy_negate"] = _drawn
''',
    },
    checks=(
        "tests/isa/test_toy_negate.py",
        "tests/isa/test_bad_operands.py",
        "tests/contract/test_signatures.py",
        "tests/contract/test_imports.py",
        "tests/nki/test_surface.py",
        "tests/oracle/test_lockstep.py::test_every_instruction_of_the_book_has_an_oracle_or_a_reason",
        "tests/oracle/test_lockstep.py::test_draws_reach_every_instruction_of_the_oracle",
        "tests/oracle/test_lockstep.py::test_few_drawn_instructions_are_refused",
        "tests/tools/test_instruction_pages.py",
    ),
    commands={"make docs": "tools.instruction_pages"},
)

KERNEL = Addition(
    "toy_twice",
    {
        "nki_kernels/toy_twice.py": '''"""toy_twice: every element times two.

Arguments:
    x          [T, H] @ HBM, float32 or bfloat16; T up to 128
    returns y  [T, H] @ HBM, x's dtype

Cost
    HBM: x once, y once.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.tiles import load


@nki.jit
def toy_twice(x):
    """2 x [T, H] @ HBM."""
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = load(x, x.dtype)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=y, src=tile)
    return y


def toy_twice_reference(x: np.ndarray) -> np.ndarray:
    """toy_twice in numpy."""
    return 2 * x
''',
        "tests/kernels/test_toy_twice.py": '''"""toy_twice: its values on every chip, and its budget."""

from __future__ import annotations

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import TARGETS, check, normal


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens", [1, 127, 128])
def test_values(tokens: int, target: str) -> None:
    check(kernels.toy_twice, kernels.toy_twice_reference, (normal(1, tokens, 70),), target)


@pytest.mark.nki_budget(time_us=10, hbm_bytes=2 * 128 * 512 * 4, target="trn2")
def test_budget(nki_budget) -> None:
    nki_budget(kernels.toy_twice, np.zeros((128, 512), np.float32))
''',
    },
    checks=(
        "tests/kernels/test_toy_twice.py",
        "tests/kernels/test_language_subset.py",
        "tests/timing/test_stored_timelines.py",
        "tests/timing/test_kernel_budgets.py::test_every_shipped_kernel_has_a_budget",
        "tests/check/test_orders.py",
        "tests/contract/test_imports.py",
        "tests/contract/test_readme.py",
    ),
    edits={
        "nki_kernels/examples.py": (
            "EXAMPLES = {\n",
            'EXAMPLES = {\n    "toy_twice": ("f32[4,256]",),\n',
        ),
        "nki_kernels/README.md": (
            "| `matmul` | `a @ b`, any sizes |\n",
            "| `matmul` | `a @ b`, any sizes |\n| `toy_twice` | twice its argument |\n",
        ),
    },
    commands={"make timelines": "tools.timelines"},
)

DETECTOR = Addition(
    "toy",
    {
        "simulate/check/toy.py": '''"""`toy`: tensors that are named toy."""

from __future__ import annotations

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, make_finding, register_kind
from simulate.run import Launch
from simulate.lines import location

TOY = register_kind("NKW-TOY", Severity.warning, "A tensor is not named toy.")


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """The tensors that a kernel names toy."""
    return [
        make_finding(TOY, f"a tensor of {record.shape} is named toy", location(record.line))
        for stream in launch.streams
        for record in stream.tensors
        if record.name == "toy" and record.line is not None
    ]
''',
        "tests/faults/toy/named_toy.py": '''"""A tile is named toy."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp

CODE = "NKW-TOY"


def kernel(x, sick):
    name = "toy" if sick else "tile"
    tile = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.sbuf, name=name)  # blamed
    nisa.dma_copy(dst=tile, src=x)
    return copied_out(tile)


def inputs():
    return (ramp(8, 4),)


def answer(x):
    return x
''',
        "tests/faults/toy/named_toy.txt": (
            "warning[NKW-TOY] a tensor of (8, 4) is named toy\n  at named_toy.py:15 in kernel\n0 errors, 1 warning\n"
        ),
    },
    checks=(
        "tests/faults/test_faults.py",
        "tests/check/test_checks_page.py",
        "tests/check/test_commands.py",
        "tests/contract/test_imports.py",
    ),
    edits={
        "docs/checks.md": (
            "| Constants of two cores differ |",
            "| A tensor is named toy | H | warning: NKW-TOY |\n| Constants of two cores differ |",
        ),
    },
)

CHIP = Addition(
    "toy1",
    {
        "simulate/hardware/toy1.py": '''"""toy1: the numbers of trn3 under another name."""

from __future__ import annotations

from simulate.hardware.gen4 import TRN3
from simulate.hardware.record import documented

TOY1 = TRN3.with_numbers(name=documented("toy1", "a test"))
''',
    },
    checks=(
        "tests/hardware",
        "tests/isa/test_tensor_scalar.py",
        "tests/isa/test_nc_matmul.py",
        "tests/testing/test_budget.py",
        "tests/tools/test_instruction_pages.py",
        "tests/contract/test_imports.py",
    ),
    edits={
        "nkw/targets.py": ('"trn3")\n', '"trn3", "toy1")\n'),
        "simulate/hardware/__init__.py": (
            "TRN2, TRN3)",
            "TRN2, TRN3, TOY1)",
            "from simulate.hardware.topology import",
            "from simulate.hardware.toy1 import TOY1\nfrom simulate.hardware.topology import",
        ),
    },
)


def family() -> Addition:
    """Return the family of the tests of families, as a shipped one."""
    module = (ROOT / "tests/model/toy_family.py").read_text(encoding="utf-8")
    return Addition(
        "toynet",
        {
            "model/families/toynet.py": module,
            "tests/model/test_toynet.py": '''"""A model of the family generates what its numpy reference does."""

from __future__ import annotations

import json

import numpy as np
import safetensors.numpy

from model.families import compose, load_config
from nkw.commands import main

SIZES = dict(v=300, h=32, f=48, l=2, q=4, g=2, d=8, n=64)


def test_its_kernels_generate_what_its_reference_does(tmp_path, byte_tokenizer, capsys) -> None:
    config = {"architectures": ["ToynetForCausalLM"], "model_type": "toynet", **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    random = np.random.default_rng(7)
    shapes = compose(load_config(tmp_path)).list_tensor_shapes()
    weights = {name: random.uniform(0.5, 1.5, shape).astype(np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    words = ["generate", "--model", str(tmp_path), "--prompt", "ab", "--max-new-tokens", "3", "--tp", "2"]
    assert main(words) == 0
    assert "3 of 3 tokens equal to the numpy reference" in capsys.readouterr().out
''',
        },
        checks=(
            "tests/model/test_toynet.py",
            "tests/model/test_families.py::test_every_row_names_a_reader",
        ),
        edits={
            "model/families/registry.py": (
                "FAMILIES: dict[str, Family] = {\n",
                "FAMILIES: dict[str, Family] = {\n"
                '    "toynet": Family("model.families.toynet", "toy", "ToynetForCausalLM"),\n',
            )
        },
    )


_FORMAT = "model/formats/toy_int8.py"
_FORMAT_TEST = "tests/model/test_toy_int8.py"
WEIGHT_FORMAT = Addition(
    "toy_int8",
    {
        _FORMAT: re.findall(r"```python\n(.*?)```", FORMAT_PAGE, re.DOTALL)[0],
        _FORMAT_TEST: '''"""A model with such weights generates the tokens of its widened weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from model.loading.checkpoint import open_checkpoint
from nkw.commands import main
from model.families import load_config
from model.formats.toy_int8 import ToyInt8


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_it_generates_the_tokens_of_its_widened_weights(
    write_model, byte_tokenizer, random_weights, capsys, ranks
) -> None:
    tokens = {}
    for quantised in (True, False):
        folder, format, tensors = write_model(name=str(quantised)), ToyInt8(), {}
        for name, tensor in random_weights().items():
            if not name.endswith("proj.weight"):
                tensors[name] = tensor
                continue
            packed = format.pack(tensor)
            stored = {name: packed["elements"], f"{name}_scale": packed["scales"]}
            tensors |= stored if quantised else {name: format.widen(packed)}
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        if quantised:
            config = json.loads((folder / "config.json").read_text())
            config["quantization_config"] = {"quant_method": "toy_int8"}
            (folder / "config.json").write_text(json.dumps(config))
            weights = open_checkpoint(folder, load_config(folder)).values()
            assert any(not isinstance(weight, np.ndarray) for weight in weights)
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        words = ["generate", "--model", str(folder), "--prompt", "ab", "--max-new-tokens", "4"]
        assert main([*words, "--tp", ranks, "--json", str(folder / "out.json")]) == 0
        assert "4 of 4 tokens equal to the numpy reference" in capsys.readouterr().out
        tokens[quantised] = json.loads((folder / "out.json").read_text())["generations"][0]["generated_ids"]
    assert tokens[True] == tokens[False]
''',
    },
    checks=("tests/model/test_toy_int8.py",),
    edits={
        "model/formats/__init__.py": (
            "from model.formats.scaled import INT8, Scaled\n",
            "from model.formats.scaled import INT8, Scaled\nfrom model.formats.toy_int8 import ToyInt8\n",
            '    "fp8": Scaled,\n',
            '    "fp8": Scaled,\n    "toy_int8": ToyInt8,\n',
        ),
    },
)

READ_BY_KERNELS = replace(
    WEIGHT_FORMAT,
    files={
        _FORMAT: WEIGHT_FORMAT.files[_FORMAT].replace(
            "    @classmethod\n    def from_config(",
            "    @property\n    def kernel_tensors(self) -> tuple[str, ...]:\n"
            '        """Elements and scales."""\n        return ELEMENTS, SCALES\n\n'
            "    @classmethod\n    def from_config(",
        ),
        _FORMAT_TEST: WEIGHT_FORMAT.files[_FORMAT_TEST]
        .replace("import json\n", "import dataclasses\nimport json\n")
        .replace("import ToyInt8\n", "import ToyInt8\nfrom model.loading.weights import shard_weights\n")
        + '''

@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_hold_the_elements_and_the_scales(write_model, random_weights, ranks) -> None:
    """Together they stand for the weights that ranks of a widened model hold; three ranks divide no size."""
    folder, format, tensors, widened = write_model(), ToyInt8(), {}, {}
    for name, tensor in random_weights().items():
        packed = format.pack(tensor) if "proj" in name else {"elements": tensor}
        tensors |= {name: packed["elements"]}
        tensors |= {f"{name}_scale": packed["scales"]} if "scales" in packed else {}
        widened[name] = format.widen(packed) if "scales" in packed else tensor
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    plain = load_config(folder)
    config = dataclasses.replace(plain, weight_format=format)
    expected = shard_weights(plain, widened, ranks)
    stored = shard_weights(config, open_checkpoint(folder, config), ranks)
    for rank, others in zip(stored, expected):
        for parameter in ("w_gate", "w_up", "w_down"):
            name = f"layers.0.mlp.{parameter}"
            elements, scales = rank.arrays[name], rank.arrays[f"{name}_scales"]
            assert (elements.dtype, scales.dtype, len(scales)) == (np.int8, np.float32, 1)
            assert np.array_equal(elements * scales, others.arrays[name])
        assert np.array_equal(rank.arrays["head.w_head"], others.arrays["head.w_head"])
''',
    },
    checks=(
        _FORMAT_TEST,
        "tests/kernels/test_language_subset.py",
        "tests/contract/test_imports.py",
        "tests/kernels/test_feed_forward.py",
    ),
)

CACHE_FORMAT = Addition(
    "toy_int8",
    {},
    checks=("tests/model/test_cache_formats.py", "tests/model/test_layer_caches.py"),
    edits={
        "model/layers/cache_formats.py": (
            "CACHE_FORMATS = {\n",
            'CACHE_FORMATS = {\n    "toy_int8": CacheFormat(np.dtype(np.int8), 100.0),\n',
        ),
    },
)

TASK = Addition(
    "toy_image",
    {
        "model/config/toy_image.py": '''"""The configuration of a filter of images."""

from __future__ import annotations

from dataclasses import dataclass

from model.config.record import Config


@dataclass(frozen=True)
class ToyImageConfig(Config):
    """Images [channels, height, width], and the number of rows and columns of the filter's windows."""

    channels: int
    height: int
    width: int
    window: int
''',
        "model/families/toy_image.py": '''"""A filter of images: one convolution."""

from __future__ import annotations

from model.config import Fields
from model.config.toy_image import ToyImageConfig
from model.layers.toy_image import ImageFilter
from model.network import Input, Network


def toy_image(fields: Fields) -> ToyImageConfig:
    """Read the sizes of images and windows."""
    sizes = {name: fields.count(name) for name in ("channels", "height", "width", "window")}
    return ToyImageConfig(**sizes)


def compose(config: ToyImageConfig) -> Network:
    """The network of one layer."""
    layer = ImageFilter(config.channels, config.height, config.width, config.window)
    return Network(((layer,),), {"image": Input("image", dtype=None)}, ("filtered",))
''',
        "model/layers/toy_image.py": '''"""A convolution of images that keeps their size, and relu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import Launch, StepShape, Value, count_product_work
from model.layers.layer import Stateless, States
from model.layers.shard import ROW, Cut, Shape, Shard
from model.layers.weight import Tensor, Weight


class WindowsLast(Cut):
    """Windows [out, in, rows, columns], kept as [rows, columns, in, out]."""

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return [rows, columns, in, out]."""
        return tensor_shape[::-1]

    def take(self, tensor: np.ndarray, shard: Shard) -> np.ndarray:
        """Return a contiguous copy."""
        return np.ascontiguousarray(np.asarray(tensor).transpose(2, 3, 1, 0))


@dataclass(frozen=True)
class ImageFilter(Stateless):
    """relu(convolution(image)) of images [channels, height, width], with square windows of odd size."""

    channels: int
    height: int
    width: int
    window: int

    @property
    def weights(self) -> Sequence[Weight]:
        """The windows and the bias."""
        shape = (self.channels, self.channels, self.window, self.window)
        return (
            Weight("filter.w", (Tensor("conv.weight", shape, WindowsLast()),)),
            Weight("filter.b", (Tensor("conv.bias", (self.channels,), ROW),)),
        )

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """One kernel."""
        windows, bias = (weight.value(step) for weight in self.weights)
        image = Value("image", (step.sequences, self.channels, self.height, self.width), step.activations)
        padding = (self.window // 2, self.window // 2)
        arguments = {"x": image, "w": windows, "bias": bias, "padding": padding, "activation": "relu"}
        work = count_product_work(step.tokens, windows, moved_bytes=2.0 * image.nbytes)
        return (Launch("conv2d", arguments, ("filtered",), work, step.tokens),)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """[channels, height, width] of one image."""
        margin = self.window // 2
        padded = np.pad(numpy.round(x), ((0, 0), (margin, margin), (margin, margin)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (self.window, self.window), (1, 2))
        sums = np.einsum("oiuv,ihwuv->ohw", numpy.load_tensor("conv.weight"), windows)
        return numpy.round(np.maximum(sums + numpy.load_tensor("conv.bias")[:, None, None], 0))
''',
        "model/runners/toy_image.py": '''"""Filters one image a step."""

from __future__ import annotations

import numpy as np

from model.config.toy_image import ToyImageConfig
from model.execution.bound_launch import Device
from model.execution.launched_network import LaunchedNetwork
from model.families import compose
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.loading.weights import RankWeights
from model.mesh import Mesh


def make_step(config: ToyImageConfig, activations: np.dtype, weights: WeightDtypes) -> StepShape:
    """The step of one image; its rows are the pixels."""
    pixels = config.height * config.width
    return StepShape(Phase.prefill, pixels, 1, pixels, pixels, 1, activations, weights)


class ImageModel:
    """Filters images on a device."""

    def __init__(self, config: ToyImageConfig, weights: RankWeights, device: Device) -> None:
        self._step = make_step(config, weights.dtype, weights.dtypes)
        self._network = LaunchedNetwork(compose(config), [weights], device, self._step, Mesh(1), "no states")

    def filter(self, image: np.ndarray) -> np.ndarray:
        """Filter an image [channels, height, width]."""
        (filtered,) = self._network.run(self._step, {"image": image[None, None]})["filtered"]
        return filtered[0]
''',
        "model/commands/toy_image/__init__.py": '"""`nkw toy_image`: filters an image."""\n',
        "model/commands/toy_image/arguments.py": '''"""The options of `nkw toy_image`."""

from pathlib import Path

from model.commands.options import options
from nkw.options import Option

OPTIONS = (*options("model"), Option("image", dict(type=Path)), Option("--out", dict(type=Path, required=True)))
''',
        "model/commands/toy_image/command.py": '''"""`nkw toy_image`: filters an image, and compares it with numpy."""

from __future__ import annotations

import argparse

import numpy as np

from model.device import SimulatedDevice
from model.families import compose, load_config
from model.families.tasks import TOY_IMAGE
from model.layers.arithmetic import Arithmetic, Span
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.toy_image import ImageModel


def toy_image_command(options: argparse.Namespace) -> int:
    """Filter the image; returns the exit status."""
    config = load_config(options.model, TOY_IMAGE)
    weights = open_checkpoint(options.model, config)
    (rank,) = shard_weights(config, weights, 1)
    image = np.load(options.image)
    filtered = ImageModel(config, rank, SimulatedDevice("trn2", 1)).filter(image)
    numpy, expected = Arithmetic(weights, rank.dtype, widened_bytes=0), image
    for layer in compose(config).layers:
        expected = layer.reference(expected, Span(0, 1), {}, numpy)
    np.save(options.out, filtered)
    print(f"differs from the numpy reference by {np.abs(filtered - expected).max():.1g} at most")
    return 0
''',
        "tests/model/test_toy_image.py": '''"""A model of images: run, planned, bundled, and compared with numpy."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from model.errors import ModelError
from model.families import compose, load_config
from model.families.tasks import TOY_IMAGE
from nkw.commands import main

SIZES = {"channels": 5, "height": 12, "width": 9, "window": 3}


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    config = {"architectures": ["ToyImageFilter"], "model_type": "toy_image", **SIZES}
    (model / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(7)
    shapes = compose(load_config(model, TOY_IMAGE)).list_tensor_shapes()
    weights = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(weights, model / "model.safetensors")
    np.save(tmp_path / "image.npy", random.standard_normal((5, 12, 9), dtype=np.float32))
    return model


def test_an_image_is_filtered_as_by_numpy(folder, tmp_path, capsys) -> None:
    words = [str(folder), str(tmp_path / "image.npy"), "--out", str(tmp_path / "filtered.npy")]
    assert main(["toy_image", *words]) == 0
    assert capsys.readouterr().out.startswith("differs from the numpy reference by ")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    padded = np.pad(np.load(tmp_path / "image.npy"), ((0, 0), (1, 1), (1, 1)))
    sums = np.zeros((5, 12, 9), np.float32)
    for row in range(3):
        for column in range(3):
            shifted = padded[:, row : row + 12, column : column + 9]
            sums += np.tensordot(tensors["conv.weight"][:, :, row, column], shifted, 1)
    expected = np.maximum(sums + tensors["conv.bias"][:, None, None], 0)
    # 45 products and a bias: each of 46 roundings is half a last place of at most the sum of the absolute terms.
    terms = 45 * np.abs(tensors["conv.weight"]).max() * np.abs(padded).max() + np.abs(tensors["conv.bias"]).max()
    assert np.allclose(np.load(tmp_path / "filtered.npy"), expected, rtol=0, atol=2 * 46 * 2.0**-24 * terms)


def test_it_is_planned(folder, tmp_path) -> None:
    assert main(["plan", str(folder), "--json", str(tmp_path / "plan.json")]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    for option in (["--tp", "2"], ["--batch", "2"], ["--sp"], ["--price", "3"]):
        assert main(["plan", str(folder), *option]) == 2
    assert plan["parameters"] == 5 * 5 * 9 + 5
    assert [launch["kernel"] for launch in plan["launches"]] == ["conv2d"]
    assert plan["step_ns"] > 0


@pytest.mark.parametrize(("options", "lnc"), [([], 2), (["--lnc", "1"], 1)])
def test_it_is_planned_on_the_physical_cores_of_lnc(folder, tmp_path, capsys, monkeypatch, options, lnc) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    assert main(["plan", str(folder), *options, "--json", str(tmp_path / "plan.json")]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["lnc"], plan["launches"][0]["cores"]) == (lnc, lnc)
    assert f"core of trn2 (LNC {lnc}): " in capsys.readouterr().out


def test_its_layer_is_bundled(folder, tmp_path, capsys) -> None:
    words = ["bundle", str(folder), "--layer", "0", "--out", str(tmp_path / "bundle")]
    assert main([*words, "--json", str(tmp_path / "bundle.json")]) == 0
    cases = json.loads((tmp_path / "bundle.json").read_text())["cases"]
    assert [case["name"] for case in cases] == ["step-1-conv2d"]
    assert main(["bundle", str(folder), "--layer", "1", "--out", str(tmp_path / "other")]) == 2
    assert "this model has layers 0 to 0" in capsys.readouterr().err


def test_it_continues_no_texts(folder) -> None:
    with pytest.raises(ModelError, match="a toy_image filters images"):
        load_config(folder)
''',
    },
    checks=(
        "tests/model/test_toy_image.py",
        "tests/model/test_families.py",
        "tests/contract/test_imports.py",
    ),
    edits={
        "model/families/tasks.py": (
            "from model.config import Config, ModelConfig\n",
            "from model.config import Config, ModelConfig\nfrom model.config.toy_image import ToyImageConfig\n",
            'TEXT = Task("continues texts", ModelConfig)\n',
            'TEXT = Task("continues texts", ModelConfig)\n'
            'TOY_IMAGE = Task("filters images", ToyImageConfig, "model.runners.toy_image")\n',
        ),
        "model/families/registry.py": (
            "FAMILIES: dict[str, Family] = {\n",
            "FAMILIES: dict[str, Family] = {\n"
            '    "toy_image": Family("model.families.toy_image", "toy_image", "ToyImageFilter", TOY_IMAGE),\n',
            "TEXT, TEXT_ENCODER, Task\n",
            "TEXT, TEXT_ENCODER, TOY_IMAGE, Task\n",
        ),
        "nkw/verbs.py": (
            "MODEL_VERBS = {\n",
            "MODEL_VERBS = {\n"
            '    "toy_image": Verb(\n'
            '        "filter an image",\n'
            '        "toy_image FOLDER image.npy --out filtered.npy",\n'
            "        _DONE,\n"
            '        function="model.commands.toy_image.command:toy_image_command",\n'
            '        options="model.commands.toy_image.arguments:OPTIONS",\n'
            "    ),\n",
        ),
    },
)


ADDITIONS = {
    "an instruction": INSTRUCTION,
    "a kernel": KERNEL,
    "a detector": DETECTOR,
    "a weight format": WEIGHT_FORMAT,
    "a weight format that kernels read": READ_BY_KERNELS,
    "a cache format": CACHE_FORMAT,
    "a task": TASK,
}
"""By row of the table; other rows join when they list every file that their additions touch."""
if "`nkw/targets.py`" in ROWS["a chip"]:
    ADDITIONS["a chip"] = CHIP
if "tests/model/test_<name>.py" in ROWS["a model family"]:
    ADDITIONS["a model family"] = family()

OTHERS = ("a weight format", "a chip", "a model family", "a task")
"""Rows of a second copy: one format has the files of the other, and a chip makes more of other rows' checks."""


def listed(row: str, name: str) -> tuple[set[str], set[str]]:
    """Return the paths and the `make` targets that a row names, for an addition of some name."""
    words = re.findall(r"`([^`]+)`", ROWS[row].replace("<name>", name))
    return {word for word in words if "/" in word}, {word for word in words if word.startswith("make ")}


def copied(folder: Path) -> Path:
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not path.relative_to(folder).parts[0].startswith(".")
    }


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def add(addition: Addition, folder: Path) -> None:
    for name, text in addition.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for name, edits in addition.edits.items():
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in zip(edits[::2], edits[1::2]):
            assert text.count(old) == 1, name
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")
    for module in addition.commands.values():
        done = python(folder, "-m", module)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rows", [set(ADDITIONS) - set(OTHERS), set(ADDITIONS) & set(OTHERS)])
def test_additions_touch_what_their_rows_list_and_pass_the_checks(rows: set[str], tmp_path: Path) -> None:
    folder, checks = copied(tmp_path / "project"), dict[str, None]()
    for row, addition in ADDITIONS.items():
        if row not in rows:
            continue
        paths, targets = listed(row, addition.name)
        assert set(addition.commands) == targets
        before = contents(folder)
        add(addition, folder)
        touched = {name for name, content in contents(folder).items() if before.get(name) != content}
        assert {name for name in touched if not any(Path(name).match(path) for path in paths)} == set()
        assert {path for path in paths if not any(Path(name).match(path) for name in touched)} == set()
        assert len([name for name in touched & before.keys() if name.startswith(("model/", "nkw/"))]) <= 12
        checks |= dict.fromkeys(addition.checks)
    options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not deep")
    done = python(folder, "-m", "pytest", *options, *checks)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.slow
def test_an_addition_without_one_of_its_files_fails_the_checks(tmp_path: Path) -> None:
    for missing in ("tests/oracle/instructions/toy_negate.py", "make docs"):
        folder = copied(tmp_path / missing.replace("/", " "))
        kept = {name: text for name, text in INSTRUCTION.files.items() if name != missing}
        commands = {name: module for name, module in INSTRUCTION.commands.items() if name != missing}
        add(Addition(INSTRUCTION.name, kept, (), commands=commands), folder)
        test = "tools/test_instruction_pages.py" if missing == "make docs" else "oracle/test_lockstep.py"
        assert (
            python(folder, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{test}").returncode
            == 1
        )


def test_every_row_of_the_table_is_known() -> None:
    assert set(ADDITIONS) <= set(ROWS)
    named = {path for row in ROWS for path in listed(row, "*")[0]}
    assert [path for path in named if not any(ROOT.glob(path))] == []
