"""Halving the step divides the error of a noise schedule by 2^order, on Gaussian data with closed forms."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.model.closed_flows import (
    FLOWS,
    STARTS,
    VARIANCES,
    Solver,
    fit_order,
    measure_flow_error,
    measure_variance_error,
    run,
)

TOLERANCE = 0.2
"""Distance of a fitted slope from the order: terms of the next order are still visible at these numbers of steps."""


@pytest.mark.parametrize("name", FLOWS)
def test_deterministic_solver_converges_with_its_order(name: str) -> None:
    solver = FLOWS[name]
    errors = [measure_flow_error(solver, steps) for steps in solver.steps]
    assert fit_order(errors) == pytest.approx(solver.order, abs=TOLERANCE), errors


@pytest.mark.parametrize("name", VARIANCES)
def test_variance_of_a_stochastic_solver_converges_with_its_order(name: str) -> None:
    solver = VARIANCES[name]
    errors = [measure_variance_error(solver, steps) for steps in solver.steps]
    assert fit_order(errors) == pytest.approx(solver.order, abs=TOLERANCE), errors


def test_the_documented_table_is_measured() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "noise-schedules.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (\d) \| ([\d.]+) \| [\d.e-]+ \|", page, re.MULTILINE)
    assert [name for name, *_ in rows] == [*FLOWS, *VARIANCES]
    for name, order, slope in rows:
        solver, measure = (
            (FLOWS | VARIANCES)[name],
            (measure_flow_error if name in FLOWS else measure_variance_error),
        )
        measured = fit_order([measure(solver, steps) for steps in solver.steps])
        assert int(order) == solver.order and float(slope) == pytest.approx(measured, abs=0.02), name


@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_ddim_with_noise_keeps_the_variance(eta: float) -> None:
    """The variance converges with order 1 for each eta; eta 1 is DDPM."""

    class NoisyDdim(Solver):
        @property
        def schedule(self):
            return replace(super().schedule, eta=eta)

    ddim = VARIANCES["DDPM"]
    solver = NoisyDdim("DDIM", 1, ddim.fields, steps=ddim.steps, to_end=True)
    errors = [measure_variance_error(solver, steps) for steps in solver.steps]
    assert fit_order(errors) == pytest.approx(1, abs=TOLERANCE), errors
    if eta == 1:
        expected = [measure_variance_error(ddim, steps) for steps in ddim.steps]
        assert errors == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["DDIM", "Euler", "Heun", "DPM-Solver++ order 2", "DPM-Solver order 2"])
def test_prediction_types_give_the_same_trajectory(name: str) -> None:
    """All types describe one conditional expectation; conversions round in float64."""
    solver = FLOWS[name]
    runs = [
        run(replace(solver, fields=solver.fields | {"prediction_type": prediction}), 10, STARTS, 0.7)[-1][0]
        for prediction in ("epsilon", "sample", "v_prediction")
    ]
    assert np.abs(runs[0]).max() > 0.1
    for images in runs[1:]:
        np.testing.assert_allclose(images, runs[0], rtol=1e-9)
