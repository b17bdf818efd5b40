"""A family is one module and one row: everything that reads, computes, predicts and plans takes it from there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from model.config import Fields
from model.errors import ModelError
from model.families import FAMILIES, compose, load_config, read_config
from model.families.registry import Family
from model.layers import find_unsupported
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.plan.sizes import ModelSizes
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.model.test_plan_parameters import CONFIGS

SIZES = dict(v=300, h=32, f=48, l=2, q=4, g=2, d=8, n=64)
IDS = np.random.default_rng(3).integers(3, 300, 12).tolist()
PROMPT = 9

# The toy's tensors under the names of transformers' Qwen3, which is the same function.
QWEN3 = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
QWEN3 |= {"qn.weight": "self_attn.q_norm", "kn.weight": "self_attn.k_norm"}
QWEN3 |= {"n1.weight": "input_layernorm", "n2.weight": "post_attention_layernorm"}
QWEN3 |= {projection: f"mlp.{projection}_proj" for projection in ("gate", "up", "down")}


@pytest.fixture
def toy(monkeypatch, tmp_path, byte_tokenizer) -> Path:
    """Write a folder of the toy family and add the family to the registry."""
    monkeypatch.setitem(FAMILIES, "toy", Family("tests.model.toy_family", "toy", "ToyForCausalLM"))
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["ToyForCausalLM"], "model_type": "toy", **SIZES})
    )
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    generator = np.random.default_rng(7)
    weights = {
        name: generator.uniform(0.5, 1.5, shape)
        if len(shape) == 1
        else generator.standard_normal(shape) * 1.5 / shape[1] ** 0.5
        for name, shape in compose(load_config(tmp_path)).list_tensor_shapes().items()
    }
    safetensors.numpy.save_file(
        {name: array.astype(np.float32) for name, array in weights.items()}, tmp_path / "model.safetensors"
    )
    return tmp_path


def logits_of(model) -> np.ndarray:
    rows = [model.prefill([IDS[:PROMPT]])[0].logits]
    rows += [model.decode([IDS[position]], [position])[0].logits for position in range(PROMPT, len(IDS))]
    return np.stack(rows)


def test_its_reference_is_that_of_transformers(toy) -> None:
    """The yardstick is what float32 costs transformers itself, as in the tests of the Llama's reference."""
    torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    transformers = pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    config = load_config(toy)
    weights = open_checkpoint(toy, config)
    oracle = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    )
    renamed = {"model.embed_tokens.weight": weights["table"], "model.norm.weight": weights["n.weight"]}
    for name in weights:
        block, dot, suffix = name.partition(".")
        if dot and block != "n":
            renamed[f"model.layers.{block[1:]}.{QWEN3[suffix]}.weight"] = weights[name]
    missing, unexpected = oracle.load_state_dict(
        {name: torch.from_numpy(np.array(array)) for name, array in renamed.items()}, strict=False
    )
    assert (missing, unexpected) == (["lm_head.weight"], [])
    with torch.no_grad():
        single = oracle(torch.tensor([IDS])).logits[0].numpy()
        double = oracle.double()(torch.tensor([IDS])).logits[0].numpy()
    noise = np.abs(single - double).max()
    assert np.abs(logits_of(ReferenceModel(config, weights)) - double[PROMPT - 1 :]).max() <= 4 * noise


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_its_kernels_compute_its_reference(toy, simulated, ranks) -> None:
    """Within what another order of float32 sums does: the noise of the same model on shuffled hidden dimensions."""
    config = load_config(toy)
    weights = dict(open_checkpoint(toy, config))
    wanted = logits_of(ReferenceModel(config, weights))
    noise = max(
        float(np.abs(logits_of(ReferenceModel(config, shuffled(weights, seed))) - wanted).max())
        for seed in range(8)
    )
    model = KernelModel(config, shard_weights(config, weights, ranks), simulated("trn1", ranks), 128)
    assert np.abs(logits_of(model) - wanted).max() <= 4 * noise


def shuffled(weights: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Return the same function with the hidden dimensions in another order."""
    order = np.random.default_rng(seed).permutation(SIZES["h"])
    last = {"o", "down", "weight"}
    heads = ("qn.weight", "kn.weight")
    return {
        name: array
        if name.endswith(heads)
        else array[order]
        if name.rpartition(".")[2] in last
        else array[:, order]
        for name, array in weights.items()
    }


@pytest.mark.slow
def test_it_generates_and_is_planned(toy, capsys) -> None:
    assert (
        main(["generate", "--model", str(toy), "--prompt", "ab", "--max-new-tokens", "3", "--tp", "2"]) == 0
    )
    assert "3 of 3 tokens equal to the numpy reference" in capsys.readouterr().out
    assert main(["plan", str(toy), "--tp", "2", "--lnc", "1"]) == 0
    text = capsys.readouterr().out
    assert "\ndecoder_layer_decode " in text and "Times are dry runs of this project's kernels" in text
    tensors = safetensors.numpy.load_file(toy / "model.safetensors")
    (counted,) = [
        line.split()[1] for line in text.splitlines() if line.startswith("all ") and "%" not in line
    ]
    assert counted == f"{sum(tensor.size for tensor in tensors.values()):,}"


def test_a_model_type_without_a_row_is_refused(toy) -> None:
    """The row that the fixture adds is all that makes the difference."""
    fields = json.loads((toy / "config.json").read_text())
    assert read_config(toy).model_type == "toy"
    (toy / "config.json").write_text(json.dumps({**fields, "model_type": "toi"}))
    with pytest.raises(ModelError, match=r"model_type: 'toi' is not known; --as \w+ plans "):
        read_config(toy)


def test_a_family_whose_parts_no_layer_computes_is_refused_before_its_weights_are_read(
    toy, monkeypatch
) -> None:
    """The same row is accepted with a reader whose parts are all computed."""
    load_config(toy)
    monkeypatch.setitem(FAMILIES, "toy", replace(FAMILIES["toy"], reader="sparse"))
    with pytest.raises(ModelError) as refused:
        load_config(toy)
    assert str(refused.value) == f"{toy / 'config.json'}: no layer computes sparse activations"


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("gemma-3-27b", "gemma3 needs the vision tower"),
    ],
)
def test_a_refused_family_says_what_is_missing_and_that_it_is_planned(tmp_path, name, needs) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    assert read_config(tmp_path).architecture == ""
    with pytest.raises(ModelError) as refused:
        load_config(tmp_path)
    message = f"model_type: {needs}, which no layer computes; nkw plan takes it"
    assert str(refused.value) == f"{tmp_path / 'config.json'}: {message}"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_a_model_without_missing_parts_is_composed_with_all_its_parameters(path) -> None:
    """The plan counts parts, the layers state tensors: two roads to one number."""
    config = read_config(path)
    if find_unsupported(config):
        assert config.architecture == ""
        return
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in compose(config).list_tensor_shapes().values()]
    model = ModelSizes(config)
    buffers = sum(
        section.count * size
        for section in model.sections
        for category, size in section.tensors.values()
        if category == "buffers"
    )
    assert sum(sizes) == model.total + buffers


@pytest.mark.parametrize(("name", "row"), FAMILIES.items())
def test_every_row_names_a_reader(name, row, tmp_path) -> None:
    """An empty config is refused by the reader, in the words of its first field."""
    (tmp_path / "config.json").write_text("{}")
    reader = getattr(__import__(row.module, fromlist=[row.reader]), row.reader)
    with pytest.raises(ModelError, match="missing"):
        reader(Fields(tmp_path / "config.json"))
