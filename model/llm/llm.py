"""`LLM`: a model folder and its engine, with the arguments, methods and results of vLLM's class `LLM`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, count
from numbers import Integral
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from model.config import Fields
from model.engine import RequestOutput, SamplingParams
from model.engine.checks import check_integer, check_sequence, check_text, check_token_ids, display_value
from model.engine.inputs import ModelInputs
from model.errors import ModelError
from model.families import SPEECH, TEXT, load_config
from model.llm.engine_args import EngineArgs, make_engine
from model.llm.vllm_options import translate_arguments
from model.loading.chat import ChatTemplate, Message
from model.loading.shipped import PRETRAINED, find_model_path
from model.loading.tokenizer import Tokenizer
from model.runners.window import WITHOUT_AUDIO
from model.speech.recording import compute_window_spectrum
from nkw.terminal import progress

if TYPE_CHECKING:
    from model.llm.prediction import StepPredictor, StepsPrediction

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`, and with an optional `cache_salt`.

A mapping for a speech model has `multi_modal_data` with `audio`: a pair of samples and their rate in Hz. Its prompt has
all first tokens, such as "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>".
"""

_NAMES = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")


class LLM:
    """Model that continues many prompts at once.

    The keywords are the fields of `EngineArgs` and those of vLLM; `model.llm.vllm_options` says what vLLM's mean here.
    Several threads may call it; a lock serialises their use of the engine.
    """

    def __init__(self, model: str | Path = PRETRAINED, **arguments: Any) -> None:
        """Load a model folder and create its engine.

        Args:
            model: A Hugging Face folder, or the name of a shipped model.
            arguments: Fields of `EngineArgs`, and keywords of vLLM.

        Raises:
            ModelError: A keyword is unknown or refused, or the folder, the arguments or the memory do not allow the
                engine.
        """
        args = EngineArgs(model, **translate_arguments(arguments, EngineArgs.__dataclass_fields__))
        self._args = replace(args, model=find_model_path(args.model))
        self.engine = make_engine(self._args)
        self._tokenizer = Tokenizer(self._args.model, self.engine.limits.vocab_size)
        self._numbers = count()
        self._lock = RLock()

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the folder."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters for prompts without any.

        They are the defaults of SamplingParams, replaced by the values in the folder's generation_config.json.

        Raises:
            ModelError: generation_config.json has a wrong value.
        """
        fields = Fields(Path(self._args.model) / "generation_config.json", optional=True)
        numbers = ("temperature", "top_p", "min_p", "repetition_penalty")
        params: dict[str, Any] = {
            name: fields.number(name, positive=False) for name in numbers if name in fields
        }
        if fields.get("top_k", 0):  # transformers writes 0 for all
            params["top_k"] = fields.count("top_k")
        if "max_new_tokens" in fields:
            params["max_tokens"] = fields.count("max_new_tokens")
        return SamplingParams(**params)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Compute continuations of prompts together, and return the outputs in the order of the prompts.

        A prompt that could not be computed has the finish reason "error", and causes a RuntimeWarning.

        Args:
            prompts: one prompt or several ones; see `Prompt`.
            sampling_params: parameters of all prompts, a sequence with the parameters of each, or None for
                `get_default_sampling_params`.
            use_tqdm: show the progress on a terminal.
            priority: a priority for each prompt; lower ones are scheduled first.

        Raises:
            ModelError: before the first step for an invalid prompt or parameter; after the last step if all prompts
                failed.
            EngineFailed: the engine failed.
        """
        prompt_list = _list_prompts(prompts)
        params = self._list_params(sampling_params, len(prompt_list))
        if priority is None:
            priorities = [0] * len(prompt_list)
        else:
            numbers = check_sequence("priority", priority, "numbers")
            priorities = [check_integer("a priority", number) for number in numbers]
        if len(priorities) != len(prompt_list):
            raise ModelError(
                f"{len(priorities)} priorities for {len(prompt_list)} prompts; give one for each prompt"
            )
        with self._lock:
            return self._generate(prompt_list, params, priorities, use_tqdm)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        shows: bool,
    ) -> list[RequestOutput]:
        """Submit a request for each prompt, run all to their ends, and return the outputs.

        After an exception, unfinished requests are cancelled.
        """
        requests: list[RequestOutput] = []
        try:
            for prompt, prompt_params, priority in zip(prompts, params, priorities):
                inputs = self._read_window(prompt)
                text, ids = self._encode(prompt, special_tokens=inputs is None)
                salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
                id = str(next(self._numbers))
                requests.append(self.engine.submit(id, ids, prompt_params, text, priority, salt, inputs))
            self._run(requests, shows)
        finally:
            for request in requests:
                self.engine.cancel(request.request_id)
        return requests

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Remove all pages from the prefix cache, and return whether it succeeded.

        Args:
            reset_running_requests: preempt running requests, whose pages prevent the reset otherwise.
        """
        with self._lock:
            return self.engine.scheduler.reset_prefix_cache(reset_running_requests)

    def predict_steps(self) -> StepsPrediction:
        """Return the predicted time of all steps so far on `target`, whose ranks have `lnc` physical cores.

        Each shape of a step is predicted once, by dry runs of its kernels.

        Raises:
            ModelError: The target does not have the number of physical cores in NEURON_LOGICAL_NC_CONFIG.
        """
        with self._lock:
            return self._step_predictor.add_up(self.engine.use.steps)

    @cached_property
    def _step_predictor(self) -> StepPredictor:
        from model.llm.prediction import Deployment, StepPredictor  # loads the simulator

        return StepPredictor(Deployment.from_engine(self.engine, self._args))

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
        """Return the answers to one conversation or several ones, in order, by `generate` with a chat template.

        Args:
            messages: the messages of a conversation, or a list of conversations.
            sampling_params: as for `generate`.
            use_tqdm: show the progress on a terminal.
            chat_template: the template; None for the folder's template.
            add_generation_prompt: a variable of the template: whether the start of an answer follows the messages.
            tools: a variable of the template: the tools that the answer may call.
            chat_template_kwargs: further variables of the template.

        Raises:
            ModelError: a message is no mapping, the template cannot be rendered, or `generate` raises it.
            EngineFailed: the engine failed.
        """
        template = ChatTemplate(self._args.model, chat_template)
        variables = {
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        texts = [template.render(conversation, **variables) for conversation in _list_conversations(messages)]
        prompts = [
            {"prompt": text, "prompt_token_ids": self._tokenizer.encode(text, special_tokens=False)}
            for text in texts
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _run(self, requests: Sequence[RequestOutput], shows: bool) -> None:
        """Run steps until all requests have finished, and warn of failed requests.

        Args:
            requests: outputs of submitted requests.
            shows: show the progress on a terminal.

        Raises:
            ModelError: all requests failed.
        """
        for request in progress(requests, "prompts") if shows else requests:
            while not request.finished:
                self.engine.step()
        errors = {
            request.request_id: str(completion.stop_reason)
            for request in requests
            for completion in request.outputs
            if completion.finish_reason == "error"
        }
        if errors and len(errors) == len(requests):
            raise ModelError(next(iter(errors.values()))) from requests[0].fault
        if errors:
            warnings.warn(
                f"{len(errors)} of {len(requests)} prompts failed and have the finish reason error; the last one: "
                f"{[*errors.values()][-1]}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _list_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, prompts: int
    ) -> Sequence[SamplingParams]:
        """Return one SamplingParams for each of `prompts` prompts.

        Raises:
            ModelError: The value has another type, or its length is not the number of prompts.
        """
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * prompts
        params_list = check_sequence("sampling_params", params, "SamplingParams")
        for prompt_params in params_list:
            if not isinstance(prompt_params, SamplingParams):
                raise ModelError(
                    f"sampling_params has {display_value(prompt_params)}; it must have SamplingParams"
                )
        if len(params_list) != prompts:
            raise ModelError(
                f"{len(params_list)} sampling_params for {prompts} prompts; give one for each prompt, or one for all"
            )
        return params_list

    def _read_window(self, prompt: Prompt) -> ModelInputs | None:
        """Return the speech window of a prompt as a spectrum; None for a prompt without multi_modal_data.

        Raises:
            ModelError: multi_modal_data is invalid, or the model takes no audio.
        """
        data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        if data is None:
            return None
        if not isinstance(data, Mapping) or [*data] != ["audio"]:
            raise ModelError(
                f"multi_modal_data is {display_value(data)}; it must be a mapping such as {{'audio': (samples, 16000)}}"
            )
        audio, shape = data["audio"], load_config(find_model_path(self._args.model), TEXT, SPEECH).spectrum
        if not isinstance(audio, Sequence) or len(audio) != 2:
            raise ModelError(
                f"audio is of type {type(audio).__name__}; it must be a pair: samples, and their rate in Hz"
            )
        if shape is None:
            raise ModelError(WITHOUT_AUDIO)
        samples, rate = audio
        return ModelInputs(compute_window_spectrum(samples, rate, shape))

    def _encode(self, prompt: Prompt, special_tokens: bool = True) -> tuple[str | None, Sequence[int]]:
        """Return (text, token ids) of a prompt; the text is None for a prompt of token ids alone.

        Args:
            prompt: The prompt.
            special_tokens: Whether the tokenizer adds special tokens to a text in a mapping.

        Raises:
            ModelError: The prompt has another form.
        """
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


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a text, a mapping or a list of token ids becomes a list with this single prompt.

    Raises:
        ModelError: The value is none of these and no list.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    sequence = check_sequence("the prompt", prompts, "token ids, or of prompts")
    return [sequence] if sequence and isinstance(sequence[0], Integral) else list(sequence)


def _list_conversations(messages: Any) -> list[Sequence[Message]]:
    """Return a list of conversations; a list of messages becomes a list with this single conversation.

    Raises:
        ModelError: A conversation is no list, or a message is no mapping.
    """
    sequence = check_sequence("messages", messages, "mappings")
    if not sequence or isinstance(sequence[0], Mapping):
        sequence = [sequence]
    conversations = [check_sequence("a conversation", messages, "mappings") for messages in sequence]
    for message in chain.from_iterable(conversations):
        if not isinstance(message, Mapping):
            raise ModelError(
                f"a message is {display_value(message)}; it must be a mapping such as {{'role': 'user'}}"
            )
    return conversations
