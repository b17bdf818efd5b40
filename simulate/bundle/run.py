#!/usr/bin/env python3
"""Runs the kernels of this bundle on a Neuron instance and writes the folder `result/`.

    python run.py              all cases
    python run.py --help       options

It needs Python 3.10 or later, numpy and AWS's Neuron SDK, and nothing of NKI Workbench. It finds out which launcher of
kernels is installed, and for every case compiles, runs, times and profiles the kernel in a process of its own with a
time limit: a case that crashes or hangs loses itself only. `result/result.json` is rewritten after every case and
valid at any time. It can be copied anywhere; nothing in it imports the rest of the project. A bundle of a model has
`run_model.py` beside it, which this file hands over to; `run_weights.py` is there where weights are not in the bundle:

    python run.py --weights FOLDER

The calls were written after AWS's documentation of SDK 2.20 to 2.33. None of it has run on a chip. The launchers:

nki          the kernel called with numpy arrays, which compiles and executes it without a framework: page "nki.jit",
             SDK 2.31 and later (NKI 0.5); NKI_ARTIFACTS_DIR keeps the NEFF: page "Test and debug a NKI kernel
             end-to-end with nrtpy", 2.32
torchneuron  TorchNeuron 2.13, 2.14: `torch_neuronx.nki_op`, device "neuron": page "How to work with NKI kernels from
             torch-neuronx", 2.33
torch_xla    torch-neuronx on torch_xla: page "NKI Kernel as a Framework Custom Operator", 2.28
neuronxcc    kernels of the Beta 1 dialect: pages "nki.baremetal" and "nki.benchmark", 2.20 to 2.27
nrtpy        times of the NEFF from the device, in a Python environment of its own (`--nrtpy`): page "nrtpy model API",
             2.32

Profiles: `neuron-explorer capture` and `view` (page "Profile a NKI Kernel", 2.33), else neuron-profile, which takes
the same options (page "Migration Guide from Neuron Profiler to Neuron Explorer", 2.29).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

SCHEMA = 2
RESERVE_BYTES = 4_000_000  # reserved for result.json on a full disk
LOG_BYTES = 400_000  # most bytes of a case's output, from its end
LAUNCHER_NAMES = ("nki", "torchneuron", "torch_xla", "neuronxcc")
PACKAGES = (
    "nki neuronx-cc nrtpy torch torch-neuronx torch-xla libneuronxla jax-neuronx numpy ml_dtypes"
    " aws-neuronx-runtime-discovery nki-library"
).split()
TOOLS = ("neuron-explorer", "neuron-profile")
TOOLS_FOLDER = "/opt/aws/neuron/bin"
NRTPY_PYTHON = "~/nrtpy_venv/bin/python"  # path in the page "Get started with nrtpy"
TORCH_BITS = {"bfloat16": "int16", "float8_e4m3fn": "int8", "float8_e4m3": "int8", "float8_e5m2": "int8"}
"""Dtypes that numpy lacks, and the integers as which torch reads their bits."""
LANGUAGE = "nl."  # prefix of the dtypes of NKI's language
Json = dict[str, Any]


def compute_digest(folder: Path, manifest: Json) -> str:
    """Return the SHA-256 of a bundle as hexadecimal text: its files by name, size and content, and its manifest.

    Files whose names begin with "result" and caches of Python are left out. The digest in the manifest counts
    as empty.

    Args:
        folder: Folder of the bundle.
        manifest: Contents of its `bundle.json`.
    """
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        name = path.relative_to(folder).as_posix()
        skipped = name == "bundle.json" or name.startswith("result") or "__pycache__" in name
        if skipped or not path.is_file():
            continue
        total.update(f"{name}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            while content := file.read(1 << 20):
                total.update(content)
    total.update(json.dumps({**manifest, "digest": ""}, sort_keys=True).encode())
    return total.hexdigest()


def split_tiles(array: Any, rows: int, columns: int) -> Iterator[tuple[int, int, Any]]:
    """Yield (first row, first column, tile) for the tiles of an array, row by row; each tile is a view.

    Leading dims are combined into rows; an array without dims is a row with a single column. Tiles at the
    edges are smaller; an array without elements has no tile.

    Args:
        rows: Rows of a tile.
        columns: Columns of a tile.
    """
    flat = array.reshape(-1, array.shape[-1] if array.ndim else 1) if array.size else array.reshape(0, 1)
    for row in range(0, flat.shape[0], rows):
        for column in range(0, flat.shape[1], columns):
            yield row, column, flat[row : row + rows, column : column + columns]


def digest_tiles(bits: Any, rows: int, columns: int) -> list[str]:
    """Return the SHA-256 of every tile of an array as hexadecimal text, row by row.

    Args:
        bits: Array with a dtype of numpy.
        rows: Rows of a tile.
        columns: Columns of a tile.
    """
    return [hashlib.sha256(tile.tobytes()).hexdigest() for _, _, tile in split_tiles(bits, rows, columns)]


# -- the environment -------------------------------------------------------------------------------------------------


def read_versions() -> dict[str, str]:
    """Return the versions of the installed packages of PACKAGES, by package."""
    from importlib import metadata  # imports slowly, and this module is also imported without running

    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def describe_environment() -> Json:
    """Return a description of this machine as JSON types: Python, packages, instance type, device files, variables.

    Of the environment variables only those named NEURON_* and NKI_* are included.
    """
    instance_type = ""
    with contextlib.suppress(OSError):
        instance_type = (
            Path("/sys/devices/virtual/dmi/id/product_name")
            .read_text(encoding="ascii", errors="replace")
            .strip()
        )
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": read_versions(),
        "instance": instance_type if re.fullmatch(r"[a-z0-9-]+\.[a-z0-9-]+", instance_type) else None,
        "devices": sorted(str(path) for path in Path("/dev").glob("neuron*")),
        "variables": {
            name: os.environ[name] for name in sorted(os.environ) if name.startswith(("NEURON_", "NKI_"))
        },
    }


def parse_release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (0, 5) for "0.5.1"."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])


def find_launcher(dialect: str, packages: dict[str, str]) -> tuple[str | None, str]:
    """Return (launcher, remark) for kernels that import `dialect`.

    (None, reason) if no installed package can launch them. The remark is empty unless the user should know
    something.

    Args:
        dialect: "nki" or "neuronxcc.nki".
        packages: Versions of installed packages by name.
    """
    nki, compiler = packages.get("nki"), packages.get("neuronx-cc")
    if dialect == "neuronxcc.nki":
        if compiler is None:
            return (
                None,
                "these kernels import neuronxcc.nki, and neuronx-cc is not installed (SDK 2.20 to 2.27 has it)",
            )
        return "neuronxcc", ""
    if nki is None:
        older = "; neuronxcc.nki does not run them" if compiler else ""
        return None, f"these kernels import nki, and no package nki is installed{older}"
    if parse_release(nki) < (0, 2):
        return (
            None,
            f"nki {nki} is the placeholder of the public index; install it from AWS's package repository",
        )
    if parse_release(nki) >= (0, 5):
        return "nki", ""
    torch = parse_release(packages.get("torch-neuronx", "0"))
    if torch >= (2, 13):
        return "torchneuron", f"nki {nki} takes no numpy arrays"
    if torch and "torch-xla" in packages:
        return "torch_xla", f"nki {nki} takes no numpy arrays"
    return (
        "nki",
        f"nki {nki} is older than 0.5, the first that takes numpy arrays, and no torch-neuronx is installed",
    )


# -- one case, in a process of its own -------------------------------------------------------------------------------


class Teller:
    """Pipe from a child process to its parent, for the progress of cases: each message is a line of JSON."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, **fields: Any) -> None:
        """Send the fields as a JSON object on a line; returns after the whole line is written."""
        line = json.dumps(fields).encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]


def find_dtype(name: str) -> Any:
    """Return the numpy dtype with a name, such as "float32" or, if numpy lacks it, "bfloat16" of ml_dtypes."""
    import numpy as np

    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))


def make_dtype_argument(name: str, dialect: str) -> Any:
    """Return a dtype as an argument of a kernel: an object of NKI's language for a name "nl.…", else a numpy dtype.

    Args:
        dialect: Package from which the kernel imports NKI.
    """
    if not name.startswith(LANGUAGE):
        return find_dtype(name)
    return getattr(importlib.import_module(f"{dialect}.language"), name.removeprefix(LANGUAGE))


Read = Callable[[Json], Any]
"""Function that returns the bits of an array argument, in a new array if the kernel may overwrite it."""


def make_reader(folder: Path, manifest: Json, weights: str | None) -> Read:
    """Return a function that returns the bits of an argument: of a weight a copy, else the array in its file.

    Args:
        folder: Folder of the bundle.
        weights: Folder of the weights, or None.
    """
    import numpy as np

    records = manifest["weights"]
    operands = importlib.import_module("run_weights").Weights(weights, records) if records else {}

    def read(argument: Json) -> Any:
        if argument["kind"] == "weight":
            return operands[argument["text"]].copy()
        return np.load(folder / argument["file"], allow_pickle=False)

    return read


def make_arguments(case: Json, read: Read, array: Callable[[Any, str], Any]) -> Json:
    """Return the arguments of a case by the kernel's parameters.

    Args:
        read: Returns the bits of an array argument.
        array: Makes an argument of the bits and the name of the dtype, such as a tensor on the device.
    """
    arguments = {}
    for name, argument in case["arguments"].items():
        if argument["kind"] == "dtype":
            arguments[name] = make_dtype_argument(argument["text"], case["imports"])
        elif argument["kind"] == "literal":
            arguments[name] = ast.literal_eval(argument["text"])
        else:
            arguments[name] = array(read(argument), argument["dtype"])
    return arguments


def import_case_kernel(folder: Path, case: Json) -> Any:
    """Return the kernel of a case, imported from the bundle's sources."""
    return import_kernel(str(folder / "sources"), case["module"], case["function"], case["imports"])


@functools.cache
def import_kernel(sources: str, module: str, function: str, dialect: str) -> Any:
    """Import a kernel and return it, compiled by `dialect`.jit if it is a plain function.

    The result is cached, so that later launches reuse its compilation. `sources` is added to `sys.path`.

    Args:
        sources: Folder of the source files.
    """
    sys.path.insert(0, sources)
    kernel = getattr(importlib.import_module(module), function)
    package = importlib.import_module(dialect)
    return package.jit(kernel) if inspect.isfunction(kernel) else kernel


def select_cores(kernel: Any, case: Json) -> Any:
    """Return the kernel for the case's number of physical cores.

    Up to NKI 0.6 the kernel gets a grid; later NEURON_LOGICAL_NC_CONFIG alone decides, and the kernel is
    returned unchanged.
    """
    older = parse_release(read_versions().get("nki", "0.0")) < (0, 7)
    return kernel[case["lnc"]] if case["lnc"] > 1 and older else kernel


def prepare_numpy_launch(folder: Path, case: Json, read: Read) -> Callable[[], Any]:
    """Return a function that launches the kernel of a case on new copies of its numpy arguments (launcher nki).

    The function takes nothing and returns what the kernel returns.

    Args:
        folder: Folder of the bundle.
        read: Returns the bits of an array argument.
    """
    kernel = select_cores(import_case_kernel(folder, case), case)
    return lambda: call_kernel(
        kernel, make_arguments(case, read, lambda bits, dtype: bits.view(find_dtype(dtype)))
    )


def prepare_baremetal_launch(folder: Path, case: Json, read: Read) -> Callable[[], Any]:
    """Return a function that launches the kernel of a case through neuronxcc.nki.baremetal (launcher neuronxcc).

    The function takes nothing and returns what the kernel returns.

    Args:
        folder: Folder of the bundle.
        read: Returns the bits of an array argument.
    """
    kernel = importlib.import_module("neuronxcc.nki").baremetal(import_case_kernel(folder, case))
    return lambda: call_kernel(
        kernel, make_arguments(case, read, lambda bits, dtype: bits.view(find_dtype(dtype)))
    )


def prepare_torch_xla_launch(folder: Path, case: Json, read: Read) -> Callable[[], Any]:
    """Return a function that launches the kernel of a case with tensors on the XLA device (launcher torch_xla).

    The function takes nothing and returns what the kernel returns; the tensors are ready after their copy to
    the host.

    Args:
        folder: Folder of the bundle.
        read: Returns the bits of an array argument.
    """
    xla = importlib.import_module("torch_xla.core.xla_model")
    kernel, device = select_cores(import_case_kernel(folder, case), case), xla.xla_device()

    def launch() -> Any:
        arguments = make_arguments(case, read, lambda bits, dtype: to_torch(bits, dtype).to(device))
        returned = call_kernel(kernel, arguments)
        xla.mark_step()
        return returned

    return launch


def prepare_torchneuron_launch(folder: Path, case: Json, read: Read) -> Callable[[], Any]:
    """Return a function that launches the kernel of a case through a custom operator of nki_op (launcher torchneuron).

    The function takes nothing and returns the outputs as a tuple of tensors on the device "neuron"; an output
    that overwrites an argument is that argument's tensor.

    Args:
        folder: Folder of the bundle.
        read: Returns the bits of an array argument.
    """
    torch = importlib.import_module("torch")
    nki_op = importlib.import_module("torch_neuronx").nki_op
    kernel = select_cores(import_case_kernel(folder, case), case)
    names = list(select_arrays(case))
    # A custom operator of torch names the arguments that it overwrites, and returns only new tensors.
    written = [output.get("argument", "") for output in case["outputs"]]
    new = [index for index, argument in enumerate(written) if not argument]
    annotations = tuple.__class_getitem__(tuple(torch.Tensor for _ in new))

    def launch() -> Any:
        arguments = make_arguments(case, read, lambda bits, dtype: to_torch(bits, dtype).to("neuron"))
        return_annotation = None if not new else torch.Tensor if len(new) == 1 else annotations

        def operator(*tensors: Any) -> Any:
            outputs = kernel(**{**arguments, **dict(zip(names, tensors))})
            kernel_outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
            made = tuple(kernel_outputs[index] for index in new)
            return None if not made else made[0] if len(made) == 1 else made

        parameter_kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, parameter_kind, annotation=torch.Tensor) for name in names]
        operator.__signature__ = inspect.Signature(parameters, return_annotation=return_annotation)  # type: ignore[attr-defined]
        operator.__annotations__ = {**dict.fromkeys(names, torch.Tensor), "return": return_annotation}
        name = f"nkw_bundle::{case['function']}_{time.monotonic_ns()}"
        made = nki_op(name, mutates_args=set(filter(None, written)))(operator)(
            *(arguments[name] for name in names)
        )
        new_outputs = iter(made if len(new) > 1 else (made,))
        return tuple(arguments[argument] if argument else next(new_outputs) for argument in written)

    return launch


def call_kernel(kernel: Any, arguments: Json) -> Any:
    """Launch a kernel on arguments by parameter, and return what it returns."""
    return kernel(**arguments)


def to_torch(bits: Any, dtype: str) -> Any:
    """Return a torch tensor of the dtype with this name, with the bits of a numpy array.

    Raises:
        TypeError: If torch lacks the dtype.
    """
    torch = importlib.import_module("torch")
    integers = TORCH_BITS.get(dtype)
    if integers is None:
        return torch.from_numpy(bits)
    if not hasattr(torch, dtype):
        raise TypeError(f"torch {torch.__version__} has no dtype {dtype}")
    return torch.from_numpy(bits.view(integers)).view(getattr(torch, dtype))


def to_numpy(output: Any) -> tuple[Any, str]:
    """Return (bits, dtype name) of a kernel's output, on the host.

    The bits are a numpy array of the dtype, or of unsigned integers if numpy lacks the dtype.

    Raises:
        TypeError: If the kernel returned no array.
    """
    import numpy as np

    if hasattr(output, "detach"):  # a torch tensor; the copy waits for the device
        output = output.detach().cpu()
        name = str(output.dtype).removeprefix("torch.")
        integers = TORCH_BITS.get(name)
        torch = importlib.import_module("torch")
        array = (output.view(getattr(torch, integers)) if integers else output).contiguous().numpy()
        return (array.view(f"u{integers}") if integers else array), name
    array = np.ascontiguousarray(output).reshape(np.shape(output))
    if array.dtype.hasobject:
        raise TypeError(f"the kernel returned a {type(output).__name__}, no array")
    is_foreign = array.dtype.kind == "V" or array.dtype.isbuiltin != 1
    return (array.view(f"uint{8 * array.dtype.itemsize}") if is_foreign else array), array.dtype.name


LAUNCHERS = {
    "nki": prepare_numpy_launch,
    "neuronxcc": prepare_baremetal_launch,
    "torchneuron": prepare_torchneuron_launch,
    "torch_xla": prepare_torch_xla_launch,
}


def run_child(folder: Path, out: Path, manifest: Json, case: Json, options: argparse.Namespace) -> int:
    """Run a case in the child process, and send stages, outputs and times to the parent.

    Returns:
        The exit status: 0, or 1 after any error, which is sent to the parent and not raised.
    """
    teller = Teller(options.fd)
    try:
        teller.say(stage="import")
        read = make_reader(folder, manifest, options.weights)
        launch = LAUNCHERS[options.launcher](folder, case, read)
        teller.say(stage="compile")
        returned = launch()
        teller.say(stage="read")
        several = returned if isinstance(returned, (tuple, list)) else (returned,)
        read_back(teller, out, case, several)
        teller.say(stage="time")
        teller.say(
            times=benchmark_kernel(folder, case, read, options)
            if options.launcher == "neuronxcc"
            else time_launches(launch, options)
        )
        teller.say(stage=None)
    except BaseException as error:
        traceback.print_exc()
        teller.say(error=describe_error(error))
        return 1
    return 0


def describe_error(error: BaseException) -> Json:
    """Return an error as JSON types: its type, and its message cut after 4,000 characters."""
    return {"type": type(error).__name__, "message": str(error)[:4000]}


def read_back(teller: Teller, out: Path, case: Json, several: Any) -> None:
    """Copy the outputs of a launch to the host, write their arrays to `values/`, and send digests to the parent.

    If the disk refuses an array, the loss is sent to the parent, and the output has its digests only.

    Args:
        out: Result folder.
        several: The outputs that the kernel returned, in order.
    """
    import numpy as np

    outputs = []
    for index, output in enumerate(several):
        bits, dtype = to_numpy(output)
        expected = case["outputs"][index] if index < len(case["outputs"]) else {}
        name, (rows, columns) = expected.get("name", f"output-{index}"), expected.get("tile", (128, 512))
        file: str | None = f"values/{case['name']}/{name}.npy"
        try:
            (out / str(file)).parent.mkdir(parents=True, exist_ok=True)
            np.save(out / str(file), bits, allow_pickle=False)
        except OSError as error:
            teller.say(
                lost=f"the values of {case['name']} {name} cannot be written: {error.strerror or error}"
            )
            with contextlib.suppress(OSError):
                (out / str(file)).unlink()
            file = None
        digests = digest_tiles(bits, rows, columns)
        outputs.append(
            {"name": name, "file": file, "dtype": dtype, "shape": list(bits.shape), "tiles": digests}
        )
    teller.say(outputs=outputs)


def time_launches(launch: Callable[[], Any], options: argparse.Namespace) -> Json:
    """Measure launches with the clock of the host, including the copies from the device.

    Return times in ns as JSON types. The first `options.warmup` launches are not timed.
    """
    durations = []
    for repetition in range(options.warmup + options.repetitions):
        start_ns = time.perf_counter_ns()
        returned = launch()
        for output in returned if isinstance(returned, (tuple, list)) else (returned,):
            to_numpy(output)
        if repetition >= options.warmup:
            durations.append(float(time.perf_counter_ns() - start_ns))
    return summarize_times(durations, options.warmup, "host")


def summarize_times(durations: list[float], warmup: int, clock: str) -> Json:
    """Return durations in ns as JSON types, with their median and interquartile range.

    The range of a single duration is 0.

    Args:
        warmup: Number of launches before the measured ones.
        clock: "host" or "device".
    """
    quartiles = (
        statistics.quantiles(durations, n=4, method="inclusive") if len(durations) > 1 else [0.0, 0.0, 0.0]
    )
    median = statistics.median(durations)
    times: Json = {"warmup": warmup, "repetitions_ns": durations, "clock": clock}
    return {**times, "median_ns": median, "spread_ns": quartiles[2] - quartiles[0]}


def benchmark_kernel(folder: Path, case: Json, read: Read, options: argparse.Namespace) -> Json:
    """Measure launches with neuronxcc.nki.benchmark on the device; return times in ns as JSON types.

    The benchmark gives percentiles only: `repetitions_ns` is empty, and the spread is twice the median less
    the first quartile.
    """
    benchmark = importlib.import_module("neuronxcc.nki").benchmark
    kernel = benchmark(warmup=options.warmup, iters=options.repetitions)(import_case_kernel(folder, case))
    arguments = make_arguments(case, read, lambda bits, dtype: bits.view(find_dtype(dtype)))
    call_kernel(kernel, arguments)
    latency = kernel.benchmark_result.nc_latency
    first, median = (1e3 * float(latency.get_latency_percentile(percentile)) for percentile in (25, 50))
    times: Json = {"warmup": options.warmup, "repetitions_ns": [], "clock": "device"}
    return {**times, "median_ns": median, "spread_ns": 2 * (median - first)}


def run_nrtpy_child(case: Json, read: Read, options: argparse.Namespace) -> int:
    """Measure the compiled kernel of a case with nrtpy, in a Python environment that has it.

    Times in ns on the device are sent to the parent.

    Returns:
        The exit status: 0, or 1 after any error, which is sent to the parent and not raised.
    """
    teller = Teller(options.fd)
    try:
        nrtpy = importlib.import_module("nrtpy")
        model = nrtpy.NrtpyModel.load_from_neff(options.neff)
        names = list(model.input_tensors_info)
        by_name = make_arguments({"arguments": select_arrays(case)}, read, lambda bits, _: bits)
        if set(names) != set(by_name):  # the compiler can name inputs by their order
            by_name = dict(zip(names, by_name.values()))
        inputs = {name: nrtpy.NrtpyTensor.from_numpy(array, name=name) for name, array in by_name.items()}
        outcome = model.benchmark(
            inputs, warmup_iter=options.warmup, benchmark_iter=options.repetitions, mode="device"
        )
        durations = [1e6 * float(duration_ms) for duration_ms in outcome.durations_ms]
        teller.say(times=summarize_times(durations, options.warmup, "device"))
    except BaseException as error:
        traceback.print_exc()
        teller.say(error=describe_error(error))
        return 1
    return 0


def select_arrays(case: Json) -> Json:
    """Return the array arguments of a case by parameter, without literals and dtypes."""
    plain = ("literal", "dtype")
    return {name: argument for name, argument in case["arguments"].items() if argument["kind"] not in plain}


# -- all cases, in this process --------------------------------------------------------------------------------------


class Record:
    """The file `result.json` in the folder `out`: complete at any time, and written even on a full disk.

    `values` is its content as JSON types; `save` writes it. Creating a record reserves space on the disk.
    """

    def __init__(self, out: Path, bundle: str, target: str) -> None:
        self._out = out
        self._file = out / "result.json"
        self._reserve = out / ".reserve"
        self.values: Json = {
            "schema": SCHEMA,
            "bundle": bundle,
            "target": target,
            "started": format_now(),
            "finished": None,
            "environment": describe_environment(),
            "launcher": None,
            "cases": [],
            "failures": [],
        }
        with contextlib.suppress(OSError):
            self._reserve.write_bytes(bytes(RESERVE_BYTES))

    def add_failure(self, stage: str, message: str) -> None:
        """Add a failure that belongs to no case to `values`; an equal failure is not added again."""
        if {"stage": stage, "message": message} not in self.values["failures"]:
            self.values["failures"].append({"stage": stage, "message": message})

    def save(self) -> None:
        """Replace the file by `values`.

        On a full disk, first the reserve is deleted, then the arrays of outputs; at last the record is
        printed to stdout.
        """
        for give_up in (lambda: None, lambda: self._reserve.unlink(missing_ok=True), self._give_up_values):
            with contextlib.suppress(OSError):
                give_up()
                self._write()
                return
        print(
            "result.json cannot be written; this is what would be in it:", json.dumps(self.values), sep="\n"
        )

    def _write(self) -> None:
        """Write `values` to the file atomically. Raises OSError if that fails.

        The earlier file then remains.
        """
        partial = self._file.with_name(".result.json.part")
        try:
            with open(partial, "w", encoding="utf-8") as file:
                json.dump(self.values, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._file)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise

    def _give_up_values(self) -> None:
        """Delete the arrays of all outputs from the disk, and their file names from `values`; digests stay."""
        self.add_failure(
            "write", "the disk is full: the arrays of outputs were deleted, their digests are here"
        )
        shutil.rmtree(self._out / "values", ignore_errors=True)
        for case in self.values["cases"]:
            for output in case["outputs"]:
                output["file"] = None

    def close(self) -> None:
        """Write the file for the last time, with the time of the end, and release the reserved space."""
        self.values["finished"] = format_now()
        self.save()
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)


def format_now() -> str:
    """Return the current time in UTC, in ISO 8601 to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Process:
    """A child process for a case, started and awaited by the constructor.

    `told` has the last value of each field that the child sent, `lost` the arrays that it could not write,
    `end` the error with which it ended or None. A process that takes longer than `seconds` is killed. A
    process with a listener runs several launches; the listener gets every message. The time limit then
    applies between two messages.
    """

    def __init__(
        self,
        command: list[str],
        variables: dict[str, str],
        cwd: Path,
        seconds: float,
        listener: Callable[[Json], None] | None = None,
    ) -> None:
        self.told: Json = {"stage": "import"}
        self._listener = listener
        self._heard = time.monotonic()
        self.lost: list[str] = []
        self._log = bytearray()
        read, write = os.pipe()
        try:
            process = subprocess.Popen(
                [*command, "--fd", str(write)],
                env={**os.environ, **variables},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                start_new_session=True,
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._reads_log(process), self._reads(read))
        ]
        for thread in threads:
            thread.start()
        try:
            while process.poll() is None and (remaining := self._heard + seconds - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(remaining)
            late = {"type": "Timeout", "message": f"ended after {seconds:g} s"}
            self.end = late if process.poll() is None else describe_end(process.returncode)
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # including processes that it started
            process.wait()
        for thread in threads:
            thread.join(10)

    @property
    def log(self) -> str:
        """End of the output to stdout and stderr, at most LOG_BYTES."""
        return self._log.decode(errors="replace")

    @property
    def error(self) -> Json | None:
        """Error that the child sent, else the error with which it ended, as type and message; else None."""
        failure: Json | None = self.told.get("error") or self.end
        return failure

    def _reads_log(self, process: subprocess.Popen[bytes]) -> Callable[[], None]:
        def read() -> None:
            assert process.stdout is not None
            while content := process.stdout.read1(65536):  # type: ignore[attr-defined]
                self._log += content
                del self._log[:-LOG_BYTES]

        return read

    def _reads(self, descriptor: int) -> Callable[[], None]:
        def read() -> None:
            with os.fdopen(descriptor, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    with contextlib.suppress(ValueError):  # cut short by a crash
                        told = json.loads(line)
                        self.lost += [told.pop("lost")] if "lost" in told else []
                        self.told.update(told)
                        if self._listener is not None:
                            self._heard = time.monotonic()
                            self._listener(told)

        return read


def describe_end(status: int) -> Json | None:
    """Return the error of a process by its exit status, as type and message; None for 0.

    Args:
        status: Status of a process that sent no error; negative for a signal.
    """
    if status >= 0:
        return (
            {"type": "Exit", "message": f"it ended with status {status} and reported no error"}
            if status
            else None
        )
    with contextlib.suppress(ValueError):
        return {"type": "Crash", "message": f"ended by {signal.Signals(-status).name}"}
    return {"type": "Crash", "message": f"ended by signal {-status}"}


def start_child(
    out: Path,
    case: Json,
    build: Path,
    launcher: str,
    options: argparse.Namespace,
    record: Record,
    listener: Callable[[Json], None] | None = None,
) -> Process:
    """Run a child process for a case, or for the case and all later ones; return the process after its end.

    Args:
        out: Result folder.
        build: Working folder of the process, which is made; if that fails, `out` is used, and the failure is
            recorded.
        listener: Gets every message of the process; None for a process with a single case.
    """
    try:
        build.mkdir(parents=True, exist_ok=True)
    except OSError as full:
        record.add_failure("write", f"{build} cannot be made: {full.strerror or full}")
        build = out
    variables = {
        "NEURON_LOGICAL_NC_CONFIG": str(case["lnc"]),
        "NKI_ARTIFACTS_DIR": str(build),  # where NKI keeps the NEFF; read when nki is imported
        "NEURON_FRAMEWORK_DEBUG": "1",  # lets frameworks keep it in the working folder
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if not os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE"):
        variables["NEURON_PLATFORM_TARGET_OVERRIDE"] = record.values["target"]
    command = [sys.executable, str(Path(__file__).resolve()), "--child", case["name"], "--launcher", launcher]
    return Process(
        [*command, *list_inherited_options(out, options)], variables, build, options.timeout, listener
    )


def list_inherited_options(out: Path, options: argparse.Namespace) -> list[str]:
    """Return the options that child processes inherit, as words of a command line.

    They are --out with the folder `out`, --warmup and --repetitions, and, if they are given, --weights with an absolute
    path, --only and --leave-out.
    """
    words = ["--out", str(out), "--warmup", str(options.warmup), "--repetitions", str(options.repetitions)]
    words += ["--weights", str(Path(options.weights).resolve())] if options.weights else []
    several = {"--only": options.only, "--leave-out": options.leave_out}
    return [
        *words,
        *(
            word
            for name, words_of_option in several.items()
            if words_of_option
            for word in (name, *words_of_option)
        ),
    ]


def run_case(out: Path, case: Json, launcher: str, options: argparse.Namespace, record: Record) -> Json:
    """Compile, run, time and profile a case in a child process; return its result as JSON types.

    Failures become part of the result or are recorded; none is raised.
    """
    build = out / "build" / case["name"]
    process = start_child(out, case, build, launcher, options, record)
    error, stage = process.error, process.told["stage"]
    neff = find_newest(build, ".neff")
    if error is not None and stage == "compile" and neff is not None:
        stage = "run"  # a single call compiles and runs; the compiled file exists
    for loss in process.lost:
        record.add_failure("write", loss)
    outputs, times = process.told.get("outputs", []), process.told.get("times")
    log = process.log
    profile = None
    if outputs and neff is not None:
        times, more = time_on_device(neff, out, case, options, times, record)
        log += more
        profile = None if options.no_profile else profile_neff(neff, out, case, options, record)
    return {
        "name": case["name"],
        "status": "ran" if outputs else "failed",
        "stage": stage if error else None,
        "error": error,
        "log": keep_text(out, f"logs/{case['name']}.txt", log, record),
        "outputs": outputs,
        "times": times,
        "profile": profile,
    }


def keep_text(out: Path, name: str, text: str, record: Record) -> str | None:
    """Write a text to the file `name` of the result folder; return the name.

    Returns None if the text is empty, or if the disk refuses, which is recorded.
    """
    if not text:
        return None
    try:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        record.add_failure("write", f"{name} cannot be written: {error.strerror or error}")
        with contextlib.suppress(OSError):
            (out / name).unlink()
        return None
    return name


def find_newest(folder: Path, suffix: str) -> Path | None:
    """Return the most recently changed file with a suffix below a folder, or None if there is none."""
    paths = [path for path in folder.rglob(f"*{suffix}") if path.is_file()]
    return max(paths, key=lambda path: path.stat().st_mtime_ns, default=None)


def time_on_device(
    neff: Path, out: Path, case: Json, options: argparse.Namespace, times: Json | None, record: Record
) -> tuple[Json | None, str]:
    """Return (times that nrtpy measures on the device, output of nrtpy).

    If nrtpy cannot measure them, `times` is returned instead. The failure is recorded, unless nrtpy is absent
    and was not asked for.

    Args:
        neff: The compiled kernel.
        out: Result folder.
        times: Times by the clock of the host, or None.
    """
    python = Path(os.path.expanduser(options.nrtpy or NRTPY_PYTHON))
    if not python.is_file():
        if options.nrtpy:
            record.add_failure(
                "time", f"--nrtpy {options.nrtpy} is no file; give the Python interpreter that has nrtpy"
            )
        return times, ""
    command = [
        str(python),
        str(Path(__file__).resolve()),
        "--nrtpy-child",
        case["name"],
        "--neff",
        str(neff),
        *list_inherited_options(out, options),
    ]
    try:
        process = Process(command, {}, neff.parent, options.timeout)
    except OSError as error:
        record.add_failure("time", f"{python} cannot be started: {error.strerror or error}")
        return times, ""
    if process.error is not None or "times" not in process.told:
        record.add_failure(
            "time",
            f"nrtpy cannot time {case['name']}: {(process.error or {}).get('message', 'it reported no times')}",
        )
        return times, process.log
    device_times: Json = process.told["times"]
    return device_times, process.log


def profile_neff(
    neff: Path, out: Path, case: Json, options: argparse.Namespace, record: Record
) -> str | None:
    """Profile a compiled kernel on the device; return the path of the profile relative to the result folder.

    Returns:
        The folder of tables, else the summary, else the NTFF file; None without any. Only neuron-explorer
            writes tables, which include the kernel's lines. Failures are recorded.
    """
    tool = next(
        (
            executable
            for name in TOOLS
            for executable in (shutil.which(name), f"{TOOLS_FOLDER}/{name}")
            if executable and Path(executable).is_file()
        ),
        None,
    )
    if tool is None:
        record.add_failure(
            "profile", "neither neuron-explorer nor neuron-profile is installed (aws-neuronx-tools has them)"
        )
        return None
    folder = out / "profiles" / case["name"]
    trace, summary = folder / "profile.ntff", folder / "summary.json"
    pair = ["-n", str(neff), "-s"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The second execution: the first execution has additional delays.
        run_tool([tool, "capture", *pair, str(trace), "--profile-nth-exec=2"], options.timeout)
        artifact = find_newest(folder, ".ntff")
        if artifact is None:
            raise RuntimeError("it wrote no .ntff file")
        text = run_tool(
            [tool, "view", *pair, str(artifact), "--output-format", "summary-json"], options.timeout
        )
        begin = text.find("{")
        if begin < 0:
            raise RuntimeError("it printed no summary")
        summary.write_text(text[begin:], encoding="utf-8")
        if Path(tool).name == TOOLS[0]:
            tables = folder / "tables"
            run_tool([tool, "view", *pair, str(artifact), "--output-file", str(tables)], options.timeout)
            if next(tables.rglob("*.parquet"), None) is not None:
                return tables.relative_to(out).as_posix()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        record.add_failure(
            "profile", f"{Path(tool).name} on {case['name']}: {getattr(error, 'strerror', None) or error}"
        )
        artifact = summary if summary.is_file() else find_newest(folder, ".ntff")
        return artifact.relative_to(out).as_posix() if artifact else None
    return summary.relative_to(out).as_posix()


def run_tool(command: list[str], seconds: float) -> str:
    """Run a tool and return its stdout.

    Args:
        seconds: Time limit.

    Raises:
        RuntimeError: With the end of its output, if it ends with another status than 0.
        subprocess.TimeoutExpired: After the time limit.
    """
    process = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
    )
    if process.returncode:
        output_end = " ".join((process.stderr or process.stdout).split())[-500:]
        raise RuntimeError(f"{command[1]} ended with status {process.returncode}: {output_end}")
    return process.stdout


def make_result_folder(folder: Path, name: str) -> Path:
    """Create an empty result folder below `folder`; return its path.

    An earlier folder of that name is renamed first: `result` to `result-1`, or the next number without a
    folder.
    """
    out = folder / name
    if out.exists():
        count = next(count for count in range(1, 10_000) if not (folder / f"{name}-{count}").exists())
        out.rename(folder / f"{name}-{count}")
    out.mkdir(parents=True)
    return out


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of `run.py`, including those that it passes to child processes."""
    options = argparse.ArgumentParser(
        description="Run the kernels of this bundle and write result/.", allow_abbrev=False
    )
    options.add_argument("--only", metavar="CASE", nargs="+", help="run these cases only")
    options.add_argument("--weights", metavar="FOLDER", help="the model's folder, for a bundle of a model")
    options.add_argument(
        "--launcher",
        choices=LAUNCHER_NAMES,
        help="what launches kernels (default: what is installed decides)",
    )
    options.add_argument(
        "--warmup", type=int, default=5, metavar="N", help="launches before those that are timed"
    )
    options.add_argument("--repetitions", type=int, default=20, metavar="N", help="launches that are timed")
    options.add_argument(
        "--timeout", type=float, default=900.0, metavar="SECONDS", help="the longest a case may take"
    )
    options.add_argument(
        "--nrtpy", metavar="PYTHON", help=f"a Python that has nrtpy (default: {NRTPY_PYTHON})"
    )
    options.add_argument("--no-profile", action="store_true", help="take no profiles")
    for name in ("--child", "--nrtpy-child", "--neff", "--out"):  # for the child processes of run.py
        options.add_argument(name, help=argparse.SUPPRESS)
    options.add_argument("--leave-out", nargs="+", help=argparse.SUPPRESS)
    options.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    return options


def raise_interrupt(number: int, frame: object) -> NoReturn:
    """Raise KeyboardInterrupt, so that a SIGTERM ends the run as an interrupt does; a signal handler."""
    raise KeyboardInterrupt


def main(folder: Path) -> int:
    """Run all cases of the bundle in `folder`, or in a child process the requested ones.

    Return the exit status.

    Returns:
        0 if all cases ran, 1 if any did not, 130 after an interrupt. Options that are refused end the process
            with status 2.
    """
    options = make_parser().parse_args()
    manifest: Json = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    cases = {case["name"]: case for case in manifest["cases"]}
    model = importlib.import_module("run_model") if manifest["kind"] == "model" else None
    if options.child:
        if model is not None:
            return int(model.run_child(folder, Path(options.out), manifest, options))
        return run_child(folder, Path(options.out), manifest, cases[options.child], options)
    if options.nrtpy_child:
        name = options.nrtpy_child
        reads = make_reader(folder, manifest, options.weights)
        if model is not None:
            reads = model.run_chain.make_expected_reader(folder, manifest, name, options.weights)
        return run_nrtpy_child(cases[name], reads, options)
    unknown = [name for name in options.only or () if name not in cases]
    if unknown or min(options.repetitions, options.timeout) < 1 or options.warmup < 0:
        problem = (
            f"no case {unknown[0]}; there are {', '.join(cases)}"
            if unknown
            else "--repetitions and --timeout must be at least 1, and --warmup at least 0"
        )
        make_parser().error(problem)
    signal.signal(signal.SIGTERM, raise_interrupt)
    out = make_result_folder(folder, "result")
    record = Record(out, manifest["digest"], manifest["target"])
    if compute_digest(folder, manifest) != manifest["digest"]:
        record.add_failure(
            "read", "files of the bundle were changed since it was written: its digest differs"
        )
    try:
        problem = ""
        if manifest["weights"]:
            check = importlib.import_module("run_weights").check_weights
            problem = check(options.weights, manifest["weights"]["files"])
        if problem:
            record.add_failure("read", problem)
        elif model is None:
            run_cases(out, cases, options, record)
        else:
            model.run_all(out, manifest, options, record)
    except KeyboardInterrupt:
        record.add_failure("run", "interrupted")
        record.close()
        return 130
    except Exception as error:  # the result is written after any error
        traceback.print_exc()
        record.add_failure("run", f"{type(error).__name__}: {error}")
    record.close()
    for case in record.values["failures"]:
        print(f"{case['stage']}: {case['message']}")
    print(f"{out} holds the result; take the whole folder of the bundle home, for `nkw compare`")
    ran = record.values["cases"]
    return 0 if ran and all(failure["status"] == "ran" for failure in ran) else 1


def run_cases(out: Path, cases: dict[str, Json], options: argparse.Namespace, record: Record) -> None:
    """Run every requested case in a separate process; add each result to `record`, save it, and print a line.

    A case that no installed package can launch is recorded as skipped.

    Args:
        out: Result folder.
        cases: All cases of the bundle by name.
    """
    for name, case in cases.items():
        if options.only and name not in options.only:
            continue
        launcher, remark = choose_launcher(case, options, record)
        record.values["cases"].append(
            run_case(out, case, launcher, options, record) if launcher else make_skipped_result(name, remark)
        )
        record.save()
        print(format_result(record.values["cases"][-1]), flush=True)


def choose_launcher(case: Json, options: argparse.Namespace, record: Record) -> tuple[str | None, str]:
    """Choose the launcher of a case: `--launcher` if it is given, else what is installed decides.

    The launcher is recorded, and so is a remark, if there is one.

    Returns:
        (launcher, remark); (None, reason) if no installed package can launch the case.
    """
    launcher, remark = find_launcher(case["imports"], read_versions())
    launcher = options.launcher or launcher
    if remark:
        record.add_failure("import", remark)
    record.values["launcher"] = launcher
    return launcher, remark


def make_skipped_result(name: str, reason: str) -> Json:
    """Return the result of a case that could not run for a reason, as JSON types."""
    error = {"type": "Environment", "message": reason}
    nothing: Json = {"log": None, "outputs": [], "times": None, "profile": None}
    return {"name": name, "status": "skipped", "stage": "import", "error": error, **nothing}


def format_result(case: Json) -> str:
    """Return a line about the result of a case: status, time and error."""
    words = [f"{case['name']}: {case['status']}"]
    if case["times"]:
        words.append(f"median {case['times']['median_ns'] / 1e3:.1f} us ({case['times']['clock']} clock)")
    if case["error"]:
        words.append(f"{case['stage']}: {case['error']['type']}: {case['error']['message']:.200}")
    return ", ".join(words)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    sys.exit(main(Path(__file__).resolve().parent))
