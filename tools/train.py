"""Train the small story-writing models of model/pretrained, on a CPU, within a time budget.

    python -m tools.train --corpus DIR --tokenizer tokenizer.json --out DIR --minutes 27
    python -m tools.train --model DIR --corpus DIR --tokenizer tokenizer.json --out DIR
    python -m tools.train --corpus DIR --tokenizer tokenizer.json --evaluate DIR
    python -m tools.train --plot loss.csv --out DIR

The model is the one of config.json in the folder `--model`: a Llama, or a Qwen3-MoE whose layers are all
sparse. The corpus folder holds train.txt and valid.txt; in both, every text is followed by a line
`<|endoftext|>`. The output folder receives model.safetensors (bfloat16, Hugging Face names, the weights of
the best validation loss), loss.csv, loss.svg, the config files and the tokenizer.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

CONTEXT, EOT, IGNORE = 256, 0, -100
FOLDER = Path(__file__).resolve().parent.parent / "model" / "pretrained"
WIDTHS = (128, 160, 192, 224, 256)  # row lengths in training


# ---------------------------------------------------------------- model


@dataclass(frozen=True)
class Sizes:
    """What a config.json says; `experts` is 0 for a Llama. Each token chooses `chosen` experts of `hidden` each."""

    width: int
    hidden: int
    head: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    eps: float
    theta: float
    experts: int = 0
    chosen: int = 0
    balance: float = 0.0

    @classmethod
    def read(cls, folder: Path) -> "Sizes":
        config = json.loads((folder / "config.json").read_text())
        sparse = config["model_type"] == "qwen3_moe"
        return cls(
            config["hidden_size"],
            config["moe_intermediate_size" if sparse else "intermediate_size"],
            config["head_dim"],
            *(config[f"num_{n}"] for n in ("attention_heads", "key_value_heads", "hidden_layers")),
            config["vocab_size"],
            config["rms_norm_eps"],
            config["rope_theta"],
            *(
                (config[n] for n in ("num_experts", "num_experts_per_tok", "router_aux_loss_coef"))
                if sparse
                else ()
            ),
        )

    @property
    def sites(self) -> int:
        """Places of dropout."""
        return 1 + 2 * self.layers


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, head = sizes.width, sizes.head
        self.q_proj = nn.Linear(width, sizes.heads * head, bias=False)
        self.k_proj = nn.Linear(width, sizes.kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, sizes.kv_heads * head, bias=False)
        self.o_proj = nn.Linear(sizes.heads * head, width, bias=False)
        if sizes.experts:  # as in Qwen3
            self.q_norm, self.k_norm = nn.RMSNorm(head, sizes.eps), nn.RMSNorm(head, sizes.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        heads, kv_heads, head = self.sizes.heads, self.sizes.kv_heads, self.sizes.head

        def rotate(y: Tensor) -> Tensor:
            a, c = y.chunk(2, -1)
            return y * cos.to(y.dtype) + torch.cat((-c, a), -1) * sin.to(y.dtype)

        q = self.q_proj(x).view(b, t, heads, head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, kv_heads, head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, kv_heads, head).transpose(1, 2)
        if self.sizes.experts:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q), rotate(k)
        k, v = (y.repeat_interleave(heads // kv_heads, 1) for y in (k, v))
        # Written out: at this size it is faster on a CPU than F.scaled_dot_product_attention.
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(head)
        seen = torch.ones(t, t, dtype=torch.bool).tril()
        y = scores.masked_fill(~seen, -1e9).softmax(-1).to(v.dtype) @ v
        return self.o_proj(y.transpose(1, 2).reshape(b, t, heads * head))


class MLP(nn.Module):
    """A gated MLP, or experts side by side: at this size all of them for every token cost less than sorting tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, hidden = sizes.width, sizes.hidden * max(1, sizes.experts)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        if sizes.experts:
            self.gate = nn.Linear(width, sizes.experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and how unevenly the experts are chosen: 1 where evenly, as transformers counts it."""
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        if not self.sizes.experts:
            return self.down_proj(hidden), x.new_zeros(())
        shares = self.gate(x).float().softmax(-1)
        best = shares.topk(self.sizes.chosen, -1)
        weights = torch.zeros_like(shares).scatter(
            -1, best.indices, best.values / best.values.sum(-1, keepdim=True)
        )
        used = (weights > 0).float().flatten(0, -2).mean(0) / self.sizes.chosen
        uneven = self.sizes.experts * (used * shares.flatten(0, -2).mean(0)).sum()
        return self.down_proj(
            hidden * weights.to(hidden.dtype).repeat_interleave(self.sizes.hidden, -1)
        ), uneven


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, sizes.eps)
        self.mlp = MLP(sizes)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, keep: list[Tensor | float]
    ) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin) * keep[0]
        out, uneven = self.mlp(self.post_attention_layernorm(x))
        return x + out * keep[1], uneven


class Dropout:
    """Dropout masks, cut at random from one pool: drawing millions of random numbers in every step
    would take a third of the time."""

    def __init__(self, p: float, sizes: Sizes, generator: np.random.Generator) -> None:
        self.rng, self.sizes = generator, sizes
        self.pool = (torch.rand(1 << 25) >= p).to(torch.bfloat16) / (1 - p)

    def __call__(self, rows: int, width: int) -> Tensor:
        shape = self.sizes.sites, rows, width, self.sizes.width
        count = math.prod(shape)
        at = 64 * int(self.rng.integers((len(self.pool) - count) // 64))
        return self.pool[at : at + count].view(shape)


class Decoder(nn.Module):
    """The model of a config.json; parameter names are Hugging Face's without the prefix `model.`, experts stacked."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, sizes.eps)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                shrink = (
                    math.sqrt(2 * sizes.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                )
                nn.init.normal_(p, std=0.02 / shrink)
        freq = sizes.theta ** (-torch.arange(0, sizes.head, 2) / sizes.head)
        angle = torch.outer(torch.arange(2 * CONTEXT), torch.cat((freq, freq)))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor, keep: Tensor | None = None) -> Tensor:
        """Summed cross entropy of the targets; `keep` holds the dropout masks, if any.

        In training the summed unevenness of the experts comes on top, as for a mean over the targets.
        """
        t = ids.shape[1]
        masks: list[Tensor | float] = [1.0] * self.sizes.sites if keep is None else list(keep.unbind())
        x = self.embed_tokens(ids) * masks[0]
        uneven = x.new_zeros((), dtype=torch.float32)
        for i, layer in enumerate(self.layers):
            x, own = layer(x, self.cos[:t], self.sin[:t], masks[2 * i + 1 : 2 * i + 3])
            uneven = uneven + own
        logits = F.linear(self.norm(x), self.embed_tokens.weight).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        if not self.training or not self.sizes.experts:
            return loss
        return loss + self.sizes.balance * (targets != IGNORE).sum() * uneven / self.sizes.layers


def places(name: str, sizes: Sizes) -> list[str]:
    """The names in a file of what the model holds as one matrix: one for each expert, or the name itself."""
    stem, dot, last = name.rpartition(".mlp.")
    if not sizes.experts or not dot or last.startswith("gate.weight"):
        return [f"model.{name}"]
    return [f"model.{stem}.mlp.experts.{expert}.{last}" for expert in range(sizes.experts)]


def experts_axis(name: str) -> int:
    """The axis on which the experts' matrices are stacked."""
    return 1 if name.endswith("down_proj.weight") else 0


def save(model: Decoder, folder: Path) -> None:
    weights = {}
    for name, whole in model.state_dict().items():
        own = places(name, model.sizes)
        for place, part in zip(own, whole.to(torch.bfloat16).chunk(len(own), experts_axis(name))):
            weights[place] = part.contiguous()
    part = folder / "model.safetensors.part"
    save_file(weights, part, metadata={"format": "pt"})
    part.chmod(0o644)
    os.replace(part, folder / "model.safetensors")


def load(model: Decoder, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict(
        {
            name: torch.cat(
                [weights[place].float() for place in places(name, model.sizes)], experts_axis(name)
            )
            for name in model.state_dict()
        }
    )


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
def evaluate(model: Decoder, stories: list[list[int]], limit: int, batch: int = 16) -> tuple[float, int]:
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


def report(model: Decoder, stories: list[list[int]], tokenizer: Tokenizer) -> None:
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
    for source in (args.tokenizer, *(args.model / n for n in names)):
        if source.resolve().parent != args.out.resolve():
            shutil.copyfile(source, args.out / source.name)
    sizes = Sizes.read(args.model)
    model = Decoder(sizes)
    dropout = Dropout(args.dropout, sizes, rng)
    step_model = model if args.no_compile else torch.compile(model, dynamic=False)
    matrices, others = [], []
    for name, p in model.named_parameters():
        (others if p.dim() != 2 or "embed" in name or "mlp.gate." in name else matrices).append(p)
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
                model.eval()
                with torch.autocast("cpu", torch.bfloat16):
                    total, count = evaluate(model, held_out, CONTEXT)
                model.train()
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
    model.eval()
    load(model, args.out)
    report(model, held_out, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, default=FOLDER, help="folder with the config.json (default: %(default)s)")
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
        help="for the matrices of the layers; embedding, norms and routers always have AdamW",
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
        tokenizer, model = Tokenizer.from_file(str(args.tokenizer)), Decoder(Sizes.read(args.evaluate)).eval()
        load(model, args.evaluate)
        report(model, read(args.corpus / "valid.txt", tokenizer), tokenizer)
    else:
        train(args)
        plot(args.out / "loss.csv", args.out / "loss.svg")


if __name__ == "__main__":
    main()
