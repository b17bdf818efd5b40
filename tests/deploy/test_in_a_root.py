"""The user data of an instance, carried out twice in a root of its own, with stand-ins for the vendor's packages.

Namespaces of the kernel give the script a root, a process table and a network of its own. The public index is a folder
with packages of the vendor's names and higher versions, which must not be installed.
"""

from __future__ import annotations

import base64
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.deploy.test_deploy import ROOT, VARIABLES, rendered

UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork")
PUBLIC_VERSION = "99.0"
DEPENDENCIES = ("numpy", "ml_dtypes", "safetensors", "tokenizers", "rich", "jinja2")
SITE_PACKAGES = Path(np.__file__).resolve().parents[1]
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def namespace_refusal() -> str | None:
    """Return why this machine gives no namespaces, or None if it does."""
    if shutil.which("unshare") is None:
        return "the command unshare is not installed"
    done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"namespaces are not allowed: {done.stderr.strip()}"


def write_wheel(index: Path, name: str, version: str, files: Mapping[str, str] | None = None) -> None:
    """Add a wheel to an index, a folder that pip reads as one with `file://`."""
    folder = index / name.replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    contents = {
        **(files or {f"{name}.py": f"VERSION = {version!r}\n"}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*contents, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**contents, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)
    links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in sorted(folder.glob("*.whl")))
    (folder / "index.html").write_text(links)


class Machine:
    """A root folder that has this machine's programs, a system configuration of its own, and no network."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shared = [Path("/usr"), Path(sys.base_prefix), SITE_PACKAGES]
        for name in (
            "etc/apt/sources.list.d",
            "proc",
            "dev",
            "tmp",
            "opt",
            "root",
            "var/log",
            "srv",
            "stand-ins",
        ):
            (root / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            host = Path("/", name)
            if host.is_symlink():
                (root / name).symlink_to(host.readlink())
            elif host.exists():
                self.shared.append(host)
        for name in ("passwd", "group", "ld.so.cache"):
            shutil.copy(Path("/etc", name), root / "etc" / name)
        alternatives = Path("/etc/alternatives")  # links, behind which Debian has awk
        if alternatives.is_dir():
            shutil.copytree(alternatives, root / "etc" / "alternatives", symlinks=True)
        (root / "etc" / "os-release").write_text('ID=ubuntu\nVERSION_CODENAME=noble\nVERSION_ID="24.04"\n')
        (root / "etc" / "profile.d").mkdir()

    def program(self, name: str, script: str) -> None:
        """Put a program before those of the machine."""
        path = self.root / "stand-ins" / name
        path.write_text(script)
        path.chmod(0o755)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the root."""
        root = shlex.quote(str(self.root))
        binds = []
        for path in self.shared:
            target = shlex.quote(f"{self.root}{path}")
            binds.append(f"mkdir -p {target} && mount --rbind {shlex.quote(str(path))} {target}")
        for device in ("null", "zero", "urandom"):
            binds.append(f"touch {root}/dev/{device} && mount --bind /dev/{device} {root}/dev/{device}")
        enter = f"exec chroot {root} /usr/bin/env -i HOME=/root PATH=/stand-ins:{SYSTEM_PATH} {shlex.join(command)}"
        script = "\n".join(["set -e", *binds, f"mount -t proc proc {root}/proc", enter])
        return subprocess.run([*UNSHARE, "sh", "-c", script], capture_output=True, text=True, check=False)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    refusal = namespace_refusal()
    if refusal is not None:
        pytest.skip(refusal)
    made = Machine(tmp_path / "root")
    log = 'echo "$(basename "$0") $*" >>/var/log/calls\n'
    made.program("apt-get", f"#!/bin/sh\n{log}")
    made.program(
        "curl",
        f"#!/bin/sh\n{log}"
        'while [ "$#" -gt 1 ]; do [ "$1" != --output ] || output="$2"; shift; done\n'
        'cp "${1#https://apt.test}" "$output"\n',
    )
    fingerprint = VARIABLES["NEURON_APT_KEY_FINGERPRINT"].replace(" ", "")
    made.program("gpg", f"#!/bin/sh\nprintf 'pub:::\\nfpr:::::::::{fingerprint}:\\n'\n")
    made.program("python3", f'#!/bin/sh\nexec {shlex.quote(f"{sys.base_prefix}/bin/python3")} "$@"\n')
    return made


def build_indexes(machine: Machine) -> str:
    """Write the vendor's index, the public one and the project's wheel; return the path of the wheel in the root."""
    vendor, public = machine.root / "srv" / "vendor", machine.root / "srv" / "public"
    for name, version in (("neuronx_cc", "2.28.7.0"), ("nki", "0.7.3"), ("nrtpy", "2.35.1")):
        write_wheel(vendor, name, version)
        write_wheel(
            public, name, f"{version}.{PUBLIC_VERSION}", {f"{name}.py": "raise SystemExit('public')\n"}
        )
    for name in DEPENDENCIES:  # the modules are those of the test's own environment
        write_wheel(public, name, PUBLIC_VERSION, {f"{name}_stand_in.pth": f"{SITE_PACKAGES}\n"})
    (machine.root / "key").write_text("stand-in of the key\n")
    (machine.root / "etc" / "pip.conf").write_text("[global]\nindex-url = file:///srv/public\n")
    folder = machine.root / "srv" / "wheels"
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(ROOT)], check=True, capture_output=True)
    return f"/srv/wheels/{next(folder.glob('*.whl')).name}"


def carry_out(machine: Machine, user_data: Mapping[str, Any]) -> list[int]:
    """Do what cloud-init does with these user data: write the files, then run the commands; return their statuses."""
    for file in user_data["write_files"]:
        path = machine.root / file["path"].lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        content = file["content"]
        path.write_bytes(base64.b64decode(content) if file.get("encoding") == "b64" else content.encode())
        path.chmod(int(file["permissions"], 8))
    statuses = []
    for command in user_data["runcmd"]:
        done = machine.run(*command)
        statuses.append(done.returncode)
        with (machine.root / "var" / "log" / "output").open("a") as log:
            log.write(done.stdout + done.stderr)
    return statuses


@pytest.mark.deep
def test_user_data_install_twice_from_the_named_repositories_alone(machine: Machine) -> None:
    variables = {
        **VARIABLES,
        "NEURON_PIP_URL": "file:///srv/vendor",
        "NKW_PACKAGE": build_indexes(machine),
        "NKW_PARTS": "driver runtime python nrtpy",
    }
    done = rendered(**variables)
    assert done.returncode == 0, done.stderr
    user_data = yaml.safe_load(done.stdout)
    for _ in range(2):
        statuses = carry_out(machine, user_data)
        assert statuses == [0, 0], (machine.root / "var" / "log" / "output").read_text()[-2000:]
    versions = {
        name: machine.run(
            f"/opt/nkw/{environment}/bin/python", "-c", f"import {name}; print({name}.VERSION)"
        ).stdout
        for environment, name in (("venv", "neuronx_cc"), ("venv", "nki"), ("nrtpy", "nrtpy"))
    }
    assert versions == {"neuronx_cc": "2.28.7.0\n", "nki": "0.7.3\n", "nrtpy": "2.35.1\n"}
    doctor = (machine.root / "opt" / "nkw" / "doctor.txt").read_text()
    assert {("nki", "0.7.3"), ("neuronx-cc", "2.28.7.0")} <= {
        tuple(line.split()[:2]) for line in doctor.splitlines()
    }
    calls = (machine.root / "var" / "log" / "calls").read_text().splitlines()
    installs = [call for call in calls if call.startswith("apt-get install")]
    assert len(installs) == 4 and installs[:2] == installs[2:]
    assert any("aws-neuronx-dkms=2.31.*" in call for call in installs)


@pytest.mark.deep
def test_an_installation_that_fails_is_an_error_of_cloud_init(machine: Machine) -> None:
    variables = {**VARIABLES, "NEURON_PIP_URL": "file:///srv/vendor", "NKW_PACKAGE": build_indexes(machine)}
    machine.program("apt-get", '#!/bin/sh\n[ "$1" = update ]\n')
    statuses = carry_out(machine, yaml.safe_load(rendered(**variables).stdout))
    assert 0 not in statuses
