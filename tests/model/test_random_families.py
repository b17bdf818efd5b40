"""Random configurations of every dense family against transformers; each number decides everything about its draw."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from model.runners.reference import ReferenceModel
from tests.deep import deep_except
from tests.model.oracle import Oracle, random_model
from tests.model.random_families import FAMILIES, ORIGINAL, drawn, drawn_ids
from tests.model.test_dense_families import assert_equal, kernels, load, logits_of

pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")


def oracle_of(family: str, seed: int, folder: Path) -> Oracle:
    """Return the oracle of a draw, whose model is written into a folder."""
    fields = drawn(family, seed)
    model = random_model(family, fields, seed)
    model.save_pretrained(folder)
    return Oracle(model, *drawn_ids(fields, seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "seed"), deep_except(product(FAMILIES, range(31)), [(family, 0) for family in FAMILIES[::3]])
)
def test_a_random_configuration_equals_transformers(family, seed, tmp_path) -> None:
    oracle = oracle_of(family, seed, tmp_path)
    config, weights = load(tmp_path)
    for model in (ReferenceModel(config, weights), kernels(config, weights, 1, "float32")):
        assert_equal(model, oracle)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "seed"), deep_except(product(FAMILIES, range(31)), [("Mistral", 0)]))
def test_bfloat16_costs_a_random_configuration_what_it_costs_transformers(family, seed, tmp_path) -> None:
    oracle = oracle_of(family, seed, tmp_path)
    logits = logits_of(kernels(*load(tmp_path), 1, "bfloat16"), oracle.ids, oracle.prompt)
    assert np.abs(logits - oracle.logits).max() <= oracle.bound("bfloat16")


@pytest.mark.slow
def test_longrope_in_some_layers_alone_equals_transformers(tmp_path) -> None:
    """Stay within the short factors: transformers takes no longer sequence in such models."""
    fields = drawn("Gemma3", 0)
    width = fields["head_dim"] // 2
    fields |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    fields["rope_parameters"]["full_attention"] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": np.linspace(1, 2, width).tolist(),
        "long_factor": np.linspace(1, 4, width).tolist(),
    }
    model = random_model("Gemma3", fields, 0)
    model.save_pretrained(tmp_path)
    oracle = Oracle(model, list(range(3, 3 + ORIGINAL)), ORIGINAL - 3)
    config, weights = load(tmp_path)
    for network in (ReferenceModel(config, weights), kernels(config, weights, 1, "float32")):
        assert_equal(network, oracle)


@pytest.mark.parametrize(("family", "asks"), [("GPT2", False), ("Llama", True)])
def test_the_oracle_is_transformers_in_float64_but_for_what_asks_for_float32(family, asks) -> None:
    import torch

    fields = drawn(family, 0)
    model = random_model(family, fields, 0)
    oracle = Oracle(model, *drawn_ids(fields, 0))
    wanted, bound = oracle.logits[-1], oracle.bound()
    with torch.no_grad():
        double = model.double()(torch.tensor([oracle.ids])).logits[0, -1].numpy()
    difference = np.abs(double - wanted).max()
    assert (difference > 1e-12) == asks
    assert difference <= bound
