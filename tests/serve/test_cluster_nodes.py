"""`nkw serve --cluster` with Ray: one node, two nodes, the loss of one, and signals.

Each scene runs in a network namespace of its own with loopback alone, so that no port of Ray is open to others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is an extra (cluster)")

from model import LLM, SamplingParams
from tests.serve.cluster_scenes import TALES

pytestmark = pytest.mark.deep

_LOOPBACK = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@pytest.fixture(scope="module")
def namespace() -> tuple[str, ...]:
    """Return the words before a command that run it with loopback alone."""
    try:
        tried = subprocess.run([*_LOOPBACK, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError as missing:
        pytest.skip(f"no network namespace: {missing}")
    if tried.returncode:
        pytest.skip(f"no network namespace: {tried.stderr.strip()}")
    return _LOOPBACK


def seen(namespace: tuple[str, ...], scene: str) -> Any:
    """Return what a scene saw."""
    command = [*namespace, sys.executable, "-m", "tests.serve.cluster_scenes", scene]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(ran.stdout)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return the texts of the engine alone."""
    outputs = LLM(max_num_seqs=2, max_num_batched_tokens=64).generate(
        ["Tom had", "The red key"], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False
    )
    return [output.outputs[0].text for output in outputs]


def test_cluster_of_this_machine_answers_drains_and_leaves_nothing(
    namespace: tuple[str, ...], texts: list[str]
) -> None:
    report = seen(namespace, "one_node")
    assert report["status"] == [200, 200, 404]
    assert report["texts"] == texts
    assert report["up"] == [1, 1]
    assert report["open"] == 2, "one port for each replica, which demands the token"
    assert report["token"] == 1
    assert report["streams"] == ["length"] * 6
    assert (report["status after SIGTERM"], report["files"]) == (0, [])


def test_cluster_ends_with_a_server_that_is_killed(namespace: tuple[str, ...]) -> None:
    assert seen(namespace, "killed_server")["before"] > 0


def test_node_that_is_lost_ends_its_streams_and_another_one_serves(
    namespace: tuple[str, ...], texts: list[str]
) -> None:
    report = seen(namespace, "two_nodes")
    llm = LLM(max_num_seqs=2, max_num_batched_tokens=64)
    assert report["hits"] == sum(len(llm.get_tokenizer().encode(tale)) // 16 * 16 for tale in TALES)
    assert report["streams"] == ["length", "length", "replica_ended", "replica_ended"]
    assert report["text"] == texts[0] and report["new texts"] == texts
    assert report["replicas of the other server"]
    assert report["streams after SIGTERM"] == ["length", "length"]
    assert report["text of the other server"] == texts[0]
    assert (report["statuses"], report["replicas' processes"]) == ([0, 0], [2, 0])


def test_server_that_a_cluster_cannot_serve_says_so_and_leaves_the_others(
    namespace: tuple[str, ...], texts: list[str]
) -> None:
    report = seen(namespace, "refused")
    status, message = report["options"]
    assert (status, message) == (
        2,
        "nkw: error: the cluster serves stories with another model or other options: give --served-model-name "
        "another name, or end the servers that use it",
    )
    status, message = report["folder"]
    assert (
        status == 2
        and message.startswith("nkw: error: an engine cannot start: ")
        and "config.json" in message
    )
    assert (report["text"], report["status"]) == (texts[0], 0)
