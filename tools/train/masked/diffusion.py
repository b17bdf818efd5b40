"""Masked diffusion: the model with its loss, and the variational bound of texts.

Every token but the first of a row is masked with probability t. The bound of a text of n such tokens, in nats, is the
mean over t, uniform in [0, 1], of the cross entropies of the masked tokens divided by t. With an exact number of masks
l, uniform in 1 … n, it is the mean of n / l times their sum, which varies less and serves evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from tools.train.decoder import Decoder

_LEAST_RATIO = 1e-3
"""Least mask ratio in training, which bounds the weight of a token."""


class MaskedDecoder(Decoder):
    """The decoder without causal mask, which predicts the tokens at masked positions."""

    def forward(self, ids: Tensor, targets: Tensor, weights: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the cross entropies of targets; positions of weight 0 are not computed.

        Args:
            ids: Token ids with masks, [rows, tokens].
            targets: Token ids without masks, [rows, tokens].
            weights: Weight of each position, [rows, tokens] float32.
            keep: Dropout masks, or None.
        """
        states, _ = self.compute_states(ids, keep)
        counted = weights > 0
        logits = functional.linear(states[counted], self.embed_tokens.weight).float()
        losses = functional.cross_entropy(logits, targets[counted], reduction="none")
        return (losses * weights[counted]).sum()


def draw_masks(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Return the weights of positions, [rows, width] float32: 1 / t where a token is masked, else 0.

    The ratios t of the rows are evenly spaced over [0, 1] from a random start, so that each is uniform and a batch has
    all sizes. The first position is never masked.
    """
    start = torch.rand(1, generator=generator)
    ratios = (torch.arange(rows) / rows + start).remainder(1.0).clamp(min=_LEAST_RATIO)[:, None]
    masked = torch.rand(rows, width, generator=generator) < ratios
    masked[:, 0] = False
    return masked / ratios


@dataclass(frozen=True)
class Bound:
    """Estimate of the variational bound in nats a token, its standard error over texts, and the number of tokens."""

    nats: float
    error: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.nats:.4f} ± {self.error:.4f}"


@torch.no_grad()
def estimate_bound(
    model: MaskedDecoder,
    texts: Sequence[Sequence[int]],
    mask: int,
    samples: int,
    seed: int,
    limit: int = 256,
) -> Bound:
    """Return the bound of texts, each alone, cut to `limit` tokens; the first token of a text is given.

    Args:
        model: The model.
        texts: Token ids.
        mask: The mask.
        samples: Masks of each text; their numbers of masks are evenly spaced from a random start.
        seed: Seed of the masks.
        limit: Most tokens of a text.
    """
    generator = torch.Generator().manual_seed(seed)
    sums, tokens = [], 0
    for text in texts:
        ids = torch.tensor(text[:limit]).repeat(samples, 1)
        count = ids.shape[1] - 1
        start = torch.rand(1, generator=generator)
        shares = (torch.arange(samples) / samples + start).remainder(1.0)
        masks = (shares * count).long() + 1  # 1 … count, each as likely
        ranks = torch.rand(samples, count, generator=generator).argsort(dim=1).argsort(dim=1)
        masked = functional.pad(ranks < masks[:, None], (1, 0))
        weights = masked * (count / masks[:, None])
        loss = model(ids.masked_fill(masked, mask), ids, weights) / samples
        sums.append(float(loss))
        tokens += count
    losses = torch.tensor(sums, dtype=torch.float64)
    error = float(losses.std(correction=0) * len(losses) ** 0.5 / tokens)
    return Bound(float(losses.sum() / tokens), error, tokens)
