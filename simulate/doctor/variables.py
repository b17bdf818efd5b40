"""Findings about environment variables that contradict each other, the chip, or the installed release.

The LNC degree is the number of physical cores of a logical core. Two variables of the runtime set it, and an option of
the compiler in NEURON_CC_FLAGS.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from nkw.targets import TARGET_VARIABLE
from simulate.doctor.finding import Finder, Finding
from simulate.doctor.machine import LNC, VIRTUAL, Machine, find_generation, format_version
from simulate.doctor.releases import make_page_address
from simulate.vendor_packages import parse_version

VISIBLE = "NEURON_RT_VISIBLE_CORES"
COUNT = "NEURON_RT_NUM_CORES"
FLAGS = "NEURON_CC_FLAGS"
GROUPS = "NEURONCORE_GROUP_SIZES"
ASYNC = "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"
_TARGET_FLAG = ("--target",)
_LNC_FLAGS = ("--lnc", "-lnc", "--logical-nc-config")
_LNC_BY_ENVIRONMENT = (0, 7)  # first NKI whose kernels take their LNC degree from the variable

_CONFIGURATION = make_page_address("neuron-runtime/guides/configuration-guide")
_LNC_PAGE = make_page_address("about-neuron/arch/neuron-features/logical-neuroncore-config")
_LNC_CHIP_PAGE = make_page_address("compiler/error-codes/EARG001")
_LNC_KERNEL_PAGE = make_page_address("compiler/error-codes/EVRF066")
_TARGET_PAGE = make_page_address("neuron-runtime/nrtpy/nrtpy-troubleshooting")


def parse_core_indices(text: str) -> list[int] | None:
    """Parse the cores of NEURON_RT_VISIBLE_CORES: indices and inclusive ranges, separated by commas, such as "0,4-7".

    Returns:
        The indices in the order of the text; None if the text has another form, as an empty one does.
    """
    matches = [re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", entry.strip()) for entry in text.split(",")]
    indices: list[int] = []
    for match in matches:
        if match is None or int(match[2] or match[1]) < int(match[1]):
            return None
        indices += range(int(match[1]), int(match[2] or match[1]) + 1)
    return indices


def _get_core_count(machine: Machine) -> int | None:
    """Return the number in NEURON_RT_NUM_CORES; None if it is not set, or is no number of at most five digits."""
    text = machine.variables.get(COUNT, "")
    return int(text) if re.fullmatch(r"\d{1,5}", text) else None


def find_malformed_cores(machine: Machine) -> Iterator[Finding]:
    """Yield a finding for each of the variables that choose cores whose text is not of the documented form."""
    visible, count = machine.variables.get(VISIBLE), machine.variables.get(COUNT)
    for variable, text, is_wrong, expected in (
        (
            VISIBLE,
            visible,
            visible and parse_core_indices(visible) is None,
            "an index or an inclusive range, such as 0-3",
        ),
        (COUNT, count, count and _get_core_count(machine) is None, "a number of cores"),
    ):
        if is_wrong:
            says = f"{variable}={text:.40} is not {expected}"
            yield Finding("cores-value", says, f"unset {variable}", _CONFIGURATION)


def find_conflicting_cores(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if NEURON_RT_VISIBLE_CORES names another number of cores than NEURON_RT_NUM_CORES asks for.

    The runtime then uses the former.
    """
    visible, count = machine.variables.get(VISIBLE, ""), _get_core_count(machine)
    indices = parse_core_indices(visible)
    if indices and count and count != len(indices):
        yield Finding(
            "cores-twice",
            f"{VISIBLE}={visible} names {len(indices)} cores and {COUNT}={count} asks for {count}; the runtime "
            f"takes {VISIBLE} and ignores {COUNT}",
            f"unset {COUNT}",
            _CONFIGURATION,
        )


def find_absent_cores(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if a variable names or asks for more cores than the instance has; none if that is unknown."""
    num_cores, visible, count = machine.cores, machine.variables.get(VISIBLE, ""), _get_core_count(machine)
    indices = parse_core_indices(visible)
    if num_cores and indices and max(indices) >= num_cores:
        says = f"{VISIBLE}={visible} names core {max(indices)}, and the cores here are 0 to {num_cores - 1}"
        yield Finding("cores-absent", says, f"export {VISIBLE}=0-{num_cores - 1}", _CONFIGURATION)
    if num_cores and not indices and count and count > num_cores:
        says = f"{COUNT}={count} asks for more cores than the {num_cores} that are here"
        yield Finding("cores-absent", says, f"export {COUNT}={num_cores}", _CONFIGURATION)


def find_core_groups(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if NEURONCORE_GROUP_SIZES is set, which only runtimes before 2.0 read."""
    if GROUPS in machine.variables:
        yield Finding(
            "cores-groups",
            f"{GROUPS} is set, which only runtimes before 2.0 read; {VISIBLE} takes its place",
            f"unset {GROUPS}",
            _CONFIGURATION,
        )


def find_malformed_lnc(machine: Machine) -> Iterator[Finding]:
    """Yield a finding for each LNC variable of the runtime that is set to neither 1 nor 2."""
    for variable in (LNC, VIRTUAL):
        degree = machine.variables.get(variable)
        if degree and degree not in ("1", "2"):
            says = f"{variable}={degree:.40} is neither 1 nor 2"
            yield Finding("lnc-value", says, f"export {variable}=1", _LNC_PAGE)


def find_unsupported_lnc(machine: Machine) -> Iterator[Finding]:
    """Yield a finding for each variable or compiler flag that asks for LNC 2 on a chip before Trn2, which has none."""
    if _is_before_trn2(machine) is not True:
        return
    for variable in (LNC, VIRTUAL):
        if machine.variables.get(variable) == "2":
            says = f"{variable}=2 joins two physical cores into one, which {machine.family} does not support"
            yield Finding("lnc-chip", says, f"export {variable}=1", _LNC_CHIP_PAGE)
    if _get_flag(machine, _LNC_FLAGS) == "2":
        says = f"{FLAGS} compiles for LNC 2, which {machine.family} does not support"
        yield Finding("lnc-chip", says, _make_removal(machine, _LNC_FLAGS), _LNC_CHIP_PAGE)


def find_conflicting_lnc(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if both LNC variables of the runtime are set, and to different degrees.

    They are NEURON_LOGICAL_NC_CONFIG and NEURON_RT_VIRTUAL_CORE_SIZE.
    """
    logical, virtual = machine.variables.get(LNC), machine.variables.get(VIRTUAL)
    if logical and virtual and logical != virtual:
        yield Finding(
            "lnc-twice",
            f"{LNC}={logical} and {VIRTUAL}={virtual} give different numbers of physical cores for one logical core",
            f"unset {VIRTUAL}",
            _LNC_PAGE,
        )


def find_compiler_lnc_mismatch(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if compiler and runtime have different LNC degrees, which is not supported.

    The compiler's degree is that of NEURON_CC_FLAGS; without it there is no finding. The runtime's degree is that of
    its variables, else 2, the default of Trn2 and later chips.
    """
    flag, setting = _get_flag(machine, _LNC_FLAGS), machine.lnc_setting
    runtime = setting or ("2" if _is_before_trn2(machine) is False else None)
    if flag and runtime and flag != runtime:
        origin = "the variables ask" if setting else "the chip's default asks"
        yield Finding(
            "lnc-compiler",
            f"{FLAGS} compiles for LNC {flag:.40}, and {origin} the runtime for {runtime:.40}",
            f"export {LNC}={shlex.quote(flag)}",
            _LNC_PAGE,
        )


def find_kernel_lnc_mismatch(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if no LNC degree is set on Trn2 or later, where the defaults for graphs and kernels differ.

    From nki 0.7 on, the compiler's default is 2 for graphs and 1 for kernels, and it refuses kernels of another degree
    than their graph.
    """
    nki = machine.version("nki")
    unset = not machine.variables.get(LNC) and not _get_flag(machine, _LNC_FLAGS)
    if unset and nki and nki >= _LNC_BY_ENVIRONMENT and _is_before_trn2(machine) is False:
        yield Finding(
            "lnc-kernels",
            f"{LNC} is not set: kernels of nki {format_version(nki)} are compiled for LNC 1, and graphs on "
            f"{machine.family} for LNC 2",
            f"export {LNC}=1",
            _LNC_KERNEL_PAGE,
        )


def find_target_mismatch(machine: Machine) -> Iterator[Finding]:
    """Yield a finding for each wrong target in the environment.

    Targets are `--target` in NEURON_CC_FLAGS, which must be known, and the variable that overrides it. Both must name
    the same generation, and that of the instance if it is known.
    """
    override, flag = machine.variables.get(TARGET_VARIABLE, ""), _get_flag(machine, _TARGET_FLAG) or ""
    by_override, by_flag, instance_target = (
        find_generation(override),
        find_generation(flag),
        find_generation(machine.family or ""),
    )
    without_flag = _make_removal(machine, _TARGET_FLAG)
    if flag and by_flag is None:
        says = f"{FLAGS} compiles for --target {flag:.40}, which is no instance family"
        yield Finding(
            "target-value",
            says,
            without_flag,
            make_page_address("compiler/neuronx-cc/api-reference-guide/index"),
        )
    if by_override and by_flag and by_override != by_flag:
        says = f"{TARGET_VARIABLE}={override} and --target {flag} of {FLAGS} name different chips"
        yield Finding("target-twice", says, f"unset {TARGET_VARIABLE}", _TARGET_PAGE)
    for target_name, target, repair in (
        (override, by_override, f"unset {TARGET_VARIABLE}"),
        (flag, by_flag, without_flag),
    ):
        if target and instance_target and target != instance_target:
            says = f"the environment compiles for {target_name}, and this is {machine.family}, which cannot load that"
            yield Finding("target-chip", says, repair, _TARGET_PAGE)


def find_implicit_async(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if implicit asynchronous execution is requested from a runtime of 2.34 or later.

    Such runtimes ignore the variable NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS. No finding if it is 0 or unset, or if
    the runtime's version is unknown.
    """
    if (
        machine.runtime
        and parse_version(machine.runtime) >= (2, 34)
        and machine.variables.get(ASYNC, "0") != "0"
    ):
        yield Finding(
            "implicit-async",
            f"{ASYNC} has no effect from runtime 2.34 on, and the runtime is {machine.runtime}",
            f"unset {ASYNC}",
            make_page_address("release-notes/components/runtime"),
        )


def _split_flags(machine: Machine) -> list[str]:
    """Return the words of NEURON_CC_FLAGS, split as a shell does, or by white space if its quotes do not match."""
    text = machine.variables.get(FLAGS, "")
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _get_flag(machine: Machine, names: tuple[str, ...]) -> str | None:
    """Return the value of an option in NEURON_CC_FLAGS, after = or white space.

    The last occurrence counts. None if the option is absent, "" if nothing follows it.

    Args:
        machine: The machine.
        names: The spellings of the option.
    """
    setting = None
    words = _split_flags(machine)
    for word, following in zip(words, [*words[1:], ""]):
        name, equals, text = word.partition("=")
        if name in names:
            setting = text if equals else following
    return setting


def _make_removal(machine: Machine, names: tuple[str, ...]) -> str:
    """Return the shell command that removes an option, given by its spellings, and its value from NEURON_CC_FLAGS.

    It unsets the variable if nothing else remains.
    """
    remaining: list[str] = []
    argument_follows = False
    for word in _split_flags(machine):
        name, equals, _ = word.partition("=")
        if not argument_follows and name not in names:
            remaining.append(word)
        argument_follows = name in names and not equals
    return f"export {FLAGS}={shlex.quote(shlex.join(remaining))}" if remaining else f"unset {FLAGS}"


def _is_before_trn2(machine: Machine) -> bool | None:
    """Return whether the machine's chips are those of Trn1 or Inf2; None without chips, or if they are unknown."""
    target = find_generation(machine.family or "")
    return None if target is None else target == "trn1"


FINDERS: tuple[Finder, ...] = (
    find_malformed_cores,
    find_conflicting_cores,
    find_absent_cores,
    find_core_groups,
    find_malformed_lnc,
    find_unsupported_lnc,
    find_conflicting_lnc,
    find_compiler_lnc_mismatch,
    find_kernel_lnc_mismatch,
    find_target_mismatch,
    find_implicit_async,
)
