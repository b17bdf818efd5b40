"""Runs the program of a trip through the code and prints the project's files in the order of their first call, as JSON.

python -m tests.contract.code_trips instruction|token
"""

from __future__ import annotations

import json
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "instructions" / "examples" / "tensor_tensor.py"
PACKAGES = tuple(f"{ROOT}/{package}/" for package in ("model", "nki_kernels", "simulate"))


def prepare_instruction() -> Callable[[], object]:
    """Import what the program of an instruction needs; return the program."""
    import simulate

    simulate.install()
    return lambda: runpy.run_path(str(EXAMPLE))


def prepare_token() -> Callable[[], object]:
    """Load the default model; return the program that computes two tokens."""
    from model import LLM, SamplingParams

    llm = LLM()
    sampling = SamplingParams(temperature=0, max_tokens=2)
    return lambda: llm.generate(["Once upon a time"], sampling, use_tqdm=False)


def record_files(program: Callable[[], object]) -> list[str]:
    """Run a program and return the files of the packages, relative to the root, in the order of their first call."""
    entered: dict[str, None] = {}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES) and code.co_name != "<module>":
            entered.setdefault(code.co_filename)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        program()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # the documented way to remove it
    return [Path(name).relative_to(ROOT).as_posix() for name in entered]


if __name__ == "__main__":
    json.dump(
        record_files({"instruction": prepare_instruction, "token": prepare_token}[sys.argv[1]]()), sys.stdout
    )
