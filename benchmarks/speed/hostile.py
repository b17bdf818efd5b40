"""Hostile clients next to normal ones: slowest time between tokens of eight streams, with and without an attack.

python -m benchmarks.speed.hostile [SECONDS]    with SECONDS: attack for that long, and print the server's memory
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.speed.measure import Row
from model.loading.shipped import PRETRAINED

STREAMS, TOKENS, ROUNDS = 8, 200, 3
ALLOWED_RATIO = 5.0
_ABANDONED, _TEXT_BYTES, _ENTRIES = 60, 10**6, 24
_TEMPLATE = (
    "{% if messages[0].content == 'loop' %}{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}"
)


@dataclass
class Streams:
    """Measurements of streams: times between tokens and to the first token in seconds.

    Streams without all their tokens.
    """

    gaps: list[float] = field(default_factory=list)
    lost: int = 0
    first_token: list[float] = field(default_factory=list)


def rows() -> Iterator[Row]:
    """Yield the slowest and the median time between tokens under attack, with the ratio to the time without.

    Rounds with and without hostile clients alternate.
    """
    with running_server() as server:
        server.read_streams()
        alone, disturbed = Streams(), Streams()
        for _ in range(ROUNDS):
            server.read_streams(alone)
            with server.attacked():
                server.read_streams(disturbed)
    assert alone.lost == disturbed.lost == 0, "a stream lost tokens"
    work = f"server: slowest time between tokens of {STREAMS} streams beside hostile clients"
    slowest, reference = max(disturbed.gaps), max(alone.gaps)
    yield Row(work, "the same without hostile clients", 1e3 * slowest, "ms", slowest / reference)
    work = f"server: median time between tokens of {STREAMS} streams beside hostile clients"
    median, reference = (sorted(streams.gaps)[len(streams.gaps) // 2] for streams in (disturbed, alone))
    yield Row(work, "the same without hostile clients", 1e3 * median, "ms", median / reference)


class HostileServer:
    """A running server of the default model, with a chat template that loops for some messages."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self._address = address
        self.refused: dict[int, int] = {}
        """Answers to hostile requests by status."""

    @property
    def memory_mib(self) -> float:
        """Resident memory of the server's process and of the processes that it started, in MiB."""
        pids = {self._process.pid}
        for status in Path("/proc").glob("[0-9]*/status"):
            with suppress(OSError):
                fields = dict(
                    line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line
                )
                if int(fields["PPid"]) in pids:
                    pids.add(int(status.parent.name))
        total = 0
        for pid in pids:
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                total += int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
        return total / 1024

    def read_streams(self, streams: Streams | None = None) -> Streams:
        """Read STREAMS streams at once to their end, add their measurements to `streams`, and return it.

        Without an argument the measurements are added to a new object.
        """
        result = Streams() if streams is None else streams
        threads = [
            threading.Thread(target=self._read_stream, args=(index, result)) for index in range(STREAMS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return result

    @contextmanager
    def attacked(self) -> Iterator[None]:
        """Attack the server from two threads during the block."""
        is_over = threading.Event()

        def attack() -> None:
            while not is_over.is_set():
                self._abandon()
                for path, body in _hostile_requests():
                    self._refused(path, body)

        threads = [threading.Thread(target=attack) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def _read_stream(self, index: int, streams: Streams) -> None:
        """Read stream `index` to its end and add its measurements."""
        request = {
            "model": "folder",
            "prompt": [3 + index, *range(5, 20)],
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "logprobs": 0,  # so that every token is an event
        }
        connection = http.client.HTTPConnection(self._address)
        begun = last = time.perf_counter()
        connection.request(
            "POST", "/v1/completions", json.dumps(request), {"content-type": "application/json"}
        )
        count = 0
        for line in connection.getresponse():
            if b'"logprobs":{' in line:
                now = time.perf_counter()
                (streams.gaps if count else streams.first_token).append(now - last if count else now - begun)
                last, count = now, count + len(json.loads(line[6:])["choices"][0]["logprobs"]["tokens"])
        connection.close()
        streams.lost += count != TOKENS

    def _abandon(self) -> None:
        """Send tokenizations of long texts and close each connection before its answer."""
        host, _, port = self._address.partition(":")
        body = json.dumps({"prompt": "long " * (_TEXT_BYTES // 5)}).encode()
        head = f"POST /tokenize HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        for _ in range(_ABANDONED):
            with suppress(OSError), socket.create_connection((host, int(port))) as connection:
                connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def _refused(self, path: str, body: dict[str, Any]) -> None:
        """Send a request and count its answer by status; a connection that breaks is not counted."""
        connection = http.client.HTTPConnection(self._address)
        with suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            status = connection.getresponse().status
            self.refused[status] = self.refused.get(status, 0) + 1
        connection.close()


def _hostile_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, body) of a request whose grammar explodes, and of one for which the chat template loops."""
    names = ({"type": "string", "pattern": f"a{index}"} for index in range(_ENTRIES))
    schema = {"allOf": [{"anyOf": [name, {"type": "integer"}]} for name in names]}
    yield "/v1/completions", {"model": "folder", "prompt": "Tom", "structured_outputs": {"json": schema}}
    messages = [{"role": "user", "content": "loop"}]
    yield "/v1/chat/completions", {"model": "folder", "messages": messages}


@contextmanager
def running_server() -> Iterator[HostileServer]:
    """Start `nkw serve` in its own process for the block, and yield the server."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "folder"
        shutil.copytree(PRETRAINED, folder)
        (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
        words = ["serve", "--model", str(folder), "--port", "0", "--log-level", "error"]
        process = subprocess.Popen([sys.executable, "-m", "nkw", *words], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield HostileServer(process, process.stdout.readline().removeprefix("http://").partition("/")[0])
        finally:
            process.terminate()
            process.communicate()


@dataclass(frozen=True)
class Round:
    """Measurements of one round of streams, and the server's state after it.

    seconds: start of the round since the attack began. refused: answers to hostile requests by status, so far.
    """

    seconds: float
    streams: Streams
    memory_mib: float
    refused: dict[int, int]


def soak(seconds: float) -> Iterator[Round]:
    """Attack a server and yield rounds of streams until `seconds` have passed."""
    begun = time.monotonic()
    with running_server() as server:
        server.read_streams()
        with server.attacked():
            while (passed := time.monotonic() - begun) < seconds:
                streams = server.read_streams()
                yield Round(passed, streams, server.memory_mib, dict(server.refused))


def main(seconds: float) -> None:
    """Print the rounds of an attack that lasts `seconds`."""
    for done in soak(seconds):
        slowest, lost = 1e3 * max(done.streams.gaps), done.streams.lost
        print(
            f"{done.seconds:6.0f} s  {STREAMS * TOKENS} tokens, {lost} streams cut, slowest {slowest:.0f} ms "
            f"between tokens, memory {done.memory_mib:.0f} MiB, refused {done.refused}",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(float(sys.argv[1]))
    else:
        for row in rows():
            print(row)
