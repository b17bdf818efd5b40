"""Serves one completion and prints the project's files in the order in which the request enters them, as JSON."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tests.serve.conftest import MODEL, serving

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(f"{ROOT}/{package}/" for package in ("model", "nki_kernels", "simulate"))


def main() -> None:
    """Record calls of functions in all threads of the server, from the request to its answer."""
    entered: dict[str, None] = {}
    recording = False

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(PACKAGES) and code.co_name != "<module>"
        if recording and event == "call" and is_ours:
            entered.setdefault(code.co_filename)

    threading.setprofile(profile)
    with serving("--max-num-seqs", "2", "--max-num-batched-tokens", "64") as server:
        prompt = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2, "seed": 1}
        recording = True
        response, _ = server.send("POST", "/v1/completions", json.dumps(prompt).encode())
        recording = False
        assert response.status == 200
    json.dump([Path(name).relative_to(ROOT).as_posix() for name in entered], sys.stdout)


if __name__ == "__main__":
    main()
