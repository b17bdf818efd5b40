"""The validation loss of a decoder, and a picture of the loss during a training."""

import csv
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.train.corpus import EOT, IGNORE
from tools.train.decoder import Decoder


@torch.no_grad()
def evaluate(model: Decoder, stories: list[list[int]], limit: int, batch: int = 16) -> tuple[float, int]:
    """Return the summed loss and the number of predicted tokens.

    Each story is evaluated alone, cut to `limit` tokens.
    """
    total, count = 0.0, 0
    cut = sorted((s[:limit] for s in stories), key=len)
    for i in range(0, len(cut), batch):
        group = cut[i : i + batch]
        width = max(map(len, group)) - 1
        ids = torch.tensor([s[:-1] + [EOT] * (width - len(s) + 1) for s in group])
        targets = torch.tensor([s[1:] + [IGNORE] * (width - len(s) + 1) for s in group])
        total += model(ids, targets).item()
        count += sum(len(s) - 1 for s in group)
    return total, count


def report(model: Decoder, stories: list[list[int]], tokenizer: Tokenizer) -> None:
    """Print the validation loss in float32 arithmetic, per token and per character."""
    for limit in (256, 512):
        total, count = evaluate(model, stories, limit)
        chars = sum(len(tokenizer.decode(s[:limit], skip_special_tokens=True)) for s in stories)
        print(
            f"cut at {limit}: {total / count:.4f} nats a token, {total / chars:.4f} a character "
            f"({count} tokens, {chars} characters)",
            flush=True,
        )


def plot(curve: Path, picture: Path) -> None:
    """Draw the losses in a loss.csv against the number of tokens trained on, and write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = list(csv.DictReader(curve.open()))
    tokens = [int(r["tokens"]) / 1e6 for r in rows]
    figure, axes = plt.subplots(figsize=(6, 3.6))
    axes.plot(tokens, [float(r["train_loss"]) for r in rows], label="train (with dropout)")
    axes.plot(tokens, [float(r["valid_loss"]) for r in rows], label="valid")
    axes.set(xlabel="million tokens", ylabel="nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, bbox_inches="tight", metadata={"Date": None})
