"""Opened folders of diffusion models: model_index.json, which names the components, and the noise schedule."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model.config.fields import Fields, read_json
from model.config.folder import PIPELINE_INDEX, check_inside
from model.errors import ModelError
from model.families.tasks import Task
from model.loading.component import LoadedComponent
from model.noise_schedules import NoiseSchedule, read_schedule

_CODE = "NKW-MODEL-PIPELINE"


def is_pipeline(folder: Path) -> bool:
    """Return whether a folder has a diffusion model in the layout of diffusers."""
    return (folder / PIPELINE_INDEX).is_file()


@dataclass(frozen=True)
class PipelineFolder:
    """Folder in the layout of diffusers; `components` has the class of each component by name.

    `is_planned` says that only dry runs follow.
    """

    path: Path
    class_name: str
    components: Mapping[str, str]
    is_planned: bool = False

    @classmethod
    def open(cls, path: Path, is_planned: bool = False) -> PipelineFolder:
        """Read model_index.json of a folder; with `is_planned` it needs neither weights nor tokenizers.

        Raises:
            ModelError: It is missing, damaged or a link out of the folder, or does not name a class for the pipeline
                and for each component.
        """
        if not path.is_dir():
            raise ModelError(
                f"{path} is not a folder; a diffusion model is a folder with {PIPELINE_INDEX}", _CODE
            )
        if not os.path.lexists(path / PIPELINE_INDEX):
            raise ModelError(f"{path} {_describe_without_index(path)}", _CODE)
        check_inside(path / PIPELINE_INDEX)
        fields = Fields(path / PIPELINE_INDEX)
        class_name = fields.get("_class_name", None)
        if not isinstance(class_name, str):
            raise fields.error("_class_name", f"{class_name!r:.60} is not the name of a pipeline")
        components = {}
        for name in fields.names:
            entry = fields.get(name, None)
            if name.startswith("_") or not isinstance(entry, list) or entry == [None, None]:
                continue
            if len(entry) != 2 or not all(isinstance(word, str) for word in entry):
                raise fields.error(name, f"{entry!r:.60} is not a library and a class")
            components[name] = entry[1]
        return cls(path, class_name, components, is_planned)

    def check_components(self, needed: Mapping[str, tuple[str, ...]]) -> None:
        """Check that the folder has components by name, each of one of some classes.

        Raises:
            ModelError: A component is missing, has another class, or is not among the `needed` ones.
        """
        for name, classes in needed.items():
            named = self.components.get(name)
            if named not in classes:
                problem = "is missing" if named is None else f"is a {named:.60}"
                raise ModelError(
                    f"{self.path / PIPELINE_INDEX}: {name} {problem}; {self.class_name} needs {' or '.join(classes)}",
                    _CODE,
                )

    def open_component(self, name: str, task: Task, dtype: str) -> LoadedComponent:
        """Open the component in the subfolder `name`; errors are those of `LoadedComponent.open`."""
        return LoadedComponent.open(self.find_subfolder(name), task, dtype, self.is_planned)

    def find_subfolder(self, name: str) -> Path:
        """Return the path of the subfolder `name`, which may be missing.

        Raises:
            ModelError: It is a link out of the folder.
        """
        folder = self.path / name
        check_inside(folder)
        return folder

    def read_schedule(self) -> NoiseSchedule:
        """Return the noise schedule in the subfolder `scheduler`.

        Raises:
            ModelError: scheduler_config.json is missing or damaged, or a field of it is not supported.
        """
        path = self.find_subfolder("scheduler") / "scheduler_config.json"
        check_inside(path)
        fields = read_json(path)
        try:
            return read_schedule(fields)
        except ModelError as error:
            raise ModelError(f"{path}: {error.message}", _CODE) from None


def _describe_without_index(folder: Path) -> str:
    """Return what a folder without model_index.json is, and what to do, as the end of a sentence about the folder."""
    if is_pipeline(folder.resolve().parent):
        return f"is one component of a diffusion model: give the folder above it, with {PIPELINE_INDEX}"
    if (folder / "config.json").is_file():
        return (
            f"has no {PIPELINE_INDEX}: nkw imagine draws with a diffusion model; nkw generate continues texts"
        )
    return f"has no {PIPELINE_INDEX}; a diffusion model is a folder in the layout of diffusers, which has one"
