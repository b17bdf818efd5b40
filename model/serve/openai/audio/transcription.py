"""Transcriptions and translations: the windows of a recording, of up to 30 seconds each, go through the engine.

Without timestamps all windows are prompts of one request and are computed together. With timestamps a window begins
where the last segment of the previous window ended, so each window is a request of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from model.engine import CompletionOutput, SamplingParams
from model.engine.async_engine import EngineFull, Stream, TokenPrompt
from model.engine.inputs import ModelInputs
from model.serve.errors import ApiError, server_stopping_error
from model.serve.openai.audio import answers
from model.serve.openai.audio.requests import AudioRequest
from model.serve.openai.audio.speech_model import ENGLISH, SpeechModel
from model.serve.openai.generation import GenerationHandler, Service
from model.speech.recording import Recording
from model.speech.rules import Rules, TranscriptionRule
from model.speech.timestamps import split_into_segments
from model.speech.wav import decode_wav

Task = Literal["transcribe", "translate"]

_MAX_RETRY_SECONDS = 1.0
"""Longest wait until a window that the full queue refused is submitted again."""


@dataclass
class TranscriptionHandler(GenerationHandler[AudioRequest]):
    """Handler of a request for `/v1/audio/transcriptions` or `/v1/audio/translations`.

    `prompt_tokens` counts the prompts of all windows that were submitted. `start_ids` are the first tokens of every
    window: the request's prompt, if any, and the rules' tokens.
    """

    speech_model: SpeechModel = field(kw_only=True)
    task: Task = field(kw_only=True)
    recording: Recording = field(kw_only=True)
    rules: Rules = field(init=False)
    language: str = field(init=False, default=ENGLISH)
    start_ids: Sequence[int] = field(init=False)
    prompt_tokens: int = 0

    @classmethod
    async def prepare(
        cls, service: Service, request: AudioRequest, file: bytes, task: Task
    ) -> TranscriptionHandler:
        """Check a request, read its recording, find its language, encode its prompts, and return its handler.

        Without a requested language the first window is submitted for one token, which is the language.

        Raises:
            ApiError: The request is refused, the recording has too many windows, or the server is stopping.
            ModelError: The file is no recording that can be read, or an argument is out of range.
            EngineFull: The queue has no place for the window that tells the language.
        """
        service.check_model(request.model)
        speech_model, params = service.check_speech(), request.to_sampling_params()
        speech_model.check_language(request.language)
        samples = await asyncio.to_thread(decode_wav, file, "the file")
        recording = Recording(samples, speech_model.spectrum, request.has_timestamps)
        if not request.has_timestamps and recording.windows > service.engine.capacity:
            raise ApiError(
                400,
                f"the recording has {recording.windows} windows; {service.engine.capacity} at most are computed at "
                "once: send shorter recordings, or ask for verbose_json",
                param="file",
            )
        if service.draining:
            raise server_stopping_error()
        self = cls(service, request, "trsc", speech_model=speech_model, task=task, recording=recording)
        self.params = params
        await asyncio.to_thread(lambda: recording.spectrum)  # cached by the recording
        await self._read_rules()
        await self._encode_prompts()
        return self

    async def answer(self) -> answers.Transcription | answers.VerboseTranscription | str:
        """Submit all windows, wait for their ends, and return the transcription in the requested format.

        Returns:
            An object, or a text for the formats text, srt and vtt.

        Raises:
            ApiError: The engine failed or could not compute a window.
            EngineFull: The queue has too few places.
        """
        response_format, seconds = self.request.response_format, self.recording.seconds
        usage = answers.Duration(seconds=ceil(seconds))
        if not self.request.has_timestamps:
            async with await self.submit() as stream:
                outputs = await self.collect_outputs(stream)
            text = "".join(output.text for output in outputs).strip()
            return f"{text}\n" if response_format == "text" else answers.Transcription(text=text, usage=usage)
        segments = [segment async for segment in self._transcribe_segments()]
        if response_format in answers.SUBTITLES:
            return answers.SUBTITLES[response_format](segments)
        return answers.VerboseTranscription(
            task=self.task,
            language=ENGLISH if self.task == "translate" else self.language,
            duration=seconds,
            text="".join(segment.text for segment in segments).strip(),
            segments=segments,
            usage=usage,
        )

    async def stream_events(self, stream: Stream) -> AsyncIterator[str]:
        """Yield the pieces of the transcription as JSON, window by window, and at the end the whole text.

        Text of a window is held back until all previous windows have ended.

        Raises:
            ApiError: The engine failed or could not compute a window.
        """
        held_back: dict[int, str] = {}
        ended: set[int] = set()
        window, transcription = 0, answers.StrippedText()
        async for update in self.iterate_updates(stream):
            held_back[update.prompt] = held_back.get(update.prompt, "") + update.text
            if update.finish_reason is not None:
                ended.add(update.prompt)
            while True:
                if delta := transcription.push(held_back.pop(window, "")):
                    usage = self._count_tokens() if self.request.include_continuous_usage else None
                    yield answers.TextDelta(delta=delta, usage=usage).model_dump_json()
                if window not in ended:
                    break
                window += 1
        usage = self._count_tokens()
        yield answers.TextDone(text=transcription.text, usage=usage).model_dump_json()

    def _count_tokens(self) -> answers.TokensUsed:
        """Return the numbers of prompt and new tokens of all windows so far."""
        return answers.TokensUsed(
            input_tokens=self.prompt_tokens,
            output_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
        )

    async def submit(self, priority: int | None = None, cache_salt: str | None = None) -> Stream:
        """Submit the prompts of all windows together, and return their stream; both arguments have no effect.

        Windows share no pages, so they need no salt.

        Raises:
            EngineFull: The queue has too few places.
        """
        return await self._submit(self.prompts, self.params)

    async def _submit(self, prompts: Sequence[TokenPrompt], params: SamplingParams) -> Stream:
        self.prompt_tokens += sum(len(prompt.ids) for prompt in prompts)
        return await self.service.engine.submit(self.answer_fields["id"], prompts, params)

    async def _read_rules(self) -> None:
        """Set `language` and `rules`: the requested language, or the most likely one of the first window.

        The most likely language is computed by the engine, as one token after the first window.
        """
        speech_model = self.speech_model
        if self.request.language is not None:
            self.language = self.request.language
        elif speech_model.languages:
            languages = {id: language for language, id in speech_model.languages.items()}
            params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=list(languages))
            features, _ = self.recording.cut_window(0)
            prompt = TokenPrompt([speech_model.start], inputs=ModelInputs(features))
            async with await self._submit([prompt], params) as stream:
                token_ids = [
                    token async for update in self.iterate_updates(stream) for token in update.token_ids
                ]
            self.language = languages[token_ids[0]]
        self.rules = speech_model.read_rules(self.language, self.request.has_timestamps, self.task)

    async def _encode_prompts(self) -> None:
        """Set `start_ids` and, without timestamps, `prompts` of all windows.

        `start_ids` begin with the last tokens of the request's prompt, if it has one, up to almost half of the context.
        """
        text, max_tokens = self.request.prompt.strip(), self.service.engine.limits.max_model_len // 2 - 1
        previous_ids = (
            await self.speech_model.encode_previous_text(text, self.service.texts, max_tokens) if text else []
        )
        self.start_ids = [*previous_ids, *self.rules.prompt]
        if not self.request.has_timestamps:
            columns = self.recording.columns
            self.prompts = [self._make_prompt(index * columns) for index in range(self.recording.windows)]

    def _make_prompt(self, begin: int) -> TokenPrompt:
        """Return the prompt of the window that begins at column `begin` of the spectrum; a column is 10 ms."""
        features, _ = self.recording.cut_window(begin)
        vocab_size = self.service.engine.limits.vocab_size
        return TokenPrompt(
            self.start_ids, inputs=ModelInputs(features, lambda: TranscriptionRule(self.rules, vocab_size))
        )

    async def _transcribe_segments(self) -> AsyncIterator[answers.SpokenSegment]:
        """Transcribe window after window, and yield the segments of each.

        A window begins where the last segment before it ended.

        Raises:
            EngineFull: The queue is full for the first window.
            ApiError: The engine failed or could not compute a window.
        """
        begin, count, times = 0, 0, self.rules.timestamps
        assert times is not None, "read with timestamps"
        while begin < self.recording.end:
            output = await self._transcribe_window(begin)
            logprobs = [by_id[token].logprob for token, by_id in zip(output.token_ids, output.logprobs or [])]
            ids = [token for token in output.token_ids if token != times.end]
            _, columns = self.recording.cut_window(begin)
            segments, columns = split_into_segments(ids, times.zero, begin, columns)
            for segment in segments:
                text = await self.service.texts.decode([id for id in segment.ids if id < times.zero])
                segment_logprobs, logprobs = logprobs[: len(segment.ids)], logprobs[len(segment.ids) :]
                yield answers.SpokenSegment(
                    id=count,
                    seek=begin,
                    start=segment.start,
                    end=segment.end,
                    text=text,
                    tokens=list(segment.ids),
                    temperature=self.request.temperature,
                    avg_logprob=sum(segment_logprobs) / max(1, len(segment_logprobs)),
                    compression_ratio=answers.compute_compression_ratio(text),
                )
                count += 1
            begin += columns

    async def _transcribe_window(self, begin: int) -> CompletionOutput:
        """Transcribe the window that begins at column `begin`, and return its output.

        If the queue is full, later windows are submitted again after a pause.

        Raises:
            EngineFull: The queue is full for the first window.
            ApiError: The engine failed or could not compute the window.
        """
        while True:
            self.prompts = [self._make_prompt(begin)]
            try:
                async with await self.submit() as stream:
                    (output,) = await self.collect_outputs(stream)
                return output
            except EngineFull as full:
                if not begin:
                    raise
                await asyncio.sleep(min(_MAX_RETRY_SECONDS, full.seconds or _MAX_RETRY_SECONDS))
