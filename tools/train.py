"""Train the small story-writing Llama of model/pretrained, on a CPU, within a time budget.

    python -m tools.train --corpus DIR --tokenizer tokenizer.json --out DIR --minutes 27
    python -m tools.train --corpus DIR --tokenizer tokenizer.json --evaluate DIR
    python -m tools.train --plot loss.csv --out DIR

The model is the one of model/pretrained/config.json. The corpus folder holds train.txt and
valid.txt; in both, every text is followed by a line `<|endoftext|>`. The output folder receives
model.safetensors (bfloat16, Hugging Face names, the weights of the best validation loss), loss.csv,
loss.svg, the config files and the tokenizer.
Needs torch 2.9 or newer (for torch.optim.Muon), numpy, tokenizers and safetensors; matplotlib only to
draw the curve. torch.compile needs a C++ compiler; its work (up to two minutes the first time, seconds
afterwards) counts into the budget. As the budget is in minutes, a run is not repeatable to the bit.
"""

import argparse
import csv
import json
import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

CONTEXT, EOT, IGNORE = 256, 0, -100
FOLDER = Path(__file__).resolve().parent.parent / "model" / "pretrained"
CONFIG = json.loads((FOLDER / "config.json").read_text())
WIDTH, HIDDEN, HEAD = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
HEADS, KV_HEADS, LAYERS = (
    CONFIG[f"num_{n}"] for n in ("attention_heads", "key_value_heads", "hidden_layers")
)
SITES = 1 + 2 * LAYERS  # places of dropout
WIDTHS = (128, 160, 192, 224, 256)  # row lengths in training


# ---------------------------------------------------------------- model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape

        def rotate(y: Tensor) -> Tensor:
            a, c = y.chunk(2, -1)
            return y * cos.to(y.dtype) + torch.cat((-c, a), -1) * sin.to(y.dtype)

        q = rotate(self.q_proj(x).view(b, t, HEADS, HEAD).transpose(1, 2))
        k = rotate(self.k_proj(x).view(b, t, KV_HEADS, HEAD).transpose(1, 2))
        v = self.v_proj(x).view(b, t, KV_HEADS, HEAD).transpose(1, 2)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        # Written out: at this size it is faster on a CPU than F.scaled_dot_product_attention.
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(HEAD)
        seen = torch.ones(t, t, dtype=torch.bool).tril()
        y = scores.masked_fill(~seen, -1e9).softmax(-1).to(v.dtype) @ v
        return self.o_proj(y.transpose(1, 2).reshape(b, t, HEADS * HEAD))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH, CONFIG["rms_norm_eps"])
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(WIDTH, CONFIG["rms_norm_eps"])
        self.mlp = MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keep: list[Tensor | float]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin) * keep[0]
        return x + self.mlp(self.post_attention_layernorm(x)) * keep[1]


class Dropout:
    """Dropout masks, cut at random from one pool: drawing millions of random numbers in every step
    would take a third of the time."""

    def __init__(self, p: float, generator: np.random.Generator) -> None:
        self.rng = generator
        self.pool = (torch.rand(1 << 25) >= p).to(torch.bfloat16) / (1 - p)

    def __call__(self, rows: int, width: int) -> Tensor:
        count = SITES * rows * width * WIDTH
        at = 64 * int(self.rng.integers((len(self.pool) - count) // 64))
        return self.pool[at : at + count].view(SITES, rows, width, WIDTH)


class Llama(nn.Module):
    """The Llama of config.json; parameter names are Hugging Face's without the prefix `model.`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, CONFIG["rms_norm_eps"])
        for name, p in self.named_parameters():
            if p.dim() == 2:
                shrink = math.sqrt(2 * LAYERS) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(p, std=0.02 / shrink)
        freq = CONFIG["rope_theta"] ** (-torch.arange(0, HEAD, 2) / HEAD)
        angle = torch.outer(torch.arange(2 * CONTEXT), torch.cat((freq, freq)))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor, keep: Tensor | None = None) -> Tensor:
        """Summed cross entropy of the targets; `keep` holds the dropout masks, if any."""
        t = ids.shape[1]
        masks: list[Tensor | float] = [1.0] * SITES if keep is None else list(keep.unbind())
        x = self.embed_tokens(ids) * masks[0]
        for i, layer in enumerate(self.layers):
            x = layer(x, self.cos[:t], self.sin[:t], masks[2 * i + 1 : 2 * i + 3])
        logits = F.linear(self.norm(x), self.embed_tokens.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def save(model: Llama, folder: Path) -> None:
    weights = {f"model.{k}": v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    part = folder / "model.safetensors.part"
    save_file(weights, part, metadata={"format": "pt"})
    part.chmod(0o644)
    os.replace(part, folder / "model.safetensors")


def load(model: Llama, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in weights.items()})


# ---------------------------------------------------------------- data


def read(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """The texts of a corpus file, each as <|endoftext|> + text + <|endoftext|>."""
    texts = path.read_text(encoding="utf-8").split("\n<|endoftext|>\n")[:-1]
    return [[EOT, *e.ids, EOT] for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def epoch(stories: list[list[int]], tokens: int, rng: np.random.Generator) -> list[Tensor]:
    """One pass over the texts: batches (2, rows, width) of inputs and targets, in a new order each time.
    A row holds one text, or a piece of one that is longer than a row (cut at a random place); rows of
    like length make a batch of about `tokens` tokens, padded to one of a few widths."""
    groups: dict[int, list[list[int]]] = {width: [] for width in WIDTHS}
    for i in rng.permutation(len(stories)):
        ids = stories[i]
        while len(ids) > 1:
            whole = len(ids) <= CONTEXT + 1
            end = len(ids) - 1 if whole else int(rng.integers(CONTEXT // 2, CONTEXT + 1))
            groups[min(w for w in WIDTHS if w >= end)].append(ids[: end + 1])
            ids = ids[end:]
    batches = []
    for width, pieces in groups.items():
        rows = tokens // width
        for i in range(
            0, len(pieces) - rows + 1, rows
        ):  # a rest smaller than a batch waits for the next pass
            batch = torch.full((2, rows, width), EOT)
            batch[1] = IGNORE
            for row, piece in enumerate(pieces[i : i + rows]):
                ids = torch.tensor(piece)
                batch[0, row, : len(piece) - 1], batch[1, row, : len(piece) - 1] = ids[:-1], ids[1:]
            batches.append(batch)
    return [batches[i] for i in rng.permutation(len(batches))]


@torch.no_grad()
def evaluate(model: Llama, stories: list[list[int]], limit: int, batch: int = 16) -> tuple[float, int]:
    """Summed loss and number of predicted tokens; every story alone, cut to `limit` tokens."""
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


def report(model: Llama, stories: list[list[int]], tokenizer: Tokenizer) -> None:
    """Print the validation loss in float32 arithmetic, a token and a character."""
    for limit in (256, 512):
        total, count = evaluate(model, stories, limit)
        chars = sum(len(tokenizer.decode(s[:limit], skip_special_tokens=True)) for s in stories)
        print(
            f"cut at {limit}: {total / count:.4f} nats a token, {total / chars:.4f} a character "
            f"({count} tokens, {chars} characters)",
            flush=True,
        )


# ---------------------------------------------------------------- training


def plot(curve: Path, picture: Path) -> None:
    """Draw the loss against the tokens trained on."""
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


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    stories, held_out = (read(args.corpus / f"{n}.txt", tokenizer) for n in ("train", "valid"))
    args.out.mkdir(parents=True, exist_ok=True)
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    for source in (args.tokenizer, *(FOLDER / n for n in names)):
        if source.resolve().parent != args.out.resolve():
            shutil.copyfile(source, args.out / source.name)
    model = Llama()
    dropout = Dropout(args.dropout, rng)
    step_model = model if args.no_compile else torch.compile(model, dynamic=False)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    common: dict = dict(lr=args.lr, betas=(0.9, 0.98), fused=True)
    optimizers = [torch.optim.AdamW(others, weight_decay=0.0, **common)]
    if args.optimizer == "adamw":
        optimizers.append(torch.optim.AdamW(matrices, weight_decay=args.decay, **common))
    else:
        optimizers.append(
            torch.optim.Muon(matrices, lr=args.lr, weight_decay=args.decay, adjust_lr_fn="match_rms_adamw")
        )
    budget, start, best = args.minutes * 60, time.monotonic(), math.inf
    step = tokens = recent_count = 0
    recent, next_check = 0.0, 0.0
    with (args.out / "loss.csv").open("w", newline="") as file:
        curve = csv.writer(file)
        curve.writerow(["step", "seconds", "tokens", "train_loss", "valid_loss"])
        batches: list[Tensor] = []
        while True:
            seconds = time.monotonic() - start
            done = seconds >= budget
            if step and (done or seconds >= next_check):
                next_check = seconds + budget / args.checks
                with torch.autocast("cpu", torch.bfloat16):
                    total, count = evaluate(model, held_out, CONTEXT)
                line = [
                    step,
                    f"{seconds:.0f}",
                    tokens,
                    f"{recent / recent_count:.4f}",
                    f"{total / count:.4f}",
                ]
                curve.writerow(line)
                file.flush()
                print(*line, flush=True)
                recent, recent_count = 0.0, 0
                if total / count < best:
                    best = total / count
                    save(model, args.out)
            if done:
                break
            batches = batches or epoch(stories, args.batch, rng)
            ids, targets = batches.pop()
            count = int((targets != IGNORE).sum())
            with torch.autocast("cpu", torch.bfloat16):
                loss = step_model(ids, targets, dropout(*ids.shape) if args.dropout else None) / count
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            progress = min(1.0, seconds / budget)  # warmup, then cosine over the time budget
            factor = min(1.0, (step + 1) / args.warmup) * (0.01 + 0.495 * (1 + math.cos(math.pi * progress)))
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * factor
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step, tokens = step + 1, tokens + count
            recent, recent_count = recent + loss.item(), recent_count + 1
    load(model, args.out)
    report(model, held_out, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--corpus", type=Path, help="folder with train.txt and valid.txt")
    add("--tokenizer", type=Path, help="tokenizer.json")
    add("--out", type=Path, help="folder to write")
    add("--minutes", type=float, default=27.0, help="time budget of the training")
    add("--seed", type=int, default=1)
    add("--batch", type=int, default=4096, help="tokens in a step, padding included")
    add("--lr", type=float, default=4e-3, help="peak, of a warmup and a cosine over the time budget")
    add("--decay", type=float, default=0.1, help="weight decay of the matrices")
    add("--dropout", type=float, default=0.1)
    add("--warmup", type=int, default=100, help="steps")
    add("--checks", type=int, default=40, help="how often to measure the validation loss")
    add(
        "--optimizer",
        choices=("muon", "adamw"),
        default="muon",
        help="for the matrices of the layers; embedding and norms always have AdamW",
    )
    add("--no-compile", action="store_true", help="do without torch.compile")
    add("--evaluate", type=Path, help="only measure the weights in this folder")
    add("--plot", type=Path, help="only draw this loss.csv")
    args = parser.parse_args()
    if not (args.plot or (args.corpus and args.tokenizer)) or not (args.evaluate or args.out):
        parser.error("--corpus, --tokenizer and --out are needed (--plot: --out; --evaluate: not --out)")
    if args.plot:
        plot(args.plot, args.out / "loss.svg")
    elif args.evaluate:
        tokenizer, model = Tokenizer.from_file(str(args.tokenizer)), Llama()
        load(model, args.evaluate)
        report(model, read(args.corpus / "valid.txt", tokenizer), tokenizer)
    else:
        train(args)
        plot(args.out / "loss.csv", args.out / "loss.svg")


if __name__ == "__main__":
    main()
