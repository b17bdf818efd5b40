"""The speed of transcription: the encoder's time for a window of speech, and that of its tokens, beside its length."""

from __future__ import annotations

from dataclasses import dataclass

from model.plan.dry import Time
from model.plan.plan import Plan
from model.speech.recording import SECONDS_OF_COLUMN


@dataclass(frozen=True)
class Transcription:
    """A window of `window_s` seconds: `encoder`, and `whole`, with the prompt and all generated tokens, alone.

    `encoder` is None where there are only rooflines. All copies together, each with the plan's batch, transcribe
    `speech_per_s` seconds of speech in a second.
    """

    window_s: float
    encoder: Time | None
    whole: Time
    speech_per_s: float

    @property
    def real_time_factor(self) -> float:
        """Seconds that a second of speech takes."""
        return self.whole.program_ns / (1e9 * self.window_s)


def transcription(plan: Plan) -> Transcription | None:
    """The speed of a plan; None of a model that continues texts."""
    shape = plan.model.config.spectrum
    if shape is None:
        return None
    window_s = shape[1] * SECONDS_OF_COLUMN
    alone = next(rate for rate in plan.rates if rate.batch == 1)
    together = next(rate for rate in plan.rates if rate.batch == plan.batch)
    predicted, encoder = plan.first_token.predicted, None
    if predicted is not None:
        encoder = sum((each.time for each in predicted.parts if each.of_encoder), Time())
    return Transcription(
        window_s,
        encoder,
        plan.first_token.time + alone.step.time * (plan.generate - 1),
        together.request_tokens_per_s / plan.generate * window_s,
    )
