"""Collectives over several ranks: movements against scalar references, agreement, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

import simulate
from nkw.errors import Deadlock, RendezvousMismatch, RuleViolation
from simulate.hardware import hardware
from simulate.isa import COLLECTIVES
from simulate.isa.book import plan as plan_call
from simulate.nki import collectives as ncc
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import assert_same, assert_same_bits, sample, through_float32
from tests.isa.tiles import HBM, SBUF, tile

Group = ncc.ReplicaGroup
PAIR = Group([[0, 1]])
FOUR = Group([[0, 1, 2, 3]])


def plan(name, rank=0, target="trn2", **arguments):
    return plan_call(COLLECTIVES[name], (hardware(target), rank), (), arguments)


def refuses(code, name, rank=0, target="trn2", **arguments):
    with pytest.raises(RuleViolation) as caught:
        plan(name, rank, target, **arguments)
    assert caught.value.code == code, str(caught.value)


def hbm(shape, dtype="float32"):
    return tile(shape, dtype, HBM)


def ranks(kernel, arguments, target="trn2"):
    """Return the outputs of a kernel run on one rank per set of arguments."""
    world = simulate.World(target, ranks=len(arguments))
    return world.launch(kernel, [(tuple(argument), {}) for argument in arguments]).outputs


def copied(source):
    """Return a private copy in HBM, as collectives want their operands."""
    inner = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.private_hbm)
    nisa.dma_copy(dst=inner, src=source)
    return inner


def returned(source):
    out = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=source)
    return out


def blank(shape, dtype="float32", value=-1):
    tensor = nl.ndarray(shape, dtype=dtype, buffer=nl.private_hbm)
    nisa.dma_copy(dst=tensor, src=nl.full(shape, value, dtype))
    return tensor


# -- all_reduce, all_gather, reduce_scatter, all_to_all


def same_shaped(shape=(8, 6), dst=None, **changes):
    return {"srcs": [hbm(shape)], "dsts": [hbm(dst or shape)], "replica_group": PAIR, **changes}


CALLS = {
    "all_reduce": same_shaped(op=nl.add),
    "all_gather": same_shaped(dst=(16, 6), collective_dim=0),
    "reduce_scatter": same_shaped(dst=(4, 6), collective_dim=0, op=nl.maximum),
    "all_to_all": same_shaped(collective_dim=0),
    "collective_permute": {
        "srcs": [hbm((8, 6))],
        "dsts": [hbm((8, 6))],
        "source_target_pairs": [(0, 1), (1, 0)],
    },
}


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize("name", CALLS)
def test_accepts_every_chip(target, name):
    made = plan(name, 1, target, **CALLS[name])
    assert made.rendezvous.members == (0, 1) and made.cost.rendezvous_ns > 0


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("NKW-COLLECTIVE-LISTS", {"srcs": hbm((8, 6))}),
        ("NKW-COLLECTIVE-LISTS", {"dsts": []}),
        ("NKW-COLLECTIVE-LISTS", {"srcs": [hbm((8, 6))] * 2}),
        ("NKW-COLLECTIVE-MEMORY", {"srcs": [tile((8, 6))]}),
        ("NKW-PACKED-DTYPE", {"srcs": [hbm((8, 6), "float8_e5m2_x4")]}),
        ("NKW-DMA-PRIORITY", {"priority": 0}),
    ],
)
def test_refuses_operands_no_collective_takes(name, code, bad):
    refuses(code, name, **{**CALLS[name], **bad})


@pytest.mark.parametrize("name", CALLS)
def test_priority_belongs_to_gen4(name):
    plan(name, 0, "trn3", **CALLS[name], priority=3)
    refuses("NKW-DMA-PRIORITY", name, 0, "trn3", **CALLS[name], priority=4)


@pytest.mark.parametrize(
    ("code", "name", "bad", "good"),
    [
        ("NKW-GROUP-TYPE", "all_reduce", {"replica_group": [[0, 1]]}, {}),
        (
            "NKW-GROUP-MEMBER",
            "all_reduce",
            {"replica_group": Group([[1, 2]])},
            {"replica_group": Group([[1], [0, 2]])},
        ),
        ("NKW-COLLECTIVE-OPERATOR", "all_reduce", {"op": nl.multiply}, {"op": nl.minimum}),
        ("NKW-COLLECTIVE-SHAPE", "all_reduce", {"dsts": [hbm((8, 7))]}, {}),
        ("NKW-COLLECTIVE-SHAPE", "all_gather", {"dsts": [hbm((15, 6))]}, {}),
        ("NKW-COLLECTIVE-GATHER-DIM", "all_gather", {"collective_dim": 1}, {}),
        (
            "NKW-COLLECTIVE-GATHER-DIM",
            "all_gather",
            {"collective_dim": 2, "srcs": [tile((8, 6))], "dsts": [tile((8, 12))]},
            {"collective_dim": 1, "srcs": [tile((8, 6))], "dsts": [tile((8, 12))]},
        ),
        ("NKW-COLLECTIVE-SHAPE", "reduce_scatter", {"srcs": [hbm((7, 6))]}, {}),
        ("NKW-COLLECTIVE-SCATTER-DIM", "reduce_scatter", {"collective_dim": 1}, {"collective_dim": 0}),
        ("NKW-COLLECTIVE-SHAPE", "all_to_all", {"srcs": [hbm((7, 6))], "dsts": [hbm((7, 6))]}, {}),
        ("NKW-COLLECTIVE-SHAPE", "all_to_all", {"dsts": [hbm((6, 8))]}, {}),
        ("NKW-COLLECTIVE-SCATTER-DIM", "all_to_all", {"collective_dim": 1}, {}),
        ("NKW-BUFFER", "all_to_all", {"srcs": [tile((8, 6))], "dsts": [tile((8, 6))]}, {}),
        ("NKW-BUFFER", "collective_permute", {"srcs": [tile((8, 6))], "dsts": [tile((8, 6))]}, {}),
        (
            "NKW-COLLECTIVE-ONE-TENSOR",
            "collective_permute",
            {"srcs": [hbm((8, 6))] * 2, "dsts": [hbm((8, 6))] * 2},
            {},
        ),
        ("NKW-COLLECTIVE-SHAPE", "collective_permute", {"dsts": [hbm((6, 8))]}, {}),
        (
            "NKW-PERMUTE-PAIRS",
            "collective_permute",
            {"source_target_pairs": [(0, 1), (2, 1)]},
            {"source_target_pairs": [(0, 1), (2, 3)]},
        ),
        (
            "NKW-PERMUTE-PAIRS",
            "collective_permute",
            {"source_target_pairs": [(0, 1), (0, 2)]},
            {"source_target_pairs": [(0, 0)]},
        ),
        ("NKW-PERMUTE-PAIRS", "collective_permute", {"source_target_pairs": []}, {}),
        ("NKW-PERMUTE-PAIRS", "collective_permute", {"source_target_pairs": 3}, {}),
        ("NKW-PERMUTE-PAIRS", "collective_permute", {"source_target_pairs": [(0, -1)]}, {}),
    ],
)
def test_refuses_and_accepts_the_twin(code, name, bad, good):
    plan(name, **{**CALLS[name], **good})
    refuses(code, name, **{**CALLS[name], **bad})


@pytest.mark.parametrize("groups", [[], [[]], [[0], [0]], [[-1]], 3, [["a"]], [0, 1]])
def test_refuses_a_group_that_is_no_list_of_disjoint_ranks(groups):
    with pytest.raises(RuleViolation, match="NKW-GROUP-FORM"):
        Group(groups)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("op", [nl.add, nl.minimum, nl.maximum])
def test_all_reduce_and_reduce_scatter(dtype, op):
    def kernel(x):
        source, total, chunk = copied(x), blank((6, 5), x.dtype), blank((2, 5), x.dtype)
        ncc.all_reduce(srcs=[source], dsts=[total], replica_group=Group([[0, 2, 1]]), op=op)
        ncc.reduce_scatter(
            srcs=[source], dsts=[chunk], replica_group=Group([[0, 2, 1]]), collective_dim=0, op=op
        )
        return returned(total), returned(chunk)

    data = [sample(dtype, (6, 5), str(rank)) for rank in range(3)]
    fold = {"add": np.add, "minimum": np.minimum, "maximum": np.maximum}[op.__name__]
    if dtype == "int32":
        expected = fold(fold(data[0], data[2]), data[1])  # wraps around like the storage type
    else:
        first = fold(data[0].astype(np.float32), data[2].astype(np.float32))
        expected = through_float32(fold(first, data[1].astype(np.float32)).astype(np.float64), dtype)
    for rank, (total, chunk) in enumerate(ranks(kernel, [(x,) for x in data])):
        position = (0, 2, 1)[rank]  # ranks 0, 1, 2 stand at places 0, 2, 1 of the list
        assert_same(total, expected)
        assert_same(chunk, expected[2 * position : 2 * position + 2])


def test_all_gather_in_hbm_and_sbuf():
    def kernel(x):
        gathered = blank((8, 3))
        ncc.all_gather(srcs=[copied(x)], dsts=[gathered], replica_group=PAIR, collective_dim=0)
        wide = nl.ndarray((4, 6), dtype=nl.float32)
        ncc.all_gather(srcs=[nl.load(x)], dsts=[wide], replica_group=PAIR, collective_dim=1)
        return returned(gathered), returned(wide)

    a, b = sample("float32", (4, 3), "a"), sample("float32", (4, 3), "b")
    for gathered, wide in ranks(kernel, [(a,), (b,)]):
        assert_same_bits(gathered, np.concatenate((a, b)))
        assert_same_bits(wide, np.concatenate((a, b), axis=1))


@pytest.mark.parametrize("members", [2, 4])
def test_all_to_all_transposes_chunks_over_ranks(members):
    def kernel(x, y):
        outs = [blank(x.shape), blank(y.shape, y.dtype)]
        ncc.all_to_all(
            srcs=[copied(x), copied(y)],
            dsts=outs,
            replica_group=Group([list(range(members))]),
            collective_dim=0,
        )
        return [returned(out) for out in outs]

    data = [(sample("float32", (4, 3), str(r)), sample("int8", (8, 2), str(r))) for r in range(members)]
    for rank, results in enumerate(ranks(kernel, data)):
        for index, result in enumerate(results):
            chunk = result.shape[0] // members
            for sender in range(members):
                sent = data[sender][index][rank * chunk : rank * chunk + chunk]
                assert_same_bits(result[sender * chunk : sender * chunk + chunk].copy(), sent)


def test_what_arrives_is_what_was_sent_even_if_the_sender_goes_on_to_overwrite_it():
    def kernel(x, rank):
        source, theirs = copied(x), blank(x.shape)
        ncc.collective_permute(srcs=[source], dsts=[theirs], source_target_pairs=[(0, 1), (1, 0)])
        nisa.dma_copy(dst=source, src=nl.zeros(x.shape, dtype=x.dtype))
        around = blank(x.shape)
        ncc.collective_permute_implicit([[theirs]], [[around]], PAIR)
        nisa.dma_copy(dst=theirs, src=nl.zeros(x.shape, dtype=x.dtype))
        return returned(around)

    data = [sample("float32", (3, 4), str(rank)) for rank in range(2)]
    for rank, result in enumerate(ranks(kernel, [(x, r) for r, x in enumerate(data)])):
        assert_same_bits(result, data[rank])


# -- permutes


def test_collective_permute_moves_along_pairs_and_leaves_others_alone():
    def kernel(x):
        target = blank(x.shape)
        ncc.collective_permute(srcs=[copied(x)], dsts=[target], source_target_pairs=[(0, 2), (2, 1)])
        return returned(target)

    data = [np.full((2, 3), rank, np.float32) for rank in range(4)]
    results = [int(result[0, 0]) for result in ranks(kernel, [(x,) for x in data])]
    assert results == [-1, 2, 0, -1]


def ring(channels=1, **changes):
    lists = [[hbm((8, 6))] for _ in range(channels)]
    return {
        "srcs_by_channel": lists,
        "dsts_by_channel": lists,
        "replica_group": PAIR,
        "channel_ids": list(range(channels)),
        **changes,
    }


@pytest.mark.parametrize(
    ("code", "bad", "good"),
    [
        ("NKW-RING-CHANNELS", ring(5), ring(4)),
        ("NKW-RING-CHANNELS", ring(2, channel_ids=[1, 0]), ring(2)),
        ("NKW-RING-CHANNELS", ring(2, channel_ids=[0]), ring(1)),
        ("NKW-RING-CHANNELS", ring(channel_ids=0), ring()),
        ("NKW-RING-CHANNELS", ring(srcs_by_channel=hbm((8, 6))), ring()),
        (
            "NKW-COLLECTIVE-ONE-TENSOR",
            ring(srcs_by_channel=[[hbm((8, 6))] * 2], dsts_by_channel=[[hbm((8, 6))] * 2]),
            ring(),
        ),
        ("NKW-COLLECTIVE-LISTS", ring(srcs_by_channel=[hbm((8, 6))]), ring()),
        ("NKW-COLLECTIVE-SHAPE", ring(dsts_by_channel=[[hbm((6, 8))]]), ring()),
        (
            "NKW-COLLECTIVE-MEMORY",
            ring(dsts_by_channel=[[tile((8, 6))]]),
            ring(srcs_by_channel=[[tile((8, 6))]], dsts_by_channel=[[tile((8, 6))]]),
        ),
        ("NKW-GROUP-TYPE", ring(replica_group=None), ring()),
    ],
)
def test_a_ring_refuses_and_accepts_the_twin(code, bad, good):
    plan("collective_permute_implicit", **good)
    refuses(code, "collective_permute_implicit", **bad)


def test_a_reducing_ring_takes_one_dtype_per_channel():
    common = {
        "dsts_by_channel": [[hbm((8, 6))]],
        "replica_group": PAIR,
        "op": nl.add,
        "srcs0_by_channel": [[hbm((8, 6))]],
    }
    plan("collective_permute_implicit_reduce", **common, srcs1_by_channel=[[hbm((8, 6))]])
    name = "collective_permute_implicit_reduce"
    refuses("NKW-RING-DTYPE", name, **common, srcs1_by_channel=[[hbm((8, 6), "bfloat16")]])
    refuses(
        "NKW-COLLECTIVE-OPERATOR", name, **{**common, "op": nl.subtract}, srcs1_by_channel=[[hbm((8, 6))]]
    )


def test_a_ring_sends_to_the_successor_on_every_channel():
    order = [2, 0, 1]

    def kernel(x, y):
        outs, sums = [blank(x.shape), blank(y.shape, y.dtype)], [blank(x.shape), blank(y.shape, y.dtype)]
        sources = [[copied(x)], [copied(y)]]
        group = Group([order])
        ncc.collective_permute_implicit(sources, [[out] for out in outs], group, channel_ids=[0, 1])
        ncc.collective_permute_implicit_reduce(
            sources, [[out] for out in outs], [[s] for s in sums], group, nl.add, channel_ids=[0, 1]
        )
        return [returned(t) for t in (*outs, *sums)]

    data = [(sample("float32", (2, 3), str(r)), sample("int32", (3, 2), str(r))) for r in range(3)]
    results = ranks(kernel, data)
    before = {rank: order[order.index(rank) - 1] for rank in order}
    for rank in range(3):
        source = before[rank]
        for index in range(2):
            assert_same_bits(results[rank][index], data[source][index])
            expected = data[source][index] + data[before[source]][index]
            assert_same_bits(results[rank][2 + index], expected)


# -- counts known at run time


def variable(rows=3, ranks_=4, group=FOUR, **changes):
    base = {"srcs": [hbm((8, 6))], "dsts": [hbm((4, 16))], "replica_group": group}
    return {**base, "metadata_tensor": hbm((rows, ranks_), "uint32"), **changes}


@pytest.mark.parametrize(
    ("code", "name", "bad", "good"),
    [
        ("NKW-METADATA", "all_to_all_v", variable(4), variable(3)),
        ("NKW-METADATA", "all_to_all_v", variable(3, has_rdispls=True), variable(4, has_rdispls=True)),
        ("NKW-METADATA", "all_to_all_v", variable(ranks_=3), variable()),
        ("NKW-METADATA", "all_to_all_v", variable(metadata_tensor=hbm((3, 4), "int32")), variable()),
        (
            "NKW-METADATA",
            "all_to_all_v",
            variable(metadata_tensor=tile((3, 4), "uint32", SBUF)),
            variable(metadata_tensor=tile((1, 3, 4), "uint32", SBUF)),
        ),
        ("NKW-OPERAND", "all_to_all_v", variable(metadata_tensor=None), variable()),
        ("NKW-BUFFER", "all_to_all_v", variable(srcs=[tile((8, 6))], dsts=[tile((8, 6))]), variable()),
        (
            "NKW-COLLECTIVE-ONE-TENSOR",
            "all_to_all_v",
            variable(srcs=[hbm((8, 6))] * 2, dsts=[hbm((8, 6))] * 2),
            variable(),
        ),
        ("NKW-GATHER-V-RANKS", "all_gather_v", variable(ranks_=2, group=PAIR), variable()),
        ("NKW-GATHER-V-RANKS", "all_gather_v", variable(4, has_rdispls=True), variable()),
    ],
)
def test_variable_collectives_refuse_and_accept_the_twin(code, name, bad, good):
    plan(name, **good)
    refuses(code, name, **bad)


@pytest.mark.parametrize("has_rdispls", [False, True])
@pytest.mark.parametrize("in_sbuf", [False, True])
@pytest.mark.parametrize("counts_known", [False, True])
def test_all_to_all_v_moves_chunks_of_any_size(has_rdispls, in_sbuf, counts_known):
    members, slot = 3, 7
    random = np.random.default_rng(4)
    counts = random.integers(0, slot + 1, (members, members)).astype(np.uint32)  # [from, to]
    starts = random.integers(0, 20 - slot, (members, members)).astype(np.uint32)
    offsets = np.array([[14, 0, 7], [7, 14, 0], [0, 7, 14]], np.uint32)  # [to, from]
    sources = [sample("float32", (4, 5), str(r)) for r in range(members)]

    def kernel(x, table):
        metadata = copied(table)
        if in_sbuf:
            metadata = nl.ndarray((1, *table.shape), dtype=nl.uint32)
            nisa.dma_copy(dst=metadata, src=table)
        out = blank((3, 7))
        ncc.all_to_all_v(
            srcs=[copied(x)],
            dsts=[out],
            replica_group=Group([list(range(members))]),
            metadata_tensor=metadata,
            recv_counts_known=counts_known,
            has_rdispls=has_rdispls,
        )
        return returned(out), returned(metadata)

    tables = [
        np.stack([counts[r], starts[r], np.full(members, 99), offsets[r]][: 4 if has_rdispls else 3]).astype(
            np.uint32
        )
        for r in range(members)
    ]
    target = "trn3" if has_rdispls else "trn2"
    for rank, (out, metadata) in enumerate(ranks(kernel, list(zip(sources, tables)), target)):
        expected = np.full(21, -1, np.float32)
        for sender in range(members):
            count, start = counts[sender, rank], starts[sender, rank]
            offset = offsets[rank, sender] if has_rdispls else slot * sender
            expected[offset : offset + count] = sources[sender].reshape(-1)[start : start + count]
        assert_same_bits(out.reshape(-1), expected)
        row = metadata.reshape(-1, members)[2].tolist()
        assert row == ([99] * members if counts_known else counts[:, rank].tolist())


def test_all_gather_v_sends_by_its_first_column():
    counts, starts = [2, 0, 5, 3], [1, 0, 0, 4]
    sources = [sample("int32", (8,), str(r)) for r in range(4)]

    def kernel(x, table):
        metadata, out = (
            copied(table),
            blank((24,), "int32") if False else nl.ndarray((24,), nl.int32, nl.private_hbm),
        )
        nisa.dma_copy(dst=out, src=nl.full((1, 24), -1, nl.int32))
        ncc.all_gather_v(srcs=[copied(x)], dsts=[out], replica_group=FOUR, metadata_tensor=metadata)
        return returned(out), returned(metadata)

    tables = [
        np.array([[counts[r], 77, 77, 77], [starts[r], 77, 77, 77], [0] * 4], np.uint32) for r in range(4)
    ]
    expected = np.full(24, -1, np.int32)
    for sender in range(4):
        expected[6 * sender : 6 * sender + counts[sender]] = sources[sender][
            starts[sender] : starts[sender] + counts[sender]
        ]
    for out, metadata in ranks(kernel, list(zip(sources, tables))):
        assert_same_bits(out, expected)
        assert metadata[2].tolist() == counts


@pytest.mark.parametrize(
    ("code", "count", "start"), [("NKW-METADATA-SEND", 3, 6), ("NKW-METADATA-RECEIVE", 5, 0), (None, 4, 4)]
)
def test_chunks_stay_inside_source_and_slot(code, count, start):
    def kernel(x, table):
        out = blank((2, 4))
        ncc.all_to_all_v(srcs=[copied(x)], dsts=[out], replica_group=PAIR, metadata_tensor=copied(table))
        return returned(out)

    table = np.array([[count, 0], [start, 0], [0, 0]], np.uint32)
    arguments = [(sample("float32", (2, 4)), table)] * 2
    if code is None:
        ranks(kernel, arguments)
    else:
        with pytest.raises(RuleViolation, match=code):
            ranks(kernel, arguments)


# -- agreement


def test_members_that_disagree_are_named():
    def kernel(x, op):
        out = blank(x.shape)
        ncc.all_reduce(srcs=[copied(x)], dsts=[out], replica_group=PAIR, op=op)
        return returned(out)

    x = np.ones((2, 2), np.float32)
    ranks(kernel, [(x, nl.add), (x, nl.add)])
    with pytest.raises(RendezvousMismatch, match="op: member 0 says add"):
        ranks(kernel, [(x, nl.add), (x, nl.maximum)])


def test_a_member_that_never_comes_is_a_deadlock():
    def kernel(x, comes):
        if comes:
            ncc.all_reduce(srcs=[copied(x)], dsts=[blank(x.shape)], replica_group=PAIR, op=nl.add)
        return returned(copied(x))

    x = np.ones((2, 2), np.float32)
    with pytest.raises(Deadlock, match="all_reduce"):
        ranks(kernel, [(x, True), (x, False)])
