"""Convergence of the noise schedules on Gaussian data, whose flows and marginal variances have closed forms.

`python -m tests.model.closed_flows` prints the measured orders, which docs/noise-schedules.md shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from model.noise_schedules import NoiseSchedule, State, Trajectory, read_schedule

MEAN, DEVIATION = 0.7, 0.6
"""Mean and standard deviation of the clean images."""
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
STARTS = np.array([-1.3, -0.2, 0.4, 1.9]).reshape(1, 1, 4)
"""Starting noise of the deterministic runs, float64."""


@dataclass(frozen=True)
class Solver:
    """Configuration whose order is measured.

    name     class of the scheduler without the suffix "Scheduler"
    order    theoretical order
    fields   fields of the configuration
    exact_curvature  whether DPM-Solver of order 3 gives the curvature its exact weight
    past     passes whose exact predictions the run starts from; 0 for the start that users have
    steps    numbers of steps; their intervals are halved from one to the next
    to_end   whether the last pass is run, which goes to the clean image
    """

    name: str
    order: int
    fields: dict[str, Any] = field(default_factory=dict)
    past: int = 0
    exact_curvature: bool = False
    steps: tuple[int, ...] = (17, 33, 65, 129)
    to_end: bool = False

    @property
    def schedule(self) -> NoiseSchedule:
        """Schedule of the configuration."""
        schedule = read_schedule({"_class_name": f"{self.name}Scheduler"} | self.fields)
        return replace(schedule, exact_curvature=True) if self.exact_curvature else schedule


def dpm(order: int, solver_order: int | None = None, **fields: Any) -> Solver:
    """Return DPM-Solver with an expected order on noise levels with equal steps of lambda."""
    config = SD | {"use_lu_lambdas": True, "lower_order_final": False} | fields
    return Solver("DPMSolverMultistep", order, config | {"solver_order": solver_order or order})


def start_exactly(solver: Solver) -> Solver:
    """Return DPM-Solver of order 3 with the exact curvature and exact first passes, which take lower orders."""
    return replace(solver, past=2, exact_curvature=True, steps=FINE)


FINE = (33, 65, 129, 257)
NOISE = {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}
WHOLE = {"steps": (10, 20, 40, 80), "to_end": True}
FLOWS: dict[str, Solver] = {
    "DDIM": Solver("DDIM", 1, {"timestep_spacing": "trailing", "clip_sample": False}, **WHOLE),
    "Euler": Solver("EulerDiscrete", 1, SD | {"use_karras_sigmas": True}),
    "Heun": Solver("HeunDiscrete", 2, SD | {"use_karras_sigmas": True}),
    "DPM-Solver++ order 1": dpm(1),
    "DPM-Solver++ order 2": dpm(2),
    "DPM-Solver++ order 2, solver type heun": dpm(2, solver_type="heun"),
    "DPM-Solver++ order 3": replace(dpm(2, 3), steps=FINE),
    "DPM-Solver++ order 3, exact curvature and first passes": start_exactly(dpm(3)),
    "DPM-Solver order 1": dpm(1, **NOISE),
    "DPM-Solver order 2": dpm(2, **NOISE),
    "DPM-Solver order 3": replace(dpm(2, 3, **NOISE), steps=FINE),
    "DPM-Solver order 3, exact curvature and first passes": start_exactly(dpm(3, **NOISE)),
    "flow-match Euler": Solver("FlowMatchEulerDiscrete", 1),
    "flow-match Euler, shift 3": Solver("FlowMatchEulerDiscrete", 1, {"shift": 3.0}),
    "flow-match Heun": Solver("FlowMatchHeunDiscrete", 2),
}
"""Deterministic solvers: the error is the distance from the exact trajectory."""
VARIANCES: dict[str, Solver] = {
    "DDPM": Solver(
        "DDPM",
        1,
        {"timestep_spacing": "trailing", "clip_sample": False},
        steps=(125, 250, 500, 1000),
        to_end=True,
    ),
    "Euler ancestral": Solver("EulerAncestralDiscrete", 1, SD, steps=(64, 127, 253, 505)),
    "SDE-DPM-Solver++ order 1": dpm(1, algorithm_type="sde-dpmsolver++"),
    "SDE-DPM-Solver++ order 2": dpm(2, algorithm_type="sde-dpmsolver++"),
    # The first-order error of this variance integrates to zero over all noise levels.
    "SDE-DPM-Solver order 1": dpm(2, 1, algorithm_type="sde-dpmsolver", final_sigmas_type="sigma_min"),
}
"""Stochastic solvers: the error is that of the variance of the images."""


def find_exact_scales(solver: Solver, trajectory: Trajectory, index: int) -> tuple[float, float]:
    """Return the scales of clean image and noise before a pass, or after the last one."""
    if index == trajectory.passes and solver.to_end:
        return 1.0, 0.0
    sigma = float(trajectory.sigmas[index])
    if solver.name.startswith("FlowMatch"):
        return 1 - sigma, sigma
    if solver.name in ("DDPM", "DDIM"):
        # The noise levels of these two are rounded, so the share of the clean image comes from the timestep.
        alpha = float(solver.schedule.training.alphas_cumprod[trajectory.timesteps[index]])
        return float(np.sqrt(alpha)), float(np.sqrt(1 - alpha))
    if solver.name == "DPMSolverMultistep":
        return 1 / np.hypot(1, sigma), sigma / np.hypot(1, sigma)
    return 1.0, sigma


def find_deviation(signal: float, noise: float) -> float:
    """Return the standard deviation of the noisy images at some scales."""
    return float(np.hypot(signal * DEVIATION, noise))


def predict(solver: Solver, scales: tuple[float, float], images: np.ndarray, mean: float) -> np.ndarray:
    """Return the exact prediction of the solver's prediction_type for noisy images: a conditional expectation."""
    signal, noise = scales
    centred = (images - signal * mean) / find_deviation(signal, noise) ** 2
    clean, gaussian = mean + signal * DEVIATION**2 * centred, noise * centred
    if solver.name.startswith("FlowMatch"):
        return gaussian - clean
    preserving = np.hypot(signal, noise)
    velocity = (signal * gaussian - noise * clean) / preserving
    predictions = {"epsilon": gaussian, "sample": clean, "v_prediction": velocity}
    return predictions[solver.fields.get("prediction_type", "epsilon")]


def find_exact_images(
    starts: np.ndarray, first: tuple[float, float], scales: tuple[float, float]
) -> np.ndarray:
    """Return where the exact flow carries images from the scales `first` to other scales."""
    ratio = find_deviation(*scales) / find_deviation(*first)
    return scales[0] * MEAN + (starts - first[0] * MEAN) * ratio


Scales = tuple[float, float]
"""Scales of clean image and noise."""


def run(
    solver: Solver, steps: int, starts: np.ndarray, mean: float, noises: np.ndarray | None = None
) -> list[tuple[np.ndarray, Scales]]:
    """Return the images and scales at the start and after each step but the last, or all steps `to_end`.

    Args:
        solver: configuration.
        steps: number of steps.
        starts: first images in units of their standard deviation.
        mean: mean of the clean images that the model knows.
        noises: noise of each pass; None for deterministic solvers.
    """
    schedule = solver.schedule
    trajectory = schedule.plan(steps)
    scales = [find_exact_scales(solver, trajectory, index) for index in range(trajectory.passes + 1)]
    images = starts * find_deviation(*scales[0])
    exact = [find_exact_images(images, scales[0], pair) for pair in scales[: solver.past + 1]]
    history = [(images, scales[0])]
    state: State = ()
    for index in range(trajectory.passes if solver.to_end else trajectory.passes - 1):
        images = exact[index] if index <= solver.past else images
        output = predict(solver, scales[index], images, mean)
        fresh = None if noises is None else noises[index]
        state, images = schedule.step(trajectory, state, index, output, images, fresh)
        if schedule.passes_per_step == 1 or index % 2 == 1:
            history.append((images, scales[index + 1]))
    return history


def measure_flow_error(solver: Solver, steps: int) -> float:
    """Return the largest distance from the exact trajectory in units of the images' standard deviation."""
    (starts, first), *history = run(solver, steps, STARTS, MEAN)
    return max(
        float(np.abs(images - find_exact_images(starts, first, scales)).max()) / find_deviation(*scales)
        for images, scales in history[solver.past :]
    )


def measure_variance_error(solver: Solver, steps: int) -> float:
    """Return the relative error of the variance of the last images.

    The images are linear in the starting noise and the noises of the passes, so a basis of these gives the variance.
    """
    basis = np.eye(steps + 1).reshape(steps + 1, 1, 1, steps + 1)
    images, scales = run(solver, steps, basis[-1], 0.0, basis)[-1]
    return abs(float((images**2).sum()) / find_deviation(*scales) ** 2 - 1)


def fit_order(errors: list[float]) -> float:
    """Return the slope of log2(error) against the number of halvings, by least squares."""
    return float(-np.polyfit(range(len(errors)), np.log2(errors), 1)[0])


def main() -> None:
    """Print the errors and the measured order of every solver."""
    for measure, solvers in ((measure_flow_error, FLOWS), (measure_variance_error, VARIANCES)):
        for name, solver in solvers.items():
            errors = [measure(solver, steps) for steps in solver.steps]
            columns = " | ".join(f"{error:.1e}" for error in errors)
            print(f"| {name} | {solver.order} | {fit_order(errors):.2f} | {columns} |")


if __name__ == "__main__":
    main()
