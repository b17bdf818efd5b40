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
import importlib
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

run: Any = importlib.import_module(f"{__package__}.run" if __package__ else "run")
run_weights: Any = importlib.import_module(f"{__package__}.run_weights" if __package__ else "run_weights")
run_chain: Any = importlib.import_module(f"{__package__}.run_chain" if __package__ else "run_chain")

MOST_VALUES_BYTES = 16_000_000
"""The largest output whose values are brought back where they differ; of a larger one the digests of tiles are."""
MOST_CRASHES = 2
"""Of one program, a kernel on arguments of the same shapes, before its later launches are left out."""
MOST_DRIFT = 1e300  # stands for an infinite difference, which JSON has not
Json = dict[str, Any]


# -- the launches, in a process that may crash -------------------------------------------------------------------------


class Runner:
    """Runs the launches of a bundle one after another and tells what became of each."""

    def __init__(self, folder: Path, out: Path, manifest: Json, options: argparse.Namespace) -> None:
        self._folder, self._out, self._options = folder, out, options
        self._cases: list[Json] = manifest["cases"]
        self._steps = {each["case"]: each for each in manifest["generated"]["steps"]}
        self._teller = run.Teller(options.fd)
        self._chain = run_chain.Chain(
            folder, self._cases, run_weights.Weights(options.weights, manifest["weights"])
        )
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
        missing = [each["text"] for each in case["arguments"].values() if not self._chain.holds(each)]
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

    def _judged(self, case: Json, expected: list[tuple[Any, Any]], result: Json) -> list[Any]:
        """Launch with the own arguments, and where that is beyond the tolerance for their sake, the expected ones."""
        returned, times = self._launched(case, self._chain.own)
        result["times"] = times
        judged = self._held(case, self._chain.own, returned, expected)
        own = judged
        if case["name"] in self._steps:
            result["token"] = chosen(self._steps[case["name"]], returned)
        carried = not all(each.right for each in judged) and result["inputs"] == "own"
        if carried and all(map(self._chain.knows, case["arguments"].values())):
            result.update(inputs="expected", drift=[min(each.error, MOST_DRIFT) for each in judged])
            again, _ = self._launched(case, self._chain.expected)
            judged = self._held(case, self._chain.expected, again, expected)
        right = all(each.right for each in judged) and len(judged) == len(case["outputs"])
        for place, ((bits, _), each) in enumerate(zip(returned, own)):
            self._chain.keep(case, place, bits if right else None, right and not each.equal)
        return judged

    def _launched(self, case: Json, arrays: Json) -> tuple[list[tuple[Any, str]], Json]:
        """The bits and dtypes that a launch returns, and its times by the clock of the host.

        Launches of a program that runs for the first time in this process are timed several times, later ones once.
        """
        launch = run.LAUNCHERS[self._options.launcher](
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

    def _held(self, case: Json, arrays: Json, returned: list[tuple[Any, str]], expected: Any) -> list[Any]:
        judged = []
        for number, (bits, dtype) in enumerate(returned):
            if number >= len(case["outputs"]):
                more: Json = {"name": f"output-{number}", "tile": (128, 512), "tolerance": None, "dtype": ""}
                judged.append(run_chain.Judged(more, bits, dtype, None, None))
                continue
            output, before = case["outputs"][number], None
            if output["onto"] is not None:
                argument = run_chain.argument_of(case, output["onto"])
                before = self._chain.given(argument, arrays), self._chain.file(output["onto"]["file"])
            judged.append(run_chain.Judged(output, bits, dtype, before, expected[number][1]))
        return judged

    def _brought_back(self, case: Json, judged: Any) -> Json:
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
        self._steps = manifest["generated"]["steps"]
        self._crashes: Counter[str] = Counter()

    def note(self, told: Json) -> None:
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
    story = Story(out, manifest, options, record)
    for case in manifest["cases"]:
        launcher, remark = run.launcher_of(case, options, record)
        if launcher is None:
            for each in story.left:
                record.values["cases"].append({**run.skipped(each["name"], remark), **MODEL_PART})
            return
        break
    build, logs = out / "build", ""
    while story.left:
        first, heard = story.left[0], len(story.left)
        options.leave_out = story.left_out
        done = run.start_child(out, first, build, launcher, options, record, story.note)
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
