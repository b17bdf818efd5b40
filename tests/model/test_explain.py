"""The path of a token, against what transformers gives out of its layers, and the command that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.commands.generate.explain import TokenTrace, trace_token
from model.config.blocks import Experts
from model.loading.shipped import PRETRAINED, SHIPPED, find_model_path
from model.loading.tokenizer import Tokenizer
from nkw.commands import main
from tests.model.folders import byte_tokenizer
from tests.model.oracle import random_model
from tests.model.test_dense_families import load
from tests.model.tiny_families import COMMON, TINY

torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

IDS = np.random.default_rng(3).integers(3, 151, 14).tolist()


def inside(
    model: Any, dtype: Any
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Return the last token's residuals and attention of each layer, its probabilities and its routers'."""
    residuals: list[np.ndarray] = []
    hooks = [
        layer.register_forward_hook(
            lambda _, inputs, out: residuals.append((out if torch.is_tensor(out) else out[0])[0, -1].numpy())
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        out = model.to(dtype)(
            torch.tensor([IDS[:-1]]),
            output_attentions=True,
            **({"output_router_logits": True} if hasattr(model.config, "output_router_logits") else {}),
        )
    for hook in hooks:
        hook.remove()
    attended = [attention[0, :, -1].numpy() for attention in out.attentions]
    routers = [logits.softmax(-1)[-1].numpy() for logits in getattr(out, "router_logits", None) or ()]
    return residuals, attended, [out.logits[0, -1].softmax(-1).numpy()], routers


@pytest.mark.parametrize("name", ["llama with biases", "mixtral", "qwen3 with experts"])
def test_path_is_what_transformers_computes(tmp_path: Path, name: str) -> None:
    """Within four times what float32 costs transformers itself."""
    family, fields = TINY[name]
    model = random_model(family, {**COMMON, **fields, "vocab_size": 259}, seed=3)
    model.save_pretrained(tmp_path)
    byte_tokenizer(add_bos=False).save(str(tmp_path / "tokenizer.json"))
    config, weights = load(tmp_path)
    path = trace_token(config, weights, Tokenizer(tmp_path, config.vocab_size), IDS, 1)
    single, exact = inside(model, torch.float32), inside(model, torch.float64)

    costs = [
        max(float(np.linalg.norm(a - b)) for a, b in zip(*both)) for both in list(zip(single, exact))[:3]
    ]

    def close(actual: float, quantity: int, wanted: float) -> bool:
        return bool(abs(actual - wanted) <= 4 * costs[quantity])

    routers = iter(exact[3])
    for number, layer in enumerate(path.layers):
        assert close(layer.norm, 0, float(np.linalg.norm(exact[0][number])))
        attended = exact[1][number]
        assert [head.position for head in layer.heads] == attended.argmax(-1).tolist()
        for head in layer.heads:
            assert close(head.weight, 1, attended[head.head, head.position])
        if isinstance(config.blocks[number].mlp, Experts):
            shares = next(routers)
            chosen = np.argsort(-shares)[: len(layer.experts)]
            assert [expert.expert for expert in layer.experts] == chosen.tolist()
            assert sum(expert.weight for expert in layer.experts) == pytest.approx(1, rel=1e-6)
            ratio = layer.experts[0].weight / layer.experts[1].weight
            assert ratio == pytest.approx(shares[chosen[0]] / shares[chosen[1]], rel=1e-3)
        else:
            assert layer.experts == ()
    assert [candidate.id for candidate in path.candidates] == np.argsort(-exact[2][0])[:5].tolist()
    for candidate in path.candidates:
        assert close(candidate.probability, 2, exact[2][0][candidate.id])


def explained(capsys: Any, *options: str) -> tuple[str, dict[str, Any]]:
    arguments = ["generate", "--backend", "numpy", "--max-new-tokens", "3", "--json", "-", *options]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    return captured.err, json.loads(captured.out)


def test_command_shows_the_token_that_was_asked_for(capsys: Any) -> None:
    report, document = explained(capsys, "--explain", "2")
    (path,) = document["explained"]
    (generation,) = document["generations"]
    assert path["number"] == 2
    assert path["chosen"]["id"] == generation["generated_ids"][1] == path["candidates"][0]["id"]
    assert [piece["id"] for piece in path["pieces"]] == [
        *generation["prompt_ids"],
        generation["generated_ids"][0],
    ]
    assert "how new token 2, ' there', came about, by the numpy reference" in report
    assert "'<|endoftext|>'" in report
    assert len(path["layers"]) == 6


@pytest.mark.slow
def test_without_a_number_it_is_the_first_token_of_each_prompt(capsys: Any) -> None:
    _, document = explained(capsys, "--prompt", "Tom", "--prompt", "The dog", "--explain")
    assert [entry["number"] for entry in document["explained"]] == [1, 1]
    assert explained(capsys)[1]["explained"] == []


def test_a_token_beyond_the_last_is_refused(capsys: Any) -> None:
    assert main(["generate", "--max-new-tokens", "3", "--explain", "4"]) == 2
    assert capsys.readouterr().err == "nkw: error: --explain 4: --max-new-tokens is 3\n"


def test_a_shipped_model_is_found_by_its_name_unless_a_path_has_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model_path("stories") == PRETRAINED
    assert find_model_path("storys") == Path("storys")
    (tmp_path / "stories").mkdir()
    assert find_model_path("stories") == Path("stories")
    for folder in SHIPPED.values():
        assert (folder / "config.json").is_file() or (folder / "model_index.json").is_file()


def test_long_texts_show_their_last_pieces(capsys: Any) -> None:
    report, document = explained(capsys, "--prompt", "word " * 20, "--explain")
    count = len(document["explained"][0]["pieces"])
    assert f"positions 0 to {count - 13} come before" in report
    assert f"{count - 1:>8}" in report


def test_path_is_a_record_of_plain_numbers(capsys: Any) -> None:
    _, document = explained(capsys, "--explain")
    (path,) = document["explained"]
    assert set(path) == set(TokenTrace.__dataclass_fields__)
    assert sum(candidate["probability"] for candidate in path["candidates"]) < 1
