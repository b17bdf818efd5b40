"""A model's folder: links stay in it, or in the blobs of the cache whose snapshot it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.errors import ModelError
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from tests.model.test_checkpoint import shard

FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "model.safetensors",
]


def moved(folder: Path, name: str, place: Path) -> None:
    """Move a file of a folder to a place, and leave a link to it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    file = folder / name
    place.write_bytes(file.read_bytes() if file.exists() else b"{}")
    file.unlink(missing_ok=True)
    file.symlink_to(place)


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_not(write_model, tmp_path, name) -> None:
    folder = write_model()
    moved(folder, name, folder / "parts" / name)
    assert load_config(folder).vocab_size == 300
    moved(folder, name, tmp_path / "elsewhere" / name)
    with pytest.raises(ModelError, match="is a link out of the model's folder") as refused:
        load_config(folder)
    assert refused.value.code == "NKW-MODEL-FOLDER"


def test_a_shard_of_any_name_is_no_link_out_of_the_folder(write_model, tmp_path) -> None:
    folder = write_model()
    where = shard(folder)
    name = next(iter(where.values()))
    moved(folder, name, folder / "parts" / name)
    assert open_checkpoint(folder, load_config(folder))
    config = load_config(folder)
    moved(folder, name, tmp_path / "elsewhere" / name)
    with pytest.raises(ModelError, match="is a link out of the model's folder"):
        open_checkpoint(folder, config)


@pytest.mark.parametrize("blobs", ["blobs", "others"])
def test_a_snapshot_of_a_cache_links_to_its_blobs_alone(write_model, tmp_path, blobs) -> None:
    cache = tmp_path / "models--x--y"
    (cache / "snapshots").mkdir(parents=True)
    folder = write_model().rename(cache / "snapshots" / "0123")
    for number, name in enumerate(("config.json", "model.safetensors")):
        moved(folder, name, cache / blobs / str(number))
    if blobs == "blobs":
        assert open_checkpoint(folder, load_config(folder))
        return
    with pytest.raises(ModelError, match="is a link out of the model's folder"):
        load_config(folder)
