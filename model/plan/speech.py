"""Speed of transcription: the time of a window of speech, its encoder and its tokens, relative to its length."""

from __future__ import annotations

from dataclasses import dataclass

from model.plan.dry import Time
from model.plan.plan import Plan
from model.speech.recording import SECONDS_OF_COLUMN


@dataclass(frozen=True)
class Transcription:
    """Time of a window of `window_s` seconds that is transcribed alone: encoder, prompt and all generated tokens.

    `encoder` is None if the plan has rooflines only. All copies together, each with the plan's batch, transcribe
    `speech_per_s` seconds of speech in a second.
    """

    window_s: float
    encoder: Time | None
    time: Time
    speech_per_s: float

    @property
    def real_time_factor(self) -> float:
        """Seconds that the transcription of a second of speech takes."""
        return self.time.program_ns / (1e9 * self.window_s)


def compute_transcription(plan: Plan) -> Transcription | None:
    """Return the speed of transcription of a plan; None for a model of texts or a batch that does not fit."""
    shape = plan.model.config.spectrum
    if shape is None or plan.rate.request_tokens_per_s is None:
        return None
    window_s = shape[1] * SECONDS_OF_COLUMN
    alone = next(rate for rate in plan.rates if rate.batch == 1)
    predicted, encoder = plan.first_token.predicted, None
    if predicted is not None:
        encoder = sum((kernel.time for kernel in predicted.kernels if kernel.is_encoder), Time())
    return Transcription(
        window_s,
        encoder,
        plan.first_token.served.time + alone.step.served.time * (plan.generate - 1),
        plan.rate.request_tokens_per_s / plan.generate * window_s,
    )
