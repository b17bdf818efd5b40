"""A bundle is carried to an environment with nothing but numpy and an `nki`, and its result comes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulate.bundle.blame import Comparison, Fault
from simulate.bundle.values import Agreement
from simulate.cli import main

Make = Callable[..., Any]
Compared = Callable[[Path], Comparison]
SUMMARY = """case "$1" in
capture) for word; do [ "$before" = -s ] && touch "${word%.ntff}_exec_2.ntff"; before=$word; done;;
view) echo 'some words first'; echo '{"n": {"total_time": 1e-5}}';;
esac"""


def result_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "result" / "result.json").read_text())
    return document


@pytest.mark.slow
def test_unchanged_it_reports_equality(
    carried: Path, instance: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = instance()
    machine.tool("neuron-explorer", SUMMARY)
    done = machine.run(carried, on_device=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert main(["compare", str(carried)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("all 4 cases are equal (trn2; instance unknown, launcher nki, nki 0.7.0)")
    assert "likely" not in out and "NO" not in out
    result = result_of(carried)
    assert result["finished"] is not None and result["failures"] == []
    for case in result["cases"]:
        assert case["times"]["clock"] == "device" and case["times"]["spread_ns"] > 0
        assert json.loads((carried / "result" / case["profile"]).read_text()) == {"n": {"total_time": 1e-5}}
        assert (carried / "result" / "profiles" / case["name"] / "profile_exec_2.ntff").is_file()


@pytest.mark.slow
def test_the_first_wrong_tile_of_a_changed_instruction_is_named(
    carried: Path, instance: Make, compared: Compared
) -> None:
    expected = np.load(carried / "expected" / "scaled" / "output-0.npy")
    above = float(np.sort(expected, axis=None)[-2])  # one element of 200,000 is larger
    row, column = (int(index) for index in np.argwhere(expected > above)[0])
    assert instance(instruction="tensor_scalar", above=above).run(carried).returncode == 0
    seen = compared(carried)
    scaled = seen.cases[0]
    (output,) = scaled.outputs
    assert (output.agreement, output.beyond, output.wrong_tiles) == (Agreement.wrong, 1, 1)
    assert output.tile == (row // 128, column // 512)
    assert output.first is not None and output.first.index == (row, column)
    assert output.first.seen == np.float32(expected[row, column]) * np.float32(1.25)
    assert [case.agreement for case in seen.cases[1:]] == [Agreement.equal] * 3
    assert not seen.agrees


@pytest.mark.slow
def test_an_instruction_that_several_wrong_kernels_share_is_blamed(
    carried: Path, instance: Make, compared: Compared
) -> None:
    assert instance(instruction="tensor_scalar", above=0.5).run(carried).returncode == 0
    (likely,) = compared(carried).likely
    assert (likely.fault, likely.rule, likely.cases) == (Fault.simulator, 6, ("scaled", "shifted"))
    assert likely.why == "kernels that use tensor_scalar are wrong, and no kernel that is right does"


@pytest.mark.slow
def test_a_slow_instruction_is_seen_in_the_times(carried: Path, instance: Make, compared: Compared) -> None:
    assert instance(instruction="tensor_scalar", slower=1e6).run(carried, on_device=True).returncode == 0
    seen = compared(carried)
    assert [case.agreement for case in seen.cases] == [Agreement.equal] * 4
    assert [case.inside for case in seen.cases] == [False, False, True, True]
    (likely,) = seen.likely
    assert (likely.fault, likely.rule, likely.cases) == (Fault.simulator, 10, ("scaled", "shifted"))
    assert "tensor_scalar" in likely.why


@pytest.mark.slow
def test_a_kernel_that_the_compiler_refuses_loses_itself_only(
    carried: Path, instance: Make, compared: Compared
) -> None:
    assert instance(refuse="shifted").run(carried, "--only", "shifted", "doubled").returncode == 1
    case = result_of(carried)["cases"][0]
    assert (case["status"], case["stage"]) == ("failed", "compile")
    assert case["error"]["message"] == "[NCC_TEST001] the compiler refuses this kernel"
    assert "NCC_TEST001" in (carried / "result" / case["log"]).read_text()
    seen = compared(carried)
    assert [case.agrees for case in seen.cases] == [False, False, True, False]  # two were not tried
    (likely,) = seen.likely
    assert (likely.fault, likely.rule, likely.cases) == (Fault.simulator, 4, ("shifted",))


@pytest.mark.slow
def test_where_every_kernel_is_refused_it_is_the_environment(
    carried: Path, instance: Make, compared: Compared
) -> None:
    assert instance(refuse="doubled").run(carried, "--only", "doubled").returncode == 1
    seen = compared(carried)
    assert {blame.fault for blame in seen.likely} == {Fault.environment}


@pytest.mark.slow
def test_a_crash_in_the_middle_loses_one_case(carried: Path, instance: Make, compared: Compared) -> None:
    assert instance(crash="shifted").run(carried).returncode == 1
    case = result_of(carried)["cases"][1]
    assert (case["status"], case["stage"]) == ("failed", "run")  # the NEFF is there: it had been compiled
    assert case["error"] == {"type": "Crash", "message": "ended by SIGSEGV"}
    seen = compared(carried)
    assert [case.agrees for case in seen.cases] == [True, False, True, True]
    (likely,) = seen.likely
    assert (likely.fault, likely.rule, likely.cases) == (Fault.environment, 2, ("shifted",))


@pytest.mark.slow
def test_a_case_that_hangs_is_ended(carried: Path, instance: Make, compared: Compared) -> None:
    words = ("--only", "shifted", "doubled", "--timeout", "4")
    assert instance(hang="shifted").run(carried, *words).returncode == 1
    first, second = result_of(carried)["cases"]
    assert first["error"] == {"type": "Timeout", "message": "ended after 4 s"}
    assert second["status"] == "ran"


@pytest.mark.slow
def test_on_a_full_disk_values_are_lost_and_digests_come_back(
    carried: Path, instance: Make, compared: Compared
) -> None:
    """No file may have more than 20 kB, which the record has room in, and the values have not."""
    machine = instance()
    text = (carried / "run.py").read_text()
    # The limit is set inside of the process, as a full disk would be met: by writes that fail.
    start = 'if __name__ == "__main__":'
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
    (carried / "limited.py").write_text(text.replace(start, limited + start))
    (carried / "limited.py").replace(carried / "run.py")
    machine.run(carried)
    result = result_of(carried)
    assert result["finished"] is not None and [case["status"] for case in result["cases"]] == ["ran"] * 4
    assert any("output-0 cannot be written" in failure["message"] for failure in result["failures"])
    seen = compared(carried)
    assert [case.agreement for case in seen.cases] == [Agreement.equal] * 4
    assert not seen.intact  # run.py was changed for this test


@pytest.mark.slow
def test_an_old_nki_is_the_environment(carried: Path, instance: Make, compared: Compared) -> None:
    """An NKI of which the kernels need a name that it lacks, and that is no reason to stop before."""
    machine = instance(version="0.6.0", refuse="doubled")
    assert machine.run(carried, "--only", "doubled", "picked").returncode == 1
    seen = compared(carried)
    (likely,) = seen.likely
    assert (likely.fault, likely.rule, likely.cases) == (Fault.environment, 3, ("doubled",))
    assert likely.why == "nki 0.6.0 is installed, the bundle is for 0.7"


def test_the_placeholder_of_the_public_index_is_recognised(
    carried: Path, instance: Make, compared: Compared
) -> None:
    assert instance(version="0.0.1").run(carried).returncode == 1
    seen = compared(carried)
    assert {blame.fault for blame in seen.likely} == {Fault.environment}
    assert "nki 0.0.1 is the placeholder of the public index" in seen.result.failures[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["echo 'open /dev/neuron0: permission denied' >&2; exit 1", None])
def test_a_profiler_without_permission_stops_nothing(
    script: str | None, carried: Path, instance: Make, compared: Compared
) -> None:
    machine = instance()
    machine.tool("neuron-explorer", script or "")
    if script is None:
        (machine.tools / "neuron-explorer").chmod(0o644)
    assert machine.run(carried, "--only", "doubled").returncode == 0
    seen = compared(carried)
    assert seen.agrees
    ((stage, message),) = seen.result.failures
    assert stage == "profile"
    assert "permission denied" in message or "neuron-explorer" in message


@pytest.mark.slow
def test_an_earlier_result_is_kept(carried: Path, instance: Make) -> None:
    machine = instance()
    for _ in range(2):
        assert machine.run(carried, "--only", "doubled", "--no-profile").returncode == 0
    assert (carried / "result-1" / "result.json").is_file() and (carried / "result" / "result.json").is_file()


@pytest.mark.slow
def test_a_changed_bundle_is_noticed_there_and_here(
    carried: Path, instance: Make, compared: Compared
) -> None:
    file = carried / "sources" / "travelling" / "elementwise.py"
    file.write_text(file.read_text() + "\n")
    assert instance().run(carried, "--only", "doubled", "--no-profile").returncode == 0
    seen = compared(carried)
    assert not seen.intact
    assert seen.result.failures == (
        ("read", "files of the bundle were changed since it was written: its digest differs"),
    )
    assert [blame.rule for blame in seen.likely] == [1]
