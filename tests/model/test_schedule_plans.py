"""Plans of noise schedules: limits of steps, tokens and noise levels, and what the fields do to a trajectory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.errors import ModelError
from model.noise_schedules import SCHEDULES
from tests.model.test_schedule_configs import DIFFUSION, DPM, FLOW, read


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_have_limits(name: str) -> None:
    schedule = read(name, num_train_timesteps=20)
    for steps in (1, 20):
        if steps == 1 or name != DPM:
            assert schedule.plan(steps).passes == steps * schedule.passes_per_step - (
                schedule.passes_per_step - 1
            )
    for steps in (0, -1, 21, 2.0, True, "5", None):
        with pytest.raises(
            ModelError, match="must be a whole number from 1 to the number of training timesteps, 20"
        ):
            schedule.plan(steps)


@pytest.mark.parametrize("spacing", ["linspace", "leading", "trailing"])
def test_dpm_solver_refuses_more_steps_than_distinct_noise_levels(spacing: str) -> None:
    """Linspace and leading place one timestep more than steps, trailing does not."""
    schedule = read(DPM, num_train_timesteps=20, timestep_spacing=spacing)
    assert schedule.plan(19).passes == 19
    if spacing == "trailing":
        assert schedule.plan(20).passes == 20
    else:
        with pytest.raises(
            ModelError, match="20 steps give noise levels that do not descend; use fewer steps"
        ):
            schedule.plan(20)


def test_dpm_solver_refuses_a_clip_that_leaves_no_timesteps() -> None:
    assert read(DPM, lambda_min_clipped=4.0).plan(1).passes == 1
    with pytest.raises(ModelError, match="lambda_min_clipped 5 leaves 0 timesteps; use a lower one"):
        read(DPM, lambda_min_clipped=5.0).plan(1)


@pytest.mark.parametrize(
    ("name", "steps"), [("DDIMScheduler", 500), ("EulerDiscreteScheduler", 500), (DPM, 499)]
)
def test_refuses_an_offset_beyond_the_last_timestep(name: str, steps: int) -> None:
    """With 500 steps the leading timesteps end at 998."""
    assert read(name, timestep_spacing="leading", steps_offset=1).plan(steps).timesteps[0] == 999
    with pytest.raises(
        ModelError, match="steps_offset 2 leads to timestep 1000, beyond the last of training, 999"
    ):
        read(name, timestep_spacing="leading", steps_offset=2).plan(steps)


@pytest.mark.parametrize("name", ["DDPMScheduler", "DDIMScheduler"])
def test_refuses_to_predict_noise_without_signal(name: str) -> None:
    fields = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    for accepted in ({"prediction_type": "v_prediction"}, {"timestep_spacing": "leading"}):
        read(name, **(fields | accepted)).plan(10)
    with pytest.raises(ModelError, match="from which prediction_type epsilon gives no clean image"):
        read(name, **fields).plan(10)


@pytest.mark.parametrize("eta", [-0.1, 1.1, math.nan])
def test_refuses_an_eta_outside_of_0_to_1(eta: float) -> None:
    schedule = read("DDIMScheduler")
    replace(replace(schedule, eta=1.0), eta=0.0)
    with pytest.raises(ModelError, match=r"eta .* must be from 0, without noise, to 1"):
        replace(schedule, eta=eta)


DYNAMIC = {"use_dynamic_shifting": True}


@pytest.mark.parametrize("name", ["FlowMatchEulerDiscreteScheduler", DPM])
def test_dynamic_shift_needs_tokens(name: str) -> None:
    schedule = read(name, **DYNAMIC, **(FLOW if name == DPM else {}))
    assert schedule.plan(4, tokens=1).passes == schedule.plan(4, tokens=4096).passes == 4
    with pytest.raises(ModelError, match="use_dynamic_shifting needs the number of image tokens"):
        schedule.plan(4)
    for tokens in (0, -1, 2.0, True):
        with pytest.raises(ModelError, match="must be a positive whole number of image tokens"):
            schedule.plan(4, tokens=tokens)


def test_dynamic_shift_has_limits() -> None:
    name = "FlowMatchEulerDiscreteScheduler"
    linear = read(name, **DYNAMIC, time_shift_type="linear", base_shift=-1.0)
    assert linear.plan(4, tokens=4096).passes == 4
    with pytest.raises(ModelError, match="256 image tokens give mu -1; a linear shift must be above 0"):
        linear.plan(4, tokens=256)
    exponential = read(name, **DYNAMIC)
    exponential.plan(4, tokens=60_000)
    with pytest.raises(ModelError, match="the shift makes some of 4 noise levels equal; use a smaller shift"):
        exponential.plan(4, tokens=200_000)
    with pytest.raises(
        ModelError, match=r"1000000 image tokens give mu .*, beyond float32; use fewer tokens"
    ):
        exponential.plan(4, tokens=1_000_000)


@pytest.mark.parametrize(
    "sigmas", [[1.0, 0.5], [0.5, 1.0, 0.2], [1.1, 0.5, 0.1], [1.0, 0.5, 0.0], [1, 1, 0.5], ["x"] * 3]
)
@pytest.mark.parametrize("name", ["FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"])
def test_sigmas_of_a_flow_descend(name: str, sigmas: Any) -> None:
    schedule = read(name)
    np.testing.assert_allclose(
        np.unique(schedule.plan(3, sigmas=[1.0, 0.5, 0.1]).sigmas), [0, 0.1, 0.5, 1], rtol=1e-6
    )
    with pytest.raises(ModelError, match="sigmas must be 3 descending numbers, above 0 and at most 1"):
        schedule.plan(3, sigmas=sigmas)


@pytest.mark.parametrize("name", DIFFUSION)
def test_sigmas_are_for_flows(name: str) -> None:
    with pytest.raises(ModelError, match="takes its own from the configuration"):
        read(name).plan(3, sigmas=[1.0, 0.5, 0.1])


@pytest.mark.parametrize(
    ("name", "fields"), [("DDPMScheduler", {}), ("DDIMScheduler", {"set_alpha_to_one": False})]
)
def test_noise_levels_of_discrete_schedules_are_standard_deviations(
    name: str, fields: dict[str, bool]
) -> None:
    """The betas are 0.1, 0.2 and 0.3: the share of the clean image is 0.9, 0.72 and 0.504."""
    trajectory = read(name, num_train_timesteps=3, trained_betas=[0.1, 0.2, 0.3], **fields).plan(3)
    shares = [0.504, 0.72, 0.9, 0.9 if fields else 1.0]
    assert trajectory.timesteps.tolist() == [2, 1, 0]
    np.testing.assert_allclose(trajectory.sigmas**2, 1 - np.array(shares), rtol=1e-6)


def test_terminal_needs_two_steps() -> None:
    schedule = read("FlowMatchEulerDiscreteScheduler", shift_terminal=0.1)
    assert schedule.plan(2).sigmas[-2] == pytest.approx(0.1, rel=1e-6)
    with pytest.raises(ModelError, match="shift_terminal needs at least 2 steps"):
        schedule.plan(1)


def test_dpm_solver_refuses_a_shift_that_leaves_no_signal() -> None:
    fields = FLOW | {"num_train_timesteps": 10_000, "beta_end": 0.001}
    assert read(DPM, **fields, flow_shift=500).plan(4).sigmas[0] < 1
    with pytest.raises(ModelError, match="use a smaller flow_shift"):
        read(DPM, **fields, flow_shift=5000).plan(4)


@pytest.mark.parametrize(
    ("name", "field", "setting"),
    [
        ("DDPMScheduler", "timestep_spacing", "trailing"),
        ("DDPMScheduler", "steps_offset", 1),
        ("DDIMScheduler", "beta_schedule", "squaredcos_cap_v2"),
        ("DDIMScheduler", "set_alpha_to_one", False),
        ("EulerDiscreteScheduler", "beta_start", 0.001),
        ("EulerDiscreteScheduler", "beta_end", 0.03),
        ("EulerDiscreteScheduler", "interpolation_type", "log_linear"),
        ("EulerDiscreteScheduler", "final_sigmas_type", "sigma_min"),
        ("EulerDiscreteScheduler", "rescale_betas_zero_snr", True),
        ("EulerAncestralDiscreteScheduler", "beta_schedule", "scaled_linear"),
        ("EulerAncestralDiscreteScheduler", "rescale_betas_zero_snr", True),
        (DPM, "use_lu_lambdas", True),
        (DPM, "final_sigmas_type", "sigma_min"),
        ("FlowMatchEulerDiscreteScheduler", "shift", 3.0),
        ("FlowMatchEulerDiscreteScheduler", "shift_terminal", 0.1),
        ("FlowMatchEulerDiscreteScheduler", "invert_sigmas", True),
        ("FlowMatchHeunDiscreteScheduler", "shift", 3.0),
    ],
)
def test_fields_change_the_trajectory(name: str, field: str, setting: Any) -> None:
    plain, changed = (read(name, **fields).plan(5).sigmas for fields in ({}, {field: setting}))
    assert plain.shape != changed.shape or not np.array_equal(plain, changed)
