"""Text encoders of diffusion models against transformers: hidden states, pooled states, and refusals of configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from model.config.text_encoders import ClipTextConfig, TextEncoderConfig
from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import compose
from model.families.tasks import AUTOENCODER, TEXT_ENCODER
from model.layers.launch import WeightDtypes
from model.layers.relative_attention import RelativePositions
from model.loading.component import LoadedComponent, read_component
from model.runners.component import KernelComponent, ReferenceComponent, make_step
from model.runners.single_step import draw_inputs as draw_step_inputs
from nkw.commands import main
from tests.model.text_encoder_oracles import (
    CLIP,
    ENCODERS,
    STORED,
    T5,
    TEXTS,
    draw_ids,
    draw_weights,
    record_encoder,
    write_encoder,
)

RECORDED = dict(np.load(STORED))


def open_encoder(folder: Path, name: str, dtype: str) -> LoadedComponent:
    model = LoadedComponent.open(write_encoder(folder, ENCODERS[name].fields), TEXT_ENCODER, dtype)
    assert isinstance(model.config, TextEncoderConfig)
    return model.resize(model.config.with_rows(ENCODERS[name].rows))


def draw_inputs(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the inputs of an encoder for a batch of texts."""
    encoder = ENCODERS[name]
    ids, mask = draw_ids(encoder, seed)
    lengths = mask.sum(axis=1, keepdims=True) if encoder.masked else np.full((TEXTS, 1), encoder.rows)
    return {"ids": ids} | ({"text_lengths": lengths} if name.startswith("t5") else {})


def assert_equal(name: str, model: LoadedComponent, outputs: dict[str, np.ndarray], dtype: str) -> None:
    """Check that outputs are within twice the largest error of the dtype in transformers."""
    ids, _ = draw_ids(ENCODERS[name], 0)
    if isinstance(model.config, ClipTextConfig):
        outputs = {**outputs, "pooled": model.config.pool(ids, outputs)}
    expected = {
        key: RECORDED[f"{name}: {key}"]
        for key in ("x", "penultimate", "pooled")
        if f"{name}: {key}" in RECORDED
    }
    assert expected.keys() <= outputs.keys()
    for key, array in expected.items():
        assert outputs[key].shape == array.shape
        assert np.abs(outputs[key] - array).max() <= 2 * RECORDED[f"{name}: {dtype} error of {key}"], key


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ENCODERS)
def test_the_reference_gives_the_states_of_transformers(tmp_path: Path, name: str, dtype: str) -> None:
    model = open_encoder(tmp_path, name, dtype)
    for ranks in (1, 2):
        assert_equal(name, model, ReferenceComponent(model, ranks).run(draw_inputs(name)), dtype)


@pytest.mark.parametrize(
    ("name", "target", "ranks", "dtype"),
    [
        ("clip", "trn1", 1, "float32"),
        ("clip", "trn2", 2, "bfloat16"),
        ("clip projected", "trn2", 2, "float32"),
        ("clip projected", "trn3", 1, "bfloat16"),
        ("clip gelu, one block, legacy end", "trn3", 3, "float32"),
        ("t5", "trn1", 1, "float32"),
        ("t5", "trn2", 2, "bfloat16"),
        ("t5 masked", "trn2", 2, "float32"),
        ("t5 masked", "trn3", 1, "bfloat16"),
        ("t5 relu, few buckets", "trn2", 1, "float32"),
        ("t5 beyond the last distance", "trn2", 2, "float32"),
    ],
)
def test_the_kernels_give_the_states_of_transformers(
    tmp_path: Path, name: str, target: str, ranks: int, dtype: str
) -> None:
    model = open_encoder(tmp_path, name, dtype)
    outputs = KernelComponent(model, SimulatedDevice(target, ranks), TEXTS).run(draw_inputs(name))
    assert_equal(name, model, outputs, dtype)


@pytest.mark.parametrize("name", ENCODERS)
def test_keys_and_values_are_not_stored(tmp_path: Path, name: str) -> None:
    """No later step reads them."""
    model = open_encoder(tmp_path, name, "bfloat16")
    step = make_step(model.config, model.activations, WeightDtypes(model.activations), TEXTS)
    launches = [launch for layer in model.network.layers for launch in layer.launches(step)]
    attentions = [launch for launch in launches if launch.kernel == "attention_prefill"]
    assert len(attentions) == model.config.layers and {launch.results for launch in attentions} == {("o",)}
    assert not any(layer.caches(step) for layer in model.network.layers)


def test_a_text_is_independent_of_neighbours_and_of_earlier_batches(tmp_path: Path) -> None:
    model = open_encoder(tmp_path, "clip", "float32")
    encoder = KernelComponent(model, SimulatedDevice("trn2", 1), 2)
    first, second = (draw_ids(ENCODERS["clip"], seed)[0] for seed in (0, 1))
    encoder.run({"ids": second})  # the first run of a kernel may add in another order
    outputs = encoder.run({"ids": first})
    encoder.run({"ids": second})
    mixed = encoder.run({"ids": np.stack([first[0], second[1]])})
    assert all(np.array_equal(mixed[name][0], array[0]) for name, array in outputs.items())
    swapped = encoder.run({"ids": first[::-1]})
    assert_equal("clip", model, {name: array[::-1] for name, array in swapped.items()}, "float32")


@pytest.mark.parametrize(
    ("end", "ids", "row"),
    [
        (49, [48, 7, 49, 49, 49], 2),
        (49, [48, 7, 9, 3, 49], 4),
        (49, [48, 7, 9, 3, 8], 0),
        (2, [48, 7, 49, 2, 2], 2),
        (2, [3, 2, 2, 2, 2], 0),
    ],
)
def test_the_pooled_state_is_that_of_the_first_end_token(
    tmp_path: Path, end: int, ids: list[int], row: int
) -> None:
    """With the end token 2, which old configs name, it is that of the largest id."""
    folder = write_encoder(tmp_path, CLIP | dict(eos_token_id=end))
    config = LoadedComponent.open(folder, TEXT_ENCODER).config
    assert isinstance(config, ClipTextConfig)
    states = np.random.default_rng(1).standard_normal((1, 5, 36))
    assert np.array_equal(config.pool(np.array([ids]), {"x": states}), states[:, row])


def rewrite(folder: Path, fields: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("architecture", ["CLIPTextModel", "CLIPTextModelWithProjection"])
def test_checkpoints_of_old_and_new_versions_of_transformers_are_read(
    tmp_path: Path, architecture: str
) -> None:
    """Old ones have position_ids and names with text_model; new ones of CLIPTextModel have neither."""
    fields = CLIP | dict(architectures=[architecture])
    weights = draw_weights(fields)
    old = weights | {"text_model.embeddings.position_ids": np.arange(13)[None]}
    new = {
        name.removeprefix("text_model.") if architecture == "CLIPTextModel" else name: array
        for name, array in weights.items()
    }
    outputs = []
    for number, tensors in enumerate((old, new)):
        model = LoadedComponent.open(rewrite(tmp_path / str(number), fields, tensors), TEXT_ENCODER)
        outputs.append(ReferenceComponent(model).run({"ids": draw_ids(ENCODERS["clip"], 0)[0]})["x"])
    assert np.array_equal(*outputs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(rope_theta=1e4), "rope_theta: the field is not known, so it may change"),
        (dict(hidden_act="tanh"), "hidden_act: 'tanh'; an MLP is computed with silu"),
        (dict(num_attention_heads=5), "hidden_size: 36 is not a multiple of num_attention_heads, 5"),
        (dict(num_attention_heads=4), "hidden_size: heads of 9; the kernels of attention take even sizes"),
        (dict(eos_token_id=[48, 49]), "eos_token_id: [48, 49]; the pooled state is that of one end token"),
        (dict(eos_token_id=50), "eos_token_id: 50 is not a token of a vocabulary of 50"),
        (dict(num_hidden_layers=0), "num_hidden_layers: 0"),
        (
            dict(architectures=["CLIPModel"]),
            "architectures: 'CLIPModel' is not known; known are CLIPTextModel",
        ),
        (dict(intermediate_size=51), "mlp.fc1.weight has shape (50, 36); config.json asks for (51, 36)"),
        (dict(num_hidden_layers=4), "tensor text_model.encoder.layers.3.layer_norm1.weight is missing"),
        (
            dict(num_hidden_layers=2),
            "text_model.encoder.layers.2.layer_norm1.bias is not a tensor of CLIPTextModel",
        ),
    ],
)
def test_refuses_configs_that_it_does_not_compute(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    weights = draw_weights(CLIP)
    folder = rewrite(tmp_path, CLIP | fields, weights)
    with pytest.raises(ModelError) as error:
        LoadedComponent.open(folder, TEXT_ENCODER)
    assert message in str(error.value)
    LoadedComponent.open(
        rewrite(tmp_path, CLIP | dict(initializer_range=9.0, rope_theta=None), weights), TEXT_ENCODER
    )


def test_shorter_texts_have_the_first_states_of_padded_ones(tmp_path: Path) -> None:
    model = open_encoder(tmp_path, "clip", "float32")
    assert isinstance(model.config, ClipTextConfig)
    ids = draw_ids(ENCODERS["clip"], 0)[0][:, :7]
    short = model.resize(model.config.with_rows(7))
    outputs = KernelComponent(short, SimulatedDevice("trn2", 1), TEXTS).run({"ids": ids})
    error = np.abs(outputs["penultimate"][0] - RECORDED["clip: penultimate"][0, :7]).max()
    assert error <= 2 * RECORDED["clip: float32 error of penultimate"]
    assert model.config.with_rows(13).rows == 13
    for rows in (0, 14):
        with pytest.raises(ModelError, match=f"texts of {rows} tokens; this text encoder takes 1 to 13"):
            model.config.with_rows(rows)


@pytest.mark.parametrize("fields", [CLIP | dict(architectures=["CLIPTextModelWithProjection"]), T5])
def test_a_section_of_a_text_encoder_is_bundled(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Ids and lengths are drawn within their limits."""
    folder = write_encoder(tmp_path / "model", fields | ({"n_positions": 9} if fields == T5 else {}))
    config = read_component(folder, TEXT_ENCODER)
    network, float32 = compose(config), np.dtype(np.float32)
    inputs = draw_step_inputs(network, make_step(config, float32, WeightDtypes(float32), batch=20))
    assert {name: array.max() for name, array in inputs.items()} == {
        "ids": 49,
        **({"text_lengths": 9} if fields == T5 else {}),
    }
    assert all(array.min() == 1 for array in inputs.values())
    main(["bundle", str(folder), "--layer", "1", "--target", "trn2", "--out", str(tmp_path / "bundle")])
    assert (tmp_path / "bundle" / "run.py").is_file()


def test_refuses_a_text_encoder_as_an_autoencoder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'CLIPTextModel' is not known"):
        LoadedComponent.open(write_encoder(tmp_path, CLIP), AUTOENCODER)


def test_refuses_more_ranks_than_heads(tmp_path: Path) -> None:
    config = open_encoder(tmp_path, "clip", "float32").config
    assert config.refusal(3) is None
    assert config.refusal(4) == "4 ranks for 3 heads; each rank needs one, so this encoder takes 1 to 3 ranks"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(position_embedding_type="rope"),
            "position_embedding_type: the field is not known, so it may change",
        ),
        (dict(is_decoder=True), "is_decoder: true; only encoders are computed"),
        (dict(d_kv=7), "d_kv: 7; the kernels of attention take even sizes"),
        (
            dict(feed_forward_proj="gated-tanh"),
            "feed_forward_proj: 'gated-tanh'; computed are relu, gated-gelu,",
        ),
        (dict(is_gated_act=False), "is_gated_act: False contradicts feed_forward_proj, gated-gelu"),
        (dict(dense_act_fn="relu"), "dense_act_fn: 'relu' contradicts feed_forward_proj, gated-gelu"),
        (
            dict(relative_attention_num_buckets=2),
            "relative_attention_num_buckets: 2 is not an even number from 4",
        ),
        (
            dict(relative_attention_num_buckets=31),
            "relative_attention_num_buckets: 31 is not an even number from 4",
        ),
        (
            dict(relative_attention_max_distance=8),
            "relative_attention_max_distance: 8 is not above a quarter of relative_attention_num_buckets, 32",
        ),
        (dict(relative_attention_num_buckets=34), "relative_attention_bias.weight has shape (32, 3)"),
        (dict(num_heads=4), "SelfAttention.q.weight has shape (24, 36); config.json asks for (32, 36)"),
        (dict(num_layers=3), "tensor encoder.block.2.layer.0.layer_norm.weight is missing"),
        (
            dict(feed_forward_proj="relu", is_gated_act=False, dense_act_fn="relu"),
            "DenseReluDense.wi.weight is",
        ),
    ],
)
def test_refuses_t5_configs_that_it_does_not_compute(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    weights = draw_weights(T5)
    with pytest.raises(ModelError) as error:
        LoadedComponent.open(rewrite(tmp_path / "refused", T5 | fields, weights), TEXT_ENCODER)
    assert message in str(error.value)
    accepted = dict(is_decoder=False, relative_attention_max_distance=9, dropout_rate=0.5, n_positions=7)
    model = LoadedComponent.open(rewrite(tmp_path / "twin", T5 | accepted, weights), TEXT_ENCODER)
    assert model.config.rows == 7


def test_reads_the_encoder_of_a_whole_t5(tmp_path: Path) -> None:
    """Tensors of the decoder, and a second name of the embedding, are not read; other tensors are refused."""
    weights = draw_weights(T5)
    table = weights["shared.weight"]
    surplus = {
        "encoder.embed_tokens.weight": table,
        "decoder.embed_tokens.weight": table,
        "lm_head.weight": table,
    }
    LoadedComponent.open(rewrite(tmp_path, T5, weights | surplus), TEXT_ENCODER)
    with pytest.raises(ModelError, match=r"encoder\.other is not a tensor of T5EncoderModel"):
        LoadedComponent.open(rewrite(tmp_path, T5, weights | {"encoder.other": table}), TEXT_ENCODER)


def test_padding_does_not_change_the_states_of_a_text(tmp_path: Path) -> None:
    model = open_encoder(tmp_path, "t5 masked", "float32")
    inputs = draw_inputs("t5 masked")
    device = KernelComponent(model, SimulatedDevice("trn2", 1), TEXTS)
    reference = ReferenceComponent(model)
    changed = np.where(np.arange(19) < inputs["text_lengths"], inputs["ids"], 7)
    device.run(inputs)
    for component in (device, reference):
        states, changed_states = (
            component.run(inputs | {"ids": ids})["x"] for ids in (inputs["ids"], changed)
        )
        is_token = np.arange(19) < inputs["text_lengths"]
        assert np.array_equal(states[is_token], changed_states[is_token]) and not is_token.all()
        assert not np.array_equal(states, changed_states)


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (12, 9), (4, 2), (32, 9), (64, 1000), (20, 77)])
@pytest.mark.parametrize("rows", [1, 2, 17, 300])
def test_distances_have_the_buckets_of_the_definition(buckets: int, distance: int, rows: int) -> None:
    """A bucket k of n beyond the first e begins at the distance e * (distance / e)^(k / n), in whole numbers here."""
    half = buckets // 2
    exact = half // 2
    remaining = half - exact

    def find_bucket(magnitude: int) -> int:
        if magnitude < exact:
            return magnitude
        begun = [
            k for k in range(remaining) if magnitude**remaining * exact**k >= distance**k * exact**remaining
        ]
        return exact + begun[-1]

    expected = [find_bucket(abs(number)) + half * (number > 0) for number in range(1 - rows, rows)]
    assert RelativePositions(buckets, distance, rows).list_buckets().tolist() == expected


@pytest.mark.deep
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (12, 9), (4, 2), (64, 1000), (20, 77)])
def test_installed_transformers_has_the_same_buckets(buckets: int, distance: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    from transformers.models.t5.modeling_t5 import T5Attention

    numbers = torch.arange(-2000, 2001)
    expected = T5Attention._relative_position_bucket(numbers, True, buckets, distance)
    assert RelativePositions(buckets, distance, 2001).list_buckets().tolist() == expected.tolist()


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENCODERS)
def test_installed_transformers_gives_the_recorded_states(name: str) -> None:
    pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    live = record_encoder(ENCODERS[name])
    for key, array in live.items():
        recorded = RECORDED[f"{name}: {key}"]
        if "error" in key:  # sums may be in another order on another machine
            assert array <= 4 * recorded
        else:
            np.testing.assert_allclose(array, recorded, rtol=1e-6, atol=1e-6)
