"""The commands of README's section on the server answer what the engine computes, word for word but for the port."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model import LLM, SamplingParams
from model.commands.serve.arguments import OPTIONS
from tests.serve.conftest import Served

pytest.importorskip("openai", reason="openai is an extra of development (dev)")

ROOT = Path(__file__).resolve().parents[2]
SERVING = ROOT / "docs" / "model" / "serving.md"


def section(page: str, heading: str) -> str:
    """Return the text below a heading of the second level."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def block(language: str, server: Served) -> str:
    """Return the listing of a language that names a server, with this server's port."""
    listings = re.findall(rf"```{language}\n(.*?)```", section("README.md", "A server"), re.DOTALL)
    (listing,) = (listing for listing in listings if "127.0.0.1:8000" in listing)
    return str(listing).replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")


def printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return the texts of the engine alone for both examples."""
    outputs = LLM().generate(
        ["Once upon a time", "Tom had"], SamplingParams(max_tokens=32, seed=0), use_tqdm=False
    )
    return [output.outputs[0].text for output in outputs]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_of_readme(server: Served, texts: list[str]) -> None:
    answer, _, metrics = printed("sh", "-c", block("sh", server)).partition("# HELP")
    assert json.loads(answer)["choices"][0]["text"] == texts[0]
    assert "nkw_generation_tokens_total" in metrics


@pytest.mark.slow
def test_openai_client_of_readme(server: Served, texts: list[str]) -> None:
    assert printed(sys.executable, "-c", block("python", server)) == texts[1]


def test_page_on_serving_names_every_option() -> None:
    options = {option.name for option in OPTIONS if option.name.startswith("-")}
    assert "--replicas" in options
    assert options <= set(re.findall(r"--[\w-]+", SERVING.read_text(encoding="utf-8")))
