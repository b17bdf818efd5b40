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
RESERVE_BYTES = 4_000_000  # kept free for result.json, should the disk become full
LOG_BYTES = 400_000  # the end of a case's output that is kept
LAUNCHER_NAMES = ("nki", "torchneuron", "torch_xla", "neuronxcc")
PACKAGES = (
    "nki neuronx-cc nrtpy torch torch-neuronx torch-xla libneuronxla jax-neuronx numpy ml_dtypes"
    " aws-neuronx-runtime-discovery nki-library"
).split()
TOOLS = ("neuron-explorer", "neuron-profile")
TOOLS_FOLDER = "/opt/aws/neuron/bin"
NRTPY_PYTHON = "~/nrtpy_venv/bin/python"  # where the page "Get started with nrtpy" puts it
TORCH_BITS = {"bfloat16": "int16", "float8_e4m3fn": "int8", "float8_e4m3": "int8", "float8_e5m2": "int8"}
"""Dtypes that numpy lacks, and the integers under which torch takes their bits."""
LANGUAGE = "nl."  # before the name of a dtype that is one of NKI's language
Json = dict[str, Any]


def digest_of(folder: Path, manifest: Json) -> str:
    """The SHA-256 of a bundle: its files by name, size and content, without results, and its manifest."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda each: each.relative_to(folder).as_posix()):
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


def tiles(array: Any, rows: int, columns: int) -> Iterator[tuple[int, int, Any]]:
    """The tiles of an array, row by row: place of the first row, of the first column, and the part.

    The leading dims are taken together as rows; an array without dims is one row of one column.
    """
    flat = array.reshape(-1, array.shape[-1] if array.ndim else 1) if array.size else array.reshape(0, 1)
    for row in range(0, flat.shape[0], rows):
        for column in range(0, flat.shape[1], columns):
            yield row, column, flat[row : row + rows, column : column + columns]


def tile_digests(bits: Any, rows: int, columns: int) -> list[str]:
    """The SHA-256 of every tile of an array of numpy's own dtypes."""
    return [hashlib.sha256(part.tobytes()).hexdigest() for _, _, part in tiles(bits, rows, columns)]


# -- the environment -------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """The versions of the installed packages of PACKAGES."""
    from importlib import metadata  # slow to import, and this file is also read where nothing runs

    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def environment() -> Json:
    """Where this runs. Of the variables only those named NEURON_* and NKI_*."""
    kind = ""
    with contextlib.suppress(OSError):
        kind = (
            Path("/sys/devices/virtual/dmi/id/product_name")
            .read_text(encoding="ascii", errors="replace")
            .strip()
        )
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
        "instance": kind if re.fullmatch(r"[a-z0-9-]+\.[a-z0-9-]+", kind) else None,
        "devices": sorted(str(each) for each in Path("/dev").glob("neuron*")),
        "variables": {
            name: os.environ[name] for name in sorted(os.environ) if name.startswith(("NEURON_", "NKI_"))
        },
    }


def number(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(each) for each in re.findall(r"\d+", version)[:2])


def usable_launcher(dialect: str, found: dict[str, str]) -> tuple[str | None, str]:
    """The launcher for kernels that import `dialect`, and what is wrong or remarkable about it."""
    nki, compiler = found.get("nki"), found.get("neuronx-cc")
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
    if number(nki) < (0, 2):
        return (
            None,
            f"nki {nki} is the placeholder of the public index; install it from AWS's package repository",
        )
    if number(nki) >= (0, 5):
        return "nki", ""
    torch = number(found.get("torch-neuronx", "0"))
    if torch >= (2, 13):
        return "torchneuron", f"nki {nki} takes no numpy arrays"
    if torch and "torch-xla" in found:
        return "torch_xla", f"nki {nki} takes no numpy arrays"
    return (
        "nki",
        f"nki {nki} is older than 0.5, the first that takes numpy arrays, and no torch-neuronx is installed",
    )


# -- one case, in a process of its own -------------------------------------------------------------------------------


class Teller:
    """Tells the parent process through a pipe how far this case has come."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, **fields: Any) -> None:
        """Send one line of JSON."""
        line = json.dumps(fields).encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]


def dtype_named(name: str) -> Any:
    """The dtype of this name: numpy's, or else that of ml_dtypes."""
    import numpy as np

    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))


def dtype_argument(name: str, dialect: str) -> Any:
    """A dtype as a kernel is given it: `nl.<name>` of NKI's language, or else numpy's."""
    if not name.startswith(LANGUAGE):
        return dtype_named(name)
    return getattr(importlib.import_module(f"{dialect}.language"), name.removeprefix(LANGUAGE))


Read = Callable[[Json], Any]
"""Gives the bits of an argument that is an array, newly made where a kernel may write to it."""


def read_from(folder: Path, manifest: Json, weights: str | None) -> Read:
    """Reads arguments from their files, and makes operands of weights, for which `weights` is the folder."""
    import numpy as np

    known = manifest["weights"]
    operands = importlib.import_module("run_weights").Weights(weights, known) if known else {}

    def read(argument: Json) -> Any:
        if argument["kind"] == "weight":
            return operands[argument["text"]].copy()
        return np.load(folder / argument["file"], allow_pickle=False)

    return read


def arguments_of(case: Json, read: Read, array: Callable[[Any, str], Any]) -> Json:
    """Return the arguments by the kernel's parameters; `array` makes one of the bits and the dtype of an array."""
    arguments = {}
    for name, argument in case["arguments"].items():
        if argument["kind"] == "dtype":
            arguments[name] = dtype_argument(argument["text"], case["imports"])
        elif argument["kind"] == "literal":
            arguments[name] = ast.literal_eval(argument["text"])
        else:
            arguments[name] = array(read(argument), argument["dtype"])
    return arguments


def kernel_of(folder: Path, case: Json) -> Any:
    """The kernel of a case, imported from the bundle's own sources."""
    return imported(str(folder / "sources"), case["module"], case["function"], case["imports"])


@functools.cache
def imported(sources: str, module: str, function: str, dialect: str) -> Any:
    """A kernel of a module, once, so that its later launches find what the first one compiled."""
    sys.path.insert(0, sources)
    kernel = getattr(importlib.import_module(module), function)
    package = importlib.import_module(dialect)
    return package.jit(kernel) if inspect.isfunction(kernel) else kernel


def on_cores(kernel: Any, case: Json) -> Any:
    """The kernel for its logical core: up to NKI 0.6 a grid says so, later NEURON_LOGICAL_NC_CONFIG alone."""
    older = number(versions().get("nki", "0.0")) < (0, 7)
    return kernel[case["lnc"]] if case["lnc"] > 1 and older else kernel


def by_numpy(folder: Path, case: Json, read: Read) -> Callable[[], Any]:
    """A function that launches the kernel on new copies of its numpy arguments (launcher nki)."""
    kernel = on_cores(kernel_of(folder, case), case)
    return lambda: kernel_call(
        kernel, arguments_of(case, read, lambda bits, dtype: bits.view(dtype_named(dtype)))
    )


def by_baremetal(folder: Path, case: Json, read: Read) -> Callable[[], Any]:
    """The same through neuronxcc.nki.baremetal."""
    kernel = importlib.import_module("neuronxcc.nki").baremetal(kernel_of(folder, case))
    return lambda: kernel_call(
        kernel, arguments_of(case, read, lambda bits, dtype: bits.view(dtype_named(dtype)))
    )


def by_torch_xla(folder: Path, case: Json, read: Read) -> Callable[[], Any]:
    """The same with tensors on the XLA device."""
    xla = importlib.import_module("torch_xla.core.xla_model")
    kernel, device = on_cores(kernel_of(folder, case), case), xla.xla_device()

    def launch() -> Any:
        arguments = arguments_of(case, read, lambda bits, dtype: to_torch(bits, dtype).to(device))
        returned = kernel_call(kernel, arguments)
        xla.mark_step()
        return returned

    return launch


def by_torchneuron(folder: Path, case: Json, read: Read) -> Callable[[], Any]:
    """The same through a custom operator that nki_op registers, with tensors on the device "neuron"."""
    torch = importlib.import_module("torch")
    nki_op = importlib.import_module("torch_neuronx").nki_op
    kernel = on_cores(kernel_of(folder, case), case)
    names = list(arrays_of(case))
    # Of a custom operator of torch: arguments that it writes to are named, and it returns new tensors only.
    written = [each.get("argument", "") for each in case["outputs"]]
    new = [place for place, argument in enumerate(written) if not argument]
    several = tuple.__class_getitem__(tuple(torch.Tensor for _ in new))

    def launch() -> Any:
        given = arguments_of(case, read, lambda bits, dtype: to_torch(bits, dtype).to("neuron"))
        result = None if not new else torch.Tensor if len(new) == 1 else several

        def operator(*tensors: Any) -> Any:
            outputs = kernel(**{**given, **dict(zip(names, tensors))})
            every = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
            made = tuple(every[place] for place in new)
            return None if not made else made[0] if len(made) == 1 else made

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind, annotation=torch.Tensor) for name in names]
        operator.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
        operator.__annotations__ = {**dict.fromkeys(names, torch.Tensor), "return": result}
        name = f"nkw_bundle::{case['function']}_{time.monotonic_ns()}"
        made = nki_op(name, mutates_args=set(filter(None, written)))(operator)(
            *(given[each] for each in names)
        )
        rest = iter(made if len(new) > 1 else (made,))
        return tuple(given[argument] if argument else next(rest) for argument in written)

    return launch


def kernel_call(kernel: Any, arguments: Json) -> Any:
    """One launch."""
    return kernel(**arguments)


def to_torch(bits: Any, dtype: str) -> Any:
    """A torch tensor of an array's bits."""
    torch = importlib.import_module("torch")
    integers = TORCH_BITS.get(dtype)
    if integers is None:
        return torch.from_numpy(bits)
    if not hasattr(torch, dtype):
        raise TypeError(f"torch {torch.__version__} has no dtype {dtype}")
    return torch.from_numpy(bits.view(integers)).view(getattr(torch, dtype))


def to_numpy(value: Any) -> tuple[Any, str]:
    """The bits of what a kernel returned, under a dtype of numpy's own, and the name of its dtype."""
    import numpy as np

    if hasattr(value, "detach"):  # a torch tensor; reading it waits for the device
        value = value.detach().cpu()
        name = str(value.dtype).removeprefix("torch.")
        integers = TORCH_BITS.get(name)
        torch = importlib.import_module("torch")
        array = (value.view(getattr(torch, integers)) if integers else value).contiguous().numpy()
        return (array.view(f"u{integers}") if integers else array), name
    array = np.ascontiguousarray(value).reshape(np.shape(value))
    if array.dtype.hasobject:
        raise TypeError(f"the kernel returned a {type(value).__name__}, no array")
    foreign = array.dtype.kind == "V" or array.dtype.isbuiltin != 1
    return (array.view(f"uint{8 * array.dtype.itemsize}") if foreign else array), array.dtype.name


LAUNCHERS = {
    "nki": by_numpy,
    "neuronxcc": by_baremetal,
    "torchneuron": by_torchneuron,
    "torch_xla": by_torch_xla,
}


def child(folder: Path, out: Path, manifest: Json, case: Json, options: argparse.Namespace) -> int:
    """Run one case and tell the parent everything."""
    teller = Teller(options.fd)
    try:
        teller.say(stage="import")
        read = read_from(folder, manifest, options.weights)
        launch = LAUNCHERS[options.launcher](folder, case, read)
        teller.say(stage="compile")
        returned = launch()
        teller.say(stage="read")
        several = returned if isinstance(returned, (tuple, list)) else (returned,)
        read_back(teller, out, case, several)
        teller.say(stage="time")
        teller.say(
            times=benchmarked(folder, case, read, options)
            if options.launcher == "neuronxcc"
            else timed(launch, options)
        )
        teller.say(stage=None)
    except BaseException as error:
        traceback.print_exc()
        teller.say(error=described(error))
        return 1
    return 0


def described(error: BaseException) -> Json:
    """An error as its type and message."""
    return {"type": type(error).__name__, "message": str(error)[:4000]}


def read_back(teller: Teller, out: Path, case: Json, several: Any) -> None:
    """Tell the digests of what was returned, and write the values; a disk without room costs the values only."""
    import numpy as np

    outputs = []
    for place, value in enumerate(several):
        bits, dtype = to_numpy(value)
        known = case["outputs"][place] if place < len(case["outputs"]) else {}
        name, (rows, columns) = known.get("name", f"output-{place}"), known.get("tile", (128, 512))
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
        digests = tile_digests(bits, rows, columns)
        outputs.append(
            {"name": name, "file": file, "dtype": dtype, "shape": list(bits.shape), "tiles": digests}
        )
    teller.say(outputs=outputs)


def timed(launch: Callable[[], Any], options: argparse.Namespace) -> Json:
    """Times by this machine's clock: a launch with its start, and the copies to the device and back."""
    durations = []
    for repetition in range(options.warmup + options.repetitions):
        begun = time.perf_counter_ns()
        returned = launch()
        for each in returned if isinstance(returned, (tuple, list)) else (returned,):
            to_numpy(each)
        if repetition >= options.warmup:
            durations.append(float(time.perf_counter_ns() - begun))
    return summarised(durations, options.warmup, "host")


def summarised(durations: list[float], warmup: int, clock: str) -> Json:
    """Durations in ns with their median and interquartile range."""
    parts = (
        statistics.quantiles(durations, n=4, method="inclusive") if len(durations) > 1 else [0.0, 0.0, 0.0]
    )
    median = statistics.median(durations)
    times: Json = {"warmup": warmup, "repetitions_ns": durations, "clock": clock}
    return {**times, "median_ns": median, "spread_ns": parts[2] - parts[0]}


def benchmarked(folder: Path, case: Json, read: Read, options: argparse.Namespace) -> Json:
    """Times by neuronxcc.nki.benchmark, which gives percentiles in microseconds; of the quartiles only the first."""
    benchmark = importlib.import_module("neuronxcc.nki").benchmark
    kernel = benchmark(warmup=options.warmup, iters=options.repetitions)(kernel_of(folder, case))
    given = arguments_of(case, read, lambda bits, dtype: bits.view(dtype_named(dtype)))
    kernel_call(kernel, given)
    latency = kernel.benchmark_result.nc_latency
    first, median = (1e3 * float(latency.get_latency_percentile(each)) for each in (25, 50))
    times: Json = {"warmup": options.warmup, "repetitions_ns": [], "clock": "device"}
    return {**times, "median_ns": median, "spread_ns": 2 * (median - first)}


def nrtpy_child(case: Json, read: Read, options: argparse.Namespace) -> int:
    """Time the NEFF of a case with nrtpy, in the environment that has it."""
    teller = Teller(options.fd)
    try:
        nrtpy = importlib.import_module("nrtpy")
        model = nrtpy.NrtpyModel.load_from_neff(options.neff)
        names = list(model.input_tensors_info)
        by_name = arguments_of({"arguments": arrays_of(case)}, read, lambda bits, _: bits)
        if set(names) != set(by_name):  # the compiler may name inputs by their order
            by_name = dict(zip(names, by_name.values()))
        inputs = {name: nrtpy.NrtpyTensor.from_numpy(value, name=name) for name, value in by_name.items()}
        seen = model.benchmark(
            inputs, warmup_iter=options.warmup, benchmark_iter=options.repetitions, mode="device"
        )
        durations = [1e6 * float(each) for each in seen.durations_ms]
        teller.say(times=summarised(durations, options.warmup, "device"))
    except BaseException as error:
        traceback.print_exc()
        teller.say(error=described(error))
        return 1
    return 0


def arrays_of(case: Json) -> Json:
    """Return the arguments of a case that are arrays, by name."""
    plain = ("literal", "dtype")
    return {name: each for name, each in case["arguments"].items() if each["kind"] not in plain}


# -- all cases, in this process --------------------------------------------------------------------------------------


class Record:
    """`result.json`: complete at any time, and written also where the disk is full."""

    def __init__(self, out: Path, bundle: str, target: str) -> None:
        self._out = out
        self._file = out / "result.json"
        self._reserve = out / ".reserve"
        self.values: Json = {
            "schema": SCHEMA,
            "bundle": bundle,
            "target": target,
            "started": now(),
            "finished": None,
            "environment": environment(),
            "launcher": None,
            "cases": [],
            "failures": [],
        }
        with contextlib.suppress(OSError):
            self._reserve.write_bytes(bytes(RESERVE_BYTES))

    def failed(self, stage: str, message: str) -> None:
        """Keep a failure that is not one of a case."""
        if {"stage": stage, "message": message} not in self.values["failures"]:
            self.values["failures"].append({"stage": stage, "message": message})

    def save(self) -> None:
        """Write everything so far in place of what was written before.

        Where there is no room, the reserve is given up, then the values of the cases, and in the end the record goes to
        stdout.
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
        self.failed("write", "the disk is full: the values were given up, their digests are here")
        shutil.rmtree(self._out / "values", ignore_errors=True)
        for case in self.values["cases"]:
            for output in case["outputs"]:
                output["file"] = None

    def close(self) -> None:
        """Save for the last time."""
        self.values["finished"] = now()
        self.save()
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)


def now() -> str:
    """The time of day, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Process:
    """A child process for one case: what it told, the end of its output, and how it ended.

    One with a listener, which gets whatever it tells, runs several launches: the time limit is that between two of
    its words.
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
            threading.Thread(target=each, daemon=True)
            for each in (self._reads_log(process), self._reads(read))
        ]
        for thread in threads:
            thread.start()
        try:
            while process.poll() is None and (left := self._heard + seconds - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(left)
            late = {"type": "Timeout", "message": f"ended after {seconds:g} s"}
            self.end = late if process.poll() is None else ended(process.returncode)
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
            process.wait()
        for thread in threads:
            thread.join(10)

    @property
    def log(self) -> str:
        """The end of what it printed."""
        return self._log.decode(errors="replace")

    @property
    def error(self) -> Json | None:
        """Why it failed; None where it did not."""
        found: Json | None = self.told.get("error") or self.end
        return found

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


def ended(status: int) -> Json | None:
    """The error of a process by its exit status: a signal, or none where it says itself what is wrong."""
    if status >= 0:
        return (
            {"type": "Exit", "message": f"it ended with status {status} and told nothing"} if status else None
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
    """Start a child process that runs a case and the ones after it. Wait for its end, and return it.

    `build` is the working folder of the process.
    """
    try:
        build.mkdir(parents=True, exist_ok=True)
    except OSError as full:
        record.failed("write", f"{build} cannot be made: {full.strerror or full}")
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
    return Process([*command, *passed_on(out, options)], variables, build, options.timeout, listener)


def passed_on(out: Path, options: argparse.Namespace) -> list[str]:
    """The options that the processes of cases take over."""
    words = ["--out", str(out), "--warmup", str(options.warmup), "--repetitions", str(options.repetitions)]
    words += ["--weights", str(Path(options.weights).resolve())] if options.weights else []
    several = {"--only": options.only, "--leave-out": options.leave_out}
    return [*words, *(word for name, own in several.items() if own for word in (name, *own))]


def run_case(out: Path, case: Json, launcher: str, options: argparse.Namespace, record: Record) -> Json:
    """Compile, run, time and profile one case; returns its result."""
    build = out / "build" / case["name"]
    done = start_child(out, case, build, launcher, options, record)
    error, stage = done.error, done.told["stage"]
    neff = newest(build, ".neff")
    if error is not None and stage == "compile" and neff is not None:
        stage = "run"  # one call does both; what was compiled is there
    for each in done.lost:
        record.failed("write", each)
    outputs, times = done.told.get("outputs", []), done.told.get("times")
    log = done.log
    profile = None
    if outputs and neff is not None:
        times, more = on_device(neff, out, case, options, times, record)
        log += more
        profile = None if options.no_profile else profiled(neff, out, case, options, record)
    return {
        "name": case["name"],
        "status": "ran" if outputs else "failed",
        "stage": stage if error else None,
        "error": error,
        "log": kept(out, f"logs/{case['name']}.txt", log, record),
        "outputs": outputs,
        "times": times,
        "profile": profile,
    }


def kept(out: Path, name: str, text: str, record: Record) -> str | None:
    """Write a text file of the result; returns its name, None where there is nothing to write or no room."""
    if not text:
        return None
    try:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        record.failed("write", f"{name} cannot be written: {error.strerror or error}")
        with contextlib.suppress(OSError):
            (out / name).unlink()
        return None
    return name


def newest(folder: Path, suffix: str) -> Path | None:
    """The file below a folder that was written last, of those with this suffix."""
    found = [each for each in folder.rglob(f"*{suffix}") if each.is_file()]
    return max(found, key=lambda each: each.stat().st_mtime_ns, default=None)


def on_device(
    neff: Path, out: Path, case: Json, options: argparse.Namespace, times: Json | None, record: Record
) -> tuple[Json | None, str]:
    """The times that nrtpy takes on the device, where it is there, else those given; and what it printed."""
    python = Path(os.path.expanduser(options.nrtpy or NRTPY_PYTHON))
    if not python.is_file():
        if options.nrtpy:
            record.failed("time", f"{options.nrtpy} is no Python interpreter")
        return times, ""
    command = [
        str(python),
        str(Path(__file__).resolve()),
        "--nrtpy-child",
        case["name"],
        "--neff",
        str(neff),
        *passed_on(out, options),
    ]
    try:
        done = Process(command, {}, neff.parent, options.timeout)
    except OSError as error:
        record.failed("time", f"{python} cannot be started: {error.strerror or error}")
        return times, ""
    if done.error is not None or "times" not in done.told:
        record.failed(
            "time",
            f"nrtpy cannot time {case['name']}: {(done.error or {}).get('message', 'it told nothing')}",
        )
        return times, done.log
    found: Json = done.told["times"]
    return found, done.log


def profiled(neff: Path, out: Path, case: Json, options: argparse.Namespace, record: Record) -> str | None:
    """Profile a NEFF; returns the folder of tables, else the summary, else the NTFF, in the result folder.

    Failures are recorded. neuron-explorer alone writes tables, which have the kernel's lines.
    """
    tool = next(
        (
            found
            for each in TOOLS
            for found in (shutil.which(each), f"{TOOLS_FOLDER}/{each}")
            if found and Path(found).is_file()
        ),
        None,
    )
    if tool is None:
        record.failed(
            "profile", "neither neuron-explorer nor neuron-profile is installed (aws-neuronx-tools has them)"
        )
        return None
    folder = out / "profiles" / case["name"]
    trace, summary = folder / "profile.ntff", folder / "summary.json"
    pair = ["-n", str(neff), "-s"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The second execution: the first one has delays that later ones do not have.
        quiet([tool, "capture", *pair, str(trace), "--profile-nth-exec=2"], options.timeout)
        found = newest(folder, ".ntff")
        if found is None:
            raise RuntimeError("it wrote no .ntff file")
        text = quiet([tool, "view", *pair, str(found), "--output-format", "summary-json"], options.timeout)
        begin = text.find("{")
        if begin < 0:
            raise RuntimeError("it printed no summary")
        summary.write_text(text[begin:], encoding="utf-8")
        if Path(tool).name == TOOLS[0]:
            tables = folder / "tables"
            quiet([tool, "view", *pair, str(found), "--output-file", str(tables)], options.timeout)
            if next(tables.rglob("*.parquet"), None) is not None:
                return tables.relative_to(out).as_posix()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        record.failed(
            "profile", f"{Path(tool).name} on {case['name']}: {getattr(error, 'strerror', None) or error}"
        )
        found = summary if summary.is_file() else newest(folder, ".ntff")
        return found.relative_to(out).as_posix() if found else None
    return summary.relative_to(out).as_posix()


def quiet(command: list[str], seconds: float) -> str:
    """What a tool prints. Raises RuntimeError with the end of its words where it fails."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
    )
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())[-500:]
        raise RuntimeError(f"{command[1]} ended with status {done.returncode}: {words}")
    return done.stdout


def fresh(folder: Path, name: str) -> Path:
    """An empty result folder; an earlier one of the name is kept under a number."""
    out = folder / name
    if out.exists():
        count = next(count for count in range(1, 10_000) if not (folder / f"{name}-{count}").exists())
        out.rename(folder / f"{name}-{count}")
    out.mkdir(parents=True)
    return out


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(
        description="Run the kernels of this bundle and write result/.", allow_abbrev=False
    )
    found.add_argument("--only", metavar="CASE", nargs="+", help="run these cases only")
    found.add_argument("--weights", metavar="FOLDER", help="the model's folder, for a bundle of a model")
    found.add_argument(
        "--launcher",
        choices=LAUNCHER_NAMES,
        help="what launches kernels (default: what is installed decides)",
    )
    found.add_argument(
        "--warmup", type=int, default=5, metavar="N", help="launches before those that are timed"
    )
    found.add_argument("--repetitions", type=int, default=20, metavar="N", help="launches that are timed")
    found.add_argument(
        "--timeout", type=float, default=900.0, metavar="SECONDS", help="the longest a case may take"
    )
    found.add_argument("--nrtpy", metavar="PYTHON", help=f"a Python that has nrtpy (default: {NRTPY_PYTHON})")
    found.add_argument("--no-profile", action="store_true", help="take no profiles")
    for name in ("--child", "--nrtpy-child", "--neff", "--out"):  # between run.py and the processes of cases
        found.add_argument(name, help=argparse.SUPPRESS)
    found.add_argument("--leave-out", nargs="+", help=argparse.SUPPRESS)
    found.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    return found


def stopped(number: int, frame: object) -> NoReturn:
    """End as by an interrupt."""
    raise KeyboardInterrupt


def main(folder: Path) -> int:
    """Run all cases; returns 0 where all ran, 1 where something failed, 130 after an interrupt."""
    options = parser().parse_args()
    manifest: Json = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    cases = {each["name"]: each for each in manifest["cases"]}
    model = importlib.import_module("run_model") if manifest["kind"] == "model" else None
    if options.child:
        if model is not None:
            return int(model.child(folder, Path(options.out), manifest, options))
        return child(folder, Path(options.out), manifest, cases[options.child], options)
    if options.nrtpy_child:
        name = options.nrtpy_child
        reads = read_from(folder, manifest, options.weights)
        if model is not None:
            reads = model.run_chain.read_at(folder, manifest, name, options.weights)
        return nrtpy_child(cases[name], reads, options)
    unknown = [each for each in options.only or () if each not in cases]
    if unknown or min(options.repetitions, options.timeout) < 1 or options.warmup < 0:
        wrong = (
            f"no case {unknown[0]}; there are {', '.join(cases)}"
            if unknown
            else "counts of 1 or more are wanted"
        )
        parser().error(wrong)
    signal.signal(signal.SIGTERM, stopped)
    out = fresh(folder, "result")
    record = Record(out, manifest["digest"], manifest["target"])
    if digest_of(folder, manifest) != manifest["digest"]:
        record.failed("read", "files of the bundle were changed: its digest is another one")
    try:
        wrong = ""
        if manifest["weights"]:
            check = importlib.import_module("run_weights").check_weights
            wrong = check(options.weights, manifest["weights"]["files"])
        if wrong:
            record.failed("read", wrong)
        elif model is None:
            run_cases(out, cases, options, record)
        else:
            model.run_all(out, manifest, options, record)
    except KeyboardInterrupt:
        record.failed("run", "interrupted")
        record.close()
        return 130
    except Exception as error:  # a result is written, whatever happens
        traceback.print_exc()
        record.failed("run", f"{type(error).__name__}: {error}")
    record.close()
    for each in record.values["failures"]:
        print(f"{each['stage']}: {each['message']}")
    print(f"{out} holds the result; take the whole folder of the bundle home, for `nkw compare`")
    ran = record.values["cases"]
    return 0 if ran and all(each["status"] == "ran" for each in ran) else 1


def run_cases(out: Path, cases: dict[str, Json], options: argparse.Namespace, record: Record) -> None:
    """Run every case in a process of its own."""
    for name, case in cases.items():
        if options.only and name not in options.only:
            continue
        launcher, remark = launcher_of(case, options, record)
        record.values["cases"].append(
            run_case(out, case, launcher, options, record) if launcher else skipped(name, remark)
        )
        record.save()
        print(line_of(record.values["cases"][-1]), flush=True)


def launcher_of(case: Json, options: argparse.Namespace, record: Record) -> tuple[str | None, str]:
    """The launcher of a case, which is recorded, and what is wrong or remarkable about it."""
    launcher, remark = usable_launcher(case["imports"], versions())
    launcher = options.launcher or launcher
    if remark:
        record.failed("import", remark)
    record.values["launcher"] = launcher
    return launcher, remark


def skipped(name: str, why: str) -> Json:
    """The result of a case that could not be tried."""
    error = {"type": "Environment", "message": why}
    nothing: Json = {"log": None, "outputs": [], "times": None, "profile": None}
    return {"name": name, "status": "skipped", "stage": "import", "error": error, **nothing}


def line_of(case: Json) -> str:
    """One line about a case."""
    words = [f"{case['name']}: {case['status']}"]
    if case["times"]:
        words.append(f"median {case['times']['median_ns'] / 1e3:.1f} us ({case['times']['clock']} clock)")
    if case["error"]:
        words.append(f"{case['stage']}: {case['error']['type']}: {case['error']['message']:.200}")
    return ", ".join(words)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    sys.exit(main(Path(__file__).resolve().parent))
