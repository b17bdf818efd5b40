"""Docstrings of functions begin with a verb of a list, so that a reader learns first what a call does.

Properties and classes are described by nouns. The docstring of a rule is the sentence that a refusal prints.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("model", "nki_kernels", "nkw", "simulate", "tools")
VERBS = frozenset(
    """
    Accept Add Adjust Advance Allocate Answer Append Apply Arrive Ask Assign Attribute Await Begin Bind Block
    Bring Broadcast Build Bundle Cache Calibrate Call Cancel Carry Cast Change Check Choose Clean Clear Close
    Collect Combine Compare Compile Complete Compute Concatenate Continue Convert Convolve Copy Count Create
    Cut Decode Delete Deliver Derive Describe Disable Discard Divide Do Drain Draw Drop Encode End Enter
    Escape Estimate Exchange Exclude Execute Exit Extend Fail Fill Find Finish Fit Fold Follow Forget Format Free
    Fuse Gate Gather Generate Give Group Guard Halve Handle Hold Import Improve Index Insert Invert Issue
    Iterate Join Judge Keep Kill Launch Leave Let Limit List Load Log Lower Make Map Mark Measure Merge Move
    Multiply Normalise Note Observe Open Order Pack Pair Parse Pass Permute Place Plan Predict Preempt Prepare
    Print Profile Provide Put Quantise Queue Raise Read Rebuild Receive Recognise Record Reduce Refuse Register Release
    Remove Rename Reopen Repeat Replace Replay Report Request Require Resume Return Rewrite Rotate Round Route
    Run Sample Scale Schedule Search Seed Select Send Serve Set Share Shorten Show Skip Solve Split Spread
    Square Start Step Stop Store Submit Subtract Sum Summarize Swap Take Time Trace Transcribe Translate
    Transpose Trigger Try Turn Update Use View Wait Warn Weight Withdraw Write Yield Zero
    """.split()
)
NOUNS = ("property", "cached_property")
"""Decorators of functions that are read like attributes."""
SENTENCES = ("rule", "lint_rule")
"""Decorators of functions whose docstrings are sentences of refusals."""


def find_misses(source: str) -> list[tuple[str, str]]:
    """Return the (function, first word) of each docstring that begins with another word than a verb of the list."""
    misses = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        decorators = {
            ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list
        }
        docstring = ast.get_docstring(node)
        if docstring and not decorators & {*NOUNS, *SENTENCES}:
            word = docstring.split()[0].rstrip(",:")
            if word not in VERBS:
                misses.append((node.name, word))
    return misses


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_of_functions_begin_with_a_verb(folder: str) -> None:
    misses = {
        f"{path.relative_to(ROOT)}: {name}: {word}"
        for path in (ROOT / folder).rglob("*.py")
        for name, word in find_misses(path.read_text(encoding="utf-8"))
    }
    assert misses == set()


@pytest.mark.parametrize(
    ("source", "misses"),
    [
        ('def sort(x):\n    """Return x in ascending order."""', []),
        ('def sort(x):\n    """The elements of x in ascending order."""', [("sort", "The")]),
        ('async def sort(x):\n    """Sorts x."""', [("sort", "Sorts")]),
        ('@cached_property\ndef size(self):\n    """Number of pages."""', []),
        ('@rule("NKW-X", hint="y")\ndef dims(x):\n    """A tile has at most four dims."""', []),
        ('@lru_cache(None)\ndef dims(x):\n    """A tile\'s dims."""', [("dims", "A")]),
        ("def undocumented(x):\n    return x", []),
    ],
)
def test_what_a_miss_is(source: str, misses: list[tuple[str, str]]) -> None:
    assert find_misses(source) == misses
