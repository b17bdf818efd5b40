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
import math
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.train.corpus import CONTEXT, IGNORE, epoch, read
from tools.train.decoder import Decoder, Dropout, Sizes, load, save
from tools.train.loss import evaluate, plot, report

FOLDER = Path(__file__).resolve().parents[2] / "model" / "pretrained"


def train(args: argparse.Namespace) -> None:
    """Run a training within a time budget, and write its best weights and the loss curve to `args.out`."""
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
    matrices, vectors = [], []
    for name, p in model.named_parameters():
        (vectors if p.dim() != 2 or "embed" in name or "mlp.gate." in name else matrices).append(p)
    common: dict = dict(lr=args.lr, betas=(0.9, 0.98), fused=True)
    optimizers = [torch.optim.AdamW(vectors, weight_decay=0.0, **common)]
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
    """Run a training, evaluate a model with --evaluate, or only draw the loss curve with --plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
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
