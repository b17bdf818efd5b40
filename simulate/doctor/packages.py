"""Findings about Python packages: placeholders, incompatible versions, packages without further support."""

from __future__ import annotations

from collections.abc import Iterator

from simulate.doctor.finding import Finder, Finding
from simulate.doctor.machine import COLLECTIVES, RUNTIME, Machine, find_generation, format_version
from simulate.doctor.releases import ARTIFACTS, find_installed, find_release, make_page_address
from simulate.doctor.repair_commands import make_install_command
from simulate.vendor_packages import FIRST_GENUINE, FIRST_TORCHNEURON, parse_version

_PIP = "python -m pip"
_FIRST_WITHOUT_BETA1 = (2, 23)  # neuronx-cc of SDK 2.28
_LAST_WITH_TRANSFORMERS = (2, 21)  # neuronx-cc of SDK 2.26, the last release that lists transformers-neuronx


def find_placeholders(machine: Machine) -> Iterator[Finding]:
    """Yield a finding for each placeholder: an unusable package of the public index with a vendor package's name."""
    for name in FIRST_GENUINE:
        if machine.is_placeholder(name):
            yield Finding(
                "placeholder",
                f"{name} {machine.packages[name].version} is a placeholder of the public index that cannot be used; "
                "the vendor's package comes from the vendor's own repository",
                f"{_PIP} uninstall -y {name}",
                make_page_address("setup/pytorch/manual"),
            )


def find_nrtpy_with_nki(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if nrtpy and nki are both installed, since they overwrite each other's files."""
    if machine.version("nrtpy") and machine.version("nki"):
        yield Finding(
            "nrtpy-beside-nki",
            "nrtpy and nki are installed in one environment, where they overwrite each other's files; compile with nki "
            "in one environment, and run the compiled kernels with nrtpy in another",
            f"{_PIP} uninstall -y nrtpy && {_PIP} install --force-reinstall --no-deps "
            f"nki=={machine.packages['nki'].version}",
            make_page_address("neuron-runtime/nrtpy/nrtpy-troubleshooting"),
        )


def find_unsupported_python(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if the SDK release of nki or of the compiler does not support this version of Python.

    At most one, for nki first; none for releases that are not in the table `RELEASES`.
    """
    for component, package in (("nki", "nki"), ("compiler", "neuronx-cc")):
        version = machine.version(package)
        release = version and find_release(component, version)
        if not release:
            continue
        oldest, newest = release.pythons
        if not oldest <= parse_version(machine.python) <= newest:
            yield Finding(
                "python-version",
                f"{package} {format_version(version or ())} belongs to SDK {format_version(release.sdk)}, which "
                f"supports Python {format_version(oldest)} to {format_version(newest)}; this is Python "
                f"{machine.python}",
                f"python{format_version(newest)} -m venv ~/neuron && ~/neuron/bin/{_PIP} install "
                f"'{package}=={format_version(version or ())}.*'",
                ARTIFACTS,
            )
            return


def find_nki_mismatch(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if nki and the compiler, neuronx-cc, belong to different releases of the SDK.

    No finding if one is not installed, or if its release is not in the table `RELEASES`.
    """
    versions = find_installed(machine)
    if "nki" not in versions or "compiler" not in versions:
        return
    nki_release, compiler_release = (
        find_release("nki", versions["nki"]),
        find_release("compiler", versions["compiler"]),
    )
    if nki_release is not None and compiler_release is not None and nki_release != compiler_release:
        newer = max(nki_release, compiler_release)
        yield Finding(
            "nki-and-compiler",
            f"nki {format_version(versions['nki'])} belongs to SDK {format_version(nki_release.sdk)}, and neuronx-cc "
            f"{format_version(versions['compiler'])} to SDK {format_version(compiler_release.sdk)}",
            f"{_PIP} install 'neuronx-cc=={format_version(newer.compiler)}.*' "
            f"'nki=={format_version(newer.nki or ())}.*'",
            ARTIFACTS,
        )


def find_missing_nki(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if neither the package nki nor the compiler's own `neuronxcc.nki` is installed.

    Compilers after SDK 2.27 have no `neuronxcc.nki`. No finding without a compiler.
    """
    compiler = machine.version("neuronx-cc")
    if compiler is None or compiler < _FIRST_WITHOUT_BETA1 or machine.version("nki"):
        return
    release = find_release("compiler", compiler)
    requirement = f"'nki=={format_version(release.nki)}.*'" if release and release.nki else "nki"
    yield Finding(
        "no-nki",
        f"neuronx-cc {format_version(compiler)} no longer contains neuronxcc.nki, and nki is not installed: no "
        "kernel can be compiled",
        f"{_PIP} install {requirement}",
        make_page_address("about-neuron/announcements/neuron2.x/announcement-end-of-support-neuronxcc-nki"),
    )


def find_ended_transformers(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if transformers-neuronx is installed with a compiler newer than SDK 2.26, its last release."""
    compiler = machine.version("neuronx-cc")
    if machine.version("transformers-neuronx") and compiler and compiler > _LAST_WITH_TRANSFORMERS:
        yield Finding(
            "transformers-neuronx",
            f"transformers-neuronx was last released with SDK 2.26, and neuronx-cc {format_version(compiler)} is newer",
            f"{_PIP} install 'neuronx-cc=={format_version(_LAST_WITH_TRANSFORMERS)}.*'",
            ARTIFACTS,
        )


def find_torch_mismatch(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if torch-neuronx was built for another version of PyTorch than the installed one.

    The first two numbers of torch-neuronx's version are those of the PyTorch for which it was built.
    """
    torch_neuronx, torch = machine.version("torch-neuronx"), machine.version("torch")
    if torch_neuronx and torch and torch_neuronx != torch:
        yield Finding(
            "torch-version",
            f"torch-neuronx {format_version(torch_neuronx)} is built for PyTorch {format_version(torch_neuronx)}, and "
            f"PyTorch {format_version(torch)} is installed",
            f"{_PIP} install 'torch=={format_version(torch_neuronx)}.*'",
            make_page_address("release-notes/components/torchneuron"),
        )


def find_unsupported_torchneuron(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if TorchNeuron, which is torch-neuronx from 2.10 on, is installed on a Trn1 or Inf2 instance."""
    torch_neuronx, family = machine.version("torch-neuronx"), machine.family
    if torch_neuronx and torch_neuronx >= FIRST_TORCHNEURON and family and find_generation(family) == "trn1":
        yield Finding(
            "torchneuron-chip",
            f"torch-neuronx {format_version(torch_neuronx)} is TorchNeuron, which supports Trn2 and Trn3, and this is "
            f"{family}; torch-neuronx 2.9 with torch_xla is the last for it",
            f"{_PIP} install 'torch-neuronx==2.9.*'",
            make_page_address("release-notes/components/torchneuron"),
        )


def find_newer_compiler(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if the compiler is of a later SDK release than the runtime, which may refuse its NEFFs."""
    versions = find_installed(machine)
    if "runtime" not in versions or "compiler" not in versions:
        return
    runtime, compiler = (
        find_release("runtime", versions["runtime"]),
        find_release("compiler", versions["compiler"]),
    )
    if runtime is not None and compiler is not None and runtime < compiler:
        yield Finding(
            "compiler-and-runtime",
            f"neuronx-cc {format_version(versions['compiler'])} belongs to SDK {format_version(compiler.sdk)} and is "
            f"newer than the runtime {format_version(versions['runtime'])}, which may refuse what it compiles",
            make_install_command(machine, RUNTIME, COLLECTIVES, version=compiler.runtime),
            make_page_address("neuron-runtime/nrt-troubleshoot"),
        )


FINDERS: tuple[Finder, ...] = (
    find_placeholders,
    find_nrtpy_with_nki,
    find_unsupported_python,
    find_nki_mismatch,
    find_missing_nki,
    find_ended_transformers,
    find_torch_mismatch,
    find_unsupported_torchneuron,
    find_newer_compiler,
)
