"""Findings of the detectors on kernels that are known to work on the chip, each with the reason why it stands."""

from __future__ import annotations

from typing import Any, NamedTuple


class Argued(NamedTuple):
    """An accepted finding: its code, words of its message, part of the kernel's path, and why it is harmless."""

    code: str
    words: str
    kernel: str
    reason: str


ARGUED = (
    Argued(
        "NKW-INPUT-UNUSED",
        "is neither read nor written",
        "",
        "An entry point has the parameters of all its variants (scales, masks, a placeholder that gives a shape). The "
        "test passes all of them, and the tested variant reads fewer.",
    ),
    Argued(
        "NKW-INPUT-WRITTEN",
        "is written and not returned",
        "experimental/",
        "The kernel updates caches and scratch tensors of its caller in place, and its test compares them as "
        "arguments. A caller on the device has to alias them.",
    ),
    Argued(
        "NKW-FP8-OVERFLOW",
        "results overflow",
        "core/qkv/qkv_cte",
        "The kernel casts to fp8 first and clips to the largest finite value in the next instruction, which replaces "
        "the infinities by it.",
    ),
    Argued(
        "NKW-PSUM-INIT",
        "accumulates onto",
        "",
        "Backward attention and depthwise convolution clear PSUM with memset before they accumulate. The reference "
        "calls that undefined before gen4; the finding stands, as the advice it is.",
    ),
    Argued(
        "NKW-SCATTER-TWICE",
        "are written more than once",
        "moe/",
        "Tokens that pad a block are scattered to the one row beyond the last, which nobody reads.",
    ),
    Argued(
        "NKW-OFFSET-COMPUTED",
        "is computed in a device loop",
        "core/moe/moe_cte",
        "The block's number is counted up in the loop and is the offset of its token indices. The warning rests on a "
        "user report about larger graphs; the vendor's kernel runs as a graph of its own.",
    ),
    Argued(
        "NKW-RACE-BARRIER",
        "the barriers between the two accesses name other tensors",
        "experimental/moe/bwd",
        "Each core clears a part of the gradients of the biases that the other adds to; between lie the barriers of "
        "every step, which name the tensors of the step.",
    ),
    Argued(
        "NKW-AFFINE-CARRIED",
        "of an nl.affine_range both write",
        "core/qkv/qkv_cte",
        "The kernel rotates a few tiles by hand; the compiler orders what iterations do to one tile, so the warning is "
        "about overlap that is lost.",
    ),
    Argued(
        "NKW-DMA-TRANSPOSE-STRIDE",
        "bytes apart",
        "",
        "Weights of a norm and indices of tokens are transposed into rows of 8 bytes. Users report that the compiler "
        "refuses rows that are no multiple of 32 bytes apart; the vendor's kernels show that small ones compile.",
    ),
    Argued(
        "NKW-RESULT-UNUSED",
        "nothing reads expert_affinities_topk_sb",
        "core/",
        "The kernel scales the affinities of the chosen experts in every variant; some variants return others.",
    ),
    Argued(
        "NKW-OUTPUT-INPUT",
        "returns its input dummy_out",
        "core/utils/tensor_view",
        "The kernel of the test compares views while it is specialised, and has nothing else to return.",
    ),
    Argued(
        "NKW-RACE",
        "both cores write the same values",
        "",
        "With two physical cores the library computes some results on both and stores both, which is a warning: it "
        "costs a transfer, and whoever writes last leaves the same bytes.",
    ),
)


def argument(row: Any, finding: str) -> str:
    """Return why a finding on a row's kernel is accepted; empty if the table does not accept it."""
    for entry in ARGUED:
        if f"[{entry.code}]" in finding and entry.words in finding and entry.kernel in row.kernel:
            return entry.reason
    return ""
