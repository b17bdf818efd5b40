"""Speed of transcription: the time to transcribe one window of recorded speech, compared with the window's length.

The reports of `nkw plan` (`text`, `document`) call this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.plan.dry import Time
from model.plan.plan import Plan
from model.speech.recording import SECONDS_OF_COLUMN


@dataclass(frozen=True)
class Transcription:
    """Time to transcribe one window of `window_s` seconds of speech alone: encoder, prompt and all generated tokens.

    `time` is that time with the engine's time on the host. `encoder` is the encoder's time on the device; None if the
    plan has only rooflines. `speech_per_s` is the number of seconds of speech that all copies of the model transcribe
    in one second, each with the plan's batch.
    """

    window_s: float
    encoder: Time | None
    time: Time
    speech_per_s: float

    @property
    def real_time_factor(self) -> float:
        """Seconds of transcription per second of speech; below 1 is faster than real time."""
        return self.time.program_ns / (1e9 * self.window_s)


def compute_transcription(plan: Plan) -> Transcription | None:
    """Return the speed of transcription of a plan.

    Returns None for a model without a speech encoder, or if the plan's batch does not fit.
    """
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
