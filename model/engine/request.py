"""A request on its way: its tokens, how many of them are computed, and the pages and the slot of what they left."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field

from model.engine.inputs import ModelInputs
from model.state import BlockTable, Key, page_key


@dataclass(eq=False)
class Request:
    """A prompt, followed by the tokens chosen so far.

    `tokens` are both; the first `prompt_tokens` are the prompt, and at most `max_new_tokens` follow. Lower `priority`
    goes first, then the earlier `arrival`. `root` names what decides the contents of pages beside the tokens.
    `computed` tokens have their keys and values in the pages of `tables`, one for each kind of pages, or none where the
    request waits; their first `filled` blocks are full. Recurrent layers have their state behind them in `slot`, and
    before drafts that are not verified yet in `kept_slot`. `shared_tokens` were computed before it started; `number`
    is its place among all submitted ones. Of several groups of ranks `group` computes it. `inputs` are encoded with
    its prompt. A request that `waits_for_mask` decodes no token in the next step.
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
        """The tokens chosen so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def is_running(self) -> bool:
        """Whether it holds pages or a slot."""
        return bool(self.tables) or self.slot is not None

    @property
    def missing(self) -> int:
        """Tokens that are not computed yet; the step that computes the last of them chooses the next token."""
        return len(self.tokens) - self.computed

    @property
    def most_positions(self) -> int:
        """Positions that the request fills at most: the last chosen token is never computed."""
        return self.prompt_tokens + self.max_new_tokens - 1

    def page_keys(self, count: int, block_size: int) -> Sequence[Key]:
        """The keys of the first `count` pages."""
        while len(self.keys) < count:
            first = len(self.keys) * block_size
            parent = self.keys[-1] if self.keys else self.root
            self.keys.append(page_key(parent, self.tokens[first : first + block_size]))
        return self.keys[:count]
