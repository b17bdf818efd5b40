"""Training of masked-diffusion text: masks and their weights, the variational bound, and the folder that is written."""

from __future__ import annotations

from math import log
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")

from model.families import load_config  # noqa: E402
from model.families.tasks import MASKED_TEXT  # noqa: E402
from model.loading.checkpoint import open_checkpoint  # noqa: E402
from model.runners.masked_text import ReferenceMaskPredictor  # noqa: E402
from tools.train.decoder import Sizes  # noqa: E402
from tools.train.masked.diffusion import MaskedDecoder, draw_masks, estimate_bound  # noqa: E402
from tools.train.masked.folder import create_folder, load_weights, read_mask, read_sizes, save_weights  # noqa: E402
from tools.train.masked.quality import count_repeated, cut_at_end  # noqa: E402

SIZES = Sizes(16, 24, 8, 2, 1, 1, 50, 1e-5, 10000.0, causal=False)
MASK = 49
TEXTS = [[0, *range(1, length), 0] for length in (2, 9, 30)]


def test_ratios_are_uniform_and_weights_their_inverse() -> None:
    """Each of 8 rows has its own eighth of [0, 1]; in expectation a position weighs 1."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([draw_masks(8, 65, generator) for _ in range(2000)])
    assert (draws[:, :, 0] == 0).all()
    ratios = 1 / draws.amax(dim=2)
    slots = (ratios * 8).sort(dim=1).values.floor()
    complete = torch.isfinite(ratios).all(dim=1)
    assert (slots[complete] == torch.arange(8)).all()
    weights = draws[:, :, 1:]
    # The variance of a weight at ratio t is 1/t - 1; its mean over [0.001, 1] is 6, and 64 positions share t.
    deviation = float(weights.mean(dim=(1, 2)).std()) / 2000**0.5
    assert abs(float(weights.mean()) - 1) <= 4 * deviation + 0.001


def test_the_bound_of_a_model_that_knows_nothing_is_the_entropy_of_the_vocabulary() -> None:
    """With equal logits every mask gives log of the vocabulary for each token, whatever is drawn."""
    model = MaskedDecoder(SIZES).eval()
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
    bound = estimate_bound(model, TEXTS, MASK, samples=3, seed=1)
    assert bound.tokens == sum(len(text) - 1 for text in TEXTS)
    assert bound.nats == pytest.approx(log(50), rel=1e-6)


def test_the_bound_of_a_text_is_the_mean_over_numbers_of_masks() -> None:
    """A text of two tokens has three sets of masks: each alone with weight 2 and share 1/4, and both with share 1/2."""
    torch.manual_seed(1)
    model = MaskedDecoder(SIZES).eval()
    with torch.no_grad():
        model.embed_tokens.weight.normal_()
    text = torch.tensor([[0, 5, 7]])

    def compute_loss(masked: list[bool], weight: float) -> float:
        chosen = torch.tensor([masked])
        return float(model(text.masked_fill(chosen, MASK), text, chosen * weight))

    with torch.no_grad():
        single = compute_loss([False, True, False], 2.0) + compute_loss([False, False, True], 2.0)
        expected = (single / 4 + compute_loss([False, True, True], 1.0) / 2) / 2
    estimates = [
        estimate_bound(model, [text[0].tolist()], MASK, samples=2, seed=seed).nats for seed in range(400)
    ]
    assert abs(np.mean(estimates) - expected) <= 4 * np.std(estimates) / 400**0.5


def test_a_written_folder_loads_and_gives_the_logits_of_the_trained_model(tmp_path: Path) -> None:
    """Within twice the error of float32 in torch, of the weights that bfloat16 has rounded."""
    create_folder(tmp_path)
    torch.manual_seed(2)
    trained = MaskedDecoder(read_sizes(tmp_path))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(3.0 if parameter.dim() == 2 else 1.5)
    save_weights(trained.state_dict(), tmp_path)
    model = MaskedDecoder(read_sizes(tmp_path)).eval()
    load_weights(model, tmp_path)
    mask = read_mask(tmp_path)
    ids = np.array([[0, 300, mask, 17, mask, mask, 5, mask]])

    def compute_logits() -> np.ndarray:
        with torch.no_grad():
            states, _ = model.compute_states(torch.from_numpy(ids))
            logits = states @ model.embed_tokens.weight.T
        return np.asarray(logits[0].double().numpy())

    float32 = compute_logits()
    model.double()
    exact = compute_logits()
    config = load_config(tmp_path, MASKED_TEXT)
    assert config.mask_token_id == mask
    predictor = ReferenceMaskPredictor(config, open_checkpoint(tmp_path, config))
    logits = predictor.predict(ids, range(ids.shape[1]), False)[0]
    assert np.abs(logits - exact).max() <= 2 * np.abs(float32 - exact).max()
    assert np.abs(exact).max() > 1


def test_repeated_ngrams_and_ends_are_counted() -> None:
    assert count_repeated([1, 2, 3, 4, 1, 2, 3, 4]) == (1, 5)
    assert count_repeated([7] * 6) == (2, 3)
    assert count_repeated([1, 2, 3]) == (0, 0)
    assert cut_at_end([3, 4, 0, 5, 0]) == [3, 4, 0]
    assert cut_at_end([3, 4]) == [3, 4]
