"""Model families, one module each: config.json becomes a config, and a config a network of layers and tensor names.

`registry.py` lists the families; `load_config` and `read_config` find the row of a config.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from model.config import Config, Fields, ModelConfig
from model.config.component import ComponentConfig
from model.config.folder import check_inside, check_model_folder, find_config_file, list_model_files
from model.config.published import check_config_path
from model.config.quantization import read_config_fields
from model.errors import ModelError
from model.families.registry import FAMILIES, compose, list_single_step_tasks, read
from model.families.stand_in import find_nearest_family, read_stand_in
from model.families.tasks import SPEECH, TEXT, C, Task
from model.layers import find_unsupported
from nkw.suggestions import closest, did_you_mean

_CODE = "NKW-MODEL-CONFIG"

__all__ = [
    "FAMILIES",
    "SPEECH",
    "TEXT",
    "Task",
    "compose",
    "find_task",
    "list_single_step_tasks",
    "load_config",
    "read_config",
    "read_record",
]


@overload
def load_config(folder: Path | str) -> ModelConfig: ...


@overload
def load_config(folder: Path | str, *tasks: Task[C]) -> C: ...


def load_config(folder: Path | str, *tasks: Task[Any]) -> Config:
    """Return the config of a model folder that can be run, for a `ModelConfig` with its special tokens.

    End tokens are those of generation_config.json if it names any, else those of config.json.

    Args:
        folder: A Hugging Face folder.
        *tasks: Tasks that the model may be for, by default `TEXT`.

    Raises:
        ModelError: A file is missing, damaged or a link out of the folder; the architecture is unknown or for another
            task; or a field is missing, has the wrong type, or describes a model that no layer computes.
    """
    folder = Path(folder)
    check_model_folder(folder)
    for file in list_model_files(folder):
        check_inside(file)
    fields = read_config_fields(folder / "config.json")
    config = read(_find_model_type(fields), fields)
    if config.refusals:
        raise ModelError(config.refusals[0], _CODE)
    task = find_task(config)
    if task not in (tasks or (TEXT,)):
        raise ModelError(f"{folder / 'config.json'}: a {config.model_type} {task.does}", _CODE)
    if not isinstance(config, ModelConfig):
        return config
    if find_unsupported(config):
        raise ModelError(
            f"{folder / 'config.json'}: no layer computes {', '.join(find_unsupported(config))}", _CODE
        )
    generation = Fields(folder / "generation_config.json", optional=True)
    ends_in = generation if "eos_token_id" in generation else fields
    starts_in = fields if "bos_token_id" in fields else generation
    return replace(
        config,
        bos_token_id=next(iter(starts_in.token_ids("bos_token_id", config.vocab_size)), None),
        eos_token_ids=ends_in.token_ids("eos_token_id", config.vocab_size),
    )


def find_task(config: Config) -> Task[Any]:
    """Return the task of a config, such as TEXT or SPEECH, from the registry's row of its model type."""
    return FAMILIES[config.model_type].task


def read_config(path: Path, family: str | None = None) -> ModelConfig:
    """Return the config of a text or speech model for a plan; it may describe what no layer computes.

    Args:
        path: A config.json, or the folder that contains it. `find_config_path` returns it for a published model's name.
        family: Model type of a family under which the config is read, whatever its own; None for its own.

    Raises:
        ModelError: There is no config at the path; its model type is unknown or for another task; or a field is missing
            or has the wrong type.
    """
    config = read_record(path, family)
    if not isinstance(config, ModelConfig):
        raise ModelError(f"{path}: a {config.model_type} {find_task(config).does}", _CODE)
    return config


def read_record(path: Path, family: str | None = None) -> Config:
    """Return the config of any known model type from a config.json or from the folder that contains it.

    Fields that no layer computes are accepted and listed in `refusals`. Special tokens are not read.

    Args:
        path: The file or the folder.
        family: Model type of a family under which the config is read, whatever its own; None for its own.

    Raises:
        ModelError: The path does not exist, the model type is unknown, or a field is missing or has the wrong type.
    """
    check_config_path(path)
    if not path.is_file() or path.suffix == ".gguf":
        check_model_folder(path)
    fields = read_config_fields(find_config_file(path))
    if family is not None:
        return read_stand_in(fields, family)
    model_type = fields.get("model_type", None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        nearest, meant = find_nearest_family(fields), did_you_mean(str(model_type), FAMILIES)
        advice = (
            f"{meant or ';'} --as {nearest} plans the nearest known family and says what it ignores"
            if nearest
            else _list_known(str(model_type), sorted(_list_models(FAMILIES)))
        )
        raise fields.error("model_type", f"{model_type!r:.60} is not known{advice}")
    return read(model_type, fields)


def _find_model_type(fields: Fields) -> str:
    """Return the registry's model type for the one name in `architectures`, or `model_type` if there is no such field.

    Raises:
        ModelError: The registry has no row with this architecture, so that the model cannot be run. The message names
            what is missing if the model can be planned, else the closest known architecture.
    """
    architectures, model_type = fields.get("architectures", None), fields.get("model_type", None)
    generated: dict[str, str] = {}
    for name, row in FAMILIES.items():
        # Of rows with one architecture that of the config's own model type counts, else the first.
        if row.architecture and (name == model_type or row.architecture not in generated):
            generated[row.architecture] = name
    if isinstance(architectures, list) and len(architectures) == 1 and isinstance(architectures[0], str):
        if architectures[0] in generated:
            return generated[architectures[0]]
        name, problem = architectures[0], f"{architectures[0]:.60} is not known"
    elif architectures is not None:
        raise fields.error(
            "architectures", f"{architectures!r:.60} is not a list of one name{_list_known('', generated)}"
        )
    elif isinstance(model_type, str) and model_type in generated.values():
        return model_type
    else:
        name, problem = str(model_type), f"missing, and model_type is {model_type!r:.60}"
    if isinstance(model_type, str) and model_type in FAMILIES and model_type not in generated.values():
        config = read(model_type, fields)
        assert isinstance(config, ModelConfig), "families of other tasks have an architecture"
        needs = [
            *find_unsupported(config),
            *([f"the {config.encoder.description}"] if config.encoder else []),
        ]
        raise fields.error(
            "model_type",
            f"{model_type} needs {', '.join(needs)}, which no layer computes; nkw plan takes it",
        )
    raise fields.error("architectures", f"{problem}{_list_known(name, generated)}")


def _list_models(model_types: Iterable[str]) -> list[str]:
    """Return the model types that are models of their own, and no components of a diffusion model."""
    return [name for name in model_types if not issubclass(FAMILIES[name].task.record, ComponentConfig)]


_KNOWN_CHARACTERS = 100
"""Most characters of a list of known names: with a path of 100 characters, the message is shown whole."""


def _list_known(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown `name`: the closest known name, if any, and the first known ones."""
    names = list(known)
    listed = ", ".join(names)
    if len(listed) > _KNOWN_CHARACTERS:
        listed = listed[: listed.rindex(", ", 0, _KNOWN_CHARACTERS)]
        listed += f" and {len(names) - listed.count(', ') - 1} more, which docs/families.md lists"
    stems = {known.partition("For")[0]: known for known in names}  # all architectures end alike
    stem = name.partition("For")[0]
    meant = stem if stem in stems else closest(stem, stems)
    return f"; did you mean {stems[meant]}? Known are {listed}" if meant else f"; known are {listed}"
