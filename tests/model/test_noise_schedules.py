"""Noise schedules against the schedulers of diffusers: stored trajectories, and the package where it is installed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.errors import ModelError
from model.noise_schedules import NoiseSchedule, State, Trajectory, read_schedule
from tests.model.schedule_oracles import (
    CASES,
    SD,
    SHAPE,
    Case,
    Draws,
    Recording,
    make_draws,
    once_shifted,
    plan,
    read_recordings,
    record,
    round_square_roots,
)

RECORDINGS = read_recordings()
UNIT = 2.0**-24
"""Half the distance of 1 and the next float32: relative error of one rounding."""
DPM = tuple(name for name in CASES if name.startswith("dpm"))
NOT_EQUAL = ("ddpm learned range", "ddpm sample cosine small log", "euler log linear", *DPM)
"""Cases whose images are not equal bit for bit, because logarithms and exponentials round differently in torch."""
LOGARITHMS = ("karras", "exponential", "lu v", "log linear", "svd")
"""Words in names of cases whose timesteps or noise levels come from logarithms of float32."""


def read_case(case: Case) -> tuple[NoiseSchedule, Trajectory]:
    """Return the schedule and the trajectory of a case."""
    schedule = read_schedule(case.config)
    if case.eta:
        schedule = replace(schedule, eta=case.eta)
    return schedule, schedule.plan(case.steps, case.tokens, case.sigmas)


def check_plan(trajectory: Trajectory, recording: Recording, most_units: float) -> None:
    """Check timesteps, noise levels and initial scale, the numbers within some units of their last place."""
    timesteps = recording["timesteps"]
    assert trajectory.timesteps.dtype == timesteps.dtype and trajectory.passes == len(timesteps)
    np.testing.assert_allclose(
        trajectory.timesteps, timesteps, rtol=most_units * UNIT, atol=most_units * UNIT
    )
    np.testing.assert_allclose(trajectory.initial_scale, recording["scale"], rtol=most_units * UNIT)
    if "sigmas" in recording:
        assert trajectory.sigmas.dtype == np.float32
        np.testing.assert_allclose(trajectory.sigmas, recording["sigmas"], rtol=most_units * UNIT)


def bound_pass(case: Case, schedule: Any, trajectory: Trajectory, index: int) -> float:
    """Return a bound on the distance of one pass from diffusers, in units of the largest term.

    DPM-Solver: diffusers computes its weights in float32. A scale of clean image or noise has at most 6 roundings (a
    root of MKL counts as 2), a logarithm doubles its own rounding, so a lambda is off by at most 10 + 3 |lambda| units
    and a step h by eta = 20 + 6 |lambda| + h. Order 1 adds eta and 20 roundings of weights, products and sums. Higher
    orders add differences of predictions, times the ratios rho of the steps, whose weights are off by 3 eta + 9; solver
    type heun divides them by h, and order 3 by h^2.

    All others: at most 32 roundings of coefficients, products and sums.
    """
    if case.name != "DPMSolverMultistep":
        return 32.0
    scales = [schedule.split_sigma(np.float64(sigma)) for sigma in trajectory.sigmas]
    lambdas = [math.log(signal / noise) if noise > 0 else math.inf for signal, noise in scales]
    step = lambdas[index + 1] - lambdas[index]
    if math.isinf(step):
        return 64.0
    past = lambdas[max(0, index - case.fields.get("solver_order", 2) + 1) : index + 1]
    eta = 20 + 6 * max(abs(point) for point in (*past, lambdas[index + 1])) + step
    ratio = max((step / distance for distance in np.diff(past)), default=0.0)
    power = 2 if len(past) == 3 else 1 if case.fields.get("solver_type") == "heun" else 0
    curvature = max(1.0, 1 / step) ** power
    growth = math.expm1(step) if case.fields.get("algorithm_type", "").endswith("dpmsolver") else 1.0
    return max(1.0, growth) * (eta + 20 + (1 + ratio) ** 2 * (3 * eta + 9) * curvature)


def find_largest_term(
    schedule: NoiseSchedule, trajectory: Trajectory, index: int, draws: Draws, images: Any
) -> float:
    """Return a bound on the terms that a pass sums: images, model output and noise, in units of a clean image."""
    signal, deviation = (float(scale) for scale in schedule.find_scales(trajectory, index))
    terms = float(np.abs(images).max() + deviation * np.abs(draws.outputs[index]).max()) / (signal or 1.0)
    return max(terms, float(np.abs(draws.noises[index]).max()) * max(1.0, deviation))


def check_images(name: str, recording: Recording, is_equal: bool) -> None:
    """Check each pass from diffusers' own images before it: equal bits, or a distance within `bound_pass`."""
    case = CASES[name]
    schedule, trajectory = read_case(case)
    draws = make_draws(trajectory.passes, case.learned)
    images = draws.start * recording["scale"]
    state: State = ()
    for index, expected in enumerate(recording["images"]):
        output, noise = draws.outputs[index], draws.noises[index]
        state, stepped = schedule.step(trajectory, state, index, output, images, noise)
        assert stepped.dtype == np.float32
        if is_equal:
            np.testing.assert_array_equal(stepped, expected, str(index))
        units = bound_pass(case, schedule, trajectory, index)
        atol = units * UNIT * find_largest_term(schedule, trajectory, index, draws, images)
        np.testing.assert_allclose(stepped, expected, rtol=0, atol=atol, err_msg=str(index))
        images = expected


@pytest.mark.parametrize("name", CASES)
def test_plan_is_that_of_diffusers(name: str) -> None:
    _, trajectory = read_case(CASES[name])
    # numpy's float32 logarithm differs between machines by some bits.
    check_plan(trajectory, RECORDINGS[name], 8 if any(word in name for word in LOGARITHMS) else 0)


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_EQUAL])
def test_images_equal_those_of_diffusers_bit_for_bit(name: str) -> None:
    check_images(name, RECORDINGS[name], is_equal=True)


@pytest.mark.parametrize("name", NOT_EQUAL)
def test_images_are_those_of_diffusers_within_rounding(name: str) -> None:
    check_images(name, RECORDINGS[name], is_equal=False)


@pytest.mark.parametrize("name", DPM)
def test_dpm_solver_is_that_of_diffusers_in_float64(name: str) -> None:
    """Without the float32 of diffusers' weights, the distance is that of float64 roundings."""
    case, recording = CASES[name], RECORDINGS[name]
    schedule, trajectory = read_case(case)
    draws = make_draws(trajectory.passes, case.learned)
    state: State = ()
    for index, images in enumerate((draws.start, *recording["images"][:-1])):
        arrays = [array.astype(np.float64) for array in (draws.outputs[index], images, draws.noises[index])]
        state, stepped = schedule.step(trajectory, state, index, *arrays)
        units = bound_pass(case, schedule, trajectory, index)
        atol = units * 2.0**-53 * find_largest_term(schedule, trajectory, index, draws, images)
        np.testing.assert_allclose(stepped, recording["exact"][index], rtol=0, atol=atol, err_msg=str(index))


@pytest.mark.parametrize("name", CASES)
def test_inputs_and_noised_images_are_those_of_diffusers(name: str) -> None:
    case, recording = CASES[name], RECORDINGS[name]
    schedule, trajectory = read_case(case)
    draws = make_draws(trajectory.passes, case.learned)
    middle = trajectory.passes // 2
    images = recording["images"][middle - 1] if middle else draws.start * recording["scale"]
    units = 0 if name not in NOT_EQUAL else 8
    np.testing.assert_allclose(
        schedule.scale_input(trajectory, middle, images), recording["input"], rtol=units * UNIT
    )
    noised = schedule.add_noise(trajectory, middle, draws.clean, draws.start)
    if "inverted" in name:
        # diffusers mixes by the inverted noise level, which gives the image of the opposite end.
        noised = draws.clean + draws.start - noised
        np.testing.assert_allclose(
            noised, recording["noised"], rtol=0, atol=8 * UNIT * np.abs(draws.clean).max()
        )
        return
    np.testing.assert_allclose(
        noised, recording["noised"], rtol=0, atol=units * UNIT * recording["scale"] * 4
    )


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_installed_diffusers_gives_the_recorded_trajectory(name: str) -> None:
    """Roots and logarithms of torch in float32 are off by a bit in places, so only rounded roots give equal images."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch.linspace rounds twice on CPUs without FMA")
    with round_square_roots():
        rounded = record(CASES[name])
    assert rounded.keys() == RECORDINGS[name].keys()
    for key, array in rounded.items():
        np.testing.assert_array_equal(array, RECORDINGS[name][key], key)
    live = record(CASES[name])
    _, trajectory = read_case(CASES[name])
    # Rescaling to zero SNR subtracts roots, which enlarges their errors.
    check_plan(trajectory, live, 64)
    check_images(name, live, is_equal=False)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.sigmas is None])
def test_plans_of_many_numbers_of_steps_are_those_of_installed_diffusers(name: str) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    schedule, _ = read_case(CASES[name])
    planned = 0
    for steps in (1, 2, 3, 10, 16, 20, 28, 50, 61, 100, 127, 128, 129, 250, 499, 999, 1000):
        if steps > schedule.most_steps:
            break
        case = replace(CASES[name], steps=steps)
        try:
            trajectory = schedule.plan(steps, case.tokens)
        except ModelError:
            assert steps in (1, 999, 1000), "only the ends of the range may be refused"
            continue
        with round_square_roots():
            scheduler = plan(case)
        timesteps = scheduler.timesteps.numpy()
        if timesteps[-1] < 0 and "svd" not in name:
            timesteps = timesteps[:-1]
        recording = {"timesteps": timesteps, "scale": np.float32(trajectory.initial_scale)}
        if hasattr(scheduler, "sigmas") and len(timesteps) == len(scheduler.timesteps):
            recording["sigmas"] = scheduler.sigmas.numpy()[: len(timesteps) + 1]
        check_plan(trajectory, recording, 8 if any(word in name for word in LOGARITHMS) else 0)
        planned += 1
    assert planned >= 3


@pytest.mark.parametrize("name", CASES)
def test_batch_equals_its_images_alone(name: str) -> None:
    case = CASES[name]
    schedule, trajectory = read_case(case)
    draws = make_draws(trajectory.passes, case.learned)
    batches = []
    for rows in (slice(None), *(slice(row, row + 1) for row in range(SHAPE[0]))):
        state, images = (), draws.start[rows] * np.float32(trajectory.initial_scale)
        for index in range(trajectory.passes):
            output, noise = draws.outputs[index][rows], draws.noises[index][rows]
            state, images = schedule.step(trajectory, state, index, output, images, noise)
        batches.append(images)
    assert np.isfinite(batches[0]).all()
    np.testing.assert_array_equal(batches[0], np.concatenate(batches[1:]))


@pytest.mark.parametrize(("steps", "passes"), [(1, 1), (2, 3), (20, 39)])
@pytest.mark.parametrize("name", ["HeunDiscrete", "FlowMatchHeunDiscrete"])
def test_heun_takes_two_passes_but_in_the_last_step(name: str, steps: int, passes: int) -> None:
    schedule = read_schedule(Case(name).config)
    assert schedule.passes_per_step == 2
    assert schedule.plan(steps).passes == steps * schedule.passes_per_step - 1 == passes


@pytest.mark.parametrize("name", sorted({case.name for case in CASES.values() if "Heun" not in case.name}))
def test_other_schedules_take_one_pass_in_each_step(name: str) -> None:
    schedule = read_schedule(Case(name).config)
    assert schedule.passes_per_step == 1
    assert [schedule.plan(steps).passes for steps in (1, 2, 20)] == [1, 2, 20]


def test_trajectories_cannot_be_changed() -> None:
    trajectory = read_schedule(Case("EulerDiscrete").config).plan(3)
    for array in (trajectory.timesteps, trajectory.sigmas):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("name", ["FlowMatchEulerDiscrete", "FlowMatchHeunDiscrete"])
def test_constant_shift_is_applied_once(name: str) -> None:
    """The last noise level is 1 / 1000 shifted once; diffusers without `sigmas` shifts it twice."""
    trajectory = read_schedule(Case(name, {"shift": 3.0}).config).plan(1000)
    once = 3 * 0.001 / (1 + 2 * 0.001)
    assert trajectory.sigmas[-2] == pytest.approx(once, rel=1e-6)
    even = np.linspace(1, 0.001, 1000)
    assert np.unique(trajectory.sigmas)[:0:-1] == pytest.approx(3 * even / (1 + 2 * even), rel=1e-5)


@pytest.mark.deep
def test_sigmas_reproduce_diffusers_that_shifts_twice() -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    config = Case("FlowMatchEulerDiscrete", {"shift": 3.0}).config
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config)
    scheduler.set_timesteps(28)
    lowest = 3 * 0.001 / (1 + 2 * 0.001)
    trajectory = read_schedule(config).plan(28, sigmas=np.linspace(1, lowest, 28).tolist())
    np.testing.assert_allclose(trajectory.sigmas, scheduler.sigmas.numpy(), rtol=8 * UNIT)


@pytest.mark.parametrize("tokens", [256, 1024, 4096])
def test_dynamic_shift_follows_the_number_of_tokens(tokens: int) -> None:
    """The mu of FLUX is linear in the tokens: 0.5 at 256 and 1.15 at 4096."""
    schedule = read_schedule(CASES["flow euler flux"].config)
    mu = 0.5 + (tokens - 256) / (4096 - 256) * (1.15 - 0.5)
    even = np.linspace(1, 0.25, 4)
    expected = math.exp(mu) / (math.exp(mu) + (1 / even - 1))
    np.testing.assert_allclose(schedule.plan(4, tokens, even.tolist()).sigmas[:-1], expected, rtol=8 * UNIT)


def test_constant_shift_ignores_tokens() -> None:
    schedule = read_schedule(CASES["flow euler sd3"].config)
    plans = [schedule.plan(5, tokens, once_shifted(5)) for tokens in (None, 4096)]
    np.testing.assert_array_equal(plans[0].sigmas, plans[1].sigmas)


def test_trailing_timesteps_end_at_a_timestep_of_training() -> None:
    """In 61 steps of 1000 timesteps, sums of rounded distances end above zero, and diffusers adds a timestep -1."""
    for name in ("DDIM", "EulerDiscrete", "DPMSolverMultistep"):
        trajectory = read_schedule(Case(name, {"timestep_spacing": "trailing"}).config).plan(61)
        assert trajectory.passes == 61 and trajectory.timesteps.min() >= 0


@pytest.mark.parametrize("name", ["DDIM", "DPMSolverMultistep", "EulerDiscrete", "FlowMatchHeunDiscrete"])
def test_learned_variance_is_left_out(name: str) -> None:
    schedule = read_schedule(Case(name).config)
    trajectory = schedule.plan(2)
    draws = make_draws(trajectory.passes, learned=True)
    doubled = schedule.step(trajectory, (), 0, draws.outputs[0], draws.start)
    alone = schedule.step(trajectory, (), 0, draws.outputs[0][:, : SHAPE[1]], draws.start)
    np.testing.assert_array_equal(doubled[1], alone[1])


def test_step_without_change_of_noise_keeps_the_images() -> None:
    """Karras noise levels end at sigma_min, and so does final_sigmas_type; diffusers divides zero by zero there."""
    fields = SD | {"use_karras_sigmas": True, "final_sigmas_type": "sigma_min", "lower_order_final": False}
    schedule = read_schedule(Case("DPMSolverMultistep", fields | {"solver_type": "heun"}).config)
    trajectory = schedule.plan(4)
    assert trajectory.sigmas[-1] == trajectory.sigmas[-2]
    draws = make_draws(4, learned=False)
    state, stepped = schedule.step(trajectory, (draws.outputs[0],), 3, draws.outputs[3], draws.start)
    np.testing.assert_array_equal(stepped, draws.start)
    assert len(state) == 1


def test_bfloat16_images_are_stepped_in_float32() -> None:
    import ml_dtypes

    schedule = read_schedule(Case("EulerDiscrete").config)
    trajectory = schedule.plan(2)
    draws = make_draws(2, learned=False)
    output, images = (array.astype(ml_dtypes.bfloat16) for array in (draws.outputs[0], draws.start))
    stepped = schedule.step(trajectory, (), 0, output, images)[1]
    widened = schedule.step(trajectory, (), 0, output.astype(np.float32), images.astype(np.float32))[1]
    assert stepped.dtype == np.float32
    np.testing.assert_array_equal(stepped, widened)


@pytest.mark.parametrize("index", [-1, 5])
def test_refuses_a_pass_outside_of_the_trajectory(index: int) -> None:
    schedule = read_schedule(Case("EulerDiscrete").config)
    trajectory, draws = schedule.plan(5), make_draws(5, learned=False)
    schedule.step(trajectory, (), 4, draws.outputs[0], draws.start)
    with pytest.raises(ModelError, match=f"pass {index} is not one of the trajectory's 0 to 4"):
        schedule.step(trajectory, (), index, draws.outputs[0], draws.start)


def test_refuses_an_output_of_another_shape() -> None:
    schedule = read_schedule(Case("EulerDiscrete").config)
    trajectory, draws = schedule.plan(5), make_draws(5, learned=False)
    with pytest.raises(ModelError, match=r"output has the shape \[2, 1, 2, 4\] for images of \[2, 3, 2, 4\]"):
        schedule.step(trajectory, (), 0, draws.outputs[0][:, :1], draws.start)


@pytest.mark.parametrize("noise", [None, np.zeros((1, 3, 2, 4), np.float32)])
def test_refuses_missing_noise(noise: np.ndarray | None) -> None:
    schedule = read_schedule(Case("EulerAncestralDiscrete").config)
    trajectory, draws = schedule.plan(5), make_draws(5, learned=False)
    with pytest.raises(ModelError, match=r"pass 0 needs noise of shape \[2, 3, 2, 4\]"):
        schedule.step(trajectory, (), 0, draws.outputs[0], draws.start, noise)
    assert not schedule.needs_noise(trajectory, 4)
    schedule.step(trajectory, (), 4, draws.outputs[0], draws.start)


@pytest.mark.parametrize("name", ["ddpm", "ancestral", "dpm sde", "flow euler stochastic"])
def test_last_step_needs_no_noise(name: str) -> None:
    schedule, trajectory = read_case(CASES[name])
    needs = [schedule.needs_noise(trajectory, index) for index in range(trajectory.passes)]
    assert needs == [True] * (trajectory.passes - 1) + [False]


def test_refuses_a_learned_variance_that_the_model_does_not_return() -> None:
    schedule = read_schedule(Case("DDPM", {"variance_type": "learned_range"}).config)
    trajectory, draws = schedule.plan(5), make_draws(5, learned=True)
    schedule.step(trajectory, (), 0, draws.outputs[0], draws.start, draws.noises[0])
    with pytest.raises(ModelError, match="variance_type learned_range needs a model whose output has twice"):
        schedule.step(trajectory, (), 0, draws.outputs[0][:, :3], draws.start, draws.noises[0])


def test_refuses_a_second_pass_without_the_first() -> None:
    schedule = read_schedule(Case("HeunDiscrete").config)
    trajectory, draws = schedule.plan(5), make_draws(9, learned=False)
    state, images = schedule.step(trajectory, (), 2, draws.outputs[0], draws.start)
    schedule.step(trajectory, state, 3, draws.outputs[1], images)
    with pytest.raises(ModelError, match="pass 3 is the second of its step; start at pass 2 or 4"):
        schedule.step(trajectory, (), 3, draws.outputs[0], draws.start)
