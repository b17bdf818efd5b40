"""What the configurations of all tasks have in common."""

from __future__ import annotations

from dataclasses import dataclass

from model.formats import Format


@dataclass(frozen=True, kw_only=True)
class Config:
    """A model of any task as its config.json describes it.

    `dtype` is the dtype of the checkpoint's weights, if it is named. `weight_format` is the number format of quantised
    weights, `quant_method` its name, also where the format is not read. The registry adds these two, `model_type`,
    `architecture` (empty where only plans are made) and `refusals`: the fields that describe what no layer of this
    package computes, each as an error says it.
    """

    dtype: str | None = None
    weight_format: Format | None = None
    quant_method: str | None = None
    model_type: str = ""
    architecture: str = ""
    refusals: tuple[str, ...] = ()

    def refusal(self, ranks: int) -> str | None:
        """The reason why `ranks` ranks cannot share this model, with what would work; None where they can."""
        return None if ranks == 1 else f"{ranks} ranks; a {self.model_type} takes 1 rank"
