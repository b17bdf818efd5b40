"""Findings about environment variables that contradict each other, the chip, or the installed release."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from nkw.targets import TARGET_VARIABLE
from simulate.doctor.finding import Finder, Finding
from simulate.doctor.machine import LNC, VIRTUAL, Machine, dotted, generation
from simulate.doctor.releases import page
from simulate.vendor_packages import numbers

VISIBLE = "NEURON_RT_VISIBLE_CORES"
COUNT = "NEURON_RT_NUM_CORES"
FLAGS = "NEURON_CC_FLAGS"
GROUPS = "NEURONCORE_GROUP_SIZES"
ASYNC = "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"
_TARGET_FLAG = ("--target",)
_LNC_FLAGS = ("--lnc", "-lnc", "--logical-nc-config")
_LNC_BY_ENVIRONMENT = (0, 7)  # the first NKI whose kernels take their LNC degree from the variable

_CONFIGURATION = page("neuron-runtime/guides/configuration-guide")
_LNC_PAGE = page("about-neuron/arch/neuron-features/logical-neuroncore-config")
_LNC_CHIP_PAGE = page("compiler/error-codes/EARG001")
_LNC_KERNEL_PAGE = page("compiler/error-codes/EVRF066")
_TARGET_PAGE = page("neuron-runtime/nrtpy/nrtpy-troubleshooting")


def core_indices(text: str) -> list[int] | None:
    """The indices that NEURON_RT_VISIBLE_CORES names: numbers and inclusive ranges, with commas; None for others."""
    parts = [re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", each.strip()) for each in text.split(",")]
    found: list[int] = []
    for part in parts:
        if part is None or int(part[2] or part[1]) < int(part[1]):
            return None
        found += range(int(part[1]), int(part[2] or part[1]) + 1)
    return found


def _count(machine: Machine) -> int | None:
    """What NEURON_RT_NUM_CORES says; None where it is not set or no number."""
    value = machine.variables.get(COUNT, "")
    return int(value) if re.fullmatch(r"\d{1,5}", value) else None


def cores_are_no_numbers(machine: Machine) -> Iterator[Finding]:
    """Values that the runtime does not document."""
    visible, count = machine.variables.get(VISIBLE), machine.variables.get(COUNT)
    for variable, value, wrong, wanted in (
        (
            VISIBLE,
            visible,
            visible and core_indices(visible) is None,
            "an index or an inclusive range, such as 0-3",
        ),
        (COUNT, count, count and _count(machine) is None, "a number of cores"),
    ):
        if wrong:
            says = f"{variable}={value:.40} is not {wanted}"
            yield Finding("cores-value", says, f"unset {variable}", _CONFIGURATION)


def cores_asked_twice(machine: Machine) -> Iterator[Finding]:
    """The list of cores takes precedence over their number."""
    visible, count = machine.variables.get(VISIBLE, ""), _count(machine)
    indices = core_indices(visible)
    if indices and count and count != len(indices):
        yield Finding(
            "cores-twice",
            f"{VISIBLE}={visible} names {len(indices)} cores and {COUNT}={count} asks for {count}; the runtime "
            f"takes {VISIBLE} and ignores {COUNT}",
            f"unset {COUNT}",
            _CONFIGURATION,
        )


def cores_that_are_not_there(machine: Machine) -> Iterator[Finding]:
    """An index or a number above what the instance has."""
    have, visible, count = machine.cores, machine.variables.get(VISIBLE, ""), _count(machine)
    indices = core_indices(visible)
    if have and indices and max(indices) >= have:
        says = f"{VISIBLE}={visible} names core {max(indices)}, and the cores here are 0 to {have - 1}"
        yield Finding("cores-absent", says, f"export {VISIBLE}=0-{have - 1}", _CONFIGURATION)
    if have and not indices and count and count > have:
        says = f"{COUNT}={count} asks for more cores than the {have} that are here"
        yield Finding("cores-absent", says, f"export {COUNT}={have}", _CONFIGURATION)


def cores_by_groups(machine: Machine) -> Iterator[Finding]:
    """The variable of the runtime before 2.0."""
    if GROUPS in machine.variables:
        yield Finding(
            "cores-groups",
            f"{GROUPS} is the variable of an older runtime; {VISIBLE} takes its place",
            f"unset {GROUPS}",
            _CONFIGURATION,
        )


def lnc_value(machine: Machine) -> Iterator[Finding]:
    """1 and 2 are the only degrees."""
    for variable in (LNC, VIRTUAL):
        value = machine.variables.get(variable)
        if value and value not in ("1", "2"):
            says = f"{variable}={value:.40} is neither 1 nor 2"
            yield Finding("lnc-value", says, f"export {variable}=1", _LNC_PAGE)


def lnc_of_the_chip(machine: Machine) -> Iterator[Finding]:
    """Chips before Trn2 have single cores alone."""
    if _before_trn2(machine) is not True:
        return
    for variable in (LNC, VIRTUAL):
        if machine.variables.get(variable) == "2":
            says = f"{variable}=2 makes one core of two, which {machine.family} does not have"
            yield Finding("lnc-chip", says, f"export {variable}=1", _LNC_CHIP_PAGE)
    if _flag(machine, _LNC_FLAGS) == "2":
        says = f"{FLAGS} compiles for LNC 2, which {machine.family} does not have"
        yield Finding("lnc-chip", says, _without(machine, _LNC_FLAGS), _LNC_CHIP_PAGE)


def lnc_twice(machine: Machine) -> Iterator[Finding]:
    """Two variables of the runtime for one degree."""
    ours, virtual = machine.variables.get(LNC), machine.variables.get(VIRTUAL)
    if ours and virtual and ours != virtual:
        yield Finding(
            "lnc-twice",
            f"{LNC}={ours} and {VIRTUAL}={virtual} give different numbers of physical cores for one logical core",
            f"unset {VIRTUAL}",
            _LNC_PAGE,
        )


def lnc_of_the_compiler(machine: Machine) -> Iterator[Finding]:
    """What is compiled for one degree is not supported on another; Trn2 and later have 2 where nothing is set."""
    flag, asked = _flag(machine, _LNC_FLAGS), machine.lnc_asked
    runtime = asked or ("2" if _before_trn2(machine) is False else None)
    if flag and runtime and flag != runtime:
        whose = "the variables ask" if asked else "the chip's default asks"
        yield Finding(
            "lnc-compiler",
            f"{FLAGS} compiles for LNC {flag:.40}, and {whose} the runtime for {runtime:.40}",
            f"export {LNC}={shlex.quote(flag)}",
            _LNC_PAGE,
        )


def lnc_of_kernels(machine: Machine) -> Iterator[Finding]:
    """From Trn2 on the compiler's default is 2 and that of kernels 1, and the compiler refuses kernels of another."""
    nki = machine.version("nki")
    unset = not machine.variables.get(LNC) and not _flag(machine, _LNC_FLAGS)
    if unset and nki and nki >= _LNC_BY_ENVIRONMENT and _before_trn2(machine) is False:
        yield Finding(
            "lnc-kernels",
            f"{LNC} is not set: kernels of nki {dotted(nki)} are compiled for LNC 1, and graphs on {machine.family} "
            "for LNC 2",
            f"export {LNC}=1",
            _LNC_KERNEL_PAGE,
        )


def target_of_the_compiler(machine: Machine) -> Iterator[Finding]:
    """Two names of the chip for which to compile, and the chip that is here."""
    override, flag = machine.variables.get(TARGET_VARIABLE, ""), _flag(machine, _TARGET_FLAG) or ""
    by_override, by_flag, here = generation(override), generation(flag), generation(machine.family or "")
    without_flag = _without(machine, _TARGET_FLAG)
    if flag and by_flag is None:
        says = f"{FLAGS} compiles for --target {flag:.40}, which is no instance family"
        yield Finding(
            "target-value", says, without_flag, page("compiler/neuronx-cc/api-reference-guide/index")
        )
    if by_override and by_flag and by_override != by_flag:
        says = f"{TARGET_VARIABLE}={override} and --target {flag} of {FLAGS} name different chips"
        yield Finding("target-twice", says, f"unset {TARGET_VARIABLE}", _TARGET_PAGE)
    for named, kind, mend in (
        (override, by_override, f"unset {TARGET_VARIABLE}"),
        (flag, by_flag, without_flag),
    ):
        if kind and here and kind != here:
            says = (
                f"the environment compiles for {named}, and this is {machine.family}, which cannot load that"
            )
            yield Finding("target-chip", says, mend, _TARGET_PAGE)


def implicit_async(machine: Machine) -> Iterator[Finding]:
    """Removed with the runtime of SDK 2.32."""
    if machine.runtime and numbers(machine.runtime) >= (2, 34) and machine.variables.get(ASYNC, "0") != "0":
        yield Finding(
            "implicit-async",
            f"{ASYNC} has no effect from runtime 2.34 on, and the runtime is {machine.runtime}",
            f"unset {ASYNC}",
            page("release-notes/components/runtime"),
        )


def _words(machine: Machine) -> list[str]:
    text = machine.variables.get(FLAGS, "")
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _flag(machine: Machine, names: tuple[str, ...]) -> str | None:
    """The value of an option in NEURON_CC_FLAGS, the last one given, with = or a space."""
    found = None
    words = _words(machine)
    for word, following in zip(words, [*words[1:], ""]):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else following
    return found


def _without(machine: Machine, names: tuple[str, ...]) -> str:
    """The command that takes options out of NEURON_CC_FLAGS."""
    kept: list[str] = []
    value_follows = False
    for word in _words(machine):
        name, equals, _ = word.partition("=")
        if not value_follows and name not in names:
            kept.append(word)
        value_follows = name in names and not equals
    return f"export {FLAGS}={shlex.quote(shlex.join(kept))}" if kept else f"unset {FLAGS}"


def _before_trn2(machine: Machine) -> bool | None:
    """Whether the chip here is one of Trn1 or Inf2; None where there is none."""
    kind = generation(machine.family or "")
    return None if kind is None else kind == "trn1"


FINDERS: tuple[Finder, ...] = (
    cores_are_no_numbers,
    cores_asked_twice,
    cores_that_are_not_there,
    cores_by_groups,
    lnc_value,
    lnc_of_the_chip,
    lnc_twice,
    lnc_of_the_compiler,
    lnc_of_kernels,
    target_of_the_compiler,
    implicit_async,
)
