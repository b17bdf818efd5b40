"""The pytest plugin: options for target, backend and checks, the fixtures `check_kernel` and `nki_budget`, and markers.

A target is a chip by name, such as trn2. The plugin is registered as an entry point, so every pytest run of an
environment with this package loads it. It imports pytest alone; the simulator and numpy are loaded by the first test
that asks for a fixture, or by `--nki-backend`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nkw.targets import DEFAULT_TARGET, TARGET_VARIABLE, TARGETS

if TYPE_CHECKING:
    from simulate.testing import BudgetChecker, KernelChecker

_BACKENDS = ("auto", "simulate", "neuron")
_LEVELS = ("off", "detect", "all")
_INI = {
    "nki_target": "targets of tests that name none, separated by spaces or commas",
    "nki_backend": f"what `import nki` means: {', '.join(_BACKENDS)}",
    "nki_check": f"what check_kernel looks for: {', '.join(_LEVELS)}",
    "nki_level": "the release of NKI that kernels are written for, such as 0.6 (default: NKI_LEVEL, else the newest)",
    "nki_rules": "whose refusals hold: chip, or simulator for those of the vendor's simulator",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options; all but --nki-artifacts are settings of the configuration file too."""
    group = parser.getgroup("nki", "NKI kernels")
    group.addoption(
        "--nki-target",
        metavar="TARGETS",
        help=f"run kernel tests on these chips only, separated by commas: {', '.join(TARGETS)}",
    )
    group.addoption("--nki-backend", choices=_BACKENDS, help="bind the name `nki` before tests are collected")
    group.addoption(
        "--nki-check",
        choices=_LEVELS,
        help="checks of check_kernel: no detectors, the detectors, or detectors and other orders",
    )
    group.addoption("--nki-level", metavar="LEVEL", help=_INI["nki_level"])
    group.addoption("--nki-rules", metavar="RULES", help=_INI["nki_rules"])
    group.addoption("--nki-artifacts", metavar="FOLDER", help="where failed kernel tests leave their files")
    for name, help_text in _INI.items():
        parser.addini(name, help_text, default="")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, set NKI_LEVEL and NKI_RULES, and bind `nki` if a backend is requested.

    The two variables get their former values when pytest ends. Raises UsageError for an unknown target, check,
    backend, level or rules, and for a backend that cannot be bound.
    """
    config.addinivalue_line(
        "markers",
        "nki_targets(*targets): run a test that uses nki_target or check_kernel on each of these chips",
    )
    config.addinivalue_line(
        "markers",
        "nki_budget(time_us, hbm_bytes, sbuf_bytes, reading='program', target, trips): the most that the kernel given "
        "to the fixture nki_budget may be predicted to take",
    )
    _check_targets(_split_words(_read_option(config, "nki_target")), "nki_target")
    for name, choices in (("nki_check", _LEVELS), ("nki_backend", _BACKENDS)):
        value = _read_option(config, name)
        if value and value not in choices:
            raise pytest.UsageError(f"{name} = {value}; known are {', '.join(choices)}")
    backend, level, rules = (_read_option(config, f"nki_{name}") for name in ("backend", "level", "rules"))
    if level or rules:
        from nkw.errors import NkwError
        from simulate.level import LEVEL_VARIABLE, RULES_VARIABLE, choose

        before = {name: os.environ.get(name) for name in (LEVEL_VARIABLE, RULES_VARIABLE)}
        try:
            choose(level, rules)
        except NkwError as error:
            raise pytest.UsageError(f"nki_level or nki_rules: {error}") from None
        config.add_cleanup(lambda: _restore(before))
    if backend:
        from nkw.errors import NkwError
        from simulate.bind import install

        try:
            install(backend)
        except NkwError as error:
            raise pytest.UsageError(f"--nki-backend {backend}: {error}") from None


def _restore(before: Mapping[str, str | None]) -> None:
    """Set environment variables to the values in `before`; None removes the variable."""
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses the fixture `nki_target` once for each of its targets.

    The targets are those of the marker `nki_targets`, else the target of the marker `nki_budget`, else --nki-target,
    else the environment's. Targets of a marker that --nki-target leaves out are dropped; if none remains the test is
    skipped. Raises UsageError for an unknown target.
    """
    if "nki_target" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("nki_targets")
    budget = metafunc.definition.get_closest_marker("nki_budget")
    if marker is None and budget is not None and budget.kwargs.get("target") in TARGETS:
        marker = pytest.mark.nki_targets(budget.kwargs["target"]).mark
    requested = _split_words(_read_option(metafunc.config, "nki_target"))
    if marker is None:
        targets = requested or [os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET]
    else:
        _check_targets(list(marker.args), f"nki_targets of {metafunc.definition.nodeid}")
        only = _split_words(metafunc.config.getoption("nki_target"))
        targets = [target for target in marker.args if not only or target in only]
        if not targets:
            skipped = pytest.mark.skip(
                reason=f"for {', '.join(marker.args)}, not for --nki-target {','.join(only)}"
            )
            metafunc.parametrize("nki_target", [pytest.param(marker.args[0], marks=skipped)])
            return
    metafunc.parametrize("nki_target", targets)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise UsageError if a test has the marker nki_budget and does not use the fixture of that name."""
    for item in items:
        if item.get_closest_marker("nki_budget") and "nki_budget" not in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(
                f"{item.nodeid} has the marker nki_budget and not its fixture; add the parameter nki_budget"
            )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Remove the simulator's frames from the traceback of a failed test (NKW_TRACEBACK=full keeps them)."""
    if call.excinfo is None or "nkw.errors" not in sys.modules:
        return
    from simulate.tracebacks import trim_traceback

    error = call.excinfo.value
    kept = trim_traceback(error)
    if kept is not None and kept is not error.__traceback__:
        call.excinfo = pytest.ExceptionInfo.from_exc_info((type(error), error.with_traceback(kept), kept))


@pytest.fixture
def nki_budget(
    nki_target: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> BudgetChecker:
    """Return a `BudgetChecker` (simulate.testing) with the budget in the test's marker `nki_budget`.

    Skips the test if `nki` is the vendor's package. Raises InvalidArgument without the marker or for a wrong budget.
    """
    from nkw.errors import InvalidArgument
    from simulate.bind import install
    from simulate.testing import Budget, BudgetChecker

    marker = request.node.get_closest_marker("nki_budget")
    if marker is None:
        raise InvalidArgument("NKW-BUDGET", "nki_budget: the test has no marker nki_budget with a budget")
    budget = Budget.from_marker(marker.args, marker.kwargs)
    if install(_read_option(request.config, "nki_backend") or None) == "neuron":
        pytest.skip("nki_budget needs the simulator; `nki` is the real package")
    return BudgetChecker(budget, nki_target, lambda: _choose_folder(request.node, tmp_path_factory))


@pytest.fixture
def check_kernel(
    nki_target: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> KernelChecker:
    """Return a `KernelChecker` (simulate.testing), which compares kernels with references on `nki_target`."""
    from simulate.bind import install
    from simulate.testing import CheckLevel, KernelChecker

    config = request.config
    backend = install(_read_option(config, "nki_backend") or None)
    level = CheckLevel(_read_option(config, "nki_check") or CheckLevel.detect.value)
    return KernelChecker(nki_target, level, backend, lambda: _choose_folder(request.node, tmp_path_factory))


def _choose_folder(node: pytest.Item, temporary: pytest.TempPathFactory) -> Path:
    """Return a folder for the files of one failure, named after the test.

    With --nki-artifacts it is a new name below that folder, not created yet; otherwise a new temporary folder.
    """
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in node.name)
    chosen = node.config.getoption("nki_artifacts")
    if chosen is None:
        return temporary.mktemp(f"nki-{name[:60]}")
    base = Path(chosen).absolute()
    number = 0
    while (folder := base / (f"{name}-{number}" if number else name)).exists():
        number += 1
    return folder


def _read_option(config: pytest.Config, name: str) -> str:
    """Return an option's text from the command line, else from the configuration file, else an empty string."""
    return str(config.getoption(name) or config.getini(name) or "")


def _split_words(text: str | None) -> list[str]:
    """Return the words of a text that are separated by spaces or commas; none for None."""
    return (text or "").replace(",", " ").split()


def _check_targets(targets: list[str], where: str) -> None:
    """Raise UsageError for a target that names no chip; `where` is the option or marker, for the message."""
    for target in targets:
        if target not in TARGETS:
            raise pytest.UsageError(f"{where}: {target} is not a target; known are {', '.join(TARGETS)}")
