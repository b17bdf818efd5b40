"""The files of deploy/: held against hadolint and a schema, filled in, and run with stand-ins for what they call."""

from __future__ import annotations

import base64
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from simulate.doctor.machine import format_version
from simulate.doctor.releases import RELEASES

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCHEMA = Path(__file__).with_name("cloud_config.schema.json")
INSTALL = DEPLOY / "install.sh"
VARIABLES = {
    "NEURON_APT_URL": "https://apt.test",
    "NEURON_APT_KEY_URL": "https://apt.test/key",
    "NEURON_APT_KEY_FINGERPRINT": "00FA2C1079260870A76D2C285749CAD8646D9185",
    "NEURON_PIP_URL": "https://pip.test",
    "NEURON_DRIVER": "2.31",
    "NEURON_RUNTIME": "2.35",
    "NEURON_TOOLS": "2.33",
    "NEURON_COMPILER": "2.28",
    "NEURON_NKI": "0.7",
    "NKW_PACKAGE": "nki-workbench @ file:///a wheel's.whl",
    "NKW_PARTS": "driver runtime python",
}


def ran(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with these environment variables and PATH alone."""
    environment = {"PATH": os.environ["PATH"], **variables}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)


def without(name: str) -> dict[str, str]:
    """Return the variables without the named one."""
    return {variable: value for variable, value in VARIABLES.items() if variable != name}


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    return ran(Path(sys.executable).with_name("hadolint"), "--no-color", path)


def rendered(**variables: str) -> subprocess.CompletedProcess[str]:
    return ran(sys.executable, DEPLOY / "render.py", **variables)


def test_hadolint_has_nothing_against_the_container_file(tmp_path: Path) -> None:
    done = hadolint(DEPLOY / "Containerfile")
    assert (done.returncode, done.stdout) == (0, "")
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    (tmp_path / "Containerfile").write_text(
        text.replace("USER 10001", "USER root").replace('"$(echo', "$(echo")
    )
    worse = hadolint(tmp_path / "Containerfile")
    assert worse.returncode == 1 and "DL3002" in worse.stdout


@pytest.fixture(scope="module")
def user_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what `render.py` prints with all variables."""
    done = rendered(**VARIABLES)
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path_factory.mktemp("rendered") / "user-data.yaml"
    path.write_text(done.stdout, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "accepted"),
    [
        ("", "", True),
        ("runcmd:", "runcmds:", False),
        ('permissions: "0755"', "permissions: 0755", False),
        ("encoding: b64", "encoding: b46", False),
        ("path: /opt/nkw/variables", "path: opt/nkw/variables", False),
        ("package_update: true", "package_update: true\nfinal_message: [ready]", False),
    ],
)
def test_user_data_have_the_documented_keys(
    user_data: Path, tmp_path: Path, before: str, after: str, accepted: bool
) -> None:
    pytest.importorskip("check_jsonschema", reason="needs Python 3.11")
    path = tmp_path / "user-data.yaml"
    text = user_data.read_text(encoding="utf-8")
    path.write_text(text.replace(before, after, 1) if before else text, encoding="utf-8")
    done = ran(sys.executable, "-m", "check_jsonschema", "--schemafile", SCHEMA, path)
    assert done.returncode == (0 if accepted else 1), done.stdout


def test_user_data_begin_as_cloud_init_wants_and_hold_the_script_and_the_variables(user_data: Path) -> None:
    text = user_data.read_text(encoding="utf-8")
    assert text.startswith("#cloud-config\n")
    config: dict[str, Any] = yaml.safe_load(text)
    files = {file["path"]: file for file in config["write_files"]}
    assert base64.b64decode(files["/opt/nkw/install.sh"]["content"]) == INSTALL.read_bytes()
    script = files["/opt/nkw/variables"]["content"]
    for name, value in VARIABLES.items():
        if name != "NKW_PARTS":
            assert ran("sh", "-c", f'{script}\nprintf %s "${name}"').stdout == value
    assert config["runcmd"][0][2].endswith("/opt/nkw/install.sh driver runtime python")
    assert "$PATH" in files["/etc/profile.d/nkw.sh"]["content"] and "$UPTIME" in config["final_message"]


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_is_not_set_is_named(name: str) -> None:
    done = rendered(**without(name))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: not set: {name}; deploy/README.md says what they are\n"


@pytest.mark.parametrize("value", ["two\nlines", 'a"b', "a\\b", "\x1b[0m"])
def test_a_value_that_no_line_can_hold_is_refused(value: str) -> None:
    done = rendered(**{**VARIABLES, "NKW_PACKAGE": value})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: NKW_PACKAGE holds a character that a line of the script cannot hold\n"


def test_no_host_of_a_package_repository_is_written_down() -> None:
    for path in DEPLOY.iterdir():
        for host in re.findall(r"https?://([\w.-]+)", path.read_text(encoding="utf-8")):
            assert host == "awsdocs-neuron.readthedocs-hosted.com", path


def test_every_variable_is_described() -> None:
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    arguments = re.findall(
        r"^ARG (\w+)", (DEPLOY / "Containerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    described = {
        name
        for row in re.findall(r"^\|(.*?)\|", page, re.MULTILINE)
        for name in re.findall(r"`([A-Z_]+)`", row)
    }
    assert {*VARIABLES, *arguments} == described
    assert all(f"--build-arg {name}" in page for name in arguments)


def test_the_versions_of_a_release_are_those_that_doctor_knows() -> None:
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (2\.\d+) \| (.*) \|$", page, re.MULTILINE)
    known = {format_version(release.sdk): release for release in RELEASES}
    assert rows[0][0] == format_version(RELEASES[0].sdk)
    for sdk, cells in rows:
        release = known[sdk]
        nki = "none" if release.nki is None else format_version(release.nki)
        wanted = [
            format_version(release.driver),
            format_version(release.runtime),
            sdk,
            format_version(release.compiler),
            nki,
        ]
        assert cells.split(" | ")[:6] == [*wanted, " to ".join(map(format_version, release.pythons))]


def test_the_environment_file_sets_the_newest_release() -> None:
    newest = RELEASES[0]
    path = DEPLOY / f"sdk-{format_version(newest.sdk)}.env"
    names = ("NEURON_DRIVER", "NEURON_RUNTIME", "NEURON_TOOLS", "NEURON_COMPILER", "NEURON_NKI", "NKW_PARTS")
    loaded = ran(
        "sh", "-c", f"set -a; . {shlex.quote(str(path))}; set +a; exec sh -c 'printf \"%s\\n\" \"$0\" \"$@\"' "
        + " ".join(f'"${name}"' for name in names)
    )  # fmt: skip
    versions = [newest.driver, newest.runtime, newest.sdk, newest.compiler, newest.nki]
    assert loaded.stdout.splitlines() == [*map(format_version, versions), "driver runtime python nrtpy"]


def test_only_the_newest_release_has_an_environment_file_that_the_page_links() -> None:
    files = [path.name for path in DEPLOY.glob("*.env")]
    assert files == [f"sdk-{format_version(RELEASES[0].sdk)}.env"]
    assert f"]({files[0]})" in (DEPLOY / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("status", "printed", "expected"),
    [(0, "finding", 0), (1, "finding", 0), (1, "", 1), (2, "finding", 1), (127, "finding", 1)],
)
def test_findings_of_doctor_do_not_fail_the_user_data(
    user_data: Path, tmp_path: Path, status: int, printed: str, expected: int
) -> None:
    config: dict[str, Any] = yaml.safe_load(user_data.read_text(encoding="utf-8"))
    shell, option, script = config["runcmd"][1]
    (tmp_path / "profile.sh").write_text(f"PATH={shlex.quote(str(tmp_path))}:$PATH\n")
    (tmp_path / "nkw").write_text(f"#!/bin/sh\nprintf %s {printed}\nexit {status}\n")
    (tmp_path / "nkw").chmod(0o755)
    local = script.replace("/etc/profile.d/nkw.sh", str(tmp_path / "profile.sh")).replace(
        "/opt/nkw", str(tmp_path)
    )
    assert ran(shell, option, local).returncode == expected
    assert (tmp_path / "doctor.txt").read_text() == printed


PYTHON = """{note}
case "$*" in
*"islpy>1"*) touch "$(dirname "$0")/../wheels/islpy.whl" ;;
*"download "*"numpy>=2"*) exit 1 ;; # the vendor's repository does not have it
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip --isolated download "*"neuronx-cc"* | "-m pip --isolated download "*"nrtpy"*)
    mkdir -p "$(dirname "$0")/../wheels"
    touch "$(dirname "$0")/../wheels/vendor.whl"
    ;;
"-c "*) printf "islpy>1\\nnumpy>=2; python_version >= \\"3.9\\"\\n" ;;
esac
"""
"""Stand-in for Python and for a repository with neuronx-cc, nki, nrtpy and islpy; two packages are required."""
GET = "-m pip --isolated download --no-cache-dir --no-deps --only-binary :all: --index-url https://pip.test --dest"


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """Create a folder with apt-get, curl, gpg, uname and python3 that record their calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    note = f'[ "$1" = -c ] || echo "$(basename "$0") $*" >>{shlex.quote(str(tmp_path / "calls"))}\n'
    made = {
        "apt-get": note,
        "curl": f'{note}while [ "$1" != --output ]; do shift; done; touch "$2"\n',
        "uname": "echo 6.17.0-1007-aws\n",
        "gpg": 'printf "pub:-:::\\nfpr:::::::::%s:\\nsub:-:::\\nfpr:::::::::AAAA:\\n" $FINGERPRINT\n',
        "python3": PYTHON.format(note=note),
    }
    for name, text in made.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}")
        (folder / name).chmod(0o755)
    for directory in ("usr/share/keyrings", "etc/apt/sources.list.d"):
        (tmp_path / "root" / directory).mkdir(parents=True)
    return tmp_path


def installed(
    folder: Path, *components: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run install.sh with the stand-ins; the process, and their calls."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {"FINGERPRINT": VARIABLES["NEURON_APT_KEY_FINGERPRINT"], **variables}
    more = {"DESTDIR": str(folder / "root"), "NKW_HOME": str(folder / "home"), "PATH": path}
    done = ran("sh", INSTALL, *components, **{**variables, **more})
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def vendor_calls(environment: str, packages: str) -> list[str]:
    """Return the calls that install packages of the vendor: no other index is asked for what its repository has."""
    get = f"python {GET} {environment}/wheels"
    return [
        f"{get} {packages}",
        f"{get} --quiet islpy>1",
        f'{get} --quiet numpy>=2; python_version >= "3.9"',
        f"python -m pip install --no-cache-dir {environment}/wheels/islpy.whl {environment}/wheels/vendor.whl",
    ]


def test_install_asks_for_exactly_the_release_that_the_variables_name(stand_ins: Path) -> None:
    done, calls = installed(stand_ins, "driver", "runtime", "python", **VARIABLES)
    assert (done.returncode, done.stderr) == (0, "")
    home = stand_ins / "home"
    assert calls == [
        "curl --fail --silent --show-error --location --output "
        f"{stand_ins}/root/usr/share/keyrings/neuron.asc.new https://apt.test/key",
        "apt-get update",
        "apt-get install --yes linux-headers-6.17.0-1007-aws aws-neuronx-dkms=2.31.*",
        "apt-get install --yes --no-install-recommends aws-neuronx-runtime-lib=2.35.* aws-neuronx-collectives=2.35.* "
        "aws-neuronx-tools=2.33.*",
        f"python3 -m venv {home}/venv",
        *vendor_calls(f"{home}/venv", "neuronx-cc==2.28.* nki==0.7.*"),
        f"python -m pip install --no-cache-dir {VARIABLES['NKW_PACKAGE']}",
    ]
    source = (stand_ins / "root/etc/apt/sources.list.d/neuron.list").read_text()
    assert re.fullmatch(
        r"deb \[signed-by=/usr/share/keyrings/neuron.asc\] https://apt.test \w+ main\n", source
    )


def test_install_gives_nrtpy_an_environment_of_its_own(stand_ins: Path) -> None:
    done, calls = installed(stand_ins, "nrtpy", **VARIABLES)
    assert done.returncode == 0
    assert calls == [
        f"python3 -m venv {stand_ins}/home/nrtpy",
        *vendor_calls(f"{stand_ins}/home/nrtpy", "nrtpy==2.35.*"),
        "python -m pip install --no-cache-dir numpy",
    ]


def test_install_reads_a_wheel_from_a_bucket_with_the_role_of_the_instance(stand_ins: Path) -> None:
    (stand_ins / "bin" / "aws").write_text((stand_ins / "bin" / "apt-get").read_text())
    (stand_ins / "bin" / "aws").chmod(0o755)
    wheel = "s3://mine/wheels/nki_workbench-0.1.0-py3-none-any.whl"
    done, calls = installed(stand_ins, "python", **{**VARIABLES, "NKW_PACKAGE": wheel})
    assert (done.returncode, done.stderr) == (0, "")
    local = stand_ins / "home" / "nki_workbench-0.1.0-py3-none-any.whl"
    assert f"aws s3 cp --only-show-errors {wheel} {local}" in calls
    assert calls[-1] == f"python -m pip install --no-cache-dir {local}"


def test_install_leaves_out_nki_where_the_compiler_brings_it(stand_ins: Path) -> None:
    done, calls = installed(stand_ins, "python", **{**VARIABLES, "NEURON_NKI": "none"})
    assert done.returncode == 0
    assert calls[1] == f"python {GET} {stand_ins}/home/venv/wheels neuronx-cc==2.28.*"


@pytest.mark.parametrize(
    "keys",
    ["", "AAAA", "00FA2C1079260870A76D2C285749CAD8646D9185 AAAA", "00FA2C1079260870A76D2C285749CAD8646D918"],
)
def test_install_stops_at_a_key_with_another_fingerprint(stand_ins: Path, keys: str) -> None:
    done, calls = installed(stand_ins, "driver", **VARIABLES, FINGERPRINT=keys)
    assert done.returncode == 2
    assert "not 00FA2C1079260870A76D2C285749CAD8646D9185; nothing was installed" in done.stderr
    assert not [call for call in calls if call.startswith("apt-get")]
    assert [*(stand_ins / "root/usr/share/keyrings").iterdir()] == []


def test_install_takes_a_fingerprint_with_spaces(stand_ins: Path) -> None:
    spaced = "00FA 2C10 7926 0870 A76D  2C28 5749 CAD8 646D 9185"
    variables = {**VARIABLES, "NEURON_APT_KEY_FINGERPRINT": spaced}
    fingerprint = VARIABLES["NEURON_APT_KEY_FINGERPRINT"]
    assert installed(stand_ins, "driver", **variables, FINGERPRINT=fingerprint)[0].returncode == 0


@pytest.mark.skipif(shutil.which("gpg") is None, reason="no gpg on this machine")
@pytest.mark.parametrize("count", [1, 2])
def test_install_reads_the_fingerprints_of_a_real_key_file(
    stand_ins: Path, tmp_path_factory: pytest.TempPathFactory, count: int
) -> None:
    (stand_ins / "bin" / "gpg").unlink()
    home = tmp_path_factory.mktemp("gnupg")
    variables = {"GNUPGHOME": str(home)}
    for number in range(count):
        made = ran(
            "gpg",
            "--batch",
            "--passphrase",
            "",
            "--quick-generate-key",
            f"key{number}",
            "ed25519",
            **variables,
        )
        assert made.returncode == 0, made.stderr
    listed = ran("gpg", "--batch", "--list-keys", "--with-colons", **variables).stdout
    fingerprint = re.findall(r"^fpr:+(\w+):", listed, re.MULTILINE)[0]
    exported = home / "exported"
    ran("gpg", "--batch", "--armor", "--output", exported, "--export", **variables)
    ran("gpgconf", "--kill", "all", **variables)
    (stand_ins / "bin" / "curl").write_text(
        f'#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done; cp {exported} "$2"\n'
    )
    variables |= {**VARIABLES, "NEURON_APT_KEY_FINGERPRINT": fingerprint}
    done, _ = installed(stand_ins, "driver", **variables)
    assert done.returncode == (0 if count == 1 else 2), done.stderr


def test_requirements_of_a_wheel_are_read(stand_ins: Path, tmp_path: Path) -> None:
    program = re.search(r"REQUIREMENTS='(.*?)'", INSTALL.read_text(encoding="utf-8"), re.DOTALL)
    assert program is not None
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "a-1.dist-info/METADATA", "Name: a\nRequires-Dist: b>1\nRequires-Dist: c; extra == 'd'\n\nText"
        )
    with zipfile.ZipFile(tmp_path / "e-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("e-1.dist-info/METADATA", "Name: e\n")
    done = ran(sys.executable, "-c", program[1], tmp_path)
    assert (done.returncode, done.stdout) == (0, "b>1\nc; extra == 'd'\n\n")


@pytest.mark.parametrize(
    ("components", "missing"),
    [
        (("driver",), "NEURON_DRIVER"),
        (("driver",), "NEURON_APT_URL"),
        (("runtime",), "NEURON_APT_KEY_URL"),
        (("driver",), "NEURON_APT_KEY_FINGERPRINT"),
        (("runtime",), "NEURON_TOOLS"),
        (("python",), "NEURON_PIP_URL"),
        (("python",), "NKW_PACKAGE"),
    ],
)
def test_install_names_the_variable_that_is_not_set(
    stand_ins: Path, components: tuple[str, ...], missing: str
) -> None:
    done, calls = installed(stand_ins, *components, **without(missing))
    assert done.returncode == 2
    assert done.stderr == f"error: {missing} is not set; deploy/README.md says what it is\n"
    assert calls == []


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ((), "a part is needed: driver, runtime, python, nrtpy"),
        (("python", "sdk"), "sdk is no part; the parts are driver, runtime, python, nrtpy"),
    ],
)
def test_install_refuses_what_is_no_part_before_it_begins(
    stand_ins: Path, components: tuple[str, ...], message: str
) -> None:
    done, calls = installed(stand_ins, *components, **VARIABLES)
    assert (done.returncode, done.stderr, calls) == (2, f"error: {message}\n", [])


def test_install_ends_where_a_package_is_not_to_be_had(stand_ins: Path) -> None:
    (stand_ins / "bin" / "apt-get").write_text('#!/bin/sh\n[ "$1" = update ]\n')
    done, calls = installed(stand_ins, "driver", "python", **VARIABLES)
    assert done.returncode == 1
    assert not [call for call in calls if call.startswith("python")]
