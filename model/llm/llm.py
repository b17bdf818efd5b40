"""`LLM`: a model folder and its engine, with the arguments, methods and results of vLLM's class of that name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from numbers import Integral
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from model.config import Fields
from model.engine import RequestOutput, SamplingParams
from model.engine.checks import check_integer, check_sequence, check_text, check_token_ids, display_value
from model.engine.inputs import ModelInputs
from model.errors import ModelError
from model.families import SPEECH, TEXT, load_config
from model.llm.engine_args import EngineArgs, make_engine
from model.loading.chat import ChatTemplate, Message
from model.loading.shipped import PRETRAINED, model_path
from model.loading.tokenizer import Tokenizer
from model.runners.window import WITHOUT_AUDIO
from model.speech.recording import window_of_samples
from nkw.terminal import progress

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping: one of them as `prompt` or `prompt_token_ids`, and a `cache_salt` if it has one.

To a speech model, a mapping brings `multi_modal_data`: `audio`, samples and how many of them a second has. Its text
is then the whole beginning, such as "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>".
"""

_NAMES = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")


class LLM:
    """A model that answers many prompts at once. The keywords are the fields of `EngineArgs`.

    Several threads may call it: a lock lets one call after the other use the engine.
    """

    def __init__(self, model: str | Path = PRETRAINED, **arguments: Any) -> None:
        """Load a model folder; ModelError for an argument that is not known or cannot be."""
        unknown = [name for name in arguments if name not in EngineArgs.__dataclass_fields__]
        if unknown:
            known = ", ".join(EngineArgs.__dataclass_fields__)
            raise ModelError(f"LLM takes no {unknown[0]}; it takes {known}")
        self._args = EngineArgs(model, **arguments)
        folder = model_path(model)
        self._args = replace(self._args, model=folder)
        self.engine = make_engine(self._args)
        self._tokenizer = Tokenizer(folder, self.engine.limits.vocab_size)
        self._numbers = count()
        self._lock = RLock()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds for prompts without parameters: the defaults, but for what generation_config.json says."""
        fields = Fields(Path(self._args.model) / "generation_config.json", optional=True)
        numbers = ("temperature", "top_p", "min_p", "repetition_penalty")
        given: dict[str, Any] = {
            name: fields.number(name, positive=False) for name in numbers if name in fields
        }
        if fields.get("top_k", 0):  # transformers writes 0 for all
            given["top_k"] = fields.count("top_k")
        if "max_new_tokens" in fields:
            given["max_tokens"] = fields.count("max_new_tokens")
        return SamplingParams(**given)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The continuations of one prompt or several, in their order, computed together.

        One `sampling_params` holds for all prompts, a sequence has one for each. `use_tqdm` shows the progress on a
        terminal. A prompt that could not be computed has the finish reason error and a warning; the others have their
        continuations. Raises ModelError, before anything is computed, for a prompt or parameters that cannot be, and
        after the last step where every prompt has failed; EngineFailed where the engine has failed.
        """
        several = _several(prompts)
        params = self._params(sampling_params, len(several))
        ranks = [0] * len(several)
        if priority is not None:
            ranks = [
                check_integer("a priority", rank) for rank in check_sequence("priority", priority, "numbers")
            ]
        if len(ranks) != len(several):
            raise ModelError(f"{len(ranks)} priorities for {len(several)} prompts")
        with self._lock:
            return self._generate(several, params, ranks, use_tqdm)

    def _generate(
        self, several: Sequence[Prompt], params: Sequence[SamplingParams], ranks: Sequence[int], shows: bool
    ) -> list[RequestOutput]:
        submitted: list[RequestOutput] = []
        try:
            for prompt, own, rank in zip(several, params, ranks):
                inputs = self._read_window(prompt)
                text, ids = self._encoded(prompt, special_tokens=inputs is None)
                salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
                id = str(next(self._numbers))
                submitted.append(self.engine.submit(id, ids, own, text, rank, salt, inputs))
            self._run(submitted, shows)
        finally:
            for each in submitted:
                self.engine.cancel(each.request_id)
        return submitted

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget the prompts that pages hold; False where requests hold pages, unless these are computed again."""
        with self._lock:
            return self.engine.scheduler.reset_prefix_cache(reset_running_requests)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one conversation or several, through a chat template: the folder's, or the one given.

        The template reads whether an answer is to begin, the `tools`, and the names of `chat_template_kwargs`.
        """
        template = ChatTemplate(self._args.model, chat_template)
        variables = {
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        several = _conversations(messages)
        texts = [template.render(each, **variables) for each in several]
        ids = [self._tokenizer.encode(text, special_tokens=False) for text in texts]
        prompts = [{"prompt": text, "prompt_token_ids": own} for text, own in zip(texts, ids)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _run(self, submitted: Sequence[RequestOutput], shows: bool) -> None:
        """Step until all have ended. Raises ModelError where all have failed; warns where some have."""
        left = iter(progress(submitted, "prompts")) if shows else iter(submitted)
        for each in left:
            while not each.finished:
                self.engine.step()
        failed = {
            output.request_id: str(continuation.stop_reason)
            for output in submitted
            for continuation in output.outputs
            if continuation.finish_reason == "error"
        }
        if failed and len(failed) == len(submitted):
            raise ModelError(next(iter(failed.values()))) from submitted[0].fault
        if failed:
            warnings.warn(
                f"{len(failed)} of {len(submitted)} prompts failed and have the finish reason error; the last one: "
                f"{[*failed.values()][-1]}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, prompts: int
    ) -> Sequence[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.get_default_sampling_params()] * prompts
        several = check_sequence("sampling_params", given, "SamplingParams")
        for params in several:
            if not isinstance(params, SamplingParams):
                raise ModelError(f"sampling_params has {display_value(params)}; it must have SamplingParams")
        if len(several) != prompts:
            raise ModelError(f"{len(several)} sampling_params for {prompts} prompts")
        return several

    def _read_window(self, prompt: Prompt) -> ModelInputs | None:
        """The window of speech that comes with a prompt."""
        data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        if data is None:
            return None
        if not isinstance(data, Mapping) or [*data] != ["audio"]:
            raise ModelError("multi_modal_data is a mapping with audio: samples, and how many a second has")
        audio, shape = data["audio"], load_config(model_path(self._args.model), TEXT, SPEECH).spectrum
        if not isinstance(audio, Sequence) or len(audio) != 2:
            raise ModelError("audio is a pair: samples, and how many of them a second has")
        if shape is None:
            raise ModelError(WITHOUT_AUDIO)
        samples, rate = audio
        return ModelInputs(window_of_samples(samples, rate, shape))

    def _encoded(self, prompt: Prompt, special_tokens: bool = True) -> tuple[str | None, Sequence[int]]:
        """The text of a prompt, where it is known, and its ids."""
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            unknown = [name for name in prompt if name not in _NAMES]
            if unknown:
                raise ModelError(f"a prompt takes no {unknown[0]}; it takes {', '.join(_NAMES)}")
            text = prompt.get("prompt")
            if text is not None:
                check_text("the prompt", text)
            if prompt.get("cache_salt") is not None:
                check_text("cache_salt", prompt["cache_salt"])
            if prompt.get("prompt_token_ids") is not None:
                return text, check_token_ids("prompt_token_ids", prompt["prompt_token_ids"])
            if text is None:
                raise ModelError("a prompt given as a mapping needs prompt or prompt_token_ids")
            return text, self._tokenizer.encode(text, special_tokens)
        return None, check_token_ids("the prompt", prompt)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a text, a mapping and a list of token ids are one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    several = check_sequence("the prompt", prompts, "token ids, or of prompts")
    return [several] if several and isinstance(several[0], Integral) else list(several)


def _conversations(messages: Any) -> list[Sequence[Message]]:
    """Return a list of conversations; a list of messages is one conversation."""
    several = check_sequence("messages", messages, "mappings")
    if not several or isinstance(several[0], Mapping):
        several = [several]
    conversations = [check_sequence("a conversation", messages, "mappings") for messages in several]
    for message in (message for messages in conversations for message in messages):
        if not isinstance(message, Mapping):
            raise ModelError(
                f"a message is {display_value(message)}; it must be a mapping such as {{'role': 'user'}}"
            )
    return conversations
