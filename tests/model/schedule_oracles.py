"""Trajectories that the schedulers of diffusers make of drawn model outputs, stored for tests.

`python -m tests.model.schedule_oracles` writes `schedule_oracles.npz` with diffusers 0.42.1. Tests read this file where
diffusers is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

STORED = Path(__file__).with_suffix(".npz")
SHAPE = (2, 3, 2, 4)
"""Shape of the images: images, channels, height, width."""
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
"""Betas of Stable Diffusion."""
FLUX = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
BETAS = [0.001 * (index + 1) for index in range(20)]


@dataclass(frozen=True)
class Case:
    """Configuration of a scheduler and the arguments of its trajectory.

    name    class of the scheduler without the suffix "Scheduler"
    fields  fields of the configuration
    steps   number of solver steps
    mu      parameter of the dynamic shift in diffusers' call; `tokens` is the number of image tokens that gives it
    sigmas  noise levels of a flow
    eta     share of DDPM's noise in DDIM
    learned whether the model's output has a learned variance
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    steps: int = 5
    tokens: int | None = None
    mu: float | None = None
    sigmas: tuple[float, ...] | None = None
    eta: float = 0.0
    learned: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """scheduler_config.json."""
        return {"_class_name": f"{self.name}Scheduler", "_diffusers_version": "0.42.1"} | self.fields


def once_shifted(steps: int) -> tuple[float, ...]:
    """Return the noise levels before a shift, which diffusers shifts once if they are handed in."""
    lowest = float(np.float32(1) / np.float32(1000))
    return tuple(
        float(sigma) for sigma in (np.linspace(1000, lowest * 1000, steps) / 1000).astype(np.float32)
    )


def flux_sigmas(steps: int) -> tuple[float, ...]:
    """Return the noise levels that FLUX's pipeline hands in."""
    return tuple(float(sigma) for sigma in np.linspace(1.0, 1 / steps, steps))


def dpm(**fields: Any) -> Case:
    """Return a case of DPM-Solver with 6 steps and the betas of Stable Diffusion."""
    return Case("DPMSolverMultistep", SD | fields, 6)


CASES: dict[str, Case] = {
    "ddpm": Case("DDPM"),
    "ddpm leading offset": Case("DDPM", SD | {"steps_offset": 1, "clip_sample": False}),
    "ddpm trailing v zero snr": Case(
        "DDPM",
        SD
        | {
            "timestep_spacing": "trailing",
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
            "variance_type": "fixed_large",
        },
    ),
    "ddpm sample cosine small log": Case(
        "DDPM",
        {
            "beta_schedule": "squaredcos_cap_v2",
            "prediction_type": "sample",
            "variance_type": "fixed_small_log",
            "clip_sample_range": 0.5,
        },
    ),
    "ddpm learned range": Case(
        "DDPM", {"variance_type": "learned_range", "clip_sample": False}, learned=True
    ),
    "ddpm learned": Case("DDPM", {"variance_type": "learned", "timestep_spacing": "linspace"}, learned=True),
    "ddpm threshold": Case(
        "DDPM", {"thresholding": True, "sample_max_value": 1.5, "dynamic_thresholding_ratio": 0.9}
    ),
    "ddpm trained betas": Case("DDPM", {"trained_betas": BETAS, "num_train_timesteps": 20}),
    "ddim": Case("DDIM"),
    "ddim sd": Case("DDIM", SD | {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}),
    "ddim linspace eta": Case("DDIM", {"timestep_spacing": "linspace"}, steps=7, eta=0.7),
    "ddim v zero snr": Case(
        "DDIM",
        {
            "timestep_spacing": "trailing",
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
        },
    ),
    "ddim sample threshold": Case(
        "DDIM", {"prediction_type": "sample", "thresholding": True, "sample_max_value": 2.0}
    ),
    "euler": Case("EulerDiscrete"),
    "euler sdxl": Case(
        "EulerDiscrete",
        SD
        | {
            "clip_sample": False,
            "interpolation_type": "linear",
            "sample_max_value": 1.0,
            "set_alpha_to_one": False,
            "skip_prk_steps": True,
            "steps_offset": 1,
            "timestep_spacing": "leading",
            "trained_betas": None,
            "use_karras_sigmas": False,
        },
    ),
    "euler svd": Case(
        "EulerDiscrete",
        SD
        | {
            "final_sigmas_type": "zero",
            "prediction_type": "v_prediction",
            "sigma_max": 700.0,
            "sigma_min": 0.002,
            "timestep_spacing": "leading",
            "timestep_type": "continuous",
            "use_karras_sigmas": True,
        },
    ),
    "euler karras sigma min": Case(
        "EulerDiscrete", SD | {"use_karras_sigmas": True, "final_sigmas_type": "sigma_min"}
    ),
    "euler exponential": Case("EulerDiscrete", SD | {"use_exponential_sigmas": True}),
    "euler log linear": Case("EulerDiscrete", SD | {"interpolation_type": "log_linear"}),
    "euler zero snr": Case(
        "EulerDiscrete",
        {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "prediction_type": "v_prediction"},
    ),
    "euler sample": Case("EulerDiscrete", {"prediction_type": "sample"}),
    "ancestral": Case("EulerAncestralDiscrete"),
    "ancestral v leading": Case(
        "EulerAncestralDiscrete", SD | {"prediction_type": "v_prediction", "timestep_spacing": "leading"}
    ),
    "ancestral trailing": Case("EulerAncestralDiscrete", SD | {"timestep_spacing": "trailing"}),
    "heun": Case("HeunDiscrete"),
    "heun karras v": Case("HeunDiscrete", {"use_karras_sigmas": True, "prediction_type": "v_prediction"}),
    "heun exponential clip": Case(
        "HeunDiscrete", {"use_exponential_sigmas": True, "clip_sample": True, "prediction_type": "sample"}
    ),
    "heun leading": Case("HeunDiscrete", {"timestep_spacing": "leading", "steps_offset": 1}),
    "heun one step": Case("HeunDiscrete", steps=1),
    "dpm order 1": dpm(solver_order=1),
    "dpm order 2": dpm(),
    "dpm order 3": dpm(solver_order=3),
    "dpm order 3 many": Case(
        "DPMSolverMultistep", SD | {"solver_order": 3, "final_sigmas_type": "sigma_min"}, 16
    ),
    "dpm pixart": Case(
        "DPMSolverMultistep",
        {
            "algorithm_type": "dpmsolver++",
            "dynamic_thresholding_ratio": 0.995,
            "euler_at_final": False,
            "lambda_min_clipped": -float("inf"),
            "lower_order_final": True,
            "sample_max_value": 1.0,
            "solver_type": "midpoint",
            "thresholding": False,
            "use_lu_lambdas": False,
            "variance_type": None,
        },
        8,
    ),
    "dpm heun karras": dpm(solver_type="heun", use_karras_sigmas=True),
    "dpm lu v": dpm(use_lu_lambdas=True, prediction_type="v_prediction"),
    "dpm exponential sample": dpm(use_exponential_sigmas=True, prediction_type="sample", thresholding=True),
    "dpm cosine clipped": Case(
        "DPMSolverMultistep",
        {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1, "use_karras_sigmas": True},
    ),
    "dpm cosine trailing clipped": Case(
        "DPMSolverMultistep",
        {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1, "timestep_spacing": "trailing"},
    ),
    "dpm leading euler at final": dpm(timestep_spacing="leading", steps_offset=1, euler_at_final=True),
    "dpm noise order 2": dpm(algorithm_type="dpmsolver", final_sigmas_type="sigma_min"),
    "dpm noise order 3": dpm(
        algorithm_type="dpmsolver",
        final_sigmas_type="sigma_min",
        solver_order=3,
        prediction_type="sample",
        lower_order_final=False,
        thresholding=True,
    ),
    "dpm noise heun v": dpm(
        algorithm_type="dpmsolver",
        final_sigmas_type="sigma_min",
        solver_type="heun",
        prediction_type="v_prediction",
    ),
    "dpm sde": dpm(algorithm_type="sde-dpmsolver++"),
    "dpm sde heun": dpm(algorithm_type="sde-dpmsolver++", solver_type="heun", lower_order_final=False),
    "dpm noise sde": dpm(algorithm_type="sde-dpmsolver", final_sigmas_type="sigma_min"),
    "dpm noise sde heun": dpm(
        algorithm_type="sde-dpmsolver", final_sigmas_type="sigma_min", solver_type="heun"
    ),
    "dpm flow": Case(
        "DPMSolverMultistep",
        {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0, "solver_order": 3},
        6,
    ),
    "dpm flow dynamic": Case(
        "DPMSolverMultistep",
        {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "use_dynamic_shifting": True},
        6,
        tokens=1024,
        mu=0.63,
    ),
    "dpm learned": Case("DPMSolverMultistep", {"variance_type": "learned_range"}, learned=True),
    "dpm zero snr": Case(
        "DPMSolverMultistep",
        SD
        | {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "prediction_type": "v_prediction"},
    ),
    "flow euler": Case("FlowMatchEulerDiscrete"),
    "flow euler sd3": Case("FlowMatchEulerDiscrete", {"shift": 3.0}, sigmas=once_shifted(5)),
    "flow euler flux": Case("FlowMatchEulerDiscrete", FLUX, 4, tokens=4096, mu=1.15, sigmas=flux_sigmas(4)),
    "flow euler flux 512": Case(
        "FlowMatchEulerDiscrete", FLUX, 4, tokens=1024, mu=0.63, sigmas=flux_sigmas(4)
    ),
    "flow euler dynamic": Case("FlowMatchEulerDiscrete", FLUX, tokens=256, mu=0.5),
    "flow euler linear shift": Case(
        "FlowMatchEulerDiscrete", FLUX | {"time_shift_type": "linear"}, tokens=256, mu=0.5
    ),
    "flow euler terminal": Case("FlowMatchEulerDiscrete", FLUX | {"shift_terminal": 0.1}, tokens=256, mu=0.5),
    "flow euler karras": Case("FlowMatchEulerDiscrete", {"use_karras_sigmas": True}),
    "flow euler exponential": Case("FlowMatchEulerDiscrete", {"use_exponential_sigmas": True}),
    "flow euler inverted": Case("FlowMatchEulerDiscrete", {"invert_sigmas": True}),
    "flow euler stochastic": Case("FlowMatchEulerDiscrete", {"stochastic_sampling": True}),
    "flow heun": Case("FlowMatchHeunDiscrete"),
    "flow heun 100": Case("FlowMatchHeunDiscrete", {"num_train_timesteps": 100}, 7),
}


def draw_images(*counts: int) -> np.ndarray:
    """Return Gaussian images float32 [*counts, *SHAPE], always the same."""
    return np.random.default_rng(37).standard_normal((*counts, *SHAPE)).astype(np.float32)


@dataclass(frozen=True)
class Draws:
    """Inputs of a case: starting noise, model outputs and fresh noises of each pass, and a clean image."""

    start: np.ndarray
    outputs: np.ndarray
    noises: np.ndarray
    clean: np.ndarray


def make_draws(passes: int, learned: bool) -> Draws:
    """Return the inputs of a trajectory; a learned variance lies between 0 and 1."""
    draws = draw_images(3, passes + 1)
    outputs = draws[0, :passes]
    if learned:
        outputs = np.concatenate([outputs, np.abs(np.sin(draws[2, :passes]))], axis=2)
    return Draws(draws[1, -1], outputs, draws[1, :passes], draws[0, -1])


@contextmanager
def round_square_roots() -> Iterator[None]:
    """Compute torch's square roots of float32 as IEEE 754 asks, because torch with MKL is off by one bit in places."""
    import torch

    power = torch.Tensor.__pow__

    def take_root(tensor: Any) -> Any:
        return power(tensor.double(), 0.5).to(tensor.dtype)

    def raise_to(tensor: Any, exponent: Any) -> Any:
        return take_root(tensor) if exponent == 0.5 else power(tensor, exponent)

    with (
        mock.patch.object(torch.Tensor, "__pow__", raise_to),
        mock.patch.object(torch.Tensor, "sqrt", take_root),
        mock.patch.object(torch, "sqrt", take_root),
    ):
        yield


Recording = dict[str, np.ndarray]
"""Arrays of a case: timesteps, sigmas, initial scale, images after each pass, a model input, a noised clean image.

DPM-Solver has `exact` too: the images after each pass from the recorded ones before it, computed in float64.
"""


def plan(case: Case) -> Any:
    """Return the scheduler of a case after it has set its timesteps."""
    import diffusers

    scheduler = getattr(diffusers, f"{case.name}Scheduler").from_config(case.config)
    arguments: dict[str, Any] = {}
    if case.mu is not None:
        arguments["mu"] = case.mu
    if case.sigmas is not None:
        arguments["sigmas"] = list(case.sigmas)
    else:
        arguments["num_inference_steps"] = case.steps
    scheduler.set_timesteps(**arguments)
    return scheduler


def step(case: Case, scheduler: Any, index: int, output: Any, images: Any, noise: Any) -> Any:
    """Return the images after a pass of the scheduler, which takes its fresh noise from an argument."""
    options = {"eta": case.eta, "variance_noise": noise} if case.eta else {}
    module = sys.modules[type(scheduler).__module__]
    with mock.patch.object(module, "randn_tensor", return_value=noise, create=True):
        return scheduler.step(output, scheduler.timesteps[index], images, **options).prev_sample


def record(case: Case) -> Recording:
    """Return what the scheduler of a case makes of the drawn inputs."""
    import torch

    scheduler = plan(case)
    timesteps = scheduler.timesteps
    draws = make_draws(len(timesteps), case.learned)
    middle = len(timesteps) // 2
    clean, noise = torch.from_numpy(draws.clean), torch.from_numpy(draws.start)
    if case.name.startswith("FlowMatch"):
        noised = scheduler.scale_noise(clean, timesteps[middle : middle + 1], noise)
    else:
        noised = scheduler.add_noise(clean, noise, timesteps[middle : middle + 1])
    scheduler = plan(case)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    scale = float(getattr(scheduler, "init_noise_sigma", 1.0))
    images = torch.from_numpy(draws.start * np.float32(scale))
    states, inputs = [], []
    for index, timestep in enumerate(timesteps):
        has_scale = hasattr(scheduler, "scale_model_input")
        inputs.append(scheduler.scale_model_input(images, timestep) if has_scale else images)
        output, fresh = torch.from_numpy(draws.outputs[index]), torch.from_numpy(draws.noises[index])
        images = step(case, scheduler, index, output, images, fresh)
        states.append(images.numpy())
    recording = {
        "timesteps": timesteps.numpy(),
        "scale": np.float32(scale),
        "images": np.stack(states),
        "input": inputs[middle].numpy(),
        "noised": noised.numpy(),
    }
    if hasattr(scheduler, "sigmas"):
        recording["sigmas"] = scheduler.sigmas.numpy()[: len(timesteps) + 1]
    if case.name == "DPMSolverMultistep":
        recording["exact"] = step_exactly(case, recording["images"])
    return recording


def step_exactly(case: Case, images: np.ndarray) -> np.ndarray:
    """Return the images after each pass of DPM-Solver in float64, from images float32 before each pass."""
    import torch

    scheduler = plan(case)
    scheduler.set_begin_index(0)
    scheduler.sigmas = scheduler.sigmas.double()
    draws = make_draws(len(images), case.learned)
    states = []
    for index, before in enumerate((draws.start, *images[:-1])):
        arrays = (draws.outputs[index], before, draws.noises[index])
        tensors = [torch.from_numpy(array).double() for array in arrays]
        # A step converts its images to float32.
        with mock.patch.object(torch.Tensor, "to", lambda tensor, *_, **__: tensor):
            states.append(step(case, scheduler, index, *tensors))
    return torch.stack(states).numpy()


def read_recordings() -> dict[str, Recording]:
    """Return the stored recordings by name."""
    recordings: dict[str, Recording] = {name: {} for name in CASES}
    with np.load(STORED) as file:
        for key in file.files:
            name, _, array = key.partition("/")
            recordings[name][array] = file[key]
    return recordings


def write_recordings() -> None:
    """Write the recordings of all cases to `STORED`."""
    with round_square_roots():
        arrays = {
            f"{name}/{key}": array for name, case in CASES.items() for key, array in record(case).items()
        }
    np.savez_compressed(STORED, **arrays)


if __name__ == "__main__":
    write_recordings()
