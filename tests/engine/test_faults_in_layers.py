"""A step that raises behind any layer of a model with a marked request in its batch changes no token of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from model import LLM, SamplingParams
from model.engine import Batch, Request, RequestOutput
from model.engine.speculation import NO_ROWS, Rows
from model.errors import ModelError
from model.sampling import StepOutput
from tests.model.folders import byte_tokenizer, write_folder

SIZES: dict[str, Any] = dict(max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64, block_size=4)
LOOKUP = {"num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
MARK = 7


class Broken(Exception):
    """What a layer raises."""


class LayerFault:
    """Makes steps of an LLM raise behind `layer`, once a marked request has computed more than `position` tokens."""

    def __init__(self, llm: LLM) -> None:
        self.layer: int | None = None
        self.position = 0
        self.layers = 0
        self._raises = False
        model: Any = llm.engine._model
        self._step: Callable[[Batch, Rows], Mapping[Request, list[StepOutput]]] = model.step
        model.step, model._runner.network._progress = self.step, self.note_layer

    def step(self, batch: Batch, rows: Rows = NO_ROWS) -> Mapping[Request, list[StepOutput]]:
        """Compute a batch."""
        self._raises = any(
            request.tokens[1:2] == [MARK] and chunk.seq_len > self.position
            for request, chunk in batch.chunks.items()
        )
        return self._step(batch, rows)

    def note_layer(self, done: int, layers: int) -> None:
        """Raise behind the layer."""
        self.layers = layers
        if self._raises and done == self.layer:
            raise Broken(f"behind layer {done}")


def windowed(folder: Path) -> dict[str, Any]:
    changes = dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=6)
    return {"model": write_folder(folder, **changes)}


def recurrent(folder: Path, family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Write a model of transformers with a tokenizer of bytes."""
    pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    from tests.model.oracle import random_model
    from tests.model.tiny_families import COMMON

    random_model(family, {**COMMON, **fields, "vocab_size": 300}, seed=1).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return {"model": folder, "mamba_block_size": 8}


def mamba(folder: Path) -> dict[str, Any]:
    return recurrent(folder, "Mamba", dict(state_size=6, expand=3, time_step_rank=5))


def delta(folder: Path) -> dict[str, Any]:
    from tests.model.tiny_families import DELTA

    return recurrent(folder, "Qwen3Next", DELTA)


def shipped(**arguments: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"model": "stories", **arguments}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "contiguous": lambda folder: {"model": write_folder(folder)},
    "windowed": windowed,
    "drafts": lambda folder: {"model": write_folder(folder), "speculative_config": LOOKUP},
    "recurrent": mamba,
    "recurrent and attention": delta,
    "recurrent with drafts": lambda folder: {**mamba(folder), "speculative_config": LOOKUP},
    "draft model": shipped(speculative_config={"model": "stories", "num_speculative_tokens": 2}),
    "groups": shipped(model="stories-moe", expert_parallel_size=2),
    "groups with drafts": shipped(model="stories-moe", expert_parallel_size=2, speculative_config=LOOKUP),
}
DEEP = ("windowed", "recurrent", "recurrent and attention", "draft model", "groups", "groups with drafts")
RUNS = [
    pytest.param("contiguous", 1),
    *(pytest.param(name, 1, marks=pytest.mark.slow) for name in CASES if name not in ("contiguous", *DEEP)),
    *(pytest.param(name, 1, marks=pytest.mark.deep) for name in DEEP),
    pytest.param("groups", 3, marks=pytest.mark.slow),
]
"""Names of models, and how many layers lie from one that raises to the next."""


PARAMS = (
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, max_tokens=6, top_k=20, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=6, presence_penalty=0.5, ignore_eos=True),
)
PROMPTS = ([1, 20, 21, 22, 23, 24], [1, 30, 31, 30, 31, 30, 31, 30], [1, MARK, 20, 21], [*range(40, 61)])


def outputs_of(llm: LLM) -> list[RequestOutput]:
    """Return the outputs of four prompts, the third marked; no page is cached before or held after."""
    llm.reset_prefix_cache()
    outputs = [
        llm.engine.submit(str(number), prompt, params)
        for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS))
    ]
    while llm.engine.busy:
        llm.engine.step()
    assert llm.engine.scheduler.cache.free == llm.engine.scheduler.cache.count
    return outputs


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [output.token_ids for output in output.outputs]


@pytest.mark.parametrize(("name", "stride"), RUNS)
def test_a_fault_behind_every_layer_ends_the_marked_request_only(
    name: str, stride: int, tmp_path: Path
) -> None:
    """In its prompt, and while it decodes."""
    llm = LLM(**{**SIZES, **CASES[name](tmp_path / "model")})
    fault = LayerFault(llm)
    wanted = [tokens_of(output) for output in outputs_of(llm)]
    for layer in range(0, fault.layers + 1, stride):
        for position in (0, 6):
            fault.layer, fault.position = layer, position
            outputs = outputs_of(llm)
            marked = outputs.pop(2)
            assert marked.outputs[0].finish_reason == "error" and isinstance(marked.fault, Broken)
            assert len(marked.outputs[0].token_ids) <= (0 if position == 0 else 3)
            expected = [*wanted[:2], *wanted[3:]]
            assert [tokens_of(output) for output in outputs] == expected, (layer, position)
            assert llm.engine.failure is None


@pytest.mark.slow
def test_generate_warns_of_a_failed_prompt_and_raises_where_all_have_failed(tmp_path: Path) -> None:
    llm = LLM(**{**SIZES, **CASES["contiguous"](tmp_path / "model")})
    fault, prompts = LayerFault(llm), [PROMPTS[0], PROMPTS[2], PROMPTS[3]]
    wanted = [tokens_of(output) for output in llm.generate(prompts, PARAMS[0], use_tqdm=False)]
    fault.layer = 1
    with pytest.warns(RuntimeWarning, match="1 of 3 prompts failed .* Broken: behind layer 1"):
        outputs = llm.generate(prompts, PARAMS[0], use_tqdm=False)
    assert [tokens_of(output) for output in outputs[::2]] == wanted[::2]
    assert (outputs[1].outputs[0].finish_reason, type(outputs[1].fault)) == ("error", Broken)
    with pytest.raises(ModelError, match="a step of the request failed: Broken: behind layer 1") as failed:
        llm.generate(PROMPTS[2], PARAMS[0], use_tqdm=False)
    assert isinstance(failed.value.__cause__, Broken)
    assert tokens_of(llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)[0]) == wanted[0]
