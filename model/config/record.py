"""Fields that the configs of all tasks share."""

from __future__ import annotations

from dataclasses import dataclass

from model.formats import Format


@dataclass(frozen=True, kw_only=True)
class Config:
    """Config of a model of any task. The registry adds all fields but `dtype`.

    dtype          dtype of the checkpoint's weights; None where config.json names none
    weight_format  number format of quantised weights, where a format of this package reads them
    quant_method   name of the quantisation, also where no format of this package reads it
    model_type     as in config.json
    architecture   class name in config.json; empty where only plans are made
    refusals       error messages, one for each field that describes a computation that no layer has
    """

    dtype: str | None = None
    weight_format: Format | None = None
    quant_method: str | None = None
    model_type: str = ""
    architecture: str = ""
    refusals: tuple[str, ...] = ()

    def refusal(self, ranks: int) -> str | None:
        """Return why `ranks` ranks cannot share this model, and which number can; None where they can."""
        return None if ranks == 1 else f"{ranks} ranks; a {self.model_type} takes 1 rank"
