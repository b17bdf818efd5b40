"""Configurations of noise schedules: every field is obeyed or refused with one sentence, as are arguments of plans."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from dataclasses import replace
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
