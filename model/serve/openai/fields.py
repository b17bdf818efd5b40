"""Fields of requests that this server knows and does not compute, by object.

The table follows the types of openai-python 3.54, which OpenAI generates from its specification, and the protocols of
vLLM 0.32.0. A field that cannot change an answer is ignored, with one line in the log. A field that would change the
answer is refused with a sentence, unless its value asks for nothing. Every other field that an object does not declare
is unknown, and refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from model.serve.errors import ApiError
from model.serve.log import LOG


@dataclass(frozen=True)
class KnownField:
    """Field of a request that is known and not computed.

    Without a `refusal` it is ignored. With a `refusal` a request is refused, unless the field's value is in `neutral`.
    """

    refusal: str | None = None
    neutral: tuple[Any, ...] = ()


def _list_ignored(names: str) -> dict[str, KnownField]:
    return {name: KnownField() for name in names.split()}


def _list_off_by_default(names: str, refusal: str) -> dict[str, KnownField]:
    """Return the named fields, each refused with `refusal` unless its value is false, 0, "", [] or {}."""
    return {name: KnownField(refusal, (False, 0, "", [], {})) for name in names.split()}


_ACCOUNTING = _list_ignored(
    "metadata prompt_cache_key prompt_cache_retention prompt_cache_options safety_identifier service_tier store user "
    "request_id session_id moderation"
)
"""Fields that describe a request to OpenAI, and the names of requests, which have names of this server here."""
_MEDIA = _list_ignored("media_io_kwargs mm_processor_kwargs mm_payload return_mm_kwargs")
"""Options for images and recordings, without which they do nothing."""
_GENERATION = {
    **_ACCOUNTING,
    **_MEDIA,
    **_list_ignored(
        "length_penalty spaces_between_special_tokens truncation_side vllm_xargs stream_interval return_token_offsets "
        "routed_experts_prompt_start guided_decoding_backend"
    ),
    **_list_off_by_default(
        "use_beam_search", "beams are not searched: ask for n answers with logprobs and take the best"
    ),
    "best_of": KnownField("answers are not ranked: ask for n answers with logprobs and take the best", (1,)),
    **_list_off_by_default("bad_words", "texts are not excluded: give logit_bias for their tokens"),
    **_list_off_by_default(
        "truncate_prompt_tokens", "prompts are not truncated: send the part that the model should read"
    ),
    **_list_off_by_default(
        "logprob_token_ids", "logprobs are those of the most likely tokens: give logprobs"
    ),
    **_list_off_by_default("watermarking", "texts have no watermark: leave the field out"),
    **_list_off_by_default(
        "return_token_ids return_tokens_as_token_ids return_prompt_text",
        "answers have texts: send them to /tokenize for their token ids",
    ),
    **_list_off_by_default(
        "repetition_detection",
        "repetitions do not end an answer: give repetition_penalty or frequency_penalty",
    ),
    **_list_off_by_default(
        "thinking_token_budget", "thoughts are not told from the answer: give max_tokens for both together"
    ),
    **_list_off_by_default(
        "kv_transfer_params ec_transfer_params",
        "prompts are computed where their answers are: leave the field out",
    ),
    **_list_off_by_default(
        "guided_whitespace_pattern", "the blanks of structured outputs are fixed: leave the field out"
    ),
}
_COMPLETION = {
    **_list_off_by_default(
        "suffix", "texts are continued, not filled in: put what precedes the gap into prompt"
    ),
    **_list_off_by_default("prompt_embeds", "prompts are texts or token ids: give prompt"),
}
_CHAT = {
    **_list_ignored("include_reasoning verbosity prediction"),
    "modalities": KnownField("answers are texts: set modalities to text", (["text"],)),
    "audio": KnownField("answers are texts: leave audio out"),
    **_list_off_by_default("echo", "conversations are not repeated in the answer: leave echo out"),
    **_list_off_by_default(
        "add_special_tokens", "the chat template writes the special tokens: leave the field out"
    ),
    "chat_template": KnownField("the chat template is that of the model's folder: leave the field out"),
    **_list_off_by_default(
        "functions function_call", "OpenAI has replaced functions by tools: give tools and tool_choice"
    ),
    "web_search_options": KnownField("this server searches nothing: give a function of yours in tools"),
}
_STATE = "this server stores no conversation: send its messages, calls and outputs in input"
_RESPONSES = {
    **_ACCOUNTING,
    **_MEDIA,
    **_list_ignored("include_reasoning context_management max_tool_calls vllm_xargs"),
    "previous_response_id": KnownField(_STATE),
    "conversation": KnownField(_STATE),
    "previous_input_messages": KnownField(_STATE),
    "prompt": KnownField("this server stores no prompts: send the text in instructions and input"),
    **_list_off_by_default("background", "answers are not computed in the background: set stream to true"),
    "truncation": KnownField("inputs are not truncated: shorten input", ("disabled",)),
    **_list_off_by_default("enable_response_messages", "messages are not returned: keep those that you send"),
    **_list_off_by_default(
        "kv_transfer_params ec_transfer_params",
        "prompts are computed where their answers are: leave the field out",
    ),
}
_TOKENIZE = {
    **_MEDIA,
    **_list_off_by_default(
        "return_token_strs", "/tokenize returns ids: send them to /detokenize for their text"
    ),
    "chat_template": _CHAT["chat_template"],
}
KNOWN_FIELDS: Mapping[str, Mapping[str, KnownField]] = {
    "completions": {**_GENERATION, **_COMPLETION},
    "chat completions": {**_GENERATION, **_CHAT},
    "responses": _RESPONSES,
    "tokenize": _TOKENIZE,
    "transcriptions": {
        **_list_ignored(
            "include include[] chunking_strategy session_id request_id user vllm_xargs length_penalty"
        ),
        "use_beam_search": KnownField(
            "beams are not searched: set temperature to 0", ("false", "False", "0", "")
        ),
        **_list_off_by_default("to_language", "speech is translated to English: use /v1/audio/translations"),
        "hotwords": KnownField("words are not boosted: put them into prompt"),
        "known_speaker_names[]": KnownField("speakers are not told apart: leave the field out"),
        "known_speaker_references[]": KnownField("speakers are not told apart: leave the field out"),
    },
    "images": {
        **_list_ignored("user moderation request_id"),
        "background": KnownField("images have no transparency: leave the field out", ("auto", "opaque")),
        "quality": KnownField("the number of steps decides: set num_inference_steps", ("auto", "standard")),
        "style": KnownField("the prompt decides: put the style into prompt"),
        "output_format": KnownField("images are PNG files: set output_format to png", ("png",)),
        "output_compression": KnownField("PNG files lose nothing: leave the field out", (100,)),
        **_list_off_by_default("stream partial_images", "images are not streamed: set stream to false"),
    },
    "stream_options": _list_ignored("include_obfuscation"),
    "structured_outputs": {
        **_list_ignored("disable_any_whitespace disable_additional_properties"),
        **_list_off_by_default("disable_fallback", "there is one backend of structured outputs"),
        "whitespace_pattern": _GENERATION["guided_whitespace_pattern"],
        "structural_tag": KnownField("tags are not followed: give tools, or a grammar"),
    },
    "message": _list_ignored("annotations refusal cache_control provider_specific_fields thinking_blocks"),
    "part": _list_ignored("annotations logprobs cache_control prompt_cache_breakpoint"),
    "tool": _list_ignored("cache_control defer_loading allowed_callers"),
    "call": _list_ignored("provider_specific_fields cache_control index"),
}
"""Fields by object: the bodies of routes, and objects in these bodies."""


def drop_known_fields(name: str, arguments: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an object that remain to be validated.

    Known fields that are not computed are dropped, and so are unknown fields whose value is null. Other unknown fields
    stay, so that validation refuses them by name.

    Args:
        name: The name of the object, a key of KNOWN_FIELDS.
        arguments: The object as sent.
        declared: The fields that the object computes, by name.

    Raises:
        ApiError: An argument would change the answer and is not computed.
    """
    known, kept = KNOWN_FIELDS[name], {}
    for field, argument in arguments.items():
        if field in declared:
            kept[field] = argument
        elif argument is None:
            continue
        elif field not in known:
            kept[field] = argument
        elif known[field].refusal is None:
            _log_ignored(name, field)
        elif argument not in known[field].neutral:
            raise ApiError(400, f"{field}: {known[field].refusal}", "unsupported_parameter", field)
    return kept


@cache
def _log_ignored(name: str, field: str) -> None:
    """Log, once in a process for each field, that a field of an object is ignored."""
    LOG.info("the field %s of %s has no effect here and is ignored", field, name)
