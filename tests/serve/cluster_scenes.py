"""Scenes of `nkw serve --cluster` with Ray, each run as a program in a network namespace that has loopback alone.

`python -m tests.serve.cluster_scenes NAME` prints what was seen as JSON on the last line of stdout.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-queue", "2")
TALES = [f"{name} had a big red ball and a small blue box. " * 3 for name in ("Tom", "Lily", "Ben")]
PORT = 6399
_LISTENING = "0A"


class Server:
    """`nkw serve WORDS` as a process, and requests to it."""

    def __init__(self, *words: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "nkw", "serve", "--port", "0", *SMALL, *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server has ended"
        self.port = int(line.rpartition(":")[2].partition("/")[0])

    def send(self, method: str, path: str, **body: Any) -> tuple[int, bytes]:
        """Send a request and return status and body of its answer."""
        response = self._response(method, path, body)
        return response.status, response.read()

    def text(self, prompt: str, **more: Any) -> str:
        """Return a greedy continuation of six tokens, or the error's code."""
        body = {"model": "stories", "prompt": prompt, "max_tokens": 6, "temperature": 0} | more
        answer = json.loads(self.send("POST", "/v1/completions", **body)[1])
        return str(answer["error"]["code"] if "error" in answer else answer["choices"][0]["text"])

    def stream(self, tokens: int) -> http.client.HTTPResponse:
        """Open a stream of some tokens and read its first event."""
        body = {"model": "stories", "prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "seed": 1}
        response = self._response("POST", "/v1/completions", body | {"stream": True})
        assert response.readline().startswith(b"data: ")
        return response

    def numbers(self, name: str) -> dict[str, float]:
        """Return a number of /metrics by replica."""
        lines = self.send("GET", "/metrics")[1].decode().splitlines()
        matches = [
            re.search(r'replica="(\w+)".* (\S+)$', line) for line in lines if line.startswith(f"{name}{{")
        ]
        return {match[1]: float(match[2]) for match in matches if match}

    def end(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def _response(self, method: str, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(
            method, path, json.dumps(body) if body else None, {"content-type": "application/json"}
        )
        return connection.getresponse()


def last(stream: http.client.HTTPResponse) -> str:
    """Return how a stream ended: its finish reason or the code of its error."""
    events = [line for line in stream.read().decode().splitlines() if line.startswith("data: {")]
    event = json.loads(events[-1].removeprefix("data: "))
    return str(event["error"]["code"] if "error" in event else event["choices"][0]["finish_reason"])


def wait_until(holds: Callable[[], bool], seconds: float = 120) -> float:
    """Wait until something holds, and return for how long."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds
        time.sleep(0.2)
    return time.monotonic() - begun


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes that a process has started, and of those that these have."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    pids = [pid]
    for parent in pids:
        pids += [child for child, parent_pid in parents.items() if parent_pid == parent]
    return pids


def ray_processes() -> list[str]:
    """Return the names of processes of Ray in this namespace of networks."""
    namespace, command_lines = os.readlink("/proc/self/ns/net"), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns/net") == namespace:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                command_lines += [line] if re.match(r"ray::|\S*/(gcs_server|raylet) ", line) else []
        except OSError:
            continue
    return command_lines


def open_to_others() -> list[str]:
    """Return the addresses of listening TCP sockets that are no loopback addresses."""
    addresses = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address = local.partition(":")[0]
            loopback = address.endswith("0100007F") or address == "0" * 24 + "01000000"
            addresses += [address] if state == _LISTENING and not loopback else []
    return addresses


@contextmanager
def node(*words: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `ray start WORDS`, a node with one processor; kill all of its processes at the end."""
    program = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "start", *words, "--num-cpus=1", "--block"]
    command += ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000", "--disable-usage-stats"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all of its descendants, as the loss of a machine does."""
    for pid in descendants(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def one_node() -> dict[str, Any]:
    """Serve with a cluster of this machine, and end it while streams are on their way."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        server = Server("--cluster", "local", "--replicas", "2", environment=os.environ | {"TMPDIR": folder})
        seen: dict[str, Any] = {
            "status": [server.send("GET", path)[0] for path in ("/health", "/ready", "/nowhere")],
            "texts": [server.text("Tom had"), server.text("The red key")],
            "up": sorted(server.numbers("nkw_replica_up").values()),
            "open": len(open_to_others()),
        }
        with_token = [path for path in Path(folder).glob("*/token") if path.stat().st_mode & 0o777 == 0o600]
        seen["token"] = len(with_token)
        streams = [server.stream(24) for _ in range(6)]
        server.process.send_signal(signal.SIGTERM)
        seen["streams"] = [last(stream) for stream in streams]
        seen["status after SIGTERM"] = server.process.wait()
        wait_until(lambda: not ray_processes())
        seen["files"] = [path.name for path in Path(folder).iterdir()]
    return seen


def killed_server() -> dict[str, Any]:
    """Kill a server with a cluster of its own: the cluster ends with it."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        server = Server("--cluster", "local", environment=os.environ | {"TMPDIR": folder})
        before = len(ray_processes())
        server.process.kill()
        server.process.wait()
        return {"before": before, "seconds": wait_until(lambda: not ray_processes())}


def two_nodes() -> dict[str, Any]:
    """Serve with two nodes, lose one of them, and get another; then two servers, of which the last ends the engines."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        token = Path(folder, "token")
        token.touch(0o600)
        token.write_text("5" * 64)
        settings = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        environment = os.environ | settings
        address = f"127.0.0.1:{PORT}"
        join = [f"--address={address}"]
        words = ("--cluster", address, "--replicas", "2")
        with node("--head", f"--port={PORT}", f"--temp-dir={folder}/ray", environment=environment):
            time.sleep(15)
            with node(*join, environment=environment) as second:
                server = Server(*words, environment=environment)
                seen: dict[str, Any] = {"hits": _hits(server)}
                streams = [server.stream(200) for _ in range(4)]
                kill(second)
                begun = time.monotonic()
                seen["streams"] = sorted(last(stream) for stream in streams)
                seen["streams' seconds"] = time.monotonic() - begun
            seen["text"] = server.text("Tom had")
            up = server.numbers("nkw_replica_up").keys()
            with node(*join, environment=environment):
                seen["seconds to the new replica"] = wait_until(
                    lambda: (
                        len(server.numbers("nkw_replica_up").keys() | up) > len(up)
                        and len(server.numbers("nkw_replica_up")) == 2
                    )
                )
                seen["new texts"] = [server.text("Tom had"), server.text("The red key")]
                other = Server(*words, environment=environment)
                seen["replicas of the other server"] = (
                    other.numbers("nkw_replica_up").keys() == server.numbers("nkw_replica_up").keys()
                )
                streams = [server.stream(24) for _ in range(2)]
                server.process.send_signal(signal.SIGTERM)
                seen["streams after SIGTERM"] = [last(stream) for stream in streams]
                seen["statuses"] = [server.process.wait()]
                seen["text of the other server"] = other.text("Tom had")
                replicas = len([name for name in ray_processes() if "ServeReplica" in name])
                seen["statuses"].append(other.end())
                left = [name for name in ray_processes() if "ServeReplica" in name]
                seen["replicas' processes"] = [replicas, len(left)]
    return seen


def refused() -> dict[str, Any]:
    """Start servers on a cluster that cannot serve what they ask for, beside one that serves."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(sys.path)}
        address, empty = f"127.0.0.1:{PORT}", Path(folder, "empty")
        empty.mkdir()
        refusals = {"options": ("--max-num-seqs", "3"), "folder": ("--model", str(empty))}
        seen: dict[str, Any] = {}
        with node("--head", f"--port={PORT}", f"--temp-dir={folder}/ray", environment=environment):
            time.sleep(15)
            with node(f"--address={address}", environment=environment):
                server = Server("--cluster", address, environment=environment)
                for name, words in refusals.items():
                    command = [
                        sys.executable,
                        "-m",
                        "nkw",
                        "serve",
                        "--port",
                        "0",
                        "--cluster",
                        address,
                        *words,
                    ]
                    ran = subprocess.run(
                        command, capture_output=True, text=True, env=environment, check=False
                    )
                    seen[name] = [ran.returncode, ran.stderr.splitlines()[-1]]
                seen["text"], seen["status"] = server.text("Tom had"), server.end()
    return seen


def _hits(server: Server) -> float:
    """Return the tokens of prompts that pages of replicas had, when tales were asked for twice in other orders."""
    for tale in TALES:
        server.text(tale)
    before = sum(server.numbers("nkw_prefix_cache_hits_total").values())
    for tale in reversed(TALES):
        server.text(tale + "The end.")
    return sum(server.numbers("nkw_prefix_cache_hits_total").values()) - before


if __name__ == "__main__":
    scenes = {scene.__name__: scene for scene in (one_node, killed_server, two_nodes, refused)}
    print(json.dumps(scenes[sys.argv[1]]()))
