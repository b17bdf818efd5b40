"""Compiled grammars of an engine: tried in a worker process, compiled here, kept by content, copied by requests."""

from __future__ import annotations

import json
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from threading import RLock
from typing import Any

import numpy as np

from model.engine.helpers import HelperCall, HelperThreads
from model.engine.structured import Constraint, StructuredOutputsParams
from model.errors import ModelError
from model.loading.tokenizer import Tokenizer
from model.workers.grammar import GrammarCompiler
from model.workers.launch import TEXT_TASKS, JobLimits, SingleWorker, TaskSource


@dataclass(frozen=True)
class GrammarLimits:
    """What one grammar may take: CPU seconds and MiB of memory to compile it, and seconds of the clock for each mask.

    The `cached` grammars used last are kept, together of at most `cached_mib` of memory. All grammars, kept or in use
    by requests, take at most `total_mib`.
    """

    grammar_cpu_seconds: int = 2
    grammar_memory_mib: int = 512
    mask_seconds: float = 1.0
    cached: int = 64
    cached_mib: int = 256
    total_mib: int = 2048

    def __post_init__(self) -> None:
        for name in ("grammar_cpu_seconds", "grammar_memory_mib", "mask_seconds"):
            value = getattr(self, name)
            wanted = (int, float) if name == "mask_seconds" else int
            if not isinstance(value, wanted) or isinstance(value, bool) or not 0 < value < 2**20:
                number = "a number" if name == "mask_seconds" else "an integer"
                raise ModelError(f"{name} is {value!r}; it must be {number} above 0 and below 2**20")

    @property
    def job(self) -> JobLimits:
        """Limits of the trial in a worker process."""
        return JobLimits(
            self.grammar_cpu_seconds,
            self.grammar_memory_mib << 20,
            "structured outputs: the grammar",
            " to compile: simplify the form, or raise the limit (grammar_cpu_seconds and grammar_memory_mib of an "
            "engine, --grammar-cpu-seconds and --grammar-memory of nkw serve)",
        )


class GrammarsFull(ModelError):
    """The grammars of the requests that run or wait take all memory that grammars may take; a later try may succeed."""


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A matcher at the start of a text, which is only ever copied, and the mask of the first token.

    It takes about `size_bytes` of memory.
    """

    matcher: Any
    mask: np.ndarray
    size_bytes: int


class Grammars:
    """The grammars of one tokenizer, whose texts end with one of `end_tokens`.

    `source` names the tasks of the worker process in which `compile` tries a grammar. Any thread may call the methods,
    except `constraint`.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        size: int,
        end_tokens: Sequence[int],
        limits: GrammarLimits,
        source: TaskSource,
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.source = source
        self.clock = clock
        self.masks = HelperThreads("masks", 2, clock)
        self._compiler = GrammarCompiler(tokenizer_json, size, end_tokens)
        self._compiling = HelperThreads("grammars", 1, clock)
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._cached_bytes = 0
        self._total_bytes = 0
        self._lock = RLock()  # a grammar may be freed, and its memory counted, while the lock is taken
        self._worker: SingleWorker | None = None

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, size: int, end_tokens: Sequence[int], limits: GrammarLimits | None = None
    ) -> Grammars:
        """Return the grammars of a folder's tokenizer, with the default limits if none are given."""
        source = TaskSource(TEXT_TASKS, (str(tokenizer.folder.resolve()), size, list(end_tokens)))
        return cls(tokenizer.as_json, size, end_tokens, limits or GrammarLimits(), source, time.monotonic)

    def find(self, params: StructuredOutputsParams) -> CompiledGrammar | None:
        """Return the compiled grammar of a form, if it is kept."""
        with self._lock:
            key = _key(params)
            grammar = self._cache.get(key)
            if grammar is not None:
                self._cache.move_to_end(key)
            return grammar

    def submit(self, params: StructuredOutputsParams, text: str, size_bytes: int) -> HelperCall:
        """Compile a grammar that passed its trial, in a helper thread; the call returns a `CompiledGrammar`.

        The call raises GrammarsFull where the grammars in use leave no memory for this one.
        """
        return self._compiling.submit(lambda: self._compile(params, text, size_bytes))

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Return the compiled grammar of a form; one that is not kept is tried in a worker process first.

        Raises ModelError for a form that cannot be compiled, or not within the limits, and GrammarsFull.
        """
        cached = self.find(params)
        if cached is not None:
            return cached
        with self._lock:
            self._worker = self._worker or SingleWorker(self.source)
        text, size_bytes = self._worker.run("grammar", [params.form], self.limits.job)
        return self._compile(params, text, size_bytes)

    def constraint(self, grammar: CompiledGrammar) -> Constraint:
        """Return a constraint at the start of a text."""
        return Constraint(
            self._compiler,
            grammar.matcher.deep_copy(),
            grammar.mask,
            self.masks,
            self.limits.mask_seconds,
        )

    def _compile(self, params: StructuredOutputsParams, text: str, size_bytes: int) -> CompiledGrammar:
        self._take_memory(size_bytes)
        try:
            matcher = self._compiler.compile(text)
            grammar = CompiledGrammar(matcher, self._compiler.mask(matcher), size_bytes)
        except BaseException:
            self._free_memory(size_bytes)
            raise
        weakref.finalize(grammar, self._free_memory, size_bytes)
        with self._lock:
            self._keep(_key(params), grammar)
        return grammar

    def _take_memory(self, size_bytes: int) -> None:
        """Count the memory of a grammar; forget kept grammars where it would not fit beside them."""
        limit = self.limits.total_mib << 20
        with self._lock:
            while self._cache and self._total_bytes + size_bytes > limit:
                self._forget_oldest()
            if self._total_bytes + size_bytes > limit:
                raise GrammarsFull(
                    f"structured outputs: the grammars in use take {self._total_bytes >> 20} of {limit >> 20} MiB: try "
                    "again later"
                )
            self._total_bytes += size_bytes

    def _free_memory(self, size_bytes: int) -> None:
        with self._lock:
            self._total_bytes -= size_bytes

    def _keep(self, key: bytes, grammar: CompiledGrammar) -> None:
        """Keep a grammar, and forget those that were not used for longest."""
        limits = self.limits
        replaced = self._cache.pop(key, None)
        if replaced is not None:
            self._cached_bytes -= replaced.size_bytes
        if limits.cached < 1 or grammar.size_bytes > limits.cached_mib << 20:
            return
        self._cache[key] = grammar
        self._cached_bytes += grammar.size_bytes
        while len(self._cache) > limits.cached or self._cached_bytes > limits.cached_mib << 20:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, grammar = self._cache.popitem(last=False)
        self._cached_bytes -= grammar.size_bytes


def _key(params: StructuredOutputsParams) -> bytes:
    """Return a digest of a form's content. Raises ModelError for a schema that is not JSON."""
    try:
        return sha256(json.dumps(params.form).encode()).digest()
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"structured outputs: the schema is not JSON: {error}") from None
