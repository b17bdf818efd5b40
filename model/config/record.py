"""Fields that the configs of all tasks share, and the record of a stand-in family.

A task is what a model is for, such as texts or speech (`model.families.tasks`). `nkw plan --as FAMILY` reads a config
under a stand-in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from model.formats import FP8_CACHES, CacheScheme, Container


@dataclass(frozen=True)
class StandIn:
    """Known family under which a config is read in place of its own model type.

    model_type  as in config.json; empty where it has none
    family      model type of the family
    text_only   whether the config is of a model for several kinds of inputs, of which the text decoder is read
    ignored     fields of config.json that the family does not read and that may change parameters or times
    meanings    these fields by what they may mean, in words
    """

    model_type: str
    family: str
    text_only: bool
    ignored: tuple[str, ...]
    meanings: tuple[str, ...]

    def describe(self) -> Iterator[str]:
        """Yield sentences for a plan: which family is planned in place of the model type, and what is ignored."""
        type_name = self.model_type or "a config without model_type"
        if self.model_type == self.family:
            yield f"--as {self.family} is the config's own model type."
        else:
            yield f"Planned is a {self.family} in place of {type_name} (--as): sizes and times are those of the family."
        if self.text_only:
            yield "Only its text decoder is planned."
        for meaning in self.meanings:
            yield f"Ignored: {meaning}."


@dataclass(frozen=True, kw_only=True)
class Config:
    """Config of a model of any task. The registry adds all fields but `dtype`.

    dtype          dtype of the checkpoint's weights; None where config.json names none
    weight_format  container of quantised weights, where this package reads it; a format is one too
    quant_method   name of the quantisation, also where no format of this package reads it
    is_quantised_on_load
                   whether the checkpoint's weights are plain and quantised to `weight_format` when they are loaded
    cache_scheme   element type for which the checkpoint has scales of caches, if it has any
    model_type     as in config.json
    architecture   class name in config.json; empty where only plans are made
    refusals       error messages, one for each field that describes a computation that no layer has
    stand_in       the family under which the config is read, where a plan names one
    """

    dtype: str | None = None
    weight_format: Container | None = None
    quant_method: str | None = None
    is_quantised_on_load: bool = False
    cache_scheme: CacheScheme = FP8_CACHES
    model_type: str = ""
    architecture: str = ""
    refusals: tuple[str, ...] = ()
    stand_in: StandIn | None = None

    @property
    def type_label(self) -> str:
        """Model type for a headline; with a stand-in also the type of config.json: "llama in place of other"."""
        if self.stand_in is None or self.stand_in.model_type == self.model_type:
            return self.model_type
        return f"{self.model_type} in place of {self.stand_in.model_type or 'an unnamed type'}"

    def refusal(self, ranks: int) -> str | None:
        """Return why `ranks` tensor-parallel ranks cannot share this model, and how many can; None if they can.

        A model that is no `ModelConfig` takes 1 rank.
        """
        return None if ranks == 1 else f"{ranks} ranks; a {self.model_type} takes 1 rank"
