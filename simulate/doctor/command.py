"""The command `doctor`: prints the installed software, whether the simulator works, and a repair for each problem."""

from __future__ import annotations

import argparse
import os
from importlib import metadata

import numpy as np

from nkw.errors import InvalidArgument, NkwError
from nkw.files import Outputs, json_document, list_imported_files
from nkw.report import Hanging, table
from nkw.targets import DEFAULT_TARGET, TARGET_VARIABLE
from nkw.terminal import error, show, show_lines
from simulate.bind import BACKEND_VARIABLE, install
from simulate.doctor import host, packages, variables
from simulate.doctor.collect import collect
from simulate.doctor.finding import Finding
from simulate.doctor.machine import LNC, VIRTUAL, Machine, format_chip_count
from simulate.doctor.releases import describe_releases
from simulate.hardware import hardware
from simulate.isa import INSTRUCTIONS
from simulate.level import LEVEL_VARIABLE, RULES_VARIABLE
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import as_dtype
from simulate.run import current_core, target_hardware
from simulate.run.issue import issue_call
from simulate.world import launch

_ALWAYS = ("nki", "neuronx-cc", "torch-neuronx", "libneuronxla")
"""The vendor's packages that are listed even if they are not installed."""
_LAST_BETA1 = (2, 22)  # neuronx-cc of SDK 2.27, the last release with neuronxcc.nki


def doctor(options: argparse.Namespace) -> int:
    """Print what is installed, the backend of `import nki`, the target, whether a kernel runs, and repairs.

    Runs a small kernel on the simulator, and writes the JSON document that the options request. Repairs nothing.

    Returns:
        The exit status: 0 without findings, 1 with findings, 2 if the JSON file cannot be written.
    """
    machine = collect()
    facts = collect_facts(machine)
    answers, failures = _check_backend()
    findings = [*find_problems(machine), *failures]
    try:
        with json_document(options.json, Outputs(list_imported_files), "doctor") as contents:
            _report({**facts, **answers}, findings)
            contents["found"] = {**facts, **answers}
            contents["findings"] = [finding._asdict() for finding in findings]
            contents["works"] = not findings
    except InvalidArgument as refused:
        error(refused)
        return 2
    return 1 if findings else 0


def find_problems(machine: Machine) -> list[Finding]:
    """Return all findings on a machine: on Python packages, then on the host, then on environment variables.

    Looks at nothing but the record.
    """
    finders = (*packages.FINDERS, *host.FINDERS, *variables.FINDERS)
    return [finding for finder in finders for finding in finder(machine)]


def collect_facts(machine: Machine) -> dict[str, str]:
    """Return lines about installed software and hardware, by label and in the order of the report.

    Driver, runtime, SDK, cores and LNC appear only where they are known. Versions of numpy, ml_dtypes and torch are
    those of this Python environment, everything else is from the record.
    """
    facts = {"Python": machine.python}
    for name in ("numpy", "ml_dtypes", "torch"):
        facts[name] = _get_version(name)
    for name in dict.fromkeys((*_ALWAYS, *machine.packages)):
        if name != "torch":
            facts[name] = _describe_package(machine, name)
    facts["NKI"] = _describe_nki(machine)
    chips = len(machine.device_files)
    facts["chip"] = (
        f"{chips} of the family {machine.family or 'unknown'}" if chips else "no Neuron device files"
    )
    optional = {
        "driver": machine.driver and f"{machine.driver}{'' if machine.module_loaded else ', not loaded'}",
        "runtime": machine.runtime,
        "SDK": describe_releases(machine),
        "cores": _describe_cores(machine),
        "LNC": _describe_lnc(machine),
    }
    return {**facts, **{label: fact for label, fact in optional.items() if fact}}


def _report(facts: dict[str, str], findings: list[Finding]) -> None:
    """Print a table of facts, then each finding with its repair and its page."""
    show([table("", [(label, Hanging(fact, 0)) for label, fact in facts.items()], left=(0, 1), firm=(0,))])
    for finding in findings:  # without line breaks, so that commands and addresses can be copied
        page = f"\n  {finding.page}" if finding.page else ""
        show_lines(f"\nto mend: {finding.says}\n  {finding.mend}{page}")


def _check_backend() -> tuple[dict[str, str], list[Finding]]:
    """Bind `import nki`, read the target and run a small kernel in this process.

    Returns:
        The backend, the target and the outcome of the kernel by label, with the error in place of a failed one; and a
        finding for each failure.
    """
    answers, failures = {}, []
    for label, query, settings in (
        ("import nki", install, (BACKEND_VARIABLE, LEVEL_VARIABLE, RULES_VARIABLE)),
        ("target", lambda: target_hardware().label, (TARGET_VARIABLE,)),
    ):
        try:
            answers[label] = query()
        except NkwError as refused:
            answers[label] = str(refused)
            repair = f"unset {' '.join(variable for variable in settings if variable in os.environ)}"
            failures.append(Finding(label.replace(" ", "-"), refused.message, repair, ""))
    answers["simulator"] = _check_simulator()
    if answers["simulator"] != _RIGHT:
        reinstall = "python -m pip install --force-reinstall nki-workbench"
        failures.append(Finding("simulator", answers["simulator"], reinstall, ""))
    return answers, failures


def _get_version(package: str) -> str:
    """Return the version of a Python package in this environment, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _describe_package(machine: Machine, name: str) -> str:
    """Return the version of one of the vendor's packages, with a note about a placeholder."""
    package = machine.packages.get(name)
    if package is None:
        return "not installed"
    return (
        f"{package.version}, a placeholder that cannot be used"
        if machine.is_placeholder(name)
        else package.version
    )


def _describe_nki(machine: Machine) -> str:
    """Return which kernel languages of the vendor are installed, nki and neuronxcc.nki, with their versions."""
    compiler = machine.version("neuronx-cc")
    names = [f"nki {machine.packages['nki'].version}"] if machine.version("nki") else []
    if compiler and compiler <= _LAST_BETA1:
        names.append(f"neuronxcc.nki of neuronx-cc {machine.packages['neuronx-cc'].version}")
    return " and ".join(names) or "none of the vendor's"


def _describe_cores(machine: Machine) -> str | None:
    """Return a text with the number of logical cores and chips, and the processes that use them; None if unknown."""
    holders = [holder for device in machine.devices for holder in device.holders]
    used = f"; in use by {', '.join(dict.fromkeys(holders))}" if holders else ""
    cores = sum(device.cores for device in machine.devices)
    return f"{cores} on {format_chip_count(machine.devices)}{used}" if cores else None


def _describe_lnc(machine: Machine) -> str | None:
    """Return the LNC degrees that neuron-ls reports and those that environment variables set; None without any.

    The LNC degree is the number of physical cores of a logical core.
    """
    settings = [f"{name}={machine.variables[name]}" for name in (LNC, VIRTUAL) if name in machine.variables]
    degrees = {str(device.lnc) for device in machine.devices if device.lnc is not None}
    return ", ".join([*(["/".join(sorted(degrees)) + " by neuron-ls"] if degrees else []), *settings]) or None


_RIGHT = "a small kernel ran and returned the right answer"


def _check_simulator() -> str:
    """Run a small matmul on the simulator; return `_RIGHT`, or a sentence about the wrong answer or the error."""
    try:
        return _RIGHT if _run_small_kernel() else "a small kernel ran and returned a wrong answer"
    except Exception as failed:
        return f"a small kernel failed: {type(failed).__name__}: {failed}"


def _run_small_kernel() -> bool:
    """Return whether a matmul of small integers, exact in float32, equals numpy's; errors pass through."""

    def kernel(stationary: NkiTensor, moving: NkiTensor) -> NkiTensor:
        core = current_core()
        float32 = as_dtype("float32")
        tiles = [core.allocate(operand.shape, float32) for operand in (stationary, moving)]
        sums = core.allocate((4, 3), float32, MemoryRegion.psum)
        copied = core.allocate((4, 3), float32)
        out = core.allocate((4, 3), float32, MemoryRegion.shared_hbm)
        for tile, source in zip(tiles, (stationary, moving)):
            issue_call(INSTRUCTIONS["dma_copy"], (), {"dst": tile, "src": source})
        issue_call(INSTRUCTIONS["nc_matmul"], (), {"dst": sums, "stationary": tiles[0], "moving": tiles[1]})
        issue_call(INSTRUCTIONS["tensor_copy"], (), {"dst": copied, "src": sums})
        issue_call(INSTRUCTIONS["dma_copy"], (), {"dst": out, "src": copied})
        return out

    a = np.arange(20, dtype=np.float32).reshape(5, 4)
    b = np.arange(15, dtype=np.float32).reshape(5, 3)
    result = launch(kernel, [((a, b), {})], hardware(DEFAULT_TARGET)).outputs[0]
    return bool(np.array_equal(result, a.T @ b))
