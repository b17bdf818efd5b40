"""Model families, one module per architecture: config.json to parts, parts to layers with the checkpoint's names.

`registry.py` lists them; `load_config` and `read_config` find a config's row.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from model.config import Config, Fields, ModelConfig
from model.config.folder import check_inside, config_file, model_files
from model.errors import ModelError
from model.families.registry import FAMILIES, compose, read, single_step_tasks
from model.families.tasks import SPEECH, TEXT, C, Task
from model.layers import unsupported

_CODE = "NKW-MODEL-CONFIG"

__all__ = [
    "FAMILIES",
    "SPEECH",
    "TEXT",
    "Task",
    "compose",
    "load_config",
    "read_config",
    "read_record",
    "single_step_tasks",
    "task_of",
]


@overload
def load_config(folder: Path | str) -> ModelConfig: ...


@overload
def load_config(folder: Path | str, *tasks: Task[C]) -> C: ...


def load_config(folder: Path | str, *tasks: Task[Any]) -> Config:
    """Read a model folder's config.json, and the end tokens of generation_config.json if it is there.

    The model is for one of the `tasks`, by default for the continuation of texts.

    Raises ModelError for a missing or damaged file, one that is a link out of the folder, an unknown architecture, and
    a field that is missing, of the wrong type, or describes a model this package does not compute.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise ModelError(
            f"{folder} is not a folder; a model is a Hugging Face folder with config.json in it", _CODE
        )
    for file in model_files(folder):
        check_inside(file)
    fields = Fields(folder / "config.json")
    config = read(_model_type(fields), fields)
    if config.refusals:
        raise ModelError(config.refusals[0], _CODE)
    task = task_of(config)
    if task not in (tasks or (TEXT,)):
        raise ModelError(f"{folder / 'config.json'}: a {config.model_type} {task.does}", _CODE)
    if not isinstance(config, ModelConfig):
        return config
    if unsupported(config):
        raise ModelError(
            f"{folder / 'config.json'}: no layer computes {', '.join(unsupported(config))}", _CODE
        )
    generation = Fields(folder / "generation_config.json", optional=True)
    ends_in = generation if "eos_token_id" in generation else fields
    starts_in = fields if "bos_token_id" in fields else generation
    return replace(
        config,
        bos_token_id=next(iter(starts_in.token_ids("bos_token_id", config.vocab_size)), None),
        eos_token_ids=ends_in.token_ids("eos_token_id", config.vocab_size),
    )


def task_of(config: Config) -> Task[Any]:
    """Return the task of a configuration."""
    return FAMILIES[config.model_type].task


def read_config(path: Path) -> ModelConfig:
    """Read the config.json of a model of tokens as `read_record` does; ModelError for another task."""
    config = read_record(path)
    if not isinstance(config, ModelConfig):
        raise ModelError(f"{path}: a {config.model_type} {task_of(config).does}", _CODE)
    return config


def read_record(path: Path) -> Config:
    """Read a config.json, or the one of a folder, of any known model type; ModelError says what cannot be read.

    Fields that describe what no layer computes are no error, and neither are tokens.
    """
    fields = Fields(config_file(path))
    model_type = fields.get("model_type", None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise fields.error("model_type", f"{model_type!r:.60} is not known; known are {known}")
    return read(model_type, fields)


def _model_type(fields: Fields) -> str:
    """The row of the registry whose architecture a config names."""
    generated = {row.architecture: name for name, row in FAMILIES.items() if row.architecture}
    known = ", ".join(generated)
    named = fields.get("architectures", None)
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        if named[0] not in generated:
            _refuse_planned_only(fields)
            raise fields.error("architectures", f"{named[0]:.60} is not known; known are {known}")
        return generated[named[0]]
    if named is not None:
        raise fields.error("architectures", f"{named!r:.60} is not a list of one name; known are {known}")
    model_type = fields.get("model_type", None)
    if isinstance(model_type, str) and model_type in generated.values():
        return model_type
    _refuse_planned_only(fields)
    raise fields.error("architectures", f"missing, and model_type is {model_type!r:.60}; known are {known}")


def _refuse_planned_only(fields: Fields) -> None:
    """Refuse a model type that plans take and no layers compute, by what is missing."""
    model_type = fields.get("model_type", None)
    row = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if row is None or row.architecture:
        return
    config = read(str(model_type), fields)
    assert isinstance(config, ModelConfig), "other tasks are not only planned"
    needs = [*unsupported(config), *([f"the {config.encoder.what}"] if config.encoder else [])]
    what = f"{model_type} needs {', '.join(needs)}, which no layer computes; nkw plan takes it"
    raise fields.error("model_type", what)
