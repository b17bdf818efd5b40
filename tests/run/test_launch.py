"""Launching kernels: arguments, results, environment, and refusals."""

from __future__ import annotations

import gc
import re
import sys
import threading
import weakref
from itertools import count
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import simulate
from nkw.errors import InvalidArgument, NkwError, RuleViolation, Unsupported
from simulate.memory import MemoryRegion
from simulate.nki.missing import NOT_YET
from simulate.run.kernel_faults import KernelError
from simulate.run.stream import Stream

simulate.install("simulate")

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


@nki.jit
def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
    nisa.dma_copy(dst=out, src=tile)
    return out


def increment_in_place(x):
    tile = nl.load(x)
    one = nl.ones(x.shape, dtype=x.dtype)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=one, op=nl.add)
    nisa.dma_copy(dst=x, src=tile)
    return x


@pytest.mark.parametrize("rows", [1, 127, 128])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.uint8])
def test_arrays_are_arguments_and_outputs(rows: int, dtype: type) -> None:
    x = np.arange(rows * 3).reshape(rows, 3).astype(np.uint8).astype(dtype) % np.array(64).astype(dtype)
    result = double(x)
    assert result.dtype == x.dtype
    assert np.array_equal(result.astype(np.float32), 2 * x.astype(np.float32))


def test_a_plain_function_runs_through_nki_simulate() -> None:
    x = np.ones((4, 4), np.float32)
    assert nki.simulate(increment_in_place)(x) is x
    assert (x == 2).all()


def test_inputs_that_are_not_contiguous_are_updated_too() -> None:
    x = np.zeros((8, 8), np.float32)
    nki.simulate(increment_in_place)(x[::2, ::2])
    assert x.sum() == 16
    assert (x[::2, ::2] == 1).all()


def test_torch_tensors_are_arguments_and_outputs() -> None:
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        x = torch.arange(12, dtype=torch.float32).reshape(4, 3).to(dtype)
        result = double(x)
        assert isinstance(result, torch.Tensor)
        assert result.dtype == dtype
        assert torch.equal(result, x + x)


def test_containers_of_arrays_are_taken_apart() -> None:
    def total(pair, named):
        out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        tile = nl.load(pair[0])
        nisa.tensor_tensor(dst=tile, data1=tile, data2=nl.load(named["b"]), op=nl.add)
        nisa.dma_copy(dst=out, src=tile)
        return {"sum": out}

    a = np.full((4, 4), 3, np.float32)
    assert (nki.simulate(total)((a, 1), {"b": a})["sum"] == 6).all()


def test_one_array_passed_twice_is_one_tensor() -> None:
    def same(a, b):
        increment_in_place(a)
        return b

    x = np.zeros((4, 4), np.float32)
    assert (nki.simulate(same)(x, x) == 1).all()


@pytest.mark.parametrize("dtype", [np.float64, np.uint64])
def test_refuses_64_bit_arrays_by_name(dtype: type) -> None:
    with pytest.raises(InvalidArgument, match=r"argument x: .*64-bit"):
        double(np.ones((4, 4), dtype))


def test_arguments_that_the_signature_does_not_take_are_refused_at_the_line_of_the_call() -> None:
    with pytest.raises(InvalidArgument) as refused:
        double()  # the line to blame
    assert isinstance(refused.value, TypeError)
    assert refused.value.code == "NKW-KERNEL-CALL"
    assert refused.value.message == "double() missing 1 required positional argument: 'x'"
    text = Path(__file__).read_text().splitlines()
    assert refused.value.where is not None
    assert text[refused.value.where.line - 1].endswith("# the line to blame")


def test_a_type_error_inside_of_a_kernel_stays_one() -> None:
    @nki.jit
    def kernel(x):
        return len(3)

    with pytest.raises(TypeError, match="has no len") as refused:
        kernel(np.ones((2, 2), np.float32))
    assert isinstance(refused.value, KernelError)


def test_a_bad_argument_is_blamed_on_the_line_of_the_launch() -> None:
    with pytest.raises(InvalidArgument) as refused:
        double(np.ones((2, 2)))
    assert refused.value.where is not None
    assert (Path(refused.value.where.file).name, refused.value.where.function) == (
        Path(__file__).name,
        "test_a_bad_argument_is_blamed_on_the_line_of_the_launch",
    )


def test_refuses_an_empty_array() -> None:
    with pytest.raises(InvalidArgument, match=r"argument x of shape \(0, 4\) has no elements"):
        double(np.ones((0, 4), np.float32))


def test_refuses_to_write_a_read_only_array() -> None:
    x = np.ones((4, 4), np.float32)
    x.flags.writeable = False
    with pytest.raises(RuleViolation, match="NKW-READ-ONLY"):
        nki.simulate(increment_in_place)(x)
    x.flags.writeable = True
    nki.simulate(increment_in_place)(x)


def test_refuses_an_output_on_chip_and_an_unwritten_one() -> None:
    def on_chip(x):
        return nl.load(x)

    def unwritten(x):
        return nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)

    x = np.ones((4, 4), np.float32)
    with pytest.raises(RuleViolation, match="NKW-OUTPUT-MEMORY"):
        nki.simulate(on_chip)(x)
    with pytest.raises(RuleViolation, match="NKW-OUTPUT-UNWRITTEN"):
        nki.simulate(unwritten)(x)


def test_a_partly_written_output_is_a_warning() -> None:
    def half(x):
        out = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[:, 0:4], src=nl.load(x))
        return out

    done = simulate.launch(half, [((np.ones((4, 4), np.float32),), {})])
    assert [w.split("]")[0] for w in done.warnings] == ["[NKW-OUTPUT-PARTIAL"]
    assert (done.outputs[0][:, :4] == 1).all()


def test_using_poison_is_refused_with_the_line_that_read_undefined_bytes() -> None:
    def kernel(x, used):
        tile = nl.ndarray((4, 4), dtype=nl.float32, name="scratch")
        nisa.tensor_copy(dst=tile[:, 0:2], src=nl.load(x)[:, 0:2])
        nisa.tensor_copy(dst=nl.ndarray((4, 2), dtype=nl.float32), src=tile[:, 0:2])
        copied = nl.ndarray((4, 3), dtype=nl.float32)
        nisa.tensor_copy(dst=copied, src=tile[:, 0:3])  # blamed
        if used:
            nisa.dma_copy(dst=nl.ndarray((4, 3), dtype=nl.float32, buffer=nl.shared_hbm), src=copied)
        nisa.dma_copy(dst=nl.ndarray((4, 2), dtype=nl.float32, buffer=nl.shared_hbm), src=copied[:, 0:2])
        return x

    with pytest.raises(RuleViolation) as refused:
        nki.simulate(kernel)(np.ones((4, 4), np.float32), True)
    nki.simulate(kernel)(np.ones((4, 4), np.float32), False)
    error = refused.value
    assert error.code == "NKW-UNWRITTEN"
    source = Path(__file__).read_text().splitlines()
    blamed = next(number for number, text in enumerate(source, 1) if text.endswith("# blamed"))
    assert error.where is not None and error.where.line == blamed
    assert "scratch (4, 3) float32 in sbuf" in str(error)


def test_an_error_names_operands_limit_and_a_way_out() -> None:
    def kernel(x):
        a = nl.load(x)
        nisa.tensor_copy(dst=nl.ndarray((2, 4), dtype=nl.float32), src=a)
        return x

    with pytest.raises(AssertionError) as refused:
        nki.simulate(kernel)(np.ones((4, 4), np.float32))
    text = str(refused.value).splitlines()
    assert text[0] == (
        "[NKW-PARTITIONS-AGREE] tensor_copy: All operands of an instruction have the same number of partitions."
    )
    assert text[1] == "  seen:  dst has 2 partitions, src has 4"
    assert text[2].startswith("  dst = (2, 4) float32 in sbuf (allocated at tests/run/test_launch.py:")
    assert text[3].startswith("  src = a (4, 4) float32 in sbuf (allocated at tests/run/test_launch.py:")
    assert text[4].startswith("  try:   slice both operands")
    assert text[5].startswith("  at ") and "in kernel" in text[5]


def test_a_misspelt_keyword_is_refused_with_the_documented_names() -> None:
    def kernel(x):
        nisa.tensor_copy(dst=x, source=x)

    with pytest.raises(TypeError, match="its parameters are dst, src, engine, name"):
        nki.simulate(kernel)(np.ones((4, 4), np.float32))


def test_a_call_outside_of_a_kernel_is_refused() -> None:
    with pytest.raises(NkwError, match="NKW-NO-KERNEL"):
        nl.ndarray((4, 4), dtype=nl.float32)


def test_names_that_are_not_there_yet_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NOT_YET["nki.isa"], "future", "nobody documents it")
    with pytest.raises(Unsupported, match=r"nki\.isa\.future cannot be simulated: nobody documents it"):
        nisa.future()
    with pytest.raises(AttributeError):
        _ = nisa.no_such_instruction


@pytest.mark.parametrize(
    ("target", "generation"), [("trn1", 2), ("inf2", 2), ("trn2", 3), ("gen3", 3), ("trn3", 4)]
)
def test_the_environment_chooses_the_chip(
    monkeypatch: pytest.MonkeyPatch, target: str, generation: int
) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    with simulate.recorded() as launches:
        double(np.ones((4, 4), np.float32))
    assert launches[0].hardware.generation == generation


def test_recordings_nest() -> None:
    x = np.ones((4, 4), np.float32)
    with simulate.recorded() as outer:
        with simulate.recorded() as inner:
            double(x)
        double(x)
    assert (len(inner), len(outer)) == (1, 2)


@pytest.mark.slow
def test_a_recording_without_outputs_keeps_no_array() -> None:
    with simulate.recorded() as complete, simulate.recorded(outputs=False) as spare:
        result = double(np.ones((4, 4), np.float32))
        kept = weakref.ref(result)
        del result
    assert [launch.outputs for launch in spare] == [[]]
    assert spare[0].streams == complete[0].streams
    assert kept() is complete[0].outputs[0]
    complete.clear()
    gc.collect()
    assert kept() is None


def test_the_default_chip_is_trn2_and_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    assert simulate.target_hardware().name == "trn2"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    with pytest.raises(InvalidArgument, match="trn9"):
        double(np.ones((4, 4), np.float32))


def test_precise_fp_off_keeps_narrow_floats_unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
        narrow = nl.ndarray(x.shape, dtype=nl.bfloat16)
        nisa.tensor_copy(dst=narrow, src=nl.load(x))
        wide = nl.ndarray(x.shape, dtype=nl.float32)
        nisa.tensor_copy(dst=wide, src=narrow)
        nisa.dma_copy(dst=out, src=wide)
        return out

    x = np.full((2, 2), 1.0 + 2.0**-12, np.float32)
    assert (nki.simulate(kernel)(x) == 1.0).all()
    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    assert np.array_equal(nki.simulate(kernel)(x), x)


def test_a_dry_run_records_the_same_stream_without_numbers() -> None:
    x = np.ones((128, 64), np.float32)
    eager = simulate.launch(double.func, [((x,), {})])
    dry = simulate.launch(double.func, [((x,), {})], mode=simulate.Mode.dry)
    assert dry.streams[0].text() == eager.streams[0].text()
    assert (dry.outputs[0] == 0).all()


def test_a_stream_is_the_same_bytes_every_time() -> None:
    x = np.ones((128, 64), np.float32)
    first, second = (simulate.launch(double.func, [((x,), {})]).streams[0].text() for _ in range(2))
    assert first == second
    assert len(first.splitlines()) == 3


def test_an_event_takes_8_bytes_and_4_for_each_operand() -> None:
    def many(x):
        tile = nl.load(x)
        for _ in range(1000):
            nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
        nisa.dma_copy(dst=x, src=tile)
        return x

    stream = simulate.launch(many, [((np.zeros((4, 4), np.float32),), {})]).streams[0]
    assert stream.nbytes == 8 * len(stream) + 4 * len(stream.operands)


def test_live_tiles_beyond_the_chip_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")

    def kernel(x, columns):
        big = nl.zeros((128, columns), dtype=nl.float32, name="big")
        small = nl.load(x)
        nisa.tensor_copy(dst=big[0:4, 0:1], src=small[:, 0:1])
        nisa.dma_copy(dst=x, src=big[0:4, 0:4])
        return x

    usable = 180224 // 4
    x = np.zeros((4, 4), np.float32)
    nki.simulate(kernel)(x, usable - 4)
    with pytest.raises(RuleViolation) as refused:
        nki.simulate(kernel)(x, usable - 3)
    assert refused.value.code == "NKW-CAPACITY"
    with pytest.raises(RuleViolation, match="at most 45056 float32 elements per partition fit"):
        nki.simulate(kernel)(x, usable + 1)


def test_print_shows_a_tiles_values(capsys: pytest.CaptureFixture[str]) -> None:
    def kernel(x):
        tile = nl.load(x)
        print(tile)
        nl.device_print("x is", tile)
        return x

    nki.simulate(kernel)(np.full((2, 2), 7, np.float32))
    shown = capsys.readouterr().out
    assert shown.count("[7. 7.]") == 4
    assert "x is <" in shown


def test_print_in_a_dry_launch_says_that_there_are_no_values(capsys: pytest.CaptureFixture[str]) -> None:
    """Tiles of a dry launch have no bytes; numpy would lay a view of any size over them."""

    def kernel(x):
        tile = nl.load(x)
        print(tile)
        print(tile[0:1, 1:2])
        print(nl.shared_constant(np.ones((2, 2), np.float32)))
        nl.device_print("x is", tile)
        return x

    simulate.launch(kernel, [((np.full((2, 2), 7, np.float32),), {})], mode=simulate.Mode.dry)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("(dry run: no values)" in line for line in lines)


def test_breakpoint_stops_inside_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "sys.breakpointhook", lambda: seen.append(threading.current_thread() is threading.main_thread())
    )

    def kernel(x):
        tile = nl.load(x)
        breakpoint()
        nisa.dma_copy(dst=x, src=tile)
        return x

    nki.simulate(kernel)(np.ones((2, 2), np.float32))
    assert seen == [True]


def test_high_water_marks_are_per_partition() -> None:
    done = simulate.launch(double.func, [((np.ones((128, 64), np.float32),), {})])
    assert done.high_water_bytes(MemoryRegion.sbuf) == 64 * 4
    assert done.high_water_bytes(MemoryRegion.psum) == 0


@pytest.mark.parametrize("grid", [0, 3, (2, 2), "2", True])
def test_refuses_a_grid_that_is_no_logical_core(grid: object) -> None:
    with pytest.raises(InvalidArgument, match="NKW-LNC"):
        double[grid]


def test_refuses_a_logical_core_size_that_the_chip_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((4, 4), np.float32)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    with pytest.raises(InvalidArgument, match="NKW-LNC"):
        double[2](x)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert (double[2](x) == 2).all()


@pytest.mark.parametrize("mode", [simulate.Mode.eager, simulate.Mode.dry])
def test_python_looks_at_the_values_of_a_launch_that_has_some(mode: simulate.Mode) -> None:
    def kernel(x):
        assert nl.load(x).array.sum() == 28
        return x

    launches = [((np.full((2, 2), 7, np.float32),), {})]
    if mode is simulate.Mode.eager:
        simulate.launch(kernel, launches, mode=mode)
        return
    with pytest.raises(
        Unsupported,
        match=r"a dry run has no values of .*\(2, 2\) float32 in sbuf \(allocated at .*\) to look",
    ):
        simulate.launch(kernel, launches, mode=mode)


def test_a_world_takes_one_entry_per_rank() -> None:
    world, array = simulate.World("trn2", ranks=2), np.ones((2, 2), np.float32)
    with pytest.raises(InvalidArgument) as refused:
        world.gather([array])
    assert refused.value.message == "gather got 1 arrays for 2 ranks; give one array per rank"
    with pytest.raises(InvalidArgument) as refused:
        world.launch(lambda x: x, [((array,), {})] * 3)
    assert (
        refused.value.message
        == "launch got arguments for 3 ranks in a world of 2; give one (args, kwargs) per rank"
    )
    assert len(world.gather([array, array])) == 2
    assert len(world.launch(lambda x: x, [((array,), {})] * 2).outputs) == 2


@pytest.mark.parametrize("beta1", [False, True])
def test_a_call_runs_on_the_ranks_of_the_environment(beta1: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import simulate.beta1.language as old
    from simulate.beta1.kernel import Kernel as OldKernel

    def old_body(x):
        out = old.ndarray(x.shape, dtype=x.dtype, buffer=old.shared_hbm)
        old.store(out, old.load(x))
        return out

    kernel = OldKernel(old_body) if beta1 else double
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for text, ranks in (("", 1), ("1", 1), ("3", 3)):
        monkeypatch.setenv("NKW_RANKS", text)
        with simulate.recorded() as launches:
            np.testing.assert_array_equal(kernel(x), x if beta1 else 2 * x)
        (done,) = launches
        assert [stream.rank for stream in done.streams] == list(range(ranks))
        assert len(done.outputs) == ranks
    for text in ("0", "two", "1000", "-1"):
        monkeypatch.setenv("NKW_RANKS", text)
        with pytest.raises(
            InvalidArgument, match=f"NKW_RANKS is '{text}'; set it to a number of ranks from 1 to 999"
        ):
            kernel(x)


def test_an_interrupt_while_an_instruction_is_recorded_stays_one_and_says_where() -> None:
    """At every line of Stream.append."""

    @nki.jit
    def twice(x):
        tile = nl.load(x)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        nisa.dma_copy(dst=out, src=tile)
        return out

    append, left = Stream.append.__code__, 0

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code is not append:
            return None
        if event == "line":
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return trace

    messages = []
    for lines in count(1):
        left = lines
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            simulate.World("trn2").launch(
                twice, [((np.zeros((8, 8), np.float32),), {})], mode=simulate.Mode.dry
            )
            break
        except KeyboardInterrupt as stopped:
            messages.append(str(stopped))
        finally:
            sys.settrace(before)
    assert len(messages) > 30
    sentence = r"twice has issued (nothing|\d instructions, the last is dma_copy at .+ in twice)"
    assert all(re.fullmatch(sentence, message) for message in messages)
    assert {"nothing", "1", "2", "3"} == {message.split()[3] for message in messages}
