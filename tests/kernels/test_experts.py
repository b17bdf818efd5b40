"""experts_decode and experts_prefill: the experts that each token chose, weighted, whatever it chose."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from nki_kernels.experts import places
from nki_kernels.experts.places import block_size, division
from tests.kernels.accuracy import TARGETS, check, compare_all, copied, normal, run

BF16 = ml_dtypes.bfloat16
BOTH = ("experts_decode", "experts_prefill")


def arguments(
    tokens: int,
    hidden: int,
    experts: int,
    inner: int,
    top_k: int,
    dtype: type = np.float32,
    weights: Any = None,
    biases: bool = False,
    activation: str = "silu",
    ids: np.ndarray | None = None,
) -> list[Any]:
    """Of random choices, or of given ones."""
    held, rng = weights or dtype, np.random.default_rng(tokens)
    if ids is None:
        ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
    return [
        normal(1, tokens, hidden, dtype=dtype),
        normal(2, tokens, hidden, dtype=dtype),
        rng.random((tokens, top_k)).astype(np.float32),
        ids.astype(np.int32),
        normal(3, experts, hidden, inner, dtype=held, scale=hidden**-0.5),
        normal(4, experts, hidden, inner, dtype=held, scale=hidden**-0.5),
        normal(5, experts, inner, hidden, dtype=held, scale=inner**-0.5),
        None,
        activation,
        *((normal(6, experts, inner, dtype=held), normal(7, experts, inner, dtype=held)) if biases else ()),
        *((normal(8, experts, hidden, dtype=held),) if biases else ()),
    ]


def checked(kernel: str, given: list[Any], target: str = "trn2") -> np.ndarray:
    reference = getattr(kernels, f"{kernel}_reference")
    return check(getattr(kernels, kernel), reference, tuple(given), target)[0]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "weights"), [(np.float32, BF16), (BF16, BF16), (BF16, np.float32)])
@pytest.mark.parametrize("tokens", [3, 30])
def test_dtypes_on_every_chip(target: str, dtype: type, weights: type, tokens: int) -> None:
    """For few choices, and for more than there are experts."""
    given = arguments(tokens, 140, 9, 136, 3, dtype, weights)
    for kernel in BOTH:
        checked(kernel, given, target)


@pytest.mark.parametrize("size", [1, 64, 127, 128, 129])
def test_any_number_of_hidden_and_intermediate_elements(size: int) -> None:
    for kernel in BOTH:
        checked(kernel, arguments(2, size, 5, 24, 2))
        checked(kernel, arguments(3, 24, 5, size, 2))


@pytest.mark.parametrize("tokens", [1, 127, 128])
def test_any_number_of_tokens_of_a_decode_step(tokens: int) -> None:
    checked("experts_decode", arguments(tokens, 24, 6, 10, 2))


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 260, 700])
def test_any_number_of_tokens_of_a_prompt(tokens: int) -> None:
    checked("experts_prefill", arguments(tokens, 24, 6, 10, 2))


@pytest.mark.parametrize("experts", [127, 128, 129, 256])
def test_choices_of_several_row_tiles_share_a_bank_that_fits_them(experts: int) -> None:
    """A PSUM bank has those of four, three or two tiles; there are five."""
    checked("experts_prefill", arguments(520, 24, experts, 10, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("experts", [1, 2, 127, 128, 129])
def test_any_number_of_experts(kernel: str, experts: int) -> None:
    checked(kernel, arguments(40, 16, experts, 8, min(2, experts)))


@pytest.mark.parametrize("kernel", BOTH)
def test_biases_and_the_clamped_gate(kernel: str) -> None:
    """Sums up to some twenty: both clamps are reached."""
    for tokens in (3, 40):
        given = arguments(tokens, 72, 6, 140, 2, biases=True, activation="swigluoai")
        given[1] = given[1] * 8
        checked(kernel, given)
    checked(kernel, arguments(3, 72, 6, 40, 2, BF16, biases=True))


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_activations(kernel: str, activation: str) -> None:
    checked(kernel, arguments(4, 24, 6, 10, 2, activation=activation))


@pytest.mark.slow
def test_an_intermediate_of_several_chunks() -> None:
    for kernel in BOTH:
        checked(kernel, arguments(2, 1030, 3, 1300, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tokens"), [(128, 500), (192, 900), (256, 1400), (384, 4000)])
def test_blocks_of_every_size(size: int, tokens: int) -> None:
    """So many choices that blocks of this many rows take least time."""
    given = arguments(tokens, 64, 4, 48, 2, BF16)
    assert block_size(2 * tokens, 4, 64, 48, 2) == size
    checked("experts_prefill", given)


CHOICES = {
    "all to one expert": lambda tokens, experts: np.full((tokens, 1), experts - 2),
    "all to two experts": lambda tokens, experts: np.tile([0, experts - 1], (tokens, 1)),
    "one token to an expert": lambda tokens, experts: np.stack([np.arange(tokens) % experts], axis=1),
    "one token elsewhere": lambda tokens, experts: np.eye(tokens, 1, -(tokens // 2), dtype=int),
    "all to all": lambda tokens, experts: np.stack([np.arange(experts)] * tokens),
    "in descending order": lambda tokens, experts: (experts - 1 - np.arange(tokens) * experts // tokens)[
        :, None
    ],
}


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("tokens", [127, 128, 129, 300])
def test_any_distribution_of_choices(choices: str, tokens: int) -> None:
    """Experts that nobody chose are never used, though their weights may be loaded: they are not numbers."""
    experts = 6
    ids = CHOICES[choices](tokens, experts)
    given = arguments(tokens, 24, experts, 10, ids.shape[1], ids=ids)
    used = np.unique(ids)
    for kernel in BOTH if tokens <= 128 else BOTH[1:]:
        wanted = checked(kernel, given)
        poisoned = [each.copy() if isinstance(each, np.ndarray) else each for each in given]
        for weight in poisoned[4:7]:
            weight[np.setdiff1d(np.arange(experts), used)] = np.nan
        if kernel == "experts_prefill":  # blocks that no row is in may have any expert: nobody reads them
            assert np.array_equal(run(kernels.experts_prefill, poisoned, "trn2"), wanted)


@pytest.mark.parametrize("experts", [6, 8, 16, 40, 136])
@pytest.mark.parametrize("choices", [None, *CHOICES])
def test_rows_beyond_own_blocks_take_dealt_ones(
    choices: str | None, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop runs over the dealt blocks that have rows: for lists of tokens by expert, and without."""
    monkeypatch.setattr(places, "LOOP_NS", -1e9)
    tokens = 300
    ids = None if choices is None else CHOICES[choices](tokens, experts)
    each = 2 if ids is None else ids.shape[1]
    given = arguments(tokens, 72, experts, 40, each, ids=ids)
    size, own, dealt = division(tokens * each, experts, 72, 40, 4, True)
    assert own > 0
    launch = simulate.World("trn2").launch(kernels.experts_prefill, [(copied(given), {})])
    compare_all((launch.outputs[0],), kernels.experts_prefill_reference, given)
    counts = np.bincount(given[3].ravel(), minlength=experts)
    expected = int(np.ceil(np.maximum(counts - own * size, 0) / size).sum())
    assert len(launch.streams[0].iterations) == expected <= dealt


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("biases", [False, True])
def test_dealt_blocks_of_a_loop_take_biases_and_every_dtype(
    dtype: type, biases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "LOOP_NS", -1e9)
    for activation in ("silu", "swigluoai") if biases else ("silu",):
        ids = np.minimum(np.arange(600).reshape(300, 2) // 200, 7) + np.array([[0, 4]])
        given = arguments(300, 72, 8, 140, 2, dtype, biases=biases, activation=activation, ids=ids)
        launch = simulate.World("trn3").launch(kernels.experts_prefill, [(copied(given), {})])
        compare_all((launch.outputs[0],), kernels.experts_prefill_reference, given)
        assert launch.streams[0].iterations


def test_gen2_has_no_loop_over_dealt_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide to loops over registers is for Trn2 and Trn3: on trn1 all blocks are dealt beforehand."""
    monkeypatch.setattr(places, "LOOP_NS", -1e9)
    given = arguments(300, 72, 16, 40, 1, ids=np.full((300, 1), 5))
    for target, loops in (("trn1", False), ("trn2", True)):
        launch = simulate.World(target).launch(kernels.experts_prefill, [(copied(given), {})])
        compare_all((launch.outputs[0],), kernels.experts_prefill_reference, given)
        assert bool(launch.streams[0].iterations) is loops


@pytest.mark.parametrize("loop_ns", [-1e9, 1e9])
def test_an_expert_that_a_row_names_twice_leaves_other_rows_alone(
    loop_ns: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the router may for a row of NaN."""
    monkeypatch.setattr(places, "LOOP_NS", loop_ns)
    ids = np.stack([np.arange(300) % 16, (np.arange(300) + 1) % 16], axis=1)
    ids[::7] = 3
    given = arguments(300, 24, 16, 10, 2, ids=ids)
    compare_all((run(kernels.experts_prefill, given, "trn2"),), kernels.experts_prefill_reference, given)


def test_an_infinity_of_one_token_stays_with_the_experts_that_it_chose() -> None:
    """Rows of tokens that did not choose an expert are multiplied with it too: what comes of that is dropped."""
    given = arguments(30, 24, 6, 10, 2)
    clean = run(kernels.experts_decode, given, "trn2")
    given[1][7] = np.inf
    spoilt = run(kernels.experts_decode, given, "trn2")
    assert not np.isfinite(spoilt[7]).any()
    rest = np.arange(30) != 7
    assert np.array_equal(spoilt[rest], clean[rest])


def test_rows_of_a_prompt_give_what_they_give_in_a_decode_step() -> None:
    given = arguments(100, 72, 12, 40, 3)
    outputs = [run(getattr(kernels, kernel), given, "trn2") for kernel in BOTH]
    for output in outputs:
        compare_all((output,), kernels.experts_decode_reference, given)


@pytest.mark.parametrize("kernel", BOTH)
def test_ranks_hold_parts_of_every_expert(kernel: str) -> None:
    given = arguments(5, 72, 6, 40, 2, biases=True)
    parts = [slice(0, 24), slice(24, 40)]
    group = ReplicaGroup([[0, 1]])
    ranks = []
    for part in parts:
        own = list(copied(given))
        own[4], own[5], own[6] = own[4][:, :, part], own[5][:, :, part], own[6][:, part]
        own[9], own[10] = own[9][:, part], own[10][:, part]
        own[7] = group
        padded = [np.zeros((6, 72, 24), np.float32) for _ in range(2)]
        for place, whole in zip((4, 5), padded):
            whole[:, :, : own[place].shape[2]] = own[place]
            own[place] = whole
        down = np.zeros((6, 24, 72), np.float32)
        down[:, : own[6].shape[1]] = own[6]
        own[6] = down
        for place in (9, 10):
            row = np.zeros((6, 24), np.float32)
            row[:, : own[place].shape[1]] = own[place]
            own[place] = row
        ranks.append((tuple(own), {}))
    outputs = simulate.World("trn2", 2).launch(getattr(kernels, kernel), ranks).outputs
    for output in outputs:
        compare_all((output,), kernels.experts_decode_reference, given)
    assert np.array_equal(outputs[0], outputs[1])


@pytest.mark.parametrize("kernel", BOTH)
def test_two_cores_give_what_one_gives(kernel: str) -> None:
    given = arguments(5, 72, 6, 40, 2)
    world = simulate.World("trn2", logical_core_size=2)
    both = world.launch(getattr(kernels, kernel), [(copied(given), {})]).outputs[0]
    assert np.array_equal(both, run(getattr(kernels, kernel), given, "trn2"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({1: normal(1, 4, 24)}, r"n is \(4, 24\)"),
        ({1: normal(1, 5, 24, dtype=BF16)}, r"n is .*bfloat16, x is .*float32"),
        ({2: normal(1, 5, 3)}, r"weights are \(5, 3\), ids are \(5, 2\)"),
        ({3: np.zeros((4, 2), np.int32)}, "ids of 4 tokens, n has 5"),
        ({5: normal(1, 6, 24, 11)}, r"w_gate and w_up are \(6, 24, 10\), not \(6, 24, 11\)"),
        ({6: normal(1, 6, 24, 10)}, r"w_down is \[6, 10, 24\], not \(6, 24, 10\)"),
        ({8: "tanh"}, "activation is silu, gelu, gelu_tanh or relu, not tanh"),
        ({9: normal(1, 6, 10)}, "b_gate and b_up come together"),
        ({9: normal(1, 6, 11), 10: normal(1, 6, 11)}, r"a bias is \[6, 10\], not \(6, 11\)"),
    ],
)
@pytest.mark.parametrize("kernel", BOTH)
def test_refuses_what_does_not_fit(kernel: str, changed: dict[int, Any], message: str) -> None:
    given = [*arguments(5, 24, 6, 10, 2), None, None, None]
    run(getattr(kernels, kernel), given)
    for place, value in changed.items():
        given[place] = value
    with pytest.raises(AssertionError, match=message):
        run(getattr(kernels, kernel), given)


def test_a_decode_step_has_at_most_128_tokens() -> None:
    with pytest.raises(AssertionError, match="takes at most 128 tokens, not 129"):
        run(kernels.experts_decode, arguments(129, 24, 6, 10, 2))


def test_more_choices_than_experts_are_refused() -> None:
    checked("experts_decode", arguments(5, 24, 2, 10, 2))
    ids = np.zeros((5, 3), np.int32)
    with pytest.raises(AssertionError, match="3 of 2 experts for a token"):
        run(kernels.experts_decode, arguments(5, 24, 2, 10, 3, ids=ids))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize(("dtype", "most"), [(np.float32, 4096), (BF16, 8192)])
def test_takes_its_largest_hidden_size_and_refuses_the_next(kernel: str, dtype: type, most: int) -> None:
    """Dry: what the tiles take of SBUF, with weights of the other dtype too."""

    def launch(hidden: int, held: type, tokens: int) -> None:
        def seen(shape: tuple[int, ...], kind: type) -> np.ndarray:
            return np.broadcast_to(np.zeros((), kind), shape)

        rows = seen((tokens, hidden), dtype)
        matrices = seen((8, hidden, 300), held), seen((8, hidden, 300), held), seen((8, 300, hidden), held)
        given = (rows, rows, seen((tokens, 2), np.float32), seen((tokens, 2), np.int32), *matrices)
        world = simulate.World("trn1")
        world.launch(getattr(kernels, kernel), [(given, {})], mode=simulate.Mode.dry)

    for held in (np.float32, BF16):
        for tokens in (1, 128) if kernel == "experts_decode" else (129, 300):
            launch(most - 1, held, tokens)
            launch(most, held, tokens)
    with pytest.raises(AssertionError, match=f"a hidden size of at most {most}, not {most + 1}"):
        launch(most + 1, dtype, 1)
