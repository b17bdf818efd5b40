"""Findings about Python packages: placeholders, versions that do not fit together, packages whose support has ended."""

from __future__ import annotations

from collections.abc import Iterator

from simulate.doctor.finding import Finder, Finding
from simulate.doctor.machine import COLLECTIVES, RUNTIME, Machine, dotted, generation
from simulate.doctor.mends import installs
from simulate.doctor.releases import ARTIFACTS, installed, page, release_of
from simulate.vendor_packages import FIRST_GENUINE, FIRST_TORCHNEURON, numbers

_PIP = "python -m pip"
_FIRST_WITHOUT_BETA1 = (2, 23)  # neuronx-cc of SDK 2.28
_LAST_WITH_TRANSFORMERS = (2, 21)  # neuronx-cc of SDK 2.26, the last release that lists transformers-neuronx


def placeholder(machine: Machine) -> Iterator[Finding]:
    """A package of the public index that has the name of one of the vendor's, and nothing in it."""
    for name in FIRST_GENUINE:
        if machine.is_placeholder(name):
            yield Finding(
                "placeholder",
                f"{name} {machine.packages[name].version} is a placeholder of the public index that cannot be used; "
                "the vendor's package comes from the vendor's own repository",
                f"{_PIP} uninstall -y {name}",
                page("setup/pytorch/manual"),
            )


def nrtpy_beside_nki(machine: Machine) -> Iterator[Finding]:
    """Both wheels have files in one namespace."""
    if machine.version("nrtpy") and machine.version("nki"):
        yield Finding(
            "nrtpy-beside-nki",
            "nrtpy and nki are installed in one environment and take each other's files: nki compiles in one "
            "environment, nrtpy runs what was compiled in another",
            f"{_PIP} uninstall -y nrtpy && {_PIP} install --force-reinstall --no-deps "
            f"nki=={machine.packages['nki'].version}",
            page("neuron-runtime/nrtpy/nrtpy-troubleshooting"),
        )


def python_of_the_release(machine: Machine) -> Iterator[Finding]:
    """Each release names the versions of Python that its wheels support."""
    for component, package in (("nki", "nki"), ("compiler", "neuronx-cc")):
        version = machine.version(package)
        release = version and release_of(component, version)
        if not release:
            continue
        oldest, newest = release.pythons
        if not oldest <= numbers(machine.python) <= newest:
            yield Finding(
                "python-version",
                f"{package} {dotted(version or ())} belongs to SDK {dotted(release.sdk)}, which supports Python "
                f"{dotted(oldest)} to {dotted(newest)}; this is Python {machine.python}",
                f"python{dotted(newest)} -m venv ~/neuron && ~/neuron/bin/{_PIP} install "
                f"'{package}=={dotted(version or ())}.*'",
                ARTIFACTS,
            )
            return


def compiler_beside_nki(machine: Machine) -> Iterator[Finding]:
    """NKI and the compiler are released together."""
    have = installed(machine)
    if "nki" not in have or "compiler" not in have:
        return
    ours, theirs = release_of("nki", have["nki"]), release_of("compiler", have["compiler"])
    if ours is not None and theirs is not None and ours != theirs:
        newer = max(ours, theirs)
        yield Finding(
            "nki-and-compiler",
            f"nki {dotted(have['nki'])} belongs to SDK {dotted(ours.sdk)}, and neuronx-cc {dotted(have['compiler'])} "
            f"to SDK {dotted(theirs.sdk)}",
            f"{_PIP} install 'neuronx-cc=={dotted(newer.compiler)}.*' 'nki=={dotted(newer.nki or ())}.*'",
            ARTIFACTS,
        )


def nki_is_missing(machine: Machine) -> Iterator[Finding]:
    """`neuronxcc.nki` ended with SDK 2.27; from then on NKI is a package of its own."""
    compiler = machine.version("neuronx-cc")
    if compiler is None or compiler < _FIRST_WITHOUT_BETA1 or machine.version("nki"):
        return
    release = release_of("compiler", compiler)
    wanted = f"'nki=={dotted(release.nki)}.*'" if release and release.nki else "nki"
    yield Finding(
        "no-nki",
        f"neuronx-cc {dotted(compiler)} has no neuronxcc.nki any more, and nki is not installed: no kernel can be "
        "compiled",
        f"{_PIP} install {wanted}",
        page("about-neuron/announcements/neuron2.x/announcement-end-of-support-neuronxcc-nki"),
    )


def transformers_neuronx_has_ended(machine: Machine) -> Iterator[Finding]:
    """SDK 2.26 is the last release that lists it."""
    compiler = machine.version("neuronx-cc")
    if machine.version("transformers-neuronx") and compiler and compiler > _LAST_WITH_TRANSFORMERS:
        yield Finding(
            "transformers-neuronx",
            f"transformers-neuronx was last released with SDK 2.26, and neuronx-cc {dotted(compiler)} is newer",
            f"{_PIP} install 'neuronx-cc=={dotted(_LAST_WITH_TRANSFORMERS)}.*'",
            ARTIFACTS,
        )


def torch_of_torch_neuronx(machine: Machine) -> Iterator[Finding]:
    """The first two numbers of torch-neuronx are those of the PyTorch that it was built for."""
    ours, torch = machine.version("torch-neuronx"), machine.version("torch")
    if ours and torch and ours != torch:
        yield Finding(
            "torch-version",
            f"torch-neuronx {dotted(ours)} is built for PyTorch {dotted(ours)}, and PyTorch {dotted(torch)} is "
            "installed",
            f"{_PIP} install 'torch=={dotted(ours)}.*'",
            page("release-notes/components/torchneuron"),
        )


def torchneuron_of_the_chip(machine: Machine) -> Iterator[Finding]:
    """TorchNeuron, torch-neuronx from 2.10 on, supports Trn2 and Trn3."""
    ours, family = machine.version("torch-neuronx"), machine.family
    if ours and ours >= FIRST_TORCHNEURON and family and generation(family) == "trn1":
        yield Finding(
            "torchneuron-chip",
            f"torch-neuronx {dotted(ours)} is TorchNeuron, which supports Trn2 and Trn3, and this is {family}; "
            "torch-neuronx 2.9 with torch_xla is the last for it",
            f"{_PIP} install 'torch-neuronx==2.9.*'",
            page("release-notes/components/torchneuron"),
        )


def compiler_newer_than_runtime(machine: Machine) -> Iterator[Finding]:
    """A runtime refuses to load what a compiler of a later NEFF version wrote."""
    have = installed(machine)
    if "runtime" not in have or "compiler" not in have:
        return
    runtime, compiler = release_of("runtime", have["runtime"]), release_of("compiler", have["compiler"])
    if runtime is not None and compiler is not None and runtime < compiler:
        yield Finding(
            "compiler-and-runtime",
            f"neuronx-cc {dotted(have['compiler'])} belongs to SDK {dotted(compiler.sdk)} and is newer than the "
            f"runtime {dotted(have['runtime'])}, which may refuse what it compiles",
            installs(machine, RUNTIME, COLLECTIVES, version=compiler.runtime),
            page("neuron-runtime/nrt-troubleshoot"),
        )


FINDERS: tuple[Finder, ...] = (
    placeholder,
    nrtpy_beside_nki,
    python_of_the_release,
    compiler_beside_nki,
    nki_is_missing,
    transformers_neuronx_has_ended,
    torch_of_torch_neuronx,
    torchneuron_of_the_chip,
    compiler_newer_than_runtime,
)
