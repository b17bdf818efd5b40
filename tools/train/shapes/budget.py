"""A training's budget in core-seconds, its learning rate, and a state that a later run continues from."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

_TABLES = ("embed", "shared", "bias")
"""Parts of the names of tables, whose rows are looked up: they are no matrices of products."""


class Training:
    """One training within a budget of processor time, which is saved and continued.

    Processor time is that of all threads of the process, so other programs on the machine do not shorten the training.

    Args:
        module: The trained module.
        folder: Folder of the state, the averaged weights and the curve; a state in it is continued.
        core_minutes: The budget.
        rate: Peak learning rate, reached after `warmup` steps; it falls with the cosine of the spent budget.
        matrices: Whether matrices are trained by Muon and the other parameters by AdamW; else all by AdamW.
    """

    def __init__(
        self,
        module: nn.Module,
        folder: Path,
        core_minutes: float,
        rate: float,
        matrices: bool,
        warmup: int = 100,
    ) -> None:
        self.module, self.folder, self.budget = module, folder, core_minutes * 60
        self.rate, self.warmup = rate, warmup
        by_muon = [
            parameter
            for name, parameter in module.named_parameters()
            if matrices and parameter.dim() == 2 and not any(table in name for table in _TABLES)
        ]
        chosen = {id(parameter) for parameter in by_muon}
        remaining = [parameter for parameter in module.parameters() if id(parameter) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(remaining, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
        ]
        if by_muon:
            self.optimizers.append(
                torch.optim.Muon(by_muon, lr=rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
            )
        self.averaged = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        self.step, self._spent_before, self._start = 0, 0.0, time.process_time()
        self._losses: list[float] = []
        folder.mkdir(parents=True, exist_ok=True)
        if self._state_file.exists():
            self._load()

    @property
    def _state_file(self) -> Path:
        return self.folder / "state.pt"

    @property
    def spent(self) -> float:
        """Core-seconds that the training has taken, with those of earlier runs."""
        return self._spent_before + time.process_time() - self._start

    @property
    def is_done(self) -> bool:
        """Whether the budget is spent."""
        return self.spent >= self.budget

    def update(self, loss: torch.Tensor) -> None:
        """Take one step down the gradient of a loss, and average the weights."""
        factor = min(1.0, (self.step + 1) / self.warmup)
        factor *= 0.01 + 0.495 * (1 + math.cos(math.pi * min(1.0, self.spent / self.budget)))
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._losses.append(float(loss.detach()))
        keep = min(0.999, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for name, tensor in self.module.state_dict().items():
                if tensor.is_floating_point():
                    self.averaged[name].lerp_(tensor, 1 - keep)

    def run(self, compute_loss: Callable[[], torch.Tensor], report: Callable[[], str], every: float) -> None:
        """Take steps until the budget is spent.

        Args:
            compute_loss: Draws a batch and returns its loss.
            report: Judges the averaged weights, as text for the log.
            every: Core-seconds between two reports; the state is saved with each.
        """
        due = self.spent + every
        while not self.is_done:
            self.update(compute_loss())
            if self.spent >= due or self.is_done:
                due = self.spent + every
                self._log(report())
                self._save()

    def use_average(self) -> dict[str, Any]:
        """Load the averaged weights into the module, and return the trained ones."""
        trained = {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}
        self.module.load_state_dict(self.averaged)
        return trained

    def _log(self, text: str) -> None:
        """Print a line and append it to the curve: step, core-seconds, mean loss since the last line, report."""
        loss = sum(self._losses) / max(1, len(self._losses))
        self._losses.clear()
        line = [self.step, f"{self.spent:.0f}", f"{loss:.5f}", text]
        print(*line, flush=True)
        with (self.folder / "log.csv").open("a", newline="") as file:
            csv.writer(file).writerow(line)

    def _save(self) -> None:
        """Write the state to disk, replacing the former one at once."""
        state = {
            "module": self.module.state_dict(),
            "averaged": self.averaged,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "spent": self.spent,
        }
        temporary = self._state_file.with_suffix(".part")
        torch.save(state, temporary)
        os.replace(temporary, self._state_file)

    def _load(self) -> None:
        """Continue from the state on disk."""
        state = torch.load(self._state_file)
        self.module.load_state_dict(state["module"])
        self.averaged = state["averaged"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        self.step, self._spent_before = state["step"], state["spent"]
