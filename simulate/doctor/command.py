"""The command `doctor`: what is installed, what works, and what to mend."""

from __future__ import annotations

import argparse
import os
from importlib import metadata

import numpy as np

from nkw.errors import InvalidArgument, NkwError
from nkw.files import Outputs, imported_files, json_document
from nkw.parts import Hanging, table
from nkw.targets import DEFAULT_TARGET, TARGET_VARIABLE
from nkw.terminal import error, show, show_lines
from simulate.bind import BACKEND_VARIABLE, install
from simulate.doctor import host, packages, variables
from simulate.doctor.collect import collect
from simulate.doctor.finding import Finding
from simulate.doctor.machine import LNC, VIRTUAL, Machine, counted
from simulate.doctor.releases import described
from simulate.hardware import hardware
from simulate.isa import INSTRUCTIONS
from simulate.level import LEVEL_VARIABLE, RULES_VARIABLE
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import as_dtype
from simulate.run import current_core, target_hardware
from simulate.run.issue import issue_call
from simulate.world import launch

_ALWAYS = ("nki", "neuronx-cc", "torch-neuronx", "libneuronxla")
"""The vendor's packages that are listed where they are not installed, too."""
_LAST_BETA1 = (2, 22)  # neuronx-cc of SDK 2.27, the last release with neuronxcc.nki


def doctor(options: argparse.Namespace) -> int:
    """Say what is installed, what `import nki` and the target would be here, whether a kernel runs, what to mend."""
    machine = collect()
    facts = facts_of(machine)
    answers, failed = _answers()
    found = [*findings(machine), *failed]
    try:
        with json_document(options.json, Outputs(imported_files), "doctor") as contents:
            _report({**facts, **answers}, found)
            contents["found"] = {**facts, **answers}
            contents["findings"] = [each._asdict() for each in found]
            contents["works"] = not found
    except InvalidArgument as refused:
        error(refused)
        return 2
    return 1 if found else 0


def findings(machine: Machine) -> list[Finding]:
    """All that is to be mended on a machine, packages first; a pure function of it."""
    finders = (*packages.FINDERS, *host.FINDERS, *variables.FINDERS)
    return [finding for finder in finders for finding in finder(machine)]


def facts_of(machine: Machine) -> dict[str, str]:
    """What is installed and what is there, by its label; of an instance its driver, runtime, cores and LNC, too."""
    facts = {"Python": machine.python}
    for name in ("numpy", "ml_dtypes", "torch"):
        facts[name] = _version(name)
    for name in dict.fromkeys((*_ALWAYS, *machine.packages)):
        if name != "torch":
            facts[name] = _package(machine, name)
    facts["NKI"] = _which_nki(machine)
    chips = len(machine.device_files)
    facts["chip"] = (
        f"{chips} of the family {machine.family or 'unknown'}" if chips else "no Neuron device files"
    )
    optional = {
        "driver": machine.driver and f"{machine.driver}{'' if machine.module_loaded else ', not loaded'}",
        "runtime": machine.runtime,
        "SDK": described(machine),
        "cores": _cores(machine),
        "LNC": _lnc(machine),
    }
    return {**facts, **{label: value for label, value in optional.items() if value}}


def _report(facts: dict[str, str], found: list[Finding]) -> None:
    show([table("", [(label, Hanging(value, 0)) for label, value in facts.items()], left=(0, 1), firm=(0,))])
    for finding in found:  # whole lines, so that commands and addresses can be copied
        page = f"\n  {finding.page}" if finding.page else ""
        show_lines(f"\nto mend: {finding.says}\n  {finding.mend}{page}")


def _answers() -> tuple[dict[str, str], list[Finding]]:
    """What `import nki` and the target would be in this process, and whether a small kernel runs."""
    answers, failed = {}, []
    for label, asked, decide in (
        ("import nki", install, (BACKEND_VARIABLE, LEVEL_VARIABLE, RULES_VARIABLE)),
        ("target", lambda: target_hardware().label, (TARGET_VARIABLE,)),
    ):
        try:
            answers[label] = asked()
        except NkwError as refused:
            answers[label] = str(refused)
            mend = f"unset {' '.join(each for each in decide if each in os.environ)}"
            failed.append(Finding(label.replace(" ", "-"), refused.message, mend, ""))
    answers["simulator"] = _simulator()
    if answers["simulator"] != _RIGHT:
        again = "python -m pip install --force-reinstall nki-workbench"
        failed.append(Finding("simulator", answers["simulator"], again, ""))
    return answers, failed


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _package(machine: Machine, name: str) -> str:
    found = machine.packages.get(name)
    if found is None:
        return "not installed"
    return (
        f"{found.version}, a placeholder that cannot be used"
        if machine.is_placeholder(name)
        else found.version
    )


def _which_nki(machine: Machine) -> str:
    """Which of the vendor's languages is installed."""
    compiler = machine.version("neuronx-cc")
    names = [f"nki {machine.packages['nki'].version}"] if machine.version("nki") else []
    if compiler and compiler <= _LAST_BETA1:
        names.append(f"neuronxcc.nki of neuronx-cc {machine.packages['neuronx-cc'].version}")
    return " and ".join(names) or "none of the vendor's"


def _cores(machine: Machine) -> str | None:
    holders = [each for device in machine.devices for each in device.holders]
    used = f"; in use by {', '.join(dict.fromkeys(holders))}" if holders else ""
    cores = sum(device.cores for device in machine.devices)
    return f"{cores} on {counted(machine.devices)}{used}" if cores else None


def _lnc(machine: Machine) -> str | None:
    """The degree of the variables, and the one that the driver has its cores in."""
    asked = [f"{name}={machine.variables[name]}" for name in (LNC, VIRTUAL) if name in machine.variables]
    have = {str(device.lnc) for device in machine.devices if device.lnc is not None}
    return ", ".join([*(["/".join(sorted(have)) + " by neuron-ls"] if have else []), *asked]) or None


_RIGHT = "a small kernel ran and returned the right answer"


def _simulator() -> str:
    """Run one matmul and compare it with numpy; small integers, so that both are exact."""
    try:
        return _RIGHT if _trial() else "a small kernel ran and returned a wrong answer"
    except Exception as failed:
        return f"a small kernel failed: {type(failed).__name__}: {failed}"


def _trial() -> bool:
    def kernel(stationary: NkiTensor, moving: NkiTensor) -> NkiTensor:
        core = current_core()
        float32 = as_dtype("float32")
        tiles = [core.allocate(each.shape, float32) for each in (stationary, moving)]
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
