"""The input arrays of a step on pages: ids, positions, block tables, slots, logits indices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from model.engine import Chunk, Request
from model.engine.padded_batch import PaddedBatch
from model.layers.launch import Phase, StepShape
from model.runners.step_inputs import StepInputs
from model.state import BlockTable, PagePool

FLOAT32 = np.dtype(np.float32)
PADDING_PAGE = 8
INPUTS = StepInputs(context=64, pools=[PagePool(PADDING_PAGE, 4)], slots=None, encoder_positions=0)
DECODE = StepShape(Phase.decode, 1, 1, 16, 64, 1, FLOAT32, FLOAT32, pages=PADDING_PAGE + 1, block_size=4)
PROMPTS = replace(DECODE, phase=Phase.prefill, tokens=8, sequences=2, prefix=4)


def prompt() -> Chunk:
    """Return a chunk of three tokens after four cached tokens, in the pages 5 and 2."""
    request = Request("prompt", [11, 12, 13, 14, 15, 16, 17], 1, tables=[BlockTable(0, [5, 2])])
    return Chunk(request, 4, 3, True)


def listed(arrays: dict[str, np.ndarray]) -> dict[str, list[int]]:
    return {name: array.ravel().tolist() for name, array in arrays.items()}


def test_padding_is_written_to_the_page_that_nobody_reads() -> None:
    """Two sequences of four tokens, of which the second one is padding."""
    assert listed(INPUTS.build_arrays(PaddedBatch(PROMPTS, ((prompt(),),)))) == {
        "ids": [15, 16, 17, 0, 0, 0, 0, 0],
        "positions": [4, 5, 6, 7, 0, 1, 2, 3],
        "logits_indices": [2, 4],
        "slot_mapping": [8, 9, 10, 35, 32, 33, 34, 35],
        "block_tables": [5, 2, 8, 8, 8, 8, 8, 8],
    }


def test_rows_of_sequences_that_decode_come_before_those_of_prompts() -> None:
    request = Request("decodes", [21, 22, 23], 4, tables=[BlockTable(0, [7])])
    decoding = PaddedBatch(DECODE, ((Chunk(request, 2, 1, True),),))
    step = replace(PROMPTS, tokens=9, decoding=DECODE)
    arrays = listed(INPUTS.build_arrays(PaddedBatch(step, ((prompt(),),), decoding)))
    assert arrays["ids"][:4] == [23, 15, 16, 17]
    assert arrays["positions"][:4] == [2, 4, 5, 6]
    assert arrays["logits_indices"] == [0, 3, 5]
    assert arrays["slot_mapping"][:4] == [30, 8, 9, 10]
    assert (arrays["block_tables"], arrays["prompt_tables"][:4]) == ([7, 8, 8, 8], [5, 2, 8, 8])
