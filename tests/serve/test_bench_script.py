"""The script of `nkw plan --bench-script`, run by bash against a server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from model.loading.shipped import PRETRAINED
from nkw.commands import main
from tests.serve.conftest import Served


@pytest.mark.slow
def test_the_script_of_a_plan_measures_a_server(server: Served, tmp_path: Path) -> None:
    path = tmp_path / "check.sh"
    words = "--tp", "1", "--lnc", "1", "--batch", "2", "--prompt", "8", "--generate", "2", "--sla", "ttft=10s"
    assert main(["plan", str(PRETRAINED), *words, "--bench-script", str(path)]) == 0
    script = path.read_text(encoding="utf-8")
    assert "--num-prompts 64 " in script
    path.write_text(script.replace("--num-prompts 64 ", "--num-prompts 3 "), encoding="utf-8")
    command = tmp_path / "nkw"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nkw "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "URL": server.url.removesuffix("/v1"),
    }
    done = subprocess.run(
        ["bash", str(path)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^(\S.*:) +([\d.]+) *$", done.stdout, re.MULTILINE))
    assert (rows["Successful requests:"], rows["Total generated tokens:"]) == ("3", "6")
    assert rows["Maximum request concurrency:"] == "2" and "Request goodput (req/s):" in rows
    assert {"Mean TTFT (ms):", "Mean TPOT (ms):", "Output token throughput (tok/s):"} <= rows.keys()
    for name in ("Mean TTFT (ms):", "Mean TPOT (ms):", "Output token throughput (tok/s):"):
        assert f"# {name} " in script
