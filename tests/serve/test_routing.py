"""Which replica a request goes to: by its prompt's prefix, unless that one has far more to do."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model.serve.replicas.routing import BLOCK_BYTES, CHATS, COMPLETIONS, RESPONSES, RoutedRequest, Routing

BOTH = (0, 1)


def build_request(prompt: Any, n: int = 1, most: int = 1000) -> RoutedRequest:
    """Build the routed request of a completion."""
    return RoutedRequest.from_body(COMPLETIONS, json.dumps({"prompt": prompt, "n": n}).encode(), most)


def chat(*contents: str, **more: Any) -> RoutedRequest:
    """Build the routed request of a conversation."""
    messages = [{"role": "user", "content": content} for content in contents]
    return RoutedRequest.from_body(CHATS, json.dumps({"messages": messages} | more).encode(), 1000)


def text(blocks: int, seed: int = 0) -> str:
    """Return a text of so many whole blocks; that of fewer blocks and the same seed is its beginning."""
    draw = random.Random(seed)
    return "".join(draw.choice("abcdefgh") for _ in range(blocks * BLOCK_BYTES))


def routing(sequences: int = 16, max_continuations: int = 80, positions: int = 16_000) -> Routing:
    return Routing(sequences, max_continuations, positions)


@pytest.mark.parametrize(("size", "blocks"), [(63, 0), (64, 1), (65, 1), (127, 1), (128, 2), (129, 2)])
def test_whole_blocks_have_keys(size: int, blocks: int) -> None:
    assert len(build_request("x" * size).block_hashes) == blocks


def test_a_longer_prompt_begins_with_the_same_keys_and_another_one_does_not() -> None:
    short, long = build_request(text(3)), build_request(text(5))
    assert list(long.block_hashes[:3]) == list(short.block_hashes)
    assert len(set(long.block_hashes)) == 5
    ids = list(range(100, 200))
    assert list(build_request([*ids, 7]).block_hashes) == list(build_request(ids).block_hashes)
    assert not set(build_request("x" + text(3)).block_hashes) & set(short.block_hashes)
    first, second = chat(text(2)), chat(text(2), "and then?", text(2, 1))
    shared = len(first.block_hashes) - 1  # the end of a message may share a block with what follows
    assert shared > 0 and list(second.block_hashes[:shared]) == list(first.block_hashes[:shared])
    assert not set(chat(text(2), tools=[{"type": "function"}]).block_hashes) & set(first.block_hashes)


@pytest.mark.parametrize(
    ("prompt", "n", "wanted"),
    [("a", 1, 1), ("a", 3, 3), (["a", "b"], 2, 4), ([1, 2, 3], 1, 1), ([[1], [2], [3]], 2, 6)],
)
def test_every_continuation_counts(prompt: Any, n: int, wanted: int) -> None:
    assert build_request(prompt, n).continuations == wanted


@pytest.mark.parametrize(("path", "wanted"), [("/tokenize", 1), ("/detokenize", 1), ("/v1/models", 0)])
def test_requests_of_the_tokenizer_count_as_one_continuation(path: str, wanted: int) -> None:
    assert RoutedRequest.from_body(path, b"{}", 1000) == RoutedRequest(continuations=wanted)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"{}", b"\xff", b"[" * 100_000, b'{"prompt": 3, "n": "x"}', b'{"prompt": []}']
    + [b'{"prompt": [[]], "n": -1}', b'{"prompt": "\\ud800"}', b'{"prompt": [null]}', b'{"messages": 3}'],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize"])
def test_what_is_no_request_has_no_prefix(path: str, body: bytes) -> None:
    assert not RoutedRequest.from_body(path, body, 1000).block_hashes


def test_a_response_to_a_longer_conversation_begins_with_the_same_keys() -> None:
    def keys(**body: Any) -> list[bytes]:
        request = RoutedRequest.from_body(RESPONSES, json.dumps(body).encode(), 1000)
        assert request.continuations == 1
        return list(request.block_hashes)

    items = [{"role": "user", "content": "a" * 200}]
    shorter = keys(input=items, instructions="Be brief.")
    assert (
        keys(input=[*items, {"role": "user", "content": "b"}], instructions="Be brief.")[: len(shorter)]
        == shorter
    )
    assert shorter[0] not in keys(input=items, instructions="Be long.")
    assert len(keys(input="a" * 200)) >= 3


def test_prompts_that_begin_alike_go_to_one_replica_and_others_to_both() -> None:
    rule, groups = routing(), 6
    first = [rule.choose(build_request(text(4, seed)), BOTH) for seed in range(groups)]
    for seed, choice in enumerate(first):
        rule.end(choice, build_request(text(4, seed)))
    again = [rule.choose(build_request(text(5, seed)), BOTH) for seed in range(groups)]
    assert [choice.replica for choice in again] == [choice.replica for choice in first]
    assert not any(choice.by_prefix for choice in first) and all(choice.by_prefix for choice in again)
    assert sum(choice.replica for choice in first) == groups // 2


def test_idle_replicas_take_turns_with_short_prompts() -> None:
    rule, replicas = routing(), []
    for _ in range(4):
        choice = rule.choose(build_request("hello"), BOTH)
        rule.end(choice, build_request("hello"))
        replicas.append(choice.replica)
    assert replicas == [0, 1, 0, 1]


@pytest.mark.parametrize(("blocks", "decides"), [(7, True), (8, True), (9, False)])
def test_a_quarter_of_the_prompt_decides(blocks: int, decides: bool) -> None:
    rule = routing()
    home = rule.choose(build_request(text(2)), BOTH)
    rule.end(home, build_request(text(2)))
    assert rule.choose(build_request(text(blocks)), BOTH).by_prefix is decides


@pytest.mark.parametrize(("more", "decides"), [(7, True), (8, True), (9, False)])
def test_a_replica_with_over_half_a_step_more_to_do_is_passed_over(more: int, decides: bool) -> None:
    rule = routing(sequences=16)
    home = rule.choose(build_request(text(4), n=more), BOTH)
    choice = rule.choose(build_request(text(4)), BOTH)
    assert (choice.by_prefix, choice.replica == home.replica) == (decides, decides)


def test_a_popular_prefix_becomes_known_to_both_and_then_the_load_decides() -> None:
    rule = routing(sequences=4)
    chosen = [rule.choose(build_request(text(4)), BOTH).replica for _ in range(20)]
    assert chosen[:3] == [chosen[0]] * 3
    assert abs(rule._states[0].load - rule._states[1].load) <= 2


@pytest.mark.parametrize(("max_continuations", "same"), [(4, False), (5, True)])
def test_a_full_replica_is_passed_over_while_another_has_places(max_continuations: int, same: bool) -> None:
    rule = routing(sequences=16, max_continuations=max_continuations)
    home = rule.choose(build_request(text(4), n=4), BOTH)
    assert (rule.choose(build_request(text(4)), BOTH).replica == home.replica) is same


def test_where_all_are_full_one_of_them_says_so() -> None:
    rule = routing(sequences=2, max_continuations=2)
    for _ in range(2):
        rule.choose(build_request("a", n=2), BOTH)
    assert rule.choose(build_request("a"), BOTH).replica in BOTH


def test_only_replicas_that_are_up_are_chosen_and_one_that_starts_anew_knows_nothing() -> None:
    rule = routing()
    home = rule.choose(build_request(text(4)), [2])
    assert home.replica == 2
    assert rule.choose(build_request(text(4)), [0, 1]).replica != 2
    rule.end(home, build_request(text(4)))
    rule.forget(2)
    assert not rule.choose(build_request(text(4)), [2]).by_prefix


def test_the_index_has_room_for_what_the_pages_hold_and_forgets_ends_before_beginnings() -> None:
    rule = routing(positions=16 * 6)  # 6 blocks
    assert rule.max_blocks == 6
    for seed in (0, 1):
        rule.end(rule.choose(build_request(text(4, seed), most=6), [0]), build_request(text(4, seed)))
    known = {seed: rule._states[0].count_prefix(build_request(text(4, seed)).block_hashes) for seed in (0, 1)}
    assert known == {0: 2, 1: 4}
    assert len(build_request(text(9), most=6).block_hashes) == 6
    assert not routing(positions=0).choose(build_request(text(4), most=0), BOTH).by_prefix


def test_loads_add_up_whatever_comes_and_ends() -> None:
    draw, rule, open_requests = random.Random(5), routing(sequences=4, max_continuations=8), []
    for _ in range(3000):
        if open_requests and draw.random() < 0.5:
            rule.end(*open_requests.pop(draw.randrange(len(open_requests))))
        else:
            one = build_request(text(draw.randrange(1, 9), draw.randrange(6)), n=draw.randrange(1, 3))
            up = draw.sample(range(3), draw.randrange(1, 4))
            choice = rule.choose(one, up)
            assert choice.replica in up
            open_requests.append((choice, one))
        loads = [
            sum(one.continuations for choice, one in open_requests if choice.replica == replica)
            for replica in range(3)
        ]
        assert [rule._states[replica].load for replica in range(3)] == loads


def test_prompts_of_different_keys_and_salts_share_no_block() -> None:
    body = json.dumps({"prompt": text(2)}).encode()
    salted = json.dumps({"prompt": text(2), "cache_salt": "a"}).encode()
    roots = [("", body), ("first", body), ("second", body), ("", salted), ("first", salted)]
    first, again = (
        [tuple(RoutedRequest.from_body(COMPLETIONS, sent, 1000, salt).block_hashes) for salt, sent in roots]
        for _ in range(2)
    )
    assert first == again
    assert len({key for keys in first for key in keys}) == 2 * len(roots)
