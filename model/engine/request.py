"""A request of the scheduler: one continuation of a prompt, with its tokens, its progress, and its pages and slot."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field

from model.engine.inputs import ModelInputs
from model.state import BlockTable, Key, compute_page_key


@dataclass(eq=False)
class Request:
    """Prompt and the tokens sampled after it.

    Attributes:
        tokens: The first `prompt_tokens` are the prompt; at most `max_new_tokens` follow.
        priority: Lower numbers are scheduled first; ties go to the earlier `arrival`, then the lower `number`.
        root: The parent key of the first page. Requests share pages only if their roots are equal.
        computed: Number of first tokens whose keys and values are in pages.
        tables: The block table of each pool; empty while the request waits.
        keys: The prefix-cache keys of the first full pages, as far as they were needed.
        filled: Number of first blocks that are full.
        slot: The slot of the state after the computed tokens.
        kept_slot: The slot of the state before draft tokens that are not verified yet.
        shared_tokens: Number of first tokens that were cached when the request started.
        number: The index among all submitted requests.
        group: The data-parallel group that computes the request.
        inputs: What the model encodes with the prompt.
        waits_for_mask: Whether the next step must not sample a token of the request.
    """

    id: str
    tokens: MutableSequence[int]
    max_new_tokens: int
    priority: int = 0
    arrival: float = 0.0
    root: Key = b""
    prompt_tokens: int = field(init=False)
    computed: int = 0
    tables: list[BlockTable] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    filled: int = 0
    slot: int | None = None
    kept_slot: int | None = None
    preemptions: int = 0
    shared_tokens: int = 0
    number: int = 0
    group: int = 0
    inputs: ModelInputs | None = None
    waits_for_mask: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def generated(self) -> Sequence[int]:
        """Tokens sampled so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def is_running(self) -> bool:
        """Whether the request has pages or a slot."""
        return bool(self.tables) or self.slot is not None

    @property
    def missing(self) -> int:
        """Number of tokens that are not computed yet; the step that computes the last of them samples the next."""
        return len(self.tokens) - self.computed

    @property
    def max_positions(self) -> int:
        """Largest number of positions with keys and values; the last sampled token is never computed."""
        return self.prompt_tokens + self.max_new_tokens - 1

    def compute_page_keys(self, count: int, block_size: int) -> Sequence[Key]:
        """Return the prefix-cache keys of the first `count` pages, and remember them in `keys`.

        A key depends on `root` and on all tokens up to the end of its page.
        """
        while len(self.keys) < count:
            first = len(self.keys) * block_size
            parent = self.keys[-1] if self.keys else self.root
            self.keys.append(compute_page_key(parent, self.tokens[first : first + block_size]))
        return self.keys[:count]
