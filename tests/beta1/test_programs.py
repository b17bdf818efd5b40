"""Launching: grids of programs, the names a kernel is run under, and what it gets and gives."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import simulate
import simulate.beta1 as nki
import simulate.beta1.isa as nisa
import simulate.beta1.language as nl
from nkw.errors import InvalidArgument, NkwError, RuleViolation, Unsupported
from simulate.run import Mode
from tests.beta1.kernels import run, stored, whole_numbers

X = whole_numbers(128, 64)


@nki.jit
def numbered(x):
    out = nl.ndarray((6, 3), np.float32, buffer=nl.shared_hbm)
    row = nl.program_id(0) * nl.num_programs(1) + nl.program_id(1)
    tile = nl.ndarray((1, 3), np.float32)
    tile[:, 0:1], tile[:, 1:2], tile[:, 2:3] = nl.program_id(0), nl.program_id(1), nl.program_ndim()
    nl.store(out[nl.ds(row, 1), :], tile)
    return out


def test_every_program_of_a_grid_runs_and_they_share_their_outputs() -> None:
    expected = [[i, j, 2] for i in range(2) for j in range(3)]
    assert np.array_equal(numbered[2, 3](X), expected)
    assert np.array_equal(numbered[nl.spmd_dim(1, nl.nc(2)), nl.nc(3)](X), expected)
    assert np.array_equal(nki.simulate_kernel(numbered[2, 3], X), expected)


@pytest.mark.parametrize("grid", [-1, (2, -1), 1.5, "2", True])
def test_refuses_a_grid_that_is_no_positive_integers(grid) -> None:
    with pytest.raises(InvalidArgument, match="a grid is one or more positive integers"):
        numbered[grid]


@pytest.mark.parametrize(("axis", "known"), [(0, True), (1, True), (2, False), (-1, False)])
def test_program_id_knows_the_axes_of_the_grid(axis: int, known: bool) -> None:
    @nki.jit
    def kernel(x):
        return stored(nl.full((1, 1), nl.program_id(axis), np.float32))

    if known:
        assert kernel[1, 1](X) == 0
    else:
        with pytest.raises(InvalidArgument, match="the launch grid has 2 axes"):
            kernel[1, 1](X)


@pytest.mark.slow
def test_refuses_programs_that_share_different_tensors() -> None:
    @nki.jit
    def kernel(x):
        out = nl.ndarray((1, 1 + nl.program_id(0)), np.float32, buffer=nl.shared_hbm)
        nl.store(out, 0.0)
        return out

    assert kernel[1](X).shape == (1, 1)
    with pytest.raises(RuleViolation, match="same shared HBM tensors"):
        kernel[2](X)


def test_the_oldest_kernels_write_the_outputs_they_are_given() -> None:
    @nki.trace
    def kernel(x, out):
        nl.store(out, nl.load(x) * 2.0)

    out = np.zeros_like(X)
    kernel(X, out)
    assert np.array_equal(out, 2 * X)


@pytest.mark.parametrize("wrap", [nki.jit, nki.baremetal, nki.profile, nki.nki_jit, nki.trace, nki.benchmark])
def test_every_decorator_takes_a_function_with_and_without_options(wrap) -> None:
    def kernel(x):
        return stored(nl.load(x))

    for made in (wrap(kernel), wrap(mode="simulation", warmup=1)(kernel)):
        assert np.array_equal(made(X), X)


def test_a_benchmark_predicts_a_latency() -> None:
    kernel = nki.benchmark(warmup=1, iters=1)(lambda x: stored(nl.load(x)))
    kernel(X)
    latency = kernel.benchmark_result.nc_latency
    assert latency.get_latency_percentile(50) == latency.get_latency_percentile(99) > 0


def test_a_kernel_inside_a_kernel_is_a_function_call() -> None:
    inner = nki.jit(lambda tile: tile * 2.0)
    assert np.array_equal(run(lambda x: stored(inner(nl.load(x))), X), 2 * X)


def test_a_world_launches_a_kernel_and_plans_it_without_computing() -> None:
    kernel = nki.jit(lambda x: stored(nl.load(x[nl.arange(9)[:, None], nl.arange(64)[None, :]]) * 2.0))
    world = simulate.World("trn1")
    eager = world.launch(kernel, [((X,), {})])
    dry = world.launch(kernel, [((X,), {})], Mode.dry)
    assert np.array_equal(eager.outputs[0], 2 * X[:9])
    assert eager.streams[0].text() == dry.streams[0].text()


def test_refuses_calls_outside_of_a_kernel() -> None:
    with pytest.raises(NkwError, match="outside of a kernel"):
        nl.ndarray((128, 4), np.float32)


def test_placements_are_accepted_and_only_name_a_memory() -> None:
    def kernel(x):
        tile = nl.ndarray(
            (nl.par_dim(128), 64),
            np.float32,
            buffer=nki.compiler.sbuf.mod_alloc(base_addr=0, num_free_tiles=(2,)),
        )
        tile[...] = nl.load(x)
        return stored(tile)

    assert np.array_equal(run(nki.compiler.skip_middle_end_transformations(kernel), X), X)
    with pytest.raises(InvalidArgument, match="base_addr=-1"):
        nki.compiler.sbuf.mod_alloc(base_addr=-1)


@pytest.mark.parametrize(
    "call", [lambda: nisa.tensor_copy_dynamic_src(), lambda: nl.random_seed(), lambda: nl.all_reduce()]
)
def test_names_that_are_not_carried_out_say_why(call) -> None:
    with pytest.raises(Unsupported, match="cannot be simulated: "):
        call()


def test_names_that_nobody_documents_are_no_attributes() -> None:
    with pytest.raises(AttributeError):
        getattr(nl, "no_such" + "_name")


BOUND = """
import sys, simulate; simulate.install("simulate")
assert "simulate.beta1" not in sys.modules
from neuronxcc import nki
import neuronxcc.nki.language as nl, neuronxcc.nki.isa, neuronxcc.nki.typing, neuronxcc.nki.compiler
from neuronxcc.nki.language import par_dim
assert nl is nki.language and nki.__name__ == "simulate.beta1", nki
"""
LOADED = """
import sys, types; sys.modules["neuronxcc"] = theirs = types.ModuleType("neuronxcc")
import simulate; simulate.install("simulate")
import neuronxcc
assert neuronxcc is theirs and "neuronxcc.nki" not in sys.modules
"""
INSTALLED = """
import pathlib, sys, tempfile
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "neuronxcc.py").write_text("theirs = True")
    sys.path.append(folder)
    import simulate; simulate.install("simulate")
    import neuronxcc
assert neuronxcc.theirs and "neuronxcc.nki" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [BOUND, LOADED, INSTALLED], ids=["absent", "loaded", "installed"])
def test_install_binds_neuronxcc_unless_there_is_one(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True)
