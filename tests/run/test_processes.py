"""Ranks in processes of their own, started by torchrun, against the same ranks in one process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import simulate
from model.device import SimulatedDevice
from model.errors import ModelError
from nkw.commands import main
from nkw.errors import InvalidArgument, Location, NkwError, Unsupported
from simulate.isa.plan import Rendezvous
from simulate.run.processes import Processes
from tests.commands import run_command
from tests.deep import deep_except
from tests.interruptible import remove_progress
from tests.run.process_program import argument_of
from tests.run.rendezvous_kernels import gathered, reduced, summed_by_both_cores

torch = pytest.importorskip("torch")

import nki.collectives as ncc  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
EVERYONE = ncc.ReplicaGroup([[0, 1, 2]])
PAIR = ncc.ReplicaGroup([[0, 2], [1]])


def torchrun(processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Start `-m command` in several processes from the project's folder."""
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        "-m",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*start, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def without_agent(
    ranks: int, command: list[str], stderr: int = subprocess.PIPE, **variables: str
) -> list[subprocess.Popen[str]]:
    """Start `-m command` for each rank, with torchrun's variables but without torchrun, which would end the others."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, **variables, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    common |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        for rank in range(ranks)
    ]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run the three processes of process_program and return the results that they print."""
    folder = tmp_path_factory.mktemp("said")
    done = torchrun(3, "tests.run.process_program", str(folder))
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]


def select_by_rank(printed: list[dict[str, Any]], topic: str) -> dict[int, dict[str, Any]]:
    """Return the results of each rank under one name."""
    return {line["rank"]: line for line in printed if line["topic"] == topic}


def in_one_process(
    kernel: Any, arguments: list[tuple[Any, ...]], target: str = "trn1", lnc: int = 1
) -> list[str]:
    world = simulate.World(target, 3, lnc)
    return [
        out.tobytes().hex()
        for out in world.launch(kernel, [(argument, {}) for argument in arguments]).outputs
    ]


@pytest.mark.slow
def test_each_process_holds_one_rank(printed: list[dict[str, Any]]) -> None:
    assert {
        rank: (report["size"], report["ranks"]) for rank, report in select_by_rank(printed, "world").items()
    } == dict.fromkeys(range(3), (3, 1))


@pytest.mark.slow
def test_eager_and_replayed_launches_give_the_bytes_of_one_process(printed: list[dict[str, Any]]) -> None:
    for launch, mode in enumerate(["eager", "replay", "replay"]):
        same = in_one_process(reduced, [(argument_of(rank, launch), EVERYONE) for rank in range(3)])
        got = [line for line in printed if line.get("launch") == launch]
        assert sorted((report["rank"], report["mode"], report["bytes"]) for report in got) == [
            (rank, mode, same[rank]) for rank in range(3)
        ]


def test_a_replayed_rank_disagrees_with_a_rank_in_another_collective(printed: list[dict[str, Any]]) -> None:
    reports = select_by_rank(printed, "replayed shapes")
    assert {rank: report["code"] for rank, report in reports.items()} == dict.fromkeys(
        range(3), "NKW-RENDEZVOUS"
    )
    for report in reports.values():
        assert [
            words
            for words in (
                "member 0 says [((5, 7), 'float32')] (a replayed launch)",
                "member 1 says [((4, 7), 'float32')] (",
            )
            if words not in report["text"]
        ] == []


def test_groups_are_separate(printed: list[dict[str, Any]]) -> None:
    same = in_one_process(gathered, [(argument_of(rank), PAIR, 1 if rank == 1 else 2) for rank in range(3)])
    assert [select_by_rank(printed, "gathered")[rank]["bytes"] for rank in range(3)] == same


def test_collectives_join_cores_of_equal_number(printed: list[dict[str, Any]]) -> None:
    same = in_one_process(
        summed_by_both_cores, [(argument_of(rank), EVERYONE) for rank in range(3)], "trn2", 2
    )
    assert [select_by_rank(printed, "both cores")[rank]["bytes"] for rank in range(3)] == same


def test_ranks_may_complete_rendezvous_in_different_orders(printed: list[dict[str, Any]]) -> None:
    wanted = {index: [float(argument_of(rank, index).sum()) for rank in range(3)] for index in range(3)}
    got = [line for line in printed if line["topic"] == "several at once"]
    assert len(got) == 9 and all(report["sums"] == wanted[report["index"]] for report in got)


def test_the_store_does_not_grow_with_the_launches() -> None:
    store = torch.distributed.HashStore()
    ranks = [Processes(rank, 2, store) for rank in range(2)]
    rendezvous = Rendezvous("place", True, (0, 1), {}, lambda operands: operands)
    keys = []
    for _ in range(20):
        posted = []
        for rank in ranks:
            with rank.launch():
                posted.append(rank.post(rendezvous, [], Location("", 0, ""), dry=True))
        for rank, posting in zip(ranks, posted):
            rank.wait([posting])
        keys.append(store.num_keys())
    assert keys[1:] == keys[:1] * 19


def test_a_lost_store_is_an_error_of_ours() -> None:
    class Lost:
        def __getattr__(self, name: str) -> Any:
            def lost(*arguments: Any) -> Any:
                raise RuntimeError("Broken pipe\nframe #0")

            return lost

    rank = Processes(0, 2, torch.distributed.HashStore())
    rendezvous = Rendezvous("place", True, (0, 1), {}, lambda operands: operands)
    posted = rank.post(rendezvous, [], Location("kernel.py", 3, "kernel"), dry=True)
    rank._store = Lost()
    for action in (lambda: rank.wait([posted]), lambda: rank.post(rendezvous, [], posted.where, dry=True)):
        with pytest.raises(
            NkwError, match=r"(?s)NKW-PROCESS-LOST.*broke: Broken pipe\n  at kernel.py:3 in kernel"
        ):
            action()


def test_a_rank_that_leaves_a_collective_out_is_waited_for_until_nobody_can_go_on(
    printed: list[dict[str, Any]],
) -> None:
    reports = select_by_rank(printed, "left out")
    assert sorted(reports) == [0, 2]
    for report in reports.values():
        assert report["code"] in ("NKW-DEADLOCK", "NKW-PROCESS-LOST") and "in total_of" in report["text"]


def test_a_disagreement_has_the_term_of_every_member(printed: list[dict[str, Any]]) -> None:
    reports = select_by_rank(printed, "shapes")
    assert ({report["code"] for report in reports.values()}, len(reports)) == ({"NKW-RENDEZVOUS"}, 3)
    for rank in range(3):
        assert f"srcs: member {rank} says [(({5 - rank}, 7), 'float32')]" in reports[0]["text"]


def test_ranks_that_wait_in_a_circle_are_told_so(printed: list[dict[str, Any]]) -> None:
    reports = select_by_rank(printed, "crossed")
    assert len(reports) == 3
    first = [report for report in reports.values() if report["code"] == "NKW-DEADLOCK"]
    assert first and all(f"rank {rank} waits in all_reduce" in first[0]["text"] for rank in range(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "how"), deep_except([(0, "is killed"), (1, "is killed"), (1, "ends"), (2, "raises")], 4)
)
def test_no_rank_waits_for_ever_for_one_that_is_gone(failing: int, how: str) -> None:
    """Rank 0 holds the store. The processes have no agent above them, which would end them itself."""
    command = ["tests.run.failing_program", str(failing), how]
    processes = without_agent(3, command, stderr=subprocess.DEVNULL)
    printed_by_rank = [process.communicate()[0] for process in processes]
    for rank in {0, 1, 2} - {failing}:
        assert processes[rank].returncode == 3
        assert printed_by_rank[rank].strip() in ("NKW-PROCESS-LOST", "NKW-DEADLOCK")


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "terminated"), deep_except([(0, 2), (1, 2), (1, 0)], 3))
def test_ranks_that_are_killed_leave_no_file_and_the_others_one_sentence(
    tmp_path: Path, killed: int, terminated: int
) -> None:
    """Rank 0 holds the store, and would write both outputs."""
    temporary, outputs = tmp_path / "temporary", tmp_path / "outputs"
    temporary.mkdir()
    outputs.mkdir()
    command = ["model", "generate", "--tp", "3", "--max-new-tokens", "250"]
    command += ["--trace", str(outputs / "trace"), "--json", str(outputs / "document")]
    ranks = without_agent(3, command, TMPDIR=str(temporary))
    assert ranks[0].stdout is not None
    assert ranks[0].stdout.read(4) == "Once"  # the prompt is done: every rank computes or waits for another
    ranks[terminated].send_signal(
        signal.SIGTERM
    )  # takes longer to end than a killed one, whose end it might see
    ranks[killed].send_signal(signal.SIGKILL)
    printed_by_rank = [remove_progress(rank.communicate()[1]) for rank in ranks]
    assert (ranks[killed].returncode, ranks[terminated].returncode) == (-signal.SIGKILL, 143)
    assert re.fullmatch(r"\nnkw: terminated.*\n", printed_by_rank[terminated])
    for rank in {0, 1, 2} - {killed, terminated}:
        assert ranks[rank].returncode == 2
        (line,) = printed_by_rank[rank].splitlines()
        assert line.startswith("nkw: error: ") and "[NKW-PROCESS-LOST]" in line and len(line) < 250
    assert [*temporary.iterdir(), *outputs.iterdir()] == []
    started = tuple(
        f"_{rank.pid}_" for rank in ranks
    )  # torch puts process numbers into names of shared memory
    assert not [file for file in Path("/dev/shm").glob("*") if any(prefix in file.name for prefix in started)]


def test_gather_takes_arrays_of_any_size(printed: list[dict[str, Any]]) -> None:
    assert {rank: report["sums"] for rank, report in select_by_rank(printed, "world gather").items()} == {
        rank: [0.0, 2.0, 4.0] for rank in range(3)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "mesh"),
    deep_except([(2, ["--tp", "2"]), (4, ["--tp", "2", "--dp", "2"]), (4, ["--pp", "2", "--tp", "2"])], 3),
)
def test_generation_of_a_mesh_is_that_of_one_process(
    processes: int, mesh: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--prompt", "Once upon a time", "--prompt", "The red key"]
    options = ["generate", *mesh, *prompts, "--max-new-tokens", "4", "--temperature", "0.8", "--top-p", "0.9"]
    several, output = torchrun(processes, "model", *options), run_command(main, options, capsys).out
    assert (several.returncode, several.stdout) == (0, output), several.stderr[-2000:]
    assert "8 of 8 tokens equal" in output


@pytest.mark.slow
def test_as_many_processes_as_ranks_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = Processes(1, 2, torch.distributed.HashStore())
    monkeypatch.setattr(Processes, "join", lambda: joined)
    assert SimulatedDevice("trn1", 2, processes=True).local_ranks == range(1, 2)
    with pytest.raises(
        ModelError, match="torchrun started 2 processes for 4 ranks; the product of --pp, --tp"
    ):
        SimulatedDevice("trn1", 4, processes=True)


def test_refuses_a_world_of_processes_outside_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        InvalidArgument, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start the processes"
    ):
        simulate.World.from_torchrun("trn1")
    assert not simulate.World.has_processes()


def test_says_that_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(Unsupported, match=r"pip install 'nki-workbench\[speed\]'"):
        simulate.World.from_torchrun("trn1")
    assert simulate.World.has_processes()
