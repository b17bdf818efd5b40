"""Configurations of noise schedules: every field is obeyed or refused with one sentence, as are arguments of plans."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.errors import ModelError
from model.noise_schedules import SCHEDULES, NoiseSchedule, read_schedule
from model.noise_schedules.fields import MOST_TIMESTEPS, ScheduleFields
from tests.model.schedule_oracles import CASES

DIFFUSION = [name for name in SCHEDULES if not name.startswith("FlowMatch")]
SPACED = [name for name in DIFFUSION if name not in ("DDPMScheduler", "DDIMScheduler")]
TINY = 2.0**-26
"""Beta that leaves the cumulative product at 1 in float32."""


def read(name: str, **fields: Any) -> NoiseSchedule:
    """Return the schedule of a class with some fields."""
    return read_schedule({"_class_name": name, "_diffusers_version": "0.42.1", **fields})


def check_refusal(name: str, message: str, **fields: Any) -> None:
    """Check that a configuration is refused with a sentence of one line that contains a message."""
    with pytest.raises(ModelError) as refusal:
        read(name, **fields)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
    assert refusal.value.code == "NKW-MODEL-CONFIG"


@pytest.mark.parametrize("name", SCHEDULES)
def test_default_configuration_is_read(name: str) -> None:
    schedule = read(name, _use_default_values=["steps_offset"])
    trajectory = schedule.plan(4)
    assert schedule.most_steps == 1000
    assert np.isfinite(trajectory.sigmas).all() and np.isfinite(trajectory.timesteps).all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "the scheduler configuration is a list, not an object"),
        (None, "the scheduler configuration is a NoneType, not an object"),
        ({}, "_class_name None is not supported; use one of DDPMScheduler, "),
        ({"_class_name": 3}, "_class_name 3 is not supported"),
        ({"_class_name": "PNDMScheduler"}, "_class_name 'PNDMScheduler' is not supported"),
    ],
)
def test_refuses_an_unknown_class(config: Any, message: str) -> None:
    with pytest.raises(ModelError) as refusal:
        read_schedule(config)
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", SCHEDULES)
def test_refuses_an_unknown_field(name: str) -> None:
    check_refusal(name, f"{name}: beta_shape: unknown field; remove it", beta_shape="linear")


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("FlowMatchHeunDiscreteScheduler", "use_dynamic_shifting"),
        ("FlowMatchHeunDiscreteScheduler", "stochastic_sampling"),
        ("EulerDiscreteScheduler", "clip_sample"),
        ("EulerDiscreteScheduler", "thresholding"),
        ("EulerAncestralDiscreteScheduler", "use_karras_sigmas"),
        ("HeunDiscreteScheduler", "rescale_betas_zero_snr"),
        ("DDIMScheduler", "use_karras_sigmas"),
        ("DPMSolverMultistepScheduler", "clip_sample"),
    ],
)
def test_fields_of_other_classes_may_be_off_but_not_on(name: str, switch: str) -> None:
    read(name, **{switch: False}, sample_max_value=1.0, skip_prk_steps=True)
    check_refusal(name, f"{switch}: True asks for what this class does not compute", **{switch: True})


def list_fields(name: str) -> set[str]:
    """Return the fields that the reader of a class looks for."""
    fields = ScheduleFields({"_class_name": name})
    SCHEDULES[name](fields)
    return fields._read


@pytest.mark.parametrize("name", SCHEDULES)
def test_documented_fields_are_read(name: str) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "noise-schedules.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{name}` \| (.+) \|$", page, re.MULTILINE)
    assert row is not None
    assert row[1] == ", ".join(f"`{field}`" for field in sorted(list_fields(name)))


@pytest.mark.deep
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_field_of_the_installed_class_is_read(name: str) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    assert set(parameters) - {"self"} == list_fields(name)


def test_mixed_configurations_are_refused_or_give_finite_images() -> None:
    """Draws fields of all recorded cases and extreme values for each class. Warnings of numpy fail the test."""
    random = np.random.default_rng(37)
    pool = [pair for case in CASES.values() for pair in case.fields.items()]
    pool += [
        (name, setting)
        for name in ("shift", "flow_shift", "sigma_max", "base_shift")
        for setting in (1e-30, 1e30)
    ]
    pool += [(name, setting) for name in ("beta_start", "beta_end") for setting in (1e-9, 0.9)]
    outcomes = Counter[str]()
    for _ in range(1500):
        name = str(random.choice(list(SCHEDULES)))
        fields = dict(pool[index] for index in random.integers(0, len(pool), random.integers(0, 4)))
        try:
            schedule = read(name, **fields)
            trajectory = schedule.plan(int(random.choice([1, 2, 5, 16])), tokens=256)
        except ModelError:
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        learned = "learned" in str(fields.get("variance_type"))
        images, state = np.full((1, 2, 2), 0.5, np.float32), ()
        with np.errstate(all="raise", under="ignore"):
            for index in range(trajectory.passes):
                output = np.full((1, 4 if learned else 2, 2), 0.3, np.float32)
                state, images = schedule.step(trajectory, state, index, output, images, np.ones_like(images))
        assert np.isfinite(images).all(), (name, fields)
    assert min(outcomes["read"], outcomes["refused"]) > 300, outcomes


COUNTS = [
    *((name, "num_train_timesteps", 1, MOST_TIMESTEPS) for name in SCHEDULES),
    ("DPMSolverMultistepScheduler", "solver_order", 1, 3),
    ("DDIMScheduler", "steps_offset", 0, MOST_TIMESTEPS),
    ("FlowMatchEulerDiscreteScheduler", "base_image_seq_len", 1, 4095),
]


@pytest.mark.parametrize(("name", "field", "lowest", "most"), COUNTS)
def test_counts_have_limits(name: str, field: str, lowest: int, most: int) -> None:
    betas = {"trained_betas": [0.01]} if field == "num_train_timesteps" and name in DIFFUSION else {}
    read(name, **{field: lowest}, **betas)
    if field != "num_train_timesteps" or name not in DIFFUSION:
        read(name, **{field: most})
    for setting in (lowest - 1, MOST_TIMESTEPS + 1, -3, 2.5, "3", True, math.nan):
        check_refusal(name, f"{name}: {field}: {setting!r} is not", **{field: setting})


@pytest.mark.parametrize("setting", [0, 1, 1.5, -0.1, math.nan, math.inf, "0.1", True, [0.1]])
@pytest.mark.parametrize("field", ["beta_start", "beta_end"])
@pytest.mark.parametrize("name", ["DDPMScheduler", "HeunDiscreteScheduler"])
def test_refuses_betas_outside_of_0_to_1(name: str, field: str, setting: Any) -> None:
    read(name, **{field: 0.01})
    check_refusal(
        name, f"{field}: {setting!r} is not a finite number above 0 and below 1", **{field: setting}
    )


@pytest.mark.parametrize(
    ("betas", "message"),
    [
        ([0.1, 0.2], "2 betas for num_train_timesteps 3"),
        ([0.1, 0.2, 0.3, 0.4], "4 betas for num_train_timesteps 3"),
        ([0.1, math.nan, 0.3], "nan at index 1 is not between 0 and 1"),
        ([0.1, 0.2, 1.0], "1.0 at index 2 is not between 0 and 1"),
        ([0.0, 0.2, 0.3], "0.0 at index 0 is not between 0 and 1"),
        ([0.1, "0.2", 0.3], "'0.2' at index 1 is not"),
        ([], "[] is not a list of 1 to"),
        (0.1, "0.1 is not a list of 1 to"),
        ([TINY, 0.2, 0.3], "the noise levels of some timesteps are equal in float32"),
        ([0.1, TINY, 0.3], "the noise levels of some timesteps are equal in float32"),
    ],
)
def test_refuses_malformed_trained_betas(betas: Any, message: str) -> None:
    read("EulerDiscreteScheduler", num_train_timesteps=3, trained_betas=[0.1, 0.2, 0.3])
    check_refusal(
        "EulerDiscreteScheduler", f"trained_betas: {message}", num_train_timesteps=3, trained_betas=betas
    )


def test_refuses_betas_that_leave_no_signal() -> None:
    read("DDIMScheduler", beta_end=0.15)
    check_refusal("DDIMScheduler", "beta_start and beta_end: the noise levels", beta_end=0.9)


@pytest.mark.parametrize("name", DIFFUSION)
@pytest.mark.parametrize("field", ["beta_schedule", "prediction_type", "timestep_spacing"])
def test_refuses_unknown_choices(name: str, field: str) -> None:
    for setting in ("sigmoid", 3, ["linear"]):
        check_refusal(name, f"{field}: {setting!r} is not supported; use one of ", **{field: setting})


@pytest.mark.parametrize("name", [name for name in DIFFUSION if name != "DPMSolverMultistepScheduler"])
def test_flow_prediction_is_for_flows(name: str) -> None:
    check_refusal(
        name, "flow_prediction is not supported; use one of epsilon", prediction_type="flow_prediction"
    )


@pytest.mark.parametrize("name", [*SPACED[:1], *SPACED[2:], "FlowMatchEulerDiscreteScheduler"])
def test_spacings_of_noise_levels_exclude_each_other(name: str) -> None:
    for field in ("use_karras_sigmas", "use_exponential_sigmas"):
        assert not np.array_equal(read(name, **{field: True}).plan(5).sigmas, read(name).plan(5).sigmas)
    check_refusal(
        name,
        "use_exponential_sigmas: excludes use_karras_sigmas",
        use_karras_sigmas=True,
        use_exponential_sigmas=True,
    )
    check_refusal(name, "use_beta_sigmas: beta sigmas need scipy and are not computed", use_beta_sigmas=True)


DPM = "DPMSolverMultistepScheduler"
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


@pytest.mark.parametrize(
    ("name", "accepted", "refused", "message"),
    [
        (
            DPM,
            {"solver_order": 3},
            {"algorithm_type": "sde-dpmsolver++"},
            "solver_order: 3 is not computed for sde-dpm",
        ),
        (
            DPM,
            {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
            {"final_sigmas_type": "zero"},
            "final_sigmas_type: dpmsolver cannot end at zero; use sigma_min",
        ),
        (DPM, FLOW, {"use_flow_sigmas": False}, "prediction_type: flow_prediction needs use_flow_sigmas"),
        (
            DPM,
            {"time_shift_type": "exponential"},
            {"time_shift_type": "linear"},
            "time_shift_type: linear is for flow matching",
        ),
        (DPM, FLOW, {"use_karras_sigmas": True}, "use_flow_sigmas: excludes use_karras_sigmas"),
        (
            DPM,
            FLOW | {"use_dynamic_shifting": True},
            {"use_flow_sigmas": False, "prediction_type": "epsilon"},
            "use_dynamic_shifting: shifts flow sigmas only",
        ),
        (
            DPM,
            {"variance_type": "learned"},
            {"variance_type": "fixed_small"},
            "variance_type: 'fixed_small' is not",
        ),
        (
            DPM,
            {"lambda_min_clipped": -math.inf},
            {"lambda_min_clipped": math.inf},
            "lambda_min_clipped: inf is neither",
        ),
        (
            DPM,
            {"lambda_min_clipped": -5.1},
            {"lambda_min_clipped": math.nan},
            "lambda_min_clipped: nan is neither",
        ),
        (DPM, {"flow_shift": 3}, {"flow_shift": 0}, "flow_shift: 0 is not a finite number above 0.0001"),
        (DPM, {"dynamic_thresholding_ratio": 1.0}, {"dynamic_thresholding_ratio": 1.1}, "1.1 is no quantile"),
        (
            "DDPMScheduler",
            {"variance_type": "fixed_large"},
            {"variance_type": "fixed_large_log"},
            "variance_type: 'fixed_large_log' is not supported",
        ),
        (
            "DDPMScheduler",
            {"clip_sample_range": 0.5},
            {"clip_sample_range": 0},
            "clip_sample_range: 0 is not",
        ),
        (
            "DDIMScheduler",
            {"set_alpha_to_one": False},
            {"set_alpha_to_one": 1},
            "set_alpha_to_one: 1 is neither true",
        ),
        (
            "EulerDiscreteScheduler",
            {"sigma_min": 0.1, "sigma_max": 9},
            {"sigma_min": 9.0},
            "sigma_min: 9 is not below sigma_max 9",
        ),
        (
            "EulerDiscreteScheduler",
            {"sigma_min": None},
            {"sigma_min": 0},
            "sigma_min: 0 is not a finite number above 1e-06",
        ),
        (
            "EulerDiscreteScheduler",
            {"rescale_betas_zero_snr": True, "num_train_timesteps": 2},
            {"num_train_timesteps": 1},
            "rescale_betas_zero_snr: needs at least 2 training timesteps",
        ),
        (
            "FlowMatchEulerDiscreteScheduler",
            {"shift_terminal": 0.02},
            {"shift_terminal": 1.0},
            "shift_terminal: 1.0 is not a finite number above 0 and below 1",
        ),
        (
            "FlowMatchEulerDiscreteScheduler",
            {"invert_sigmas": True},
            {"stochastic_sampling": True},
            "stochastic_sampling: is not defined for inverted sigmas",
        ),
        (
            "FlowMatchEulerDiscreteScheduler",
            {"base_image_seq_len": 4095},
            {"base_image_seq_len": 4096},
            "base_image_seq_len: 4096 is not below max_image_seq_len",
        ),
        (
            "FlowMatchHeunDiscreteScheduler",
            {"shift": 3},
            {"shift": -1.0},
            "shift: -1.0 is not a finite number above 0.0001",
        ),
    ],
)
def test_refuses_contradictory_or_wrong_fields(
    name: str, accepted: dict[str, Any], refused: dict[str, Any], message: str
) -> None:
    read(name, **accepted)
    check_refusal(name, message, **(accepted | refused))


@pytest.mark.parametrize(
    ("name", "field", "lowest", "highest"),
    [
        ("FlowMatchEulerDiscreteScheduler", "shift", 1e-4, 1e4),
        ("FlowMatchHeunDiscreteScheduler", "shift", 1e-4, 1e4),
        (DPM, "flow_shift", 1e-4, 1e4),
        ("EulerDiscreteScheduler", "sigma_min", 1e-6, 1e6),
        ("EulerDiscreteScheduler", "sigma_max", 1e-6, 1e6),
        ("FlowMatchEulerDiscreteScheduler", "shift_terminal", 0.0, 1.0),
    ],
)
def test_numbers_have_limits(name: str, field: str, lowest: float, highest: float) -> None:
    for number in (lowest * 1.001 + 1e-9, highest * 0.999):
        read(name, **{field: number})
    for number in (lowest, highest, lowest - 1, highest + 1):
        check_refusal(name, f"{field}: {number!r} is not a finite number above", **{field: number})
