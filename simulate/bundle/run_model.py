"""Runs the generation of a bundle of a model: every launch of every step, with outputs as arguments of later launches.

`run.py` calls this module. Weights come from `--weights FOLDER`. Its .safetensors files, and every operand
made of them by the bundle's recipes, must have the SHA-256 in the bundle. A child process runs the launches
in order, and its parent writes the result. If the child crashes or hangs, that launch is lost, and a new
child continues after it.

A launch receives outputs of earlier launches on the chip. Its outputs are compared with the expected ones,
within the launch's tolerance. An output beyond the tolerance may be due to rounding in earlier launches if
its inputs were not bitwise as expected. Then the launch is repeated with the expected inputs, and those
outputs are reported; `drift` has the errors of the first outputs. After a wrong or lost launch, later
launches receive the expected outputs. The token after a step is always the expected token.

A program is a kernel with arguments of certain shapes; many launches have the same program. The head is the
launch of a step that chooses the token.
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
"""Most bytes of an output whose array is returned if it differs; of a larger output, only digests of tiles are."""
MOST_CRASHES = 2
"""Crashes of a program, a kernel with arguments of certain shapes, after which its later launches are skipped."""
MOST_DRIFT = 1e300  # represents an infinite difference, which JSON lacks
Json = dict[str, Any]


# -- the launches, in a process that may crash -------------------------------------------------------------------------


class Runner:
    """Runs the launches of a bundle in order, in the child process, and sends each result to the parent."""

    def __init__(self, folder: Path, out: Path, manifest: Json, options: argparse.Namespace) -> None:
        self._folder, self._out, self._options = folder, out, options
        self._cases: list[Json] = manifest["cases"]
        self._steps = {step["case"]: step for step in manifest["generated"]["steps"]}
        self._teller = run.Teller(options.fd)
        self._chain = run_chain.Chain(
            folder, self._cases, run_weights.Weights(options.weights, manifest["weights"])
        )
        self._seen: set[str] = set()
        self._stage = "import"

    def _enter_stage(self, stage: str) -> None:
        """Store the stage under which an error is reported from now on, and send it to the parent."""
        self._stage = stage
        self._teller.say(stage=stage)

    def run_from(self, name: str) -> None:
        """Run the case with a name and the cases after it, and send each result to the parent.

        Earlier cases, and cases that `--only` leaves out, are not launched: later launches receive their
        expected outputs.
        """
        begun = False
        for index, case in enumerate(self._cases):
            begun = begun or case["name"] == name
            expected = self._chain.expect_outputs(case)
            if begun and (not self._options.only or case["name"] in self._options.only):
                self._teller.say(begun=case["name"])
                self._teller.say(result=self._run_case(case, expected))
            else:
                self._use_expected_outputs(case)
            self._chain.forget(index)

    def _run_case(self, case: Json, expected: list[tuple[Any, Any]]) -> Json:
        """Launch a case and return its result; errors of the launch become part of the result.

        A case is skipped if its program crashed too often, or if an argument is an output of a lost launch
        that is not stored in the bundle. Arrays of differing outputs are written to the result folder.
        """
        result: Json = {
            "name": case["name"],
            "status": "failed",
            "stage": None,
            "error": None,
            "log": None,
            "outputs": [],
            "times": None,
            "profile": None,
            "inputs": "expected" if self._chain.has_exact_arguments(case) else "own",
            "drift": [],
            "token": None,
        }
        if (case["like"] or case["name"]) in (self._options.leave_out or ()):
            reason = f"{case['kernel']} with arguments of these shapes ended {MOST_CRASHES} processes before"
            self._use_expected_outputs(case)
            return {**run.make_skipped_result(case["name"], reason), **MODEL_PART}
        missing = [
            argument["text"]
            for argument in case["arguments"].values()
            if not self._chain.has_chip_output(argument)
        ]
        if missing:
            reason = (
                f"it takes an output of {missing[0]}, which was lost there and is not stored in the bundle"
            )
            self._use_expected_outputs(case)
            return {**run.make_skipped_result(case["name"], reason), **MODEL_PART}
        self._enter_stage("import")
        try:
            judged = self._launch_and_judge(case, expected, result)
            self._enter_stage("read")
            result["outputs"] = [self._write_output(case, output) for output in judged]
            result["status"] = "ran"
        except Exception as error:
            traceback.print_exc()
            result.update(stage=self._stage, error=run.describe_error(error))
            self._use_expected_outputs(case)
        return result

    def _use_expected_outputs(self, case: Json) -> None:
        """Let later launches receive the expected outputs of a case, since the chip has no usable ones."""
        for index in range(len(case["outputs"])):
            self._chain.keep(case, index, None, False)

    def _launch_and_judge(self, case: Json, expected: list[tuple[Any, Any]], result: Json) -> list[Any]:
        """Launch a case, perhaps twice, and return a `Judged` for each output of the last launch.

        The first launch may be wrong only because its arguments drifted from the expected ones by rounding.
        That may be so if an output is wrong and an argument from the chip is not bitwise as expected. Then
        the case is launched again with the expected arguments, if all are known. For later launches, the
        outputs of the first launch are stored if all returned ones are right, else the expected outputs.

        Args:
            expected: (complete output, stored part) of every output, as `Chain.expect_outputs` returns them.
            result: Result of the case; times, token, inputs and drift are set in it.
        """
        returned, times = self._launch(case, self._chain.chip_outputs)
        result["times"] = times
        judged = self._judge_outputs(case, self._chain.chip_outputs, returned, expected)
        first_judged = judged
        if case["name"] in self._steps:
            result["token"] = choose_token(self._steps[case["name"]], returned)
        may_be_drift = not all(judged_output.right for judged_output in judged) and result["inputs"] == "own"
        if may_be_drift and all(map(self._chain.has_expected, case["arguments"].values())):
            result.update(
                inputs="expected", drift=[min(judged_output.error, MOST_DRIFT) for judged_output in judged]
            )
            again, _ = self._launch(case, self._chain.expected)
            judged = self._judge_outputs(case, self._chain.expected, again, expected)
        right = all(judged_output.right for judged_output in judged) and len(judged) == len(case["outputs"])
        for index, ((bits, _), judged_output) in enumerate(zip(returned, first_judged)):
            self._chain.keep(case, index, bits if right else None, right and not judged_output.equal)
        return judged

    def _launch(self, case: Json, arrays: Json) -> tuple[list[tuple[Any, str]], Json]:
        """Launch a case; return (bits, dtype) of each output, and times in ns by the clock of the host.

        The first launch of a program in this process is repeated as often as the options say, for its times.
        Later launches are timed once. A new NEFF is reported to the parent.

        Args:
            arrays: Outputs of earlier launches that are the arguments: those of the chip, or the expected
                ones.
        """
        launch = run.LAUNCHERS[self._options.launcher](
            self._folder, case, lambda argument: self._chain.resolve(argument, arrays)
        )
        program = case["like"] or case["name"]
        first = program not in self._seen
        self._seen.add(program)
        before = time.time_ns()
        self._enter_stage("compile" if first else "run")
        begun = time.perf_counter_ns()
        returned = launch()
        several = returned if isinstance(returned, (tuple, list)) else (returned,)
        outputs = [run.to_numpy(output) for output in several]
        spent = float(time.perf_counter_ns() - begun)
        if not first:
            return outputs, run.summarize_times([spent], 0, "host")
        neff = run.find_newest(Path.cwd(), ".neff")
        if neff is not None and neff.stat().st_mtime_ns >= before:
            self._teller.say(program=case["name"], neff=str(neff))
        self._enter_stage("time")
        return outputs, run.time_launches(launch, self._options)

    def _judge_outputs(
        self, case: Json, arrays: Json, returned: list[tuple[Any, str]], expected: Any
    ) -> list[Any]:
        """Return a `Judged` for each returned output; an output that the case does not have is judged wrong.

        Args:
            arrays: Outputs of earlier launches that the launch received.
            expected: (complete output, stored part) of every output, as `Chain.expect_outputs` returns them.
        """
        judged = []
        for index, (bits, dtype) in enumerate(returned):
            if index >= len(case["outputs"]):
                unexpected: Json = {
                    "name": f"output-{index}",
                    "tile": (128, 512),
                    "tolerance": None,
                    "dtype": "",
                }
                judged.append(run_chain.Judged(unexpected, bits, dtype, None, None))
                continue
            output, before = case["outputs"][index], None
            if output["onto"] is not None:
                argument = run_chain.find_written_argument(case, output["onto"])
                before = self._chain.resolve(argument, arrays), self._chain.load_file(output["onto"]["file"])
            judged.append(run_chain.Judged(output, bits, dtype, before, expected[index][1]))
        return judged

    def _write_output(self, case: Json, judged: Any) -> Json:
        """Return the record of an output for the result, after writing its array to `values/` if it differs.

        An array is written unless it is bitwise as expected or larger than MOST_VALUES_BYTES. If the disk
        refuses, the loss is sent to the parent, and the record's `file` stays None.
        """
        import numpy as np

        if not judged.equal and judged.bits.nbytes <= MOST_VALUES_BYTES:
            file = f"values/{case['name']}/{judged.record['name']}.npy"
            try:
                (self._out / file).parent.mkdir(parents=True, exist_ok=True)
                np.save(self._out / file, judged.bits, allow_pickle=False)
                judged.record["file"] = file
            except OSError as error:
                reason = error.strerror or error
                self._teller.say(
                    lost=f"the values of {case['name']} {judged.record['name']} cannot be written: {reason}"
                )
                with contextlib.suppress(OSError):
                    (self._out / file).unlink()
        return judged.record


def choose_token(step: Json, returned: list[tuple[Any, str]]) -> int | None:
    """Return the token with the largest logit, the lowest of equal ones; None if the outputs are missing.

    Args:
        step: Step of the generation: `values` and `tokens` are indices of the head's outputs.
        returned: (bits, dtype) of each output of the head: the largest logits, and their tokens in the same
            order.
    """
    if max(step["values"], step["tokens"]) >= len(returned):
        return None
    values, tokens = (returned[step[name]][0].reshape(-1) for name in ("values", "tokens"))
    if values.shape != tokens.shape or not values.size:
        return None
    candidates = [int(token) for logit, token in zip(values, tokens) if logit == values.max()]
    return min(candidates, default=None)


def run_child(folder: Path, out: Path, manifest: Json, options: argparse.Namespace) -> int:
    """Run the launches from the case `options.child` on, in the child process; results are sent to the parent.

    Returns:
        The exit status: 0 after the last launch, 1 after an error outside of a launch. The error is sent to
            the parent, not raised.
    """
    teller = run.Teller(options.fd)
    try:
        Runner(folder, out, manifest, options).run_from(options.child)
    except BaseException as error:
        traceback.print_exc()
        teller.say(error=run.describe_error(error))
        return 1
    teller.say(stage=None)
    return 0


# -- all launches, in the process that does not ------------------------------------------------------------------------


class Story:
    """State of a run in the parent: the launches that are left, the NEFFs of programs, the crashes."""

    def __init__(self, out: Path, manifest: Json, options: argparse.Namespace, record: Any) -> None:
        self._out, self._options, self._record = out, options, record
        only = set(options.only or ())
        self.left = [case for case in manifest["cases"] if not only or case["name"] in only]
        self.neffs: dict[str, str] = {}
        self._steps = manifest["generated"]["steps"]
        self._crashes: Counter[str] = Counter()

    def note(self, told: Json) -> None:
        """Record a message of a child: the path of a program's NEFF, or the result of the next launch.

        A result of any other launch is ignored.
        """
        if "neff" in told:
            self.neffs[told["program"]] = told["neff"]
        result = told.get("result")
        if result is not None and self.left and result["name"] == self.left[0]["name"]:
            self._append(result)

    def lose(self, error: Json, stage: str, log: str) -> None:
        """Record that the next launch failed because its process ended, and count a crash of its program.

        Args:
            error: Type and message of the error.
            stage: Stage in which the process ended.
            log: End of the output of the process, written to `logs/`.
        """
        case = self.left[0]
        self._crashes[case["like"] or case["name"]] += 1
        self._append(
            {
                **run.make_skipped_result(case["name"], ""),
                **MODEL_PART,
                "status": "failed",
                "stage": stage,
                "error": error,
                "log": run.keep_text(self._out, f"logs/{case['name']}.txt", log, self._record),
            }
        )

    @property
    def left_out(self) -> list[str]:
        """Names of the first cases of programs that crashed MOST_CRASHES times or more, which new processes skip."""
        return [name for name, crashes in self._crashes.items() if crashes >= MOST_CRASHES]

    def _append(self, result: Json) -> None:
        """Add the result of the next launch to `result.json`, and save the file.

        Prints the launch if it did not run, and the step after its last launch.
        """
        case = self.left.pop(0)
        self._record.values["cases"].append(result)
        self._record.save()
        if result["status"] != "ran":
            print(run.format_result(result), flush=True)
        if not self.left or self.left[0]["step"] != case["step"]:
            self._tell_step(case["step"])

    def _tell_step(self, index: int) -> None:
        """Print the chosen and the expected token of the step with an index."""
        step = self._steps[index]
        ran = [case["token"] for case in self._record.values["cases"] if case["name"] == step["case"]]
        token = ran[0] if ran and ran[0] is not None else "none"
        position = f"prompt {step['prompt'] + 1}, token {step['number'] + 1}"
        print(f"{position}: {token}, expected {step['token']}", flush=True)


MODEL_PART: Json = {"inputs": "expected", "drift": [], "token": None}


def run_all(out: Path, manifest: Json, options: argparse.Namespace, record: Any) -> None:
    """Run all launches, with a new child process after each crash, then time and profile each program.

    Results are added to `record` and saved. Without a launcher of kernels, all launches are recorded as
    skipped.
    """
    story = Story(out, manifest, options, record)
    for case in manifest["cases"]:
        launcher, remark = run.choose_launcher(case, options, record)
        if launcher is None:
            for case_result in story.left:
                record.values["cases"].append(
                    {**run.make_skipped_result(case_result["name"], remark), **MODEL_PART}
                )
            return
        break
    build, logs = out / "build", ""
    while story.left:
        first, heard = story.left[0], len(story.left)
        options.leave_out = story.left_out
        process = run.start_child(out, first, build, launcher, options, record, story.note)
        for loss in process.lost:
            record.add_failure("write", loss)
        logs = (logs + process.log)[-run.LOG_BYTES :]
        if not story.left or process.error is None:
            break
        if "begun" not in process.told and heard == len(story.left):
            record.add_failure("read", f"{process.error['type']}: {process.error['message']}")
            break
        story.lose(process.error, process.told["stage"], process.log)
    run.keep_text(out, "logs/launches.txt", logs, record)
    for name, case, neff in list_timed_programs(manifest, story.neffs):
        result = next((case for case in record.values["cases"] if case["name"] == name), None)
        if result is not None and result["status"] == "ran":
            result["times"], _ = run.time_on_device(neff, out, case, options, result["times"], record)
            if not options.no_profile:
                result["profile"] = run.profile_neff(neff, out, case, options, record)
            record.save()


def list_timed_programs(manifest: Json, neffs: dict[str, str]) -> Iterator[tuple[str, Json, Path]]:
    """Yield (name, case, path of the NEFF) of every case whose launch reported a NEFF, in the order of cases."""
    for case in manifest["cases"]:
        if case["name"] in neffs:
            yield case["name"], case, Path(neffs[case["name"]])
