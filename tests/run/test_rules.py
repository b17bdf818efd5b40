"""The rules of the vendor's simulator: what it does not check is a warning of the launch, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from nkw.errors import InvalidArgument, RuleViolation
from simulate import nki
from simulate.cli import main
from simulate.level import CHIP_ONLY, Rules
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.run import Mode, recorded
from simulate.run.launcher import ToleratedRule
from simulate.world import World

X = np.arange(128 * 4, dtype=np.float32).reshape(128, 4)


def _copied_to(out, tile):
    kept = nl.ndarray(out.shape, out.dtype)
    nisa.tensor_copy(dst=kept, src=tile)
    nl.store(out, kept)


def large_psum_tile(x):
    """Fill 128 KB per partition in PSUM, one bank by each matmul, as unscheduled programs do."""
    out = nl.ndarray((4, 512), nl.float32, buffer=nl.shared_hbm)
    sums = nl.ndarray((4, 64, 512), nl.float32, buffer=nl.psum)
    wide = nl.ones((128, 512), nl.float32)
    for block in range(64):
        nisa.nc_matmul(dst=sums[:, block], stationary=nl.load(x), moving=wide)
    _copied_to(out, sums[:, 63])
    return out


def many_live_tiles(x):
    tiles = [nl.full((128, 32 * 1024), number, nl.float32) for number in range(2)]
    tile = nl.load(x)
    for live in tiles:
        nisa.tensor_tensor(dst=tile, data1=tile, data2=live[:, 0:4], op=nl.add)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


def address_beyond_the_end(x):
    tile = nl.ndarray(x.shape, x.dtype, address=(0, 2**20))
    nisa.dma_copy(dst=tile, src=x)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


def unwritten_float(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.ndarray(x.shape, x.dtype))
    return out


def unwritten_integer(x):
    out = nl.ndarray(x.shape, nl.int32, buffer=nl.shared_hbm)
    nl.store(out, nl.ndarray(x.shape, nl.int32))
    return out


def reduced_over_a_gap(x):
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(dst=tile[:, 0:3], src=x[:, 0:3])
    out = nl.ndarray((128, 1), x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.sum(tile, axis=1, keepdims=True))
    return out


def unwritten_output(x):
    return nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)


def unstarted_sum(x):
    sums = nl.ndarray((4, 4), nl.float32, buffer=nl.psum)
    tile = nl.load(x)
    nisa.nc_matmul(dst=sums, stationary=tile, moving=tile, accumulate=True)
    out = nl.ndarray((4, 4), nl.float32, buffer=nl.shared_hbm)
    _copied_to(out, sums)
    return out


def sum_never_reset(x):
    """Sum into registers that hold zeros from the start in this simulator."""
    out = nl.ndarray((128, 1), nl.float32, buffer=nl.shared_hbm)
    tile, total = nl.load(x), nl.ndarray((128, 1), nl.float32)
    nisa.activation(dst=tile, op=nl.copy, data=tile, reduce_op=nl.add, reduce_res=total)
    nl.store(out, total)
    return out


NAN = np.float32(np.nan)
BROKEN = [
    ("NKW-TILE-SIZE", large_psum_tile, np.repeat(X.sum(0)[:, None], 512, 1)),
    ("NKW-CAPACITY", many_live_tiles, X + 1),
    ("NKW-ADDRESS", address_beyond_the_end, X),
    ("NKW-UNWRITTEN", unwritten_float, np.full_like(X, NAN)),
    ("NKW-UNWRITTEN", unwritten_integer, np.full(X.shape, 4, np.int32)),
    ("NKW-UNWRITTEN", reduced_over_a_gap, np.full((128, 1), NAN)),
    ("NKW-OUTPUT-UNWRITTEN", unwritten_output, np.full_like(X, NAN)),
    ("NKW-PSUM-UNSTARTED", unstarted_sum, np.full((4, 4), NAN)),
    ("NKW-REGISTERS-UNSET", sum_never_reset, np.zeros((128, 1))),
]


@pytest.mark.parametrize(("code", "kernel", "expected"), BROKEN, ids=[k.__name__ for _, k, _ in BROKEN])
def test_what_the_vendors_simulator_does_not_check_is_a_warning(code: str, kernel, expected) -> None:
    launches = [((X.copy(),), {})]
    with pytest.raises(RuleViolation) as refused:
        World("trn2").launch(kernel, launches)
    assert refused.value.code == code
    with pytest.warns(ToleratedRule, match=rf"^\[{code}\]"):
        done = World("trn2", rules="simulator").launch(kernel, launches)
    np.testing.assert_array_equal(done.outputs[0], expected)
    assert {error.code for error in done.tolerated} >= {code}
    assert all(error.where is not None and "test_rules.py" in error.where.file for error in done.tolerated)
    assert any(text.startswith(f"[{code}]") for text in done.warnings)


def test_every_tolerated_rule_is_tried() -> None:
    assert {code for code, _, _ in BROKEN} == CHIP_ONLY


def clean(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    return out


def wrong_shapes(x):
    tile = nl.load(x)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile[:, 0:2], op=nl.add)
    return x


@pytest.mark.parametrize("rules", [Rules.chip, Rules.simulator])
def test_what_both_check_is_refused_under_both(rules: Rules) -> None:
    world = World("trn2", rules=rules)
    assert world.launch(clean, [((X,), {})]).tolerated == ()
    with pytest.raises(RuleViolation, match="NKW-ELEMENTS-AGREE"):
        world.launch(wrong_shapes, [((X,), {})])


def test_a_tolerated_launch_is_timed_and_not_replayed() -> None:
    world = World("trn2", rules="simulator")
    with pytest.warns(ToleratedRule):
        world.launch(many_live_tiles, [((X,), {})], Mode.dry)
    for _ in range(2):
        with pytest.warns(ToleratedRule):
            world.launch(many_live_tiles, [((X,), {})], Mode.replay)
    assert world.replays.report.hits == 0


def test_a_repeated_line_gives_one_warning() -> None:
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, x.dtype)
        for _ in range(5):
            nl.store(out, tile)
        return out

    with pytest.warns(ToleratedRule):
        done = World("trn2", rules="simulator").launch(kernel, [((X,), {})])
    assert len(done.tolerated) == 1


def test_the_environment_chooses_the_rules(monkeypatch) -> None:
    with pytest.raises(RuleViolation, match="NKW-UNWRITTEN"):
        nki.jit(unwritten_float)(X)
    monkeypatch.setenv("NKI_RULES", "simulator")
    with pytest.warns(ToleratedRule), recorded() as launches:
        assert np.isnan(nki.jit(unwritten_float)(X)).all()
    assert [error.code for error in launches[0].tolerated] == ["NKW-UNWRITTEN"]
    monkeypatch.setenv("NKI_RULES", "strict")
    with pytest.raises(InvalidArgument, match="NKI_RULES is 'strict'; known are chip, simulator"):
        nki.jit(clean)(X)


SCRIPT = """
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.ndarray(x.shape, x.dtype))
    {line}
    return out

kernel(np.ones((4, 4), np.int32))
"""


@pytest.mark.parametrize(
    ("command", "refused"),
    [("run", 1), ("time", 1), ("memory", 1), ("check", 1)],
    ids=lambda argument: str(argument),
)
def test_every_command_takes_the_rules(tmp_path, capsys, monkeypatch, command: str, refused: int) -> None:
    monkeypatch.delenv("NKI_RULES", raising=False)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(line=""))
    assert main([command, str(script)]) == refused
    capsys.readouterr()
    with pytest.warns(ToleratedRule, match="NKW-UNWRITTEN"):
        assert main([command, "--rules", "simulator", str(script)]) == 0
    printed = capsys.readouterr().out
    assert command != "check" or "warning[NKW-UNWRITTEN]" in printed


@pytest.mark.parametrize("command", ["run", "time", "memory", "check"])
def test_every_command_takes_the_level(tmp_path, capfd, monkeypatch, command: str) -> None:
    monkeypatch.setenv("NKI_LEVEL", "0.7")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(line="").replace("nl.ndarray(x.shape, x.dtype))", "nl.load(x))"))
    assert main([command, "--level", "0.6", str(script)]) == 0
    script.write_text(
        SCRIPT.format(line="nisa.scalar_load(x[0:1, 0:1])").replace(
            "nl.ndarray(x.shape, x.dtype))", "nl.load(x))"
        )
    )
    assert main([command, "--level", "0.7", str(script)]) == 0
    capfd.readouterr()
    assert main([command, "--level", "0.6", str(script)]) == 1
    assert "NKI_LEVEL is 0.6" in "".join(capfd.readouterr())


def poison_summed_into_gathered_columns(x, index):
    """Read registers with poison out by an instruction whose destination is known at run time only."""
    out = nl.ndarray((128, 8), nl.float32, buffer=nl.shared_hbm)
    half, sums = nl.ndarray((128, 4), nl.float32), nl.ndarray((128, 1), nl.float32)
    nisa.dma_copy(dst=half[0:64], src=x[0:64])
    reset, add = nisa.reduce_cmd.reset_reduce, nisa.reduce_cmd.reduce
    copied, wide = nl.ndarray((128, 4), nl.float32), nl.zeros((128, 8), nl.float32)
    nisa.activation(copied, nl.copy, half, reduce_op=nl.add, reduce_res=sums, reduce_cmd=reset)
    columns = wide.indirect(nl.load(index), 4)
    nisa.activation(columns, nl.copy, nl.load(x), reduce_op=nl.add, reduce_cmd=add)
    nl.store(out, wide)
    return out


def test_poison_that_no_element_can_carry_is_tolerated() -> None:
    index = (np.arange(128, dtype=np.uint32) % 8)[:, None]
    launches = [((X.copy(), index), {})]
    with pytest.raises(RuleViolation, match="NKW-UNWRITTEN"):
        World("trn3").launch(poison_summed_into_gathered_columns, launches)
    with pytest.warns(ToleratedRule, match="NKW-UNWRITTEN"):
        done = World("trn3", rules="simulator").launch(poison_summed_into_gathered_columns, launches)
    assert {error.code for error in done.tolerated} == {"NKW-UNWRITTEN"}
    # Sixteen partitions share the list 0, 1, 2, …, of which each takes four columns.
    np.testing.assert_array_equal(done.outputs[0].sum(axis=1), X.sum(axis=1))
