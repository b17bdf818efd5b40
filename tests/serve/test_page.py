"""The page at `/` needs nothing but its server: a browser talks with the model and sees what the server does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.browser import CHROMIUM, Tab, browsing
from tests.serve.conftest import MODEL, Served
from tests.serve.test_ends import wait_until

in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
HOSTILE = "<img src=x onerror=alert(1)> {{ 7 * 7 }} </script><script>alert(2)</script>"


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with browsing(tmp_path) as browser_tab:
        yield browser_tab


def opened(tab: Tab, server: Served, width: int = 1280) -> None:
    tab.open(f"http://127.0.0.1:{server.port}/", width)


def sent(tab: Tab, text: str, tokens: int, temperature: float = 0) -> None:
    """Send a message that is typed into the page."""
    tab.value(
        f"byId('tokens').value = {tokens}; byId('temperature').value = {temperature}; byId('text').value = {text!r}"
    )
    tab.value("byId('send').click()")


def messages(tab: Tab) -> list[str]:
    expression = "[...document.querySelectorAll('.message')].map((each) => each.firstChild.data)"
    return [str(text) for text in tab.value(expression)]


def test_page_names_no_other_host_and_allows_none(server: Served) -> None:
    response, body = server.send("GET", "/")
    text, policy = body.decode(), response.headers["content-security-policy"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"\s(on\w+|style|src)=", text), "the policy would stop it"
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert response.headers["content-type"].startswith("text/html")


@in_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_browser_talks_with_the_model(tab: Tab, server: Served, client: Any, width: int) -> None:
    opened(tab, server, width)
    tab.until(f"byId('model').textContent === '{MODEL}'")
    conversation: list[dict[str, str]] = []
    for text in ("Tom had", HOSTILE):
        conversation.append({"role": "user", "content": text})
        sent(tab, text, 6)
        tab.until(f"document.querySelectorAll('small').length === {len(conversation) // 2 + 1}")
        answer = client.chat.completions.create(
            model=MODEL, messages=conversation, max_tokens=6, temperature=0
        )
        conversation.append({"role": "assistant", "content": answer.choices[0].message.content})
        assert messages(tab) == [message["content"] for message in conversation]
    tab.until("Number(byId('rate').textContent) > 0 || byId('rates').querySelector('polyline')")
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []
    assert {url.split("/")[2] for url in tab.requests} == {f"127.0.0.1:{server.port}"}


@in_chromium
def test_browser_that_stops_frees_the_pages(tab: Tab, server: Served) -> None:
    cache = server.engine.scheduler.cache
    opened(tab, server)
    tab.until(f"byId('model').textContent === '{MODEL}'")
    sent(tab, "Tom had", 240, 0.7)
    tab.until("document.querySelector('.assistant').firstChild.data")
    tab.value("byId('stop').click()")
    wait_until(lambda: cache.free == cache.count and not server.engine.busy)
    tab.until("byId('stop').disabled")
    assert len(messages(tab)) == 2
    texts = messages(tab)
    sent(tab, "word " * 400, 6)
    tab.until("document.querySelector('.error')")
    assert messages(tab) == [
        *texts,
        "The context of 256 tokens is full. Your message is in the field again: shorten it, or begin a new "
        "conversation.",
    ]
    assert tab.value("byId('text').value") == "word " * 400
    assert tab.value("talk.messages.length") == len(texts)


@in_chromium
def test_browser_says_that_the_context_ended_an_answer(tab: Tab, server: Served) -> None:
    opened(tab, server)
    tab.until(f"byId('model').textContent === '{MODEL}'")
    sent(tab, "Tom had " * 80, 256, 1)
    tab.until("document.querySelector('small')?.textContent.includes('; ')")
    note = tab.value("document.querySelector('small').textContent")
    assert note.endswith("; the context of 256 tokens is full")


@in_chromium
def test_browser_asks_for_a_key(tab: Tab, start: Callable[..., Any], key_file: Path) -> None:
    with start("--api-key-file", str(key_file), "--max-num-seqs", "1") as served:
        opened(tab, served)
        tab.until("!byId('login').hidden")
        tab.value(f"byId('key').value = '{served.keys[0]}'; byId('login').requestSubmit()")
        tab.until(f"byId('model').textContent === '{MODEL}' && byId('login').hidden")
        sent(tab, "Tom had", 2)
        tab.until("document.querySelector('small')")
