"""Machines as data: a laptop, and instances on which nothing is to be mended."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from simulate.doctor.machine import Machine, Package

LAPTOP = Machine(
    python="3.12.3", packages={"torch": Package("2.13.0+cpu", 2000)}, variables={"PATH": "/usr/bin"}
)


def neuron_ls(chips: int, cores: int, lnc: int | None) -> str:
    """Return what `neuron-ls --json-output` prints, in the form of the Neuron LS user guide."""
    rows: list[dict[str, Any]] = [
        {"neuron_device": chip, "nc_count": cores, "memory_size": 103079215104, "neuron_processes": []}
        for chip in range(chips)
    ]
    for row in rows:
        row.update({"logical_neuroncore_config": lnc} if lnc else {})
    return json.dumps(rows)


def instance(family: str, chips: int, driver: str, runtime: str, neuron_ls: str) -> Machine:
    """Return an instance with chips, their driver and the runtime, and no Python packages yet."""
    files = {f"/dev/neuron{chip}": "" for chip in range(chips)}
    files |= {
        "/sys/module/neuron/version": f"{driver}\n",
        "/proc/modules": "neuron 503808 0 - Live 0x0000000000000000 (OE)\n",
        "/sys/devices/virtual/dmi/id/product_name": f"{family}.48xlarge\n",
        "/opt/aws/neuron/lib/libnrt.so.1": "",
        "/opt/aws/neuron/bin/neuron-ls": "",
        "/etc/os-release": 'NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\n',
    }
    return Machine(
        python="3.12.3",
        system_packages={
            "aws-neuronx-dkms": driver,
            "aws-neuronx-runtime-lib": runtime,
            "aws-neuronx-collectives": runtime,
        },
        files=files,
        variables={"PATH": "/opt/aws/neuron/bin:/usr/bin", "NEURON_LOGICAL_NC_CONFIG": "1"},
        outputs={"modinfo -F version neuron": f"{driver}\n", "neuron-ls --json-output": neuron_ls},
    )


def genuine(**versions: str) -> dict[str, Package]:
    """Return packages with many files; _ stands for - in their names."""
    return {name.replace("_", "-"): Package(version, 900) for name, version in versions.items()}


TRN2 = replace(
    instance("trn2", 16, "2.31.7.0", "2.35.30.0", neuron_ls(16, 8, 1)),
    packages=genuine(nki="0.7.0", neuronx_cc="2.28.7631.0+abc", torch_neuronx="2.14.3.0", torch="2.14.0"),
)
TRN1 = replace(
    instance("trn1", 16, "2.29.0.0", "2.33.10.0", neuron_ls(16, 2, None)),
    packages=genuine(nki="0.5.0", neuronx_cc="2.26.6360.0", torch_neuronx="2.9.0.2.15.32035", torch="2.9.0"),
)
INF2 = replace(
    instance("inf2", 1, "2.24.7.0", "2.28.23.0", neuron_ls(1, 2, None)),
    python="3.10.12",
    packages=genuine(
        neuronx_cc="2.21.33363.0", transformers_neuronx="0.13.1315", torch_neuronx="2.8.0.2.10.16998"
    ),
)
HEALTHY = {"laptop": LAPTOP, "trn2": TRN2, "trn1": TRN1, "inf2": INF2}


def with_variables(machine: Machine, **variables: str | None) -> Machine:
    """Return the machine with more variables; None takes one away."""
    merged = {**machine.variables, **variables}
    return replace(machine, variables={name: value for name, value in merged.items() if value is not None})


def with_packages(machine: Machine, **versions: str) -> Machine:
    """Return the machine with more or other Python packages."""
    return replace(machine, packages={**machine.packages, **genuine(**versions)})


def with_system(machine: Machine, **versions: str) -> Machine:
    """Return the machine with other versions of system packages, all said to be loaded and found."""
    named = {f"aws-neuronx-{name.replace('_', '-')}": version for name, version in versions.items()}
    driver = named.get("aws-neuronx-dkms", machine.files["/sys/module/neuron/version"])
    return replace(
        machine,
        system_packages={**machine.system_packages, **named},
        files={**machine.files, "/sys/module/neuron/version": driver},
        outputs={**machine.outputs, "modinfo -F version neuron": driver},
    )


def without(machine: Machine, *names: str) -> Machine:
    """Return the machine without files, packages or outputs whose names begin so."""

    def kept(table: Any) -> dict[str, Any]:
        return {name: value for name, value in table.items() if not name.startswith(names)}

    return replace(
        machine,
        packages=kept(machine.packages),
        system_packages=kept(machine.system_packages),
        files=kept(machine.files),
        outputs=kept(machine.outputs),
    )
