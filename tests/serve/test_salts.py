"""Each API key has a prefix cache of its own, and `cache_salt` divides it further; with replicas as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model.serve.http.admission import combine_salts, derive_salt
from tests.serve.conftest import MODEL, Reached, Served
from tests.serve.test_replicas import OPTIONS, process

openai = pytest.importorskip("openai", reason="openai is an extra of development (dev)")

TALE = "Tom had a big red ball and a small blue box. " * 3
KEYS = ("first-key-of-clients", "second-key-of-clients")


def cached(server: Reached, key: str, end: str, chat: bool = False, **extra: Any) -> int:
    """Return how many tokens of a prompt were in the prefix cache."""
    client = server.client(api_key=key)
    if chat:
        messages = [{"role": "user", "content": f"A chat: {TALE}{end}"}]
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=1, extra_body=extra
        )
    else:
        answer = client.completions.create(model=MODEL, prompt=TALE + end, max_tokens=1, extra_body=extra)
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def check_caches_are_divided(server: Reached) -> None:
    """Check that only requests of one key with one cache_salt share pages."""
    for chat in (False, True):
        for key in KEYS:
            for extra in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": derive_salt(KEYS[0])}):
                assert cached(server, key, "", chat, **extra) == 0, (chat, key, extra)
                assert cached(server, key, " The end.", chat, **extra) > 0, (chat, key, extra)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reached]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("\n".join(KEYS), encoding="utf-8")
    with process(*OPTIONS, "--api-key-file", str(path)) as served:
        yield served


@pytest.mark.slow
def test_keys_share_no_pages(start: Callable[..., Any], key_file: Path) -> None:
    with start("--api-key-file", str(key_file), "--max-num-seqs", "1") as served:
        check_caches_are_divided(served)


@pytest.mark.deep
def test_keys_share_no_pages_of_replicas(replicas: Reached) -> None:
    check_caches_are_divided(replicas)


@pytest.mark.slow
def test_client_cannot_send_the_salt_of_another_key(replicas: Reached) -> None:
    client = replicas.client(api_key=KEYS[0])
    other = {"x-nkw-key-salt": derive_salt(KEYS[1])}
    for headers, is_cached in ((None, False), (other, True)):
        answer = client.completions.create(
            model=MODEL, prompt="A salt. " + TALE, max_tokens=1, extra_headers=headers
        )
        assert (answer.usage.prompt_tokens_details.cached_tokens > 0) is is_cached


@pytest.mark.slow
def test_cache_salt_without_keys_divides_the_cache(server: Served) -> None:
    prompt = {"model": MODEL, "prompt": "Salted: " + TALE, "max_tokens": 1}
    for extra in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        usages = [server.client().completions.create(**prompt, extra_body=extra).usage for _ in range(2)]
        first, second = (usage.prompt_tokens_details.cached_tokens for usage in usages)
        assert first == 0 and second > 0


@pytest.mark.parametrize(
    ("salt", "is_taken"), [("", False), ("a", True), ("a" * 1024, True), ("a" * 1025, False)]
)
def test_length_of_cache_salt_is_that_of_vllm(server: Served, salt: str, is_taken: bool) -> None:
    def ask() -> None:
        server.client().completions.create(
            model=MODEL, prompt="Tom", max_tokens=1, extra_body={"cache_salt": salt}
        )

    if is_taken:
        ask()
    else:
        with pytest.raises(openai.BadRequestError, match="cache_salt"):
            ask()


def test_salts_of_keys_have_one_length_so_that_pairs_are_distinct() -> None:
    salts = [derive_salt(key) for key in (*KEYS, "a" * 16, "a" * 1024)]
    assert {len(salt) for salt in salts} == {64} and len(set(salts)) == 4
    assert combine_salts("", None) is None
    pairs = [(salt, extra) for salt in salts for extra in (None, "a", salts[0])]
    assert len({combine_salts(*pair) for pair in pairs}) == len(pairs)
