"""Runs the generation of a bundle of a model: every launch of every step, with outputs feeding what follows.

`run.py` hands over to this file. Weights come from `--weights FOLDER`: its .safetensors files have to have the SHA-256
of the bundle, and every operand that is made of them, by the recipe of the bundle, as well. A process of its own runs
launch after launch; where it crashes or hangs, that launch is lost, and a new process goes on behind it.

A launch is given what the launches before it returned here. Its outputs are held against those expected, within the
tolerance of the launch. Where one is beyond it, and the inputs were not the expected ones to the bit, rounding may
have been carried on from earlier launches: then the launch is made again with the expected inputs, and those outputs
are what is reported; `drift` says how far the first ones were off. What follows is given the expected values where the
launch was wrong or lost, else its own. The token after a step is the expected one, also where another was chosen.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

run: Any = importlib.import_module(f"{__package__}.run" if __package__ else "run")

MOST_VALUES_BYTES = 16_000_000
"""The largest output whose values are brought back where they differ; of a larger one the digests of tiles are."""
MOST_CRASHES = 2
"""Of one program, a kernel on arguments of the same shapes, before its later launches are left out."""
MOST_DRIFT = 1e300  # stands for an infinite difference, which JSON has not
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes of .safetensors files."""
BITS = {"float32": "uint32", "float16": "uint16", "bfloat16": "uint16"}
Json = dict[str, Any]
Place = tuple[str, int]
"""An output: the name of its case and its number there."""


# -- weights ---------------------------------------------------------------------------------------------------------


def check_weights(folder: str | None, files: list[Json]) -> str:
    """What is wrong with a folder of weights, in one sentence; empty where the files are those of the bundle."""
    if folder is None:
        return f"the weights are missing: give --weights FOLDER, the folder that holds {files[0]['name']}"
    root = Path(folder)
    if not root.is_dir():
        return f"--weights {folder} is no folder"
    for file in files:
        path, seen = root / file["name"], hashlib.sha256()
        try:
            if path.stat().st_size != file["nbytes"]:
                sizes = f"{path.stat().st_size:,} bytes, that of the bundle {file['nbytes']:,}"
                return f"{path} is not the file that the bundle was made with: it has {sizes}"
            with open(path, "rb") as content:
                while part := content.read(1 << 22):
                    seen.update(part)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
        if seen.hexdigest() != file["sha256"]:
            digests = f"its SHA-256 is {seen.hexdigest()}, that of the bundle {file['sha256']}"
            return f"{path} is not the file that the bundle was made with: {digests}"
    return ""


def tensors_of(path: Path) -> dict[str, tuple[Any, str]]:
    """The tensors of a .safetensors file by name: their bits in the order of the file, mapped, and their dtype.

    The file begins with the length of a JSON header, 8 bytes, and the header; the tensors follow it.
    """
    import numpy as np

    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = {}
    for name, about in header.items():
        if name != "__metadata__" and about["dtype"] in STORED:
            dtype = STORED[about["dtype"]]
            begin, end = about["data_offsets"]
            count = (end - begin) // np.dtype(BITS[dtype]).itemsize
            bits = np.memmap(path, BITS[dtype], "r", 8 + length + begin, (count,)) if count else None
            found[name] = bits, dtype
    return found


def rounded(bits: Any, dtype: str, into: str) -> Any:
    """The bits of floats of one dtype in another: unchanged, or in bfloat16, to the nearest value and then to even."""
    import numpy as np

    if dtype == into:
        return bits
    if into != "bfloat16":
        raise ValueError(f"{dtype} is not turned into {into}")
    wide = bits if dtype == "float32" else bits.view(np.float16).astype(np.float32).view(np.uint32)
    nearest = (wide + np.uint32(0x7FFF) + (wide >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, wide >> np.uint32(16) | np.uint32(0x40), nearest).astype(np.uint16)


def prepared(operand: Json, tensors: dict[str, tuple[Any, str]]) -> Any:
    """The bits of an operand, put together from pieces of tensors.

    Raises ValueError with a sentence where a tensor is missing or too short, or the result has another SHA-256.
    """
    import numpy as np

    name, dtype = operand["name"], operand["dtype"]
    found = np.zeros(operand["shape"], BITS[dtype])
    for piece in operand["pieces"]:
        tensor, stored = tensors.get(piece["tensor"], (None, ""))
        steps = list(zip(piece["shape"], piece["strides"]))
        last = piece["start"] + sum((size - 1) * stride for size, stride in steps)
        if tensor is None or last >= tensor.size:
            raise ValueError(f"the weight {name} needs more of tensor {piece['tensor']} than there is")
        strides = [stride * tensor.itemsize for stride in piece["strides"]]
        box = np.lib.stride_tricks.as_strided(
            tensor[piece["start"] :], piece["shape"], strides, writeable=False
        )
        found[tuple(slice(at, at + size) for at, size in zip(piece["at"], piece["shape"]))] = rounded(
            box, stored, dtype
        )
    digest = hashlib.sha256(found.tobytes()).hexdigest()
    if digest != operand["sha256"]:
        raise ValueError(
            f"the weight {name} has SHA-256 {digest} as it is made here, not {operand['sha256']}"
        )
    return found


class Weights:
    """The operands of a bundle, each made when it is asked for the first time."""

    def __init__(self, folder: Path, generation: Json) -> None:
        self._tensors: dict[str, tuple[Any, str]] = {}
        for file in generation["files"]:
            self._tensors.update(tensors_of(folder / file["name"]))
        self._operands = {each["name"]: each for each in generation["operands"]}
        self._made: Json = {}

    def __getitem__(self, name: str) -> Any:
        """The bits of an operand."""
        if name not in self._made:
            self._made[name] = prepared(self._operands[name], self._tensors)
        return self._made[name]


# -- values ----------------------------------------------------------------------------------------------------------


def float_errors(seen: Any, expected: Any) -> tuple[Any, Any, Any]:
    """Of two arrays of one dtype: how far apart their elements are, in float64, which are equal, and which to the bit.

    Both NaN, or 0 and -0, are equal; beside a NaN any other value is infinitely far.
    """
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        wide, exact = seen.astype(np.float64), expected.astype(np.float64)
        errors = np.abs(wide - exact)
    unsigned = f"uint{8 * seen.dtype.itemsize}"
    bits = [np.ascontiguousarray(each).view(unsigned).reshape(each.shape) for each in (seen, expected)]
    same_bits = bits[0] == bits[1]
    same = same_bits | (wide == exact) | (np.isnan(wide) & np.isnan(exact))
    return np.where(same, 0.0, np.where(np.isnan(errors), np.inf, errors)), same, same_bits


def written(whole: Any, onto: Json, places: Any) -> Any:
    """The places of an array that a launch writes anew."""
    import numpy as np

    return np.ascontiguousarray(np.take(whole, places, axis=onto["axis"]))


class Chain:
    """What the launches of a bundle are given and should return, in their order; arrays are of bits.

    `expected` and `own` hold the outputs that later launches read; those of `differing` are not as expected to the bit.
    """

    def __init__(self, folder: Path, cases: list[Json], weights: Weights) -> None:
        self._folder, self._weights = folder, weights
        self._files: Json = {}
        self._last: dict[Place, int] = {}
        self.expected: dict[Place, Any] = {}
        self.own: dict[Place, Any] = {}
        self.differing: set[Place] = set()
        for number, case in enumerate(cases):
            for each in case["arguments"]:
                if each["kind"] == "result":
                    self._last[each["text"], each["output"]] = number

    def file(self, name: str) -> Any:
        """The array of a file, which is kept: a table of rotations, or the places of one token in every cache."""
        import numpy as np

        if name not in self._files:
            self._files[name] = np.load(self._folder / name, allow_pickle=False)
        return self._files[name]

    def given(self, argument: Json, arrays: dict[Place, Any]) -> Any:
        """The bits of an argument, of results those in `arrays`; KeyError where it is unknown what is expected."""
        import numpy as np

        kind = argument["kind"]
        if kind == "weight":
            return self._weights[argument["text"]]
        if kind == "array":
            return self.file(argument["file"]).copy()
        if kind == "zeros":
            return np.zeros(argument["shape"], bits_of(argument["dtype"]))
        whole = arrays[argument["text"], argument["output"]]
        return whole[-argument["shape"][0] :].copy() if argument["shape"] else whole.copy()

    def expect(self, case: Json) -> list[tuple[Any, Any]]:
        """The outputs of a launch as expected, as far as values travel, and of each what is compared of it."""
        import numpy as np

        found: list[tuple[Any, Any]] = []
        for number, output in enumerate(case["outputs"]):
            part = np.load(self._folder / output["file"], allow_pickle=False) if output["file"] else None
            whole, onto = part, output["onto"]
            if onto is not None and part is not None:
                argument = argument_of(case, onto)
                whole = self.given(argument, self.expected) if self.knows(argument) else None
                if whole is not None:
                    np.moveaxis(whole, onto["axis"], 0)[self.file(onto["file"])] = np.moveaxis(
                        part, onto["axis"], 0
                    )
            found.append((whole, part))
            if whole is not None and (case["name"], number) in self._last:
                self.expected[case["name"], number] = whole
        return found

    def knows(self, argument: Json) -> bool:
        """Whether an argument's expected value is there."""
        return argument["kind"] != "result" or (argument["text"], argument["output"]) in self.expected

    def holds(self, argument: Json) -> bool:
        """Whether an argument's own value is there."""
        return argument["kind"] != "result" or (argument["text"], argument["output"]) in self.own

    def exact(self, case: Json) -> bool:
        """Whether a launch's own arguments are the expected ones to the bit."""
        return not any(
            each["kind"] == "result" and (each["text"], each["output"]) in self.differing
            for each in case["arguments"]
        )

    def keep(self, case: Json, place: int, value: Any, differs: bool) -> None:
        """Note an own output where later launches read it; the expected one with None."""
        key = case["name"], place
        if key not in self._last:
            return
        if value is None or not differs:
            value = self.expected.get(key, value)
        if value is not None:
            self.own[key] = value
            if differs:
                self.differing.add(key)

    def forget(self, number: int) -> None:
        """Let go of what no case after this one reads."""
        for arrays in (self.own, self.expected):
            for key in [key for key in arrays if self._last[key] <= number]:
                del arrays[key]


def bits_of(dtype: str) -> Any:
    """The dtype of numpy's own under which arrays of a dtype are stored."""
    found = run.dtype_named(dtype)
    return f"uint{8 * found.itemsize}" if found.kind == "V" or found.isbuiltin != 1 else found


def argument_of(case: Json, onto: Json) -> Json:
    """The argument that an output is written onto."""
    found: Json = next(each for each in case["arguments"] if each["name"] == onto["argument"])
    return found


def read_at(folder: Path, manifest: Json, name: str, weights: str) -> Callable[[Json], Any]:
    """Reads the expected arguments of one case."""
    chain = Chain(folder, manifest["cases"], Weights(Path(weights), manifest["generation"]))
    for number, case in enumerate(manifest["cases"]):
        if case["name"] == name:
            break
        chain.expect(case)
        chain.forget(number - 1)
    return lambda argument: chain.given(argument, chain.expected)


# -- the launches, in a process that may crash -------------------------------------------------------------------------


class Judged:
    """One output held against what is expected: its record, whether it is equal to the bit, whether it may be right.

    `before` is the argument that it is written onto, with the places that are expected to be written, `part` what is
    expected: None where only its digests travel, or no such output is expected. `error` is the largest difference.
    """

    def __init__(
        self, output: Json, bits: Any, dtype: str, before: tuple[Any, Any] | None, part: Any
    ) -> None:
        tolerance = output["tolerance"]
        allowed = 0.0 if tolerance is None else tolerance["bound"] + tolerance["error"]
        stray = None
        if before is not None and list(bits.shape) == output["onto"]["shape"] and dtype == output["dtype"]:
            stray = strayed(bits, *before, output, allowed)
            bits = written(bits, output["onto"], before[1])
        self.bits = bits
        self.record: Json = {
            "name": output["name"],
            "file": None,
            "dtype": dtype,
            "shape": list(bits.shape),
            "tiles": run.tile_digests(bits, *output["tile"]),
            "stray": stray,
        }
        alike = stray is None and dtype == output["dtype"] and list(bits.shape) == output["shape"]
        self.equal, self.right, self.error = False, alike, 0.0
        if alike and part is None:
            self.equal = self.record["tiles"] == output["tiles"]
        elif alike:
            element = run.dtype_named(dtype)
            errors, _, same_bits = float_errors(bits.view(element), part.view(element))
            self.equal, self.error = bool(same_bits.all()), float(errors.max(initial=0.0))
            self.right = self.error <= (0.0 if element.kind in "biu" else allowed)


def strayed(bits: Any, before: Any, places: Any, output: Json, allowed: float) -> int | None:
    """The first place along the axis that should be as it was and differs from the argument, beyond what is allowed."""
    import numpy as np

    axis, element = output["onto"]["axis"], run.dtype_named(output["dtype"])
    errors, _, _ = float_errors(bits.view(element), before.view(element))
    most = np.moveaxis(errors, axis, 0).reshape(bits.shape[axis], -1).max(axis=1, initial=0.0)
    most[places] = 0.0
    astray = np.flatnonzero(most > allowed)
    return int(astray[0]) if len(astray) else None


class Runner:
    """Runs the launches of a bundle one after another and tells what became of each."""

    def __init__(self, folder: Path, out: Path, manifest: Json, options: argparse.Namespace) -> None:
        self._folder, self._out, self._options = folder, out, options
        self._cases: list[Json] = manifest["cases"]
        self._steps = {each["case"]: each for each in manifest["generation"]["steps"]}
        self._teller = run.Teller(options.fd)
        self._chain = Chain(folder, self._cases, Weights(Path(options.weights), manifest["generation"]))
        self._seen: set[str] = set()
        self._stage = "import"

    def _at(self, stage: str) -> None:
        self._stage = stage
        self._teller.say(stage=stage)

    def run_from(self, name: str) -> None:
        """Run this case and those behind it; before it everything is as expected."""
        begun = False
        for number, case in enumerate(self._cases):
            begun = begun or case["name"] == name
            expected = self._chain.expect(case)
            if begun and (not self._options.only or case["name"] in self._options.only):
                self._teller.say(begun=case["name"])
                self._teller.say(result=self._run(case, expected))
            else:
                self._forgo(case)
            self._chain.forget(number)

    def _run(self, case: Json, expected: list[tuple[Any, Any]]) -> Json:
        result: Json = {
            "name": case["name"],
            "status": "failed",
            "stage": None,
            "error": None,
            "log": None,
            "outputs": [],
            "times": None,
            "profile": None,
            "inputs": "expected" if self._chain.exact(case) else "own",
            "drift": [],
            "token": None,
        }
        if (case["like"] or case["name"]) in (self._options.leave_out or ()):
            why = f"{case['kernel']} on such arguments ended {MOST_CRASHES} processes before"
            self._forgo(case)
            return {**run.skipped(case["name"], why), **MODEL_PART}
        missing = [each["text"] for each in case["arguments"] if not self._chain.holds(each)]
        if missing:
            why = f"what {missing[0]} should return did not travel, and what it returned is lost"
            self._forgo(case)
            return {**run.skipped(case["name"], why), **MODEL_PART}
        self._at("import")
        try:
            judged = self._judged(case, expected, result)
            self._at("read")
            result["outputs"] = [self._brought_back(case, each) for each in judged]
            result["status"] = "ran"
        except Exception as error:
            traceback.print_exc()
            result.update(stage=self._stage, error=run.described(error))
            self._forgo(case)
        return result

    def _forgo(self, case: Json) -> None:
        """Go on behind a launch with the expected values."""
        for place in range(len(case["outputs"])):
            self._chain.keep(case, place, None, False)

    def _judged(self, case: Json, expected: list[tuple[Any, Any]], result: Json) -> list[Judged]:
        """Launch with the own arguments, and where that is beyond the tolerance for their sake, the expected ones."""
        returned, times = self._launched(case, self._chain.own)
        result["times"] = times
        judged = self._held(case, self._chain.own, returned, expected)
        own = judged
        if case["name"] in self._steps:
            result["token"] = chosen(self._steps[case["name"]], returned)
        carried = not all(each.right for each in judged) and result["inputs"] == "own"
        if carried and all(map(self._chain.knows, case["arguments"])):
            result.update(inputs="expected", drift=[min(each.error, MOST_DRIFT) for each in judged])
            again, _ = self._launched(case, self._chain.expected)
            judged = self._held(case, self._chain.expected, again, expected)
        right = all(each.right for each in judged) and len(judged) == len(case["outputs"])
        for place, ((bits, _), each) in enumerate(zip(returned, own)):
            self._chain.keep(case, place, bits if right else None, right and not each.equal)
        return judged

    def _launched(self, case: Json, arrays: dict[Place, Any]) -> tuple[list[tuple[Any, str]], Json]:
        """The bits and dtypes that a launch returns, and its times by the clock of the host.

        Launches of a program that runs for the first time in this process are timed several times, later ones once.
        """
        launch = run.LAUNCHERS[self._options.path](
            self._folder, case, lambda argument: self._chain.given(argument, arrays)
        )
        program = case["like"] or case["name"]
        first = program not in self._seen
        self._seen.add(program)
        before = time.time_ns()
        self._at("compile" if first else "run")
        begun = time.perf_counter_ns()
        returned = launch()
        several = returned if isinstance(returned, (tuple, list)) else (returned,)
        found = [run.to_numpy(each) for each in several]
        spent = float(time.perf_counter_ns() - begun)
        if not first:
            return found, run.summarised([spent], 0, "host")
        neff = run.newest(Path.cwd(), ".neff")
        if neff is not None and neff.stat().st_mtime_ns >= before:
            self._teller.say(program=case["name"], neff=str(neff))
        self._at("time")
        return found, run.timed(launch, self._options)

    def _held(
        self, case: Json, arrays: dict[Place, Any], returned: list[tuple[Any, str]], expected: Any
    ) -> list[Judged]:
        judged = []
        for number, (bits, dtype) in enumerate(returned):
            if number >= len(case["outputs"]):
                more: Json = {"name": f"output-{number}", "tile": (128, 512), "tolerance": None, "dtype": ""}
                judged.append(Judged(more, bits, dtype, None, None))
                continue
            output, before = case["outputs"][number], None
            if output["onto"] is not None:
                argument = argument_of(case, output["onto"])
                before = self._chain.given(argument, arrays), self._chain.file(output["onto"]["file"])
            judged.append(Judged(output, bits, dtype, before, expected[number][1]))
        return judged

    def _brought_back(self, case: Json, judged: Judged) -> Json:
        """The record of an output; its values are written where they are not equal to those expected."""
        import numpy as np

        if not judged.equal and judged.bits.nbytes <= MOST_VALUES_BYTES:
            file = f"values/{case['name']}/{judged.record['name']}.npy"
            try:
                (self._out / file).parent.mkdir(parents=True, exist_ok=True)
                np.save(self._out / file, judged.bits, allow_pickle=False)
                judged.record["file"] = file
            except OSError as error:
                why = error.strerror or error
                self._teller.say(
                    lost=f"the values of {case['name']} {judged.record['name']} cannot be written: {why}"
                )
                with contextlib.suppress(OSError):
                    (self._out / file).unlink()
        return judged.record


def chosen(step: Json, returned: list[tuple[Any, str]]) -> int | None:
    """The token with the largest logit, of equal ones the lowest; None where these outputs did not come."""
    if max(step["values"], step["tokens"]) >= len(returned):
        return None
    values, tokens = (returned[step[name]][0].reshape(-1) for name in ("values", "tokens"))
    if values.shape != tokens.shape or not values.size:
        return None
    best = [int(token) for value, token in zip(values, tokens) if value == values.max()]
    return min(best, default=None)


def child(folder: Path, out: Path, manifest: Json, options: argparse.Namespace) -> int:
    """Run the launches from `options.child` on and tell the parent of each."""
    teller = run.Teller(options.fd)
    try:
        Runner(folder, out, manifest, options).run_from(options.child)
    except BaseException as error:
        traceback.print_exc()
        teller.say(error=run.described(error))
        return 1
    teller.say(stage=None)
    return 0


# -- all launches, in the process that does not ------------------------------------------------------------------------


class Story:
    """Listens to the processes that run launches, records what they tell, and knows which launch is next."""

    def __init__(self, out: Path, manifest: Json, options: argparse.Namespace, record: Any) -> None:
        self._out, self._options, self._record = out, options, record
        only = set(options.only or ())
        self.left = [each for each in manifest["cases"] if not only or each["name"] in only]
        self.neffs: dict[str, str] = {}
        self._steps = manifest["generation"]["steps"]
        self._crashes: Counter[str] = Counter()

    def hear(self, told: Json) -> None:
        """Record a result, or the NEFF of a program."""
        if "neff" in told:
            self.neffs[told["program"]] = told["neff"]
        result = told.get("result")
        if result is not None and self.left and result["name"] == self.left[0]["name"]:
            self._take(result)

    def lose(self, error: Json, stage: str, log: str) -> None:
        """Record the launch that a process ended in, with the end of what it printed."""
        case = self.left[0]
        self._crashes[case["like"] or case["name"]] += 1
        self._take(
            {
                **run.skipped(case["name"], ""),
                **MODEL_PART,
                "status": "failed",
                "stage": stage,
                "error": error,
                "log": run.kept(self._out, f"logs/{case['name']}.txt", log, self._record),
            }
        )

    @property
    def left_out(self) -> list[str]:
        """The programs that ended too many processes, by their first cases."""
        return [name for name, crashes in self._crashes.items() if crashes >= MOST_CRASHES]

    def _take(self, result: Json) -> None:
        case = self.left.pop(0)
        self._record.values["cases"].append(result)
        self._record.save()
        if result["status"] != "ran":
            print(run.line_of(result), flush=True)
        if not self.left or self.left[0]["step"] != case["step"]:
            self._tell_step(case["step"])

    def _tell_step(self, number: int) -> None:
        step = self._steps[number]
        ran = [each["token"] for each in self._record.values["cases"] if each["name"] == step["case"]]
        token = ran[0] if ran and ran[0] is not None else "none"
        what = f"prompt {step['prompt'] + 1}, token {step['number'] + 1}"
        print(f"{what}: {token}, expected {step['token']}", flush=True)


MODEL_PART: Json = {"inputs": "expected", "drift": [], "token": None}


def run_all(out: Path, manifest: Json, options: argparse.Namespace, record: Any) -> None:
    """Run all launches, in as many processes as it takes; then time and profile each program on the device."""
    wrong = check_weights(options.weights, manifest["generation"]["files"])
    if wrong:
        record.failed("read", wrong)
        return
    story = Story(out, manifest, options, record)
    for case in manifest["cases"]:
        path, remark = run.path_of(case, options, record)
        if path is None:
            for each in story.left:
                record.values["cases"].append({**run.skipped(each["name"], remark), **MODEL_PART})
            return
        break
    build, logs = out / "build", ""
    while story.left:
        first, heard = story.left[0], len(story.left)
        options.leave_out = story.left_out
        done = run.start_child(out, first, build, path, options, record, story.hear)
        for each in done.lost:
            record.failed("write", each)
        logs = (logs + done.log)[-run.LOG_BYTES :]
        if not story.left or done.error is None:
            break
        if "begun" not in done.told and heard == len(story.left):
            record.failed("read", f"{done.error['type']}: {done.error['message']}")
            break
        story.lose(done.error, done.told["stage"], done.log)
    run.kept(out, "logs/launches.txt", logs, record)
    for name, case, neff in timed_programs(manifest, story.neffs):
        result = next((each for each in record.values["cases"] if each["name"] == name), None)
        if result is not None and result["status"] == "ran":
            result["times"], _ = run.on_device(neff, out, case, options, result["times"], record)
            if not options.no_profile:
                result["profile"] = run.profiled(neff, out, case, options, record)
            record.save()


def timed_programs(manifest: Json, neffs: dict[str, str]) -> Iterator[tuple[str, Json, Path]]:
    """The programs whose NEFFs are there, by the cases that ran them first."""
    for case in manifest["cases"]:
        if case["name"] in neffs:
            yield case["name"], case, Path(neffs[case["name"]])
