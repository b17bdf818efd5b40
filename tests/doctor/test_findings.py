"""What doctor finds on machines that are given as data, and that it is silent on healthy ones."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from simulate.doctor.command import collect_facts, find_problems
from simulate.doctor.machine import Machine, Package
from simulate.doctor.releases import RELEASES
from simulate.doctor.variables import parse_core_indices
from simulate.vendor_packages import FIRST_GENUINE
from tests.doctor.machines import (
    HEALTHY,
    INF2,
    LAPTOP,
    TRN1,
    TRN2,
    neuron_ls,
    with_packages,
    with_system,
    with_variables,
    without,
)

AMAZON = {"/etc/os-release": 'ID="amzn"\nID_LIKE="fedora"\n'}
NO_DRIVER = without(TRN2, "/dev", "/sys/module", "/proc", "aws-neuronx-dkms", "modinfo", "neuron-ls")
NOT_LOADED = without(TRN2, "/dev", "/sys/module", "/proc", "neuron-ls")
RELOADED = "modinfo -F version neuron"
OLD_INF2 = without(INF2, "torch-neuronx", "transformers")


def placed(name: str, version: str, code_files: int) -> Machine:
    """Return a laptop with one package."""
    return replace(LAPTOP, packages={name: Package(version, code_files)})


def told(machine: Machine) -> list[tuple[str, str]]:
    """Return names and mends of all findings."""
    return [(problem.name, problem.mend) for problem in find_problems(machine)]


SICK = {
    "runtime needs a newer driver": (
        with_system(
            without(TRN1, "neuronx-cc", "nki"),
            dkms="2.26.10.0",
            runtime_lib="2.32.31.0",
            collectives="2.32.28.0",
        ),
        "driver-too-old",
        "sudo apt-get install -y aws-neuronx-dkms && sudo rmmod neuron && sudo modprobe neuron",
    ),
    "driver needs a newer runtime": (
        with_system(OLD_INF2, dkms="2.29.0.0", runtime_lib="2.32.31.0", collectives="2.32.28.0"),
        "runtime-too-old",
        "sudo apt-get install -y aws-neuronx-runtime-lib aws-neuronx-collectives",
    ),
    "collectives of another release": (
        with_system(TRN2, collectives="2.34.10.0"),
        "collectives-and-runtime",
        "sudo apt-get install -y aws-neuronx-runtime-lib=2.35.* aws-neuronx-collectives=2.35.*",
    ),
    "no driver": (NO_DRIVER, "driver-missing", "sudo apt-get install -y aws-neuronx-dkms"),
    "no driver on Amazon Linux": (
        replace(NO_DRIVER, files={**NO_DRIVER.files, **AMAZON}),
        "driver-missing",
        "sudo dnf install -y aws-neuronx-dkms",
    ),
    "driver is not loaded": (
        NOT_LOADED,
        "driver-not-loaded",
        "sudo apt-get install -y linux-headers-$(uname -r) && sudo apt-get install --reinstall -y aws-neuronx-dkms && "
        "sudo modprobe neuron",
    ),
    "driver is not loaded on Amazon Linux": (
        replace(NOT_LOADED, files={**NOT_LOADED.files, **AMAZON}),
        "driver-not-loaded",
        'sudo dnf install -y "kernel-devel-uname-r = $(uname -r)" && sudo dnf reinstall -y aws-neuronx-dkms && '
        "sudo modprobe neuron",
    ),
    "the old driver runs on": (
        replace(TRN2, outputs={**TRN2.outputs, RELOADED: "2.32.1.0\n"}),
        "driver-not-reloaded",
        "sudo rmmod neuron && sudo modprobe neuron",
    ),
    "container without a chip": (
        without(TRN2, "/dev", "neuron-ls"),
        "devices-missing",
        "docker run --device=/dev/neuron0 IMAGE",
    ),
    "no runtime": (
        without(TRN2, "aws-neuronx-runtime-lib", "/opt/aws/neuron/lib"),
        "runtime-missing",
        "sudo apt-get install -y aws-neuronx-runtime-lib aws-neuronx-collectives",
    ),
    "tools not on PATH": (
        with_variables(TRN2, PATH="/usr/bin"),
        "tools-path",
        "export PATH=/opt/aws/neuron/bin:$PATH",
    ),
    "nrtpy beside nki": (
        with_packages(TRN2, nrtpy="2.35.30"),
        "nrtpy-beside-nki",
        "python -m pip uninstall -y nrtpy && python -m pip install --force-reinstall --no-deps nki==0.7.0",
    ),
    "Python newer than the release": (
        replace(TRN1, python="3.14.0"),
        "python-version",
        "python3.13 -m venv ~/neuron && ~/neuron/bin/python -m pip install 'nki==0.5.*'",
    ),
    "Python older than the release": (
        replace(TRN1, python="3.10.9"),
        "python-version",
        "python3.13 -m venv ~/neuron && ~/neuron/bin/python -m pip install 'nki==0.5.*'",
    ),
    "nki newer than the compiler": (
        with_packages(TRN1, nki="0.6.0"),
        "nki-and-compiler",
        "python -m pip install 'neuronx-cc==2.27.*' 'nki==0.6.*'",
    ),
    "compiler newer than nki": (
        with_packages(TRN2, nki="0.6.0"),
        "nki-and-compiler",
        "python -m pip install 'neuronx-cc==2.28.*' 'nki==0.7.*'",
    ),
    "compiler without any nki": (without(TRN2, "nki"), "no-nki", "python -m pip install 'nki==0.7.*'"),
    "compiler of an unknown release without nki": (
        with_packages(without(TRN2, "nki"), neuronx_cc="2.40.1"),
        "no-nki",
        "python -m pip install nki",
    ),
    "transformers-neuronx after its end": (
        with_system(
            with_packages(INF2, neuronx_cc="2.22.12471.0"), runtime_lib="2.29.40.0", collectives="2.29.41.0"
        ),
        "transformers-neuronx",
        "python -m pip install 'neuronx-cc==2.21.*'",
    ),
    "PyTorch of another version": (
        with_packages(TRN2, torch="2.13.0"),
        "torch-version",
        "python -m pip install 'torch==2.14.*'",
    ),
    "TorchNeuron on Trn1": (
        with_packages(TRN1, torch_neuronx="2.13.3.0", torch="2.13.0"),
        "torchneuron-chip",
        "python -m pip install 'torch-neuronx==2.9.*'",
    ),
    "compiler newer than the runtime": (
        with_system(TRN2, dkms="2.30.2.0", runtime_lib="2.34.10.0", collectives="2.34.10.0"),
        "compiler-and-runtime",
        "sudo apt-get install -y aws-neuronx-runtime-lib=2.35.* aws-neuronx-collectives=2.35.*",
    ),
    "cores in no documented form": (
        with_variables(TRN2, NEURON_RT_VISIBLE_CORES="3-1"),
        "cores-value",
        "unset NEURON_RT_VISIBLE_CORES",
    ),
    "count of cores that is no number": (
        with_variables(TRN2, NEURON_RT_NUM_CORES="all"),
        "cores-value",
        "unset NEURON_RT_NUM_CORES",
    ),
    "cores twice": (
        with_variables(LAPTOP, NEURON_RT_VISIBLE_CORES="0-3", NEURON_RT_NUM_CORES="3"),
        "cores-twice",
        "unset NEURON_RT_NUM_CORES",
    ),
    "a core that is not there": (
        with_variables(TRN2, NEURON_RT_VISIBLE_CORES="128"),
        "cores-absent",
        "export NEURON_RT_VISIBLE_CORES=0-127",
    ),
    "more cores than there are": (
        with_variables(TRN1, NEURON_RT_NUM_CORES="33"),
        "cores-absent",
        "export NEURON_RT_NUM_CORES=32",
    ),
    "cores in groups": (
        with_variables(INF2, NEURONCORE_GROUP_SIZES="1,1"),
        "cores-groups",
        "unset NEURONCORE_GROUP_SIZES",
    ),
    "LNC 3": (
        with_variables(TRN2, NEURON_LOGICAL_NC_CONFIG="3"),
        "lnc-value",
        "export NEURON_LOGICAL_NC_CONFIG=1",
    ),
    "LNC 2 on Inf2": (
        with_variables(INF2, NEURON_LOGICAL_NC_CONFIG="2"),
        "lnc-chip",
        "export NEURON_LOGICAL_NC_CONFIG=1",
    ),
    "LNC 2 of the compiler on Trn1": (
        with_variables(TRN1, NEURON_LOGICAL_NC_CONFIG=None, NEURON_CC_FLAGS="-O1 -lnc 2 --retry=1"),
        "lnc-chip",
        "export NEURON_CC_FLAGS='-O1 --retry=1'",
    ),
    "LNC twice": (
        with_variables(TRN2, NEURON_RT_VIRTUAL_CORE_SIZE="2"),
        "lnc-twice",
        "unset NEURON_RT_VIRTUAL_CORE_SIZE",
    ),
    "LNC of compiler and runtime": (
        with_variables(TRN2, NEURON_CC_FLAGS="--logical-nc-config=2"),
        "lnc-compiler",
        "export NEURON_LOGICAL_NC_CONFIG=2",
    ),
    "LNC of the compiler and the chip's default": (
        with_variables(TRN2, NEURON_LOGICAL_NC_CONFIG=None, NEURON_CC_FLAGS="--lnc 1"),
        "lnc-compiler",
        "export NEURON_LOGICAL_NC_CONFIG=1",
    ),
    "LNC of kernels and graphs": (
        with_variables(TRN2, NEURON_LOGICAL_NC_CONFIG=None),
        "lnc-kernels",
        "export NEURON_LOGICAL_NC_CONFIG=1",
    ),
    "a target that is none": (
        with_variables(LAPTOP, NEURON_CC_FLAGS="--target=trn9 -O1"),
        "target-value",
        "export NEURON_CC_FLAGS=-O1",
    ),
    "two targets": (
        with_variables(LAPTOP, NEURON_CC_FLAGS="--target trn1", NEURON_PLATFORM_TARGET_OVERRIDE="trn2"),
        "target-twice",
        "unset NEURON_PLATFORM_TARGET_OVERRIDE",
    ),
    "another chip by the variable": (
        with_variables(TRN1, NEURON_PLATFORM_TARGET_OVERRIDE="trn2"),
        "target-chip",
        "unset NEURON_PLATFORM_TARGET_OVERRIDE",
    ),
    "another chip by the flags": (
        with_variables(TRN2, NEURON_CC_FLAGS="--target trn1"),
        "target-chip",
        "unset NEURON_CC_FLAGS",
    ),
    "implicit async": (
        with_variables(TRN2, NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS="3"),
        "implicit-async",
        "unset NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
    ),
}


@pytest.mark.parametrize("case", SICK)
def test_one_thing_is_to_be_mended(case: str) -> None:
    machine, name, mend = SICK[case]
    assert told(machine) == [(name, mend)]
    (finding,) = find_problems(machine)
    assert finding.page.startswith("https://awsdocs-neuron.readthedocs-hosted.com/en/latest/")
    assert "\n" not in finding.says and shlex.split(finding.mend)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_to_be_mended_on_a_healthy_machine(name: str) -> None:
    assert find_problems(HEALTHY[name]) == []


@pytest.mark.parametrize(
    "machine",
    [
        with_variables(LAPTOP, NEURON_RT_VISIBLE_CORES="0-3", NEURON_RT_NUM_CORES="4"),
        with_variables(TRN1, NEURON_RT_VISIBLE_CORES="0-31", NEURON_RT_NUM_CORES="0"),
        with_variables(TRN1, NEURON_RT_VISIBLE_CORES="31"),
        with_variables(TRN1, NEURON_RT_NUM_CORES="32"),
        with_variables(TRN2, NEURON_LOGICAL_NC_CONFIG="2"),
        with_variables(TRN2, NEURON_LOGICAL_NC_CONFIG="2", NEURON_RT_VIRTUAL_CORE_SIZE="2"),
        with_variables(TRN2, NEURON_CC_FLAGS="--lnc=1"),
        with_variables(TRN2, NEURON_LOGICAL_NC_CONFIG=None, NEURON_CC_FLAGS="--lnc=2"),
        with_variables(TRN1, NEURON_LOGICAL_NC_CONFIG=None, NEURON_CC_FLAGS="--lnc=1"),
        with_variables(with_packages(TRN2, nki="0.7.0"), NEURON_CC_FLAGS="--target trn2 -O1"),
        with_variables(TRN1, NEURON_CC_FLAGS="--target trn1n", NEURON_PLATFORM_TARGET_OVERRIDE="gen2"),
        with_variables(INF2, NEURON_PLATFORM_TARGET_OVERRIDE="inf2"),
        with_variables(TRN2, NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS="0"),
        with_variables(TRN1, NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS="3"),
        with_system(OLD_INF2, dkms="2.27.4.0", runtime_lib="2.32.31.0", collectives="2.32.28.0"),
        with_system(OLD_INF2, dkms="2.26.10.0", runtime_lib="2.31.24.0", collectives="2.31.24.0"),
        with_system(OLD_INF2, dkms="2.28.0.0", runtime_lib="2.32.31.0", collectives="2.32.28.0"),
        with_system(OLD_INF2, dkms="2.29.0.0", runtime_lib="2.33.10.0", collectives="2.33.10.0"),
        replace(TRN1, python="3.11.0"),
        replace(TRN1, python="3.13.9"),
        without(TRN2, "nki", "neuronx-cc"),
        without(TRN2, "aws-neuronx-runtime-lib"),
        without(TRN2, "/opt/aws/neuron/lib"),
        with_variables(without(TRN2, "/opt/aws/neuron/bin"), PATH="/usr/bin"),
        with_packages(without(TRN2, "nki"), neuronx_cc="2.22.12471.0"),
        with_packages(without(TRN2, "nki", "neuronx-cc"), nrtpy="2.35.30"),
        with_packages(TRN1, torch_neuronx="2.9.0.2.15.32035"),
    ],
    ids=lambda machine: None,
)
def test_the_twin_of_what_is_refused_is_accepted(machine: Machine) -> None:
    assert find_problems(machine) == []


@pytest.mark.parametrize("name", FIRST_GENUINE)
@pytest.mark.parametrize("code_files", [0, 1, 3])
def test_a_placeholder_is_known_by_its_version_and_its_few_files(name: str, code_files: int) -> None:
    assert told(placed(name, "0.0.1", code_files)) == [("placeholder", f"python -m pip uninstall -y {name}")]
    assert (
        collect_facts(placed(name, "0.0.1", code_files))[name] == "0.0.1, a placeholder that cannot be used"
    )
    assert "placeholder" not in [finding for finding, _ in told(placed(name, "0.0.1", 4))]
    assert "placeholder" not in [finding for finding, _ in told(placed(name, "9.1", code_files))]


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("nki", "0.0.1"),
        ("neuronx-cc", "1.0.post1"),
        ("torch-neuronx", "1.0"),
        ("libneuronxla", "1.0"),
        ("transformers-neuronx", "0.1"),
        ("neuronx-distributed", "0.1"),
        ("nrtpy", "0.0.1"),
        ("vllm-neuron", "0.1.0"),
        ("nki-library", "0.0.2"),
    ],
)
def test_the_placeholders_of_the_public_index_are_known(name: str, version: str) -> None:
    assert [finding for finding, _ in told(placed(name, version, 1))] == ["placeholder"]


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("0", [0]),
        ("1-3", [1, 2, 3]),
        ("0,2-3", [0, 2, 3]),
        ("2-2", [2]),
        ("3-2", None),
        ("", None),
        ("a", None),
        ("-1", None),
    ],
)
def test_visible_cores_are_indices_and_inclusive_ranges(text: str, indices: list[int] | None) -> None:
    assert parse_core_indices(text) == indices


@pytest.mark.parametrize(
    ("machine", "sdk", "nki"),
    [
        (TRN2, "2.33", "nki 0.7.0"),
        (TRN1, "2.31", "nki 0.5.0"),
        (INF2, "2.26", "neuronxcc.nki of neuronx-cc 2.21.33363.0"),
        (LAPTOP, None, "none of the vendor's"),
        (
            with_packages(INF2, nki="0.1.0", neuronx_cc="2.22.1"),
            "2.26 (driver), 2.26 (runtime), 2.27 (compiler), 2.27 (nki)",
            "nki 0.1.0 and neuronxcc.nki of neuronx-cc 2.22.1",
        ),
    ],
)
def test_the_release_and_the_language_are_told(machine: Machine, sdk: str | None, nki: str) -> None:
    facts = collect_facts(machine)
    assert facts["NKI"] == nki
    assert facts.get("SDK") == sdk


def test_components_of_several_releases_are_told_apart() -> None:
    mixed = with_packages(TRN2, nki="0.6.0", neuronx_cc="2.99.0")
    assert collect_facts(mixed)["SDK"] == "2.33 (driver), 2.33 (runtime), unknown (compiler), 2.32 (nki)"


def test_cores_are_told_with_who_holds_them() -> None:
    assert collect_facts(TRN2)["cores"] == "128 on 16 chips"
    assert collect_facts(TRN2)["LNC"] == "1 by neuron-ls, NEURON_LOGICAL_NC_CONFIG=1"
    used = '[{"nc_count": 2, "neuron_processes": [{"pid": 7, "command": "python serve.py"}]}]'
    busy = replace(INF2, outputs={"neuron-ls --json-output": used})
    assert collect_facts(busy)["cores"] == "2 on 1 chip; in use by 7 (python serve.py)"


@pytest.mark.parametrize(
    ("lnc", "visible", "is_present"),
    [
        ("1", "127", True),
        ("1", "128", False),
        ("2", "63", True),
        ("2", "64", False),
        (None, "63", True),
        (None, "64", False),
    ],
)
def test_cores_are_counted_at_the_degree_that_the_variables_ask_for(
    lnc: str | None, visible: str, is_present: bool
) -> None:
    """neuron-ls has counted 64 logical cores of two physical ones each."""
    listed = replace(TRN2, outputs={"neuron-ls --json-output": neuron_ls(16, 4, 2)})
    machine = with_variables(listed, NEURON_LOGICAL_NC_CONFIG=lnc, NEURON_RT_VISIBLE_CORES=visible)
    assert [finding for finding, _ in told(machine) if finding == "cores-absent"] == (
        [] if is_present else ["cores-absent"]
    )


def test_cores_are_not_counted_where_their_degree_is_not_known() -> None:
    sysfs = {"/sys/devices/virtual/neuron_device/neuron0/core_count": "8\n"}
    far = {"NEURON_RT_VISIBLE_CORES": "99"}
    for machine, counted in ((TRN2, False), (TRN1, True)):
        known = replace(machine, files={**machine.files, **sysfs}, outputs={})
        assert collect_facts(known)["cores"] == "8 on 1 chip"
        assert (known.cores == 8) is counted
        assert bool(find_problems(with_variables(known, **far))) is counted


TEXT = strategies.one_of(
    strategies.text(max_size=12),
    strategies.sampled_from(
        ["", "1", "2", "0-3", "--lnc", "--target=", "-lnc 2 --target trn1", "trn2", "inf2", "2.31.7", "'"]
    ),
)
NAMES = (
    "NEURON_RT_VISIBLE_CORES NEURON_RT_NUM_CORES NEURON_LOGICAL_NC_CONFIG NEURON_RT_VIRTUAL_CORE_SIZE NEURON_CC_FLAGS "
    "NEURON_PLATFORM_TARGET_OVERRIDE NEURONCORE_GROUP_SIZES NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS PATH"
).split()


def some(
    names: Iterable[str], values: strategies.SearchStrategy[Any]
) -> strategies.SearchStrategy[dict[str, Any]]:
    return strategies.dictionaries(strategies.sampled_from(sorted(names)), values)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    python=TEXT,
    packages=some([*FIRST_GENUINE, "torch"], strategies.builds(Package, TEXT, strategies.integers(0, 5))),
    system=some(TRN2.system_packages, TEXT),
    files=some([*TRN2.files, "/sys/devices/virtual/neuron_device/neuron0/core_count"], TEXT),
    variables=some(NAMES, TEXT),
    outputs=some(TRN2.outputs, TEXT | strategies.just(neuron_ls(2, 4, 2))),
)
def test_no_machine_is_too_strange(
    python: str,
    packages: dict[str, Package],
    system: dict[str, str],
    files: dict[str, str],
    variables: dict[str, str],
    outputs: dict[str, str],
) -> None:
    machine = Machine(python, packages, system, files, variables, outputs)
    assert all(problem.says and problem.mend for problem in find_problems(machine))
    assert all(isinstance(fact, str) for fact in collect_facts(machine).values())


def test_each_version_of_a_component_belongs_to_one_release() -> None:
    for component in ("sdk", "driver", "runtime", "compiler", "nki"):
        versions = [version for version in (getattr(release, component) for release in RELEASES) if version]
        assert versions == sorted(set(versions), reverse=True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "[",
        '[{"nc_count": "8"}]',
        '[{"nc_count": true}]',
        '[{"nc_count": -1}]',
        "[" * 100_000,
    ],
)
def test_what_neuron_ls_does_not_document_is_not_believed(text: str) -> None:
    damaged = replace(TRN2, outputs={**TRN2.outputs, "neuron-ls --json-output": text})
    assert damaged.cores is None
    assert find_problems(with_variables(damaged, NEURON_RT_VISIBLE_CORES="4000")) == []


@pytest.mark.parametrize("digits", ["9" * 5000, "٣", "1.", "x", ""])
def test_numbers_of_any_form_are_read_or_left(digits: str) -> None:
    machine = with_variables(
        TRN2, NEURON_RT_NUM_CORES=digits, NEURON_LOGICAL_NC_CONFIG=digits, NEURON_CC_FLAGS="'"
    )
    damaged = replace(
        with_packages(machine, nki=digits, neuronx_cc=digits),
        files={**machine.files, "/sys/module/neuron/version": digits},
        outputs={"modinfo -F version neuron": digits},
        system_packages={"aws-neuronx-runtime-lib": digits, "aws-neuronx-collectives": digits},
    )
    assert all(problem.says and problem.mend for problem in find_problems(damaged))
    assert collect_facts(damaged)["Python"] == "3.12.3"
