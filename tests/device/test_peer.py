"""`nkw peer`: our kernels against the vendor's inference libraries, whose stand-ins compute with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.commands.peer.comparison import Comparison, GreedyRun, compare_runs
from model.commands.peer.libraries import LIBRARIES
from nkw.commands import main
from tests.device import peers, site
from tests.device.core import NotDocumented

pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

VERSIONS = {"transformers-neuronx": "0.13.1216", "neuronx-distributed-inference": "0.6.10598"}


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install(tmp_path / "site", VERSIONS, monkeypatch)
    peers.installed(monkeypatch)


def run(capsys: Any, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    file = tmp_path / "peer.json"
    status = main(["peer", *arguments, "--json", str(file)])
    told = capsys.readouterr()
    return status, json.loads(file.read_text()) if file.exists() else {}, told.out + told.err


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_tokens_and_logits_are_those_of_the_library(
    tiny: Path, tmp_path: Path, libraries: None, library: str, capsys: Any
) -> None:
    prompts = ["--prompt", "Once", "--prompt", "The sea is"]
    status, document, told = run(
        capsys, tmp_path, str(tiny), "--with", library, *prompts, "--max-new-tokens", "5"
    )
    assert status == 0, told
    assert (document["library"], document["version"]) == (library, VERSIONS[library])
    assert [comparison["equal"] for comparison in document["results"]] == [5, 5]
    assert all(0 < comparison["largest_difference"] < 1e-4 for comparison in document["results"])
    assert all(
        comparison["measured_s"] > 0 and comparison["predicted_ms"] > 0 for comparison in document["results"]
    )
    assert "5 of 5 tokens equal" in told
    assert document["lnc"] == 1 and "ms with our kernels (LNC 1)" in told


def test_the_first_other_token_is_named(
    tiny: Path, tmp_path: Path, libraries: None, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(peers.Adapter, "change", 3.0)
    arguments = ["--with", LIBRARIES[0], "--prompt", "Once", "--max-new-tokens", "5"]
    arguments += ["--target", "trn2", "--lnc", "2"]
    status, document, told = run(capsys, tmp_path, str(tiny), *arguments)
    (result,) = document["results"]
    assert status == 1
    assert result["equal"] < result["tokens"] == 5
    assert result["ours"] != result["theirs"] == 7
    assert result["gap"] > 0
    assert f"token {result['equal'] + 1}: ours " in told
    assert document["lnc"] == 2 and "ms with our kernels (LNC 2)" in told


@pytest.mark.parametrize(
    ("library", "how"),
    [(LIBRARIES[0], "'nki-workbench[legacy]'"), (LIBRARIES[1], "pip install neuronx-distributed-inference")],
)
def test_a_library_that_is_not_there_or_a_placeholder_is_said(
    tiny: Path, tmp_path: Path, library: str, how: str, capsys: Any, monkeypatch: Any
) -> None:
    status, _, told = run(capsys, tmp_path, str(tiny), "--with", library)
    assert (status, len(told.splitlines())) == (2, 1)
    assert f"{library} is not installed here" in told
    assert how in told
    site.install(tmp_path / "site", {library: "0.1"}, monkeypatch)
    assert run(capsys, tmp_path, str(tiny), "--with", library)[2] == told


def test_another_architecture_is_refused_for_nxd(
    tiny: Path, tmp_path: Path, libraries: None, capsys: Any
) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(
        json.dumps(config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"})
    )
    status, _, told = run(capsys, tmp_path, str(tiny), "--with", LIBRARIES[1])
    assert status == 2
    assert "is called for LlamaForCausalLM here" in told


def test_the_stand_ins_refuse_other_orders_of_calls(tiny: Path) -> None:
    model = peers.LegacyModel.from_pretrained(str(tiny), batch_size=1, n_positions=64, tp_degree=1, amp="f32")
    with pytest.raises(NotDocumented, match="before the model is on the cores"):
        peers.LegacyAdapter(None, model).generate()
    with pytest.raises(NotDocumented, match="tp_degree 3"):
        peers.LegacyModel.from_pretrained(str(tiny), batch_size=1, n_positions=64, tp_degree=3, amp="f32")
    with pytest.raises(NotDocumented, match="load before compile"):
        peers.NxdModel(str(tiny)).load(str(tiny))
    with pytest.raises(NotDocumented, match="without a configuration"):
        peers.NxdModel(str(tiny)).compile(str(tiny))


def logits(*rows: tuple[float, float, float]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(row, np.float32) for row in rows)


def test_logits_are_compared_as_long_as_prefixes_are_equal() -> None:
    ours = GreedyRun((0, 1, 2), logits((4, 1, 0), (0, 3, 1), (0, 0, 9)), 0.0)
    same = GreedyRun((0, 1, 2), logits((4, 1, 0.5), (0, 3, 1), (0, 0, 8)), 1.0)
    assert compare_runs(ours, same) == Comparison(3, 3, 1.0)
    other = GreedyRun((0, 2, 2), logits((4, 1, 0.5), (0, 3, 3.25), (0, 0, 100)), 1.0)
    assert compare_runs(ours, other) == Comparison(3, 1, 2.25, 1, 2, 2.0)
    ended = GreedyRun((0,), logits((4, 1, 0)), 1.0)
    assert compare_runs(ours, ended) == Comparison(1, 1, 0.0)
