"""`/v1/audio/transcriptions` and `/v1/audio/translations`: a recording's windows through the engine, and what is said.

Without times all windows are prompts of one request, computed together. With times a window begins where the last
segment of the one before ended, so each is a request behind the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from model.engine import SamplingParams
from model.engine.async_engine import EngineFull, Stream, TokenPrompt
from model.engine.inputs import ModelInputs
from model.serve.errors import ApiError, stopping_now
from model.serve.openai.audio import answers
from model.serve.openai.audio.requests import AudioRequest
from model.serve.openai.audio.speech_model import ENGLISH, SpeechModel
from model.serve.openai.generation import Answering, Continuation, Service
from model.speech.recording import Recording
from model.speech.rules import Rules
from model.speech.timestamps import segments_of
from model.speech.wav import samples_of

Task = Literal["transcribe", "translate"]

_LONGEST_PAUSE = 1.0  # seconds until the next window of a recording asks for a place again


@dataclass
class Transcribing(Answering[AudioRequest]):
    """One recording on its way."""

    speech_model: SpeechModel = field(kw_only=True)
    task: Task = field(kw_only=True)
    recording: Recording = field(kw_only=True)
    rules: Rules = field(init=False)
    language: str = field(init=False, default=ENGLISH)
    prompt_tokens: int = 0

    @classmethod
    async def prepared(cls, service: Service, asked: AudioRequest, file: bytes, task: Task) -> Transcribing:
        """With windows, and in a language that is known; ApiError or ModelError for what cannot be."""
        service.check_model(asked.model)
        speech_model, params = service.check_speech(), asked.params()
        speech_model.check_language(asked.language)
        samples = await asyncio.to_thread(samples_of, file, "the file")
        recording = Recording(samples, speech_model.spectrum, asked.timestamps)
        if not asked.timestamps and recording.windows > service.engine.places:
            raise ApiError(
                400,
                f"the recording has {recording.windows} windows; {service.engine.places} at most are computed at once",
                param="file",
            )
        if service.draining:
            raise stopping_now()
        self = cls(service, asked, "trsc", speech_model=speech_model, task=task, recording=recording)
        self.params = params
        await asyncio.to_thread(lambda: recording.spectrum)
        await self._settle_language()
        await self._settle_prompt()
        return self

    async def answer(self) -> answers.Transcription | answers.VerboseTranscription | str:
        """What was said, in the form that was asked for."""
        asked, seconds = self.asked, self.recording.seconds
        if not asked.timestamps:
            async with await self._opened(self.prompts, self.params) as stream:
                text = "".join([each.text for each in await self.whole(stream)]).strip()
            if asked.response_format == "text":
                return f"{text}\n"
            return answers.Transcription(text=text, usage=answers.Duration.of(seconds))
        segments = [each async for each in self._segments()]
        if asked.response_format in answers.SUBTITLES:
            return answers.SUBTITLES[asked.response_format](segments)
        return answers.VerboseTranscription(
            task=self.task,
            language=ENGLISH if self.task == "translate" else self.language,
            duration=seconds,
            text="".join(each.text for each in segments).strip(),
            segments=segments,
            usage=answers.Duration.of(seconds),
        )

    async def events(self, stream: Stream) -> AsyncIterator[str]:
        """The pieces as JSON, window after window; what comes early of a later one waits."""
        waiting: dict[int, str] = {}
        ended: set[int] = set()
        shown, whole = 0, answers.StrippedText()
        async for update in self.updates(stream):
            waiting[update.prompt] = waiting.get(update.prompt, "") + update.text
            if update.finish_reason is not None:
                ended.add(update.prompt)
            while True:
                if delta := whole.push(waiting.pop(shown, "")):
                    yield answers.TextDelta(delta=delta).model_dump_json()
                if shown not in ended:
                    break
                shown += 1
        used = self.prompt_tokens, self.completion_tokens
        usage = answers.TokensUsed(input_tokens=used[0], output_tokens=used[1], total_tokens=sum(used))
        yield answers.TextDone(text=whole.text, usage=usage).model_dump_json()

    async def open(self, priority: int | None = None, cache_salt: str | None = None) -> Stream:
        """Submit all windows and return their stream; windows share no pages, so the salt has no effect."""
        return await self._opened(self.prompts, self.params)

    async def _opened(self, prompts: Sequence[TokenPrompt], params: SamplingParams) -> Stream:
        self.prompt_tokens += sum(len(each.ids) for each in prompts)
        return await self.service.engine.submit(self.head["id"], prompts, params)

    async def _settle_language(self) -> None:
        """The language that is asked for, that of the model, or the one that the first window sounds like most."""
        speech_model = self.speech_model
        if self.asked.language is not None:
            self.language = self.asked.language
        elif speech_model.languages:
            names = {id: name for name, id in speech_model.languages.items()}
            params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=list(names))
            features, _ = self.recording.window(0)
            async with await self._opened(
                [TokenPrompt([speech_model.start], inputs=ModelInputs(features))], params
            ) as stream:
                said = [token async for update in self.updates(stream) for token in update.token_ids]
            self.language = names[said[0]]
        self.rules = speech_model.rules(self.language, self.asked.timestamps, self.task)

    async def _settle_prompt(self) -> None:
        """Every window begins with the rules' tokens, and before them with the text that is to go before."""
        text, most = self.asked.prompt.strip(), self.service.engine.limits.max_model_len // 2 - 1
        before = await self.speech_model.before(text, self.service.texts, most) if text else []
        self._ids = [*before, *self.rules.prompt]
        if not self.asked.timestamps:
            columns = self.recording.columns
            self.prompts = [self._window(number * columns) for number in range(self.recording.windows)]

    def _window(self, begins: int) -> TokenPrompt:
        features, _ = self.recording.window(begins)
        size = self.service.engine.limits.vocab_size
        return TokenPrompt(self._ids, inputs=ModelInputs(features, lambda: self.rules.of_text(size)))

    async def _segments(self) -> AsyncIterator[answers.SpokenSegment]:
        """The segments of all windows, each of which begins where the last segment before it ended."""
        begins, count, times = 0, 0, self.rules.timestamps
        assert times is not None, "read with timestamps"
        while begins < self.recording.end:
            said = await self._said(begins)
            ids = [each for each in said.token_ids if each != times.end]
            _, columns = self.recording.window(begins)
            found, columns = segments_of(ids, times.zero, begins, columns)
            first = 0
            for each in found:
                text = await self.service.texts.decode([id for id in each.ids if id < times.zero])
                places = range(first, first + len(each.ids))
                logprobs = [said.logprobs[at][said.token_ids[at]].logprob for at in places]
                first += len(each.ids)
                yield answers.SpokenSegment(
                    id=count,
                    seek=begins,
                    start=each.start,
                    end=each.end,
                    text=text,
                    tokens=list(each.ids),
                    temperature=self.asked.temperature,
                    avg_logprob=sum(logprobs) / max(1, len(logprobs)),
                    compression_ratio=answers.compression_ratio(text),
                )
                count += 1
            begins += columns

    async def _said(self, begins: int) -> Continuation:
        """What is said in a window. Only the first one is refused where the queue is full; later ones wait."""
        while True:
            self.prompts = [self._window(begins)]
            try:
                async with await self._opened(self.prompts, self.params) as stream:
                    (said,) = await self.whole(stream)
                return said
            except EngineFull as full:
                if not begins:
                    raise
                await asyncio.sleep(min(_LONGEST_PAUSE, full.seconds or _LONGEST_PAUSE))
