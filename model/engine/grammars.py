"""Compiled grammars of an engine for structured outputs, cached by content.

A grammar is first compiled in a worker process under limits of time and memory, then in this process. Each request
copies the compiled matcher. The engine and the HTTP server call this module.
"""

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
    """Limits of time and memory for grammars.

    Attributes:
        grammar_cpu_seconds: CPU seconds to compile one grammar.
        grammar_memory_mib: MiB of memory to compile one grammar.
        mask_seconds: Seconds to compute one mask.
        cached: Number of cached grammars; the least recently used ones are removed.
        cached_mib: MiB of memory of the cached grammars.
        total_mib: MiB of memory of all grammars, cached or used by requests.

    Raises:
        ModelError: One of the first three is not above 0 and below 2**20, or has another type.
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
        """Limits of the compilation in a worker process, with the words of its messages."""
        return JobLimits(
            self.grammar_cpu_seconds,
            self.grammar_memory_mib << 20,
            "structured outputs: the grammar",
            " to compile: simplify the form, or raise the limit (grammar_cpu_seconds and grammar_memory_mib of an "
            "engine, --grammar-cpu-seconds and --grammar-memory of nkw serve)",
        )


class GrammarsFull(ModelError):
    """Error raised if grammars of unfinished requests take all memory of grammars; a later attempt may succeed."""


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """Compiled grammar: a matcher at the start of a text, which requests copy, and the mask of the first token.

    `mask` is [vocabulary] bool. The grammar takes about `size_bytes` of memory.
    """

    matcher: Any
    mask: np.ndarray
    size_bytes: int


class Grammars:
    """Cache of compiled grammars for one tokenizer, with limits of memory.

    Any thread may call the methods, except `create_constraint`.
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
        """Create an empty cache.

        Args:
            tokenizer_json: Returns the JSON of the tokenizer.
            size: The size of the vocabulary.
            end_tokens: The tokens that end a text.
            limits: The limits of grammars.
            source: The tasks of the worker process in which `compile` first compiles a grammar.
            clock: Returns the time in seconds.
        """
        self.limits = limits
        self.source = source
        self.clock = clock
        self.masks = HelperThreads("masks", 2, clock)
        self._compiler = GrammarCompiler(tokenizer_json, size, end_tokens)
        self._compiling = HelperThreads("grammars", 1, clock)
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._total_bytes = 0
        self._lock = RLock()  # a grammar may be freed, and its memory counted, while the lock is taken
        self._worker: SingleWorker | None = None

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, size: int, end_tokens: Sequence[int], limits: GrammarLimits | None = None
    ) -> Grammars:
        """Return an empty cache for the tokenizer of a model's folder.

        Args:
            tokenizer: The tokenizer.
            size: The size of the vocabulary.
            end_tokens: The tokens that end a text.
            limits: The limits of grammars; by default those of `GrammarLimits()`.
        """
        source = TaskSource(TEXT_TASKS, (str(tokenizer.folder.resolve()), size, list(end_tokens)))
        return cls(tokenizer.as_json, size, end_tokens, limits or GrammarLimits(), source, time.monotonic)

    def find(self, params: StructuredOutputsParams) -> CompiledGrammar | None:
        """Return the compiled grammar of a form, or None if it is not cached; it becomes the most recently used one.

        Raises:
            ModelError: The form's schema is not JSON.
        """
        with self._lock:
            key = _compute_key(params)
            grammar = self._cache.get(key)
            if grammar is not None:
                self._cache.move_to_end(key)
            return grammar

    def submit(self, params: StructuredOutputsParams, text: str, size_bytes: int) -> HelperCall:
        """Compile a grammar in a helper thread of this process, and cache it.

        No worker process is started here: the caller has had one compile the form within its limits, which returned
        `text` and `size_bytes`.

        Args:
            params: The form, which is the key of the cache.
            text: The grammar in llguidance's notation.
            size_bytes: The memory that the grammar takes.

        Returns:
            The future of a `CompiledGrammar`. Its exception is GrammarsFull if grammars in use leave too little memory.
        """
        return self._compiling.submit(lambda: self._compile(params, text, size_bytes))

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Return the compiled grammar of a form from the cache, or compile it and wait for it.

        A worker process compiles it first, under the limits; then this process does.

        Raises:
            ModelError: The form cannot be compiled within the limits.
            GrammarsFull: Grammars in use leave too little memory.
        """
        cached = self.find(params)
        if cached is not None:
            return cached
        with self._lock:
            self._worker = self._worker or SingleWorker(self.source)
        text, size_bytes = self._worker.run("grammar", [params.form], self.limits.job)
        return self._compile(params, text, size_bytes)

    def create_constraint(self, grammar: CompiledGrammar) -> Constraint:
        """Return a new constraint for one text, at its start; it has a copy of the grammar's matcher."""
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
            self._keep(_compute_key(params), grammar)
        return grammar

    def _take_memory(self, size_bytes: int) -> None:
        """Add the memory of a grammar to the total, and remove cached grammars if the limit requires it.

        Raises:
            GrammarsFull: Grammars in use leave too little memory.
        """
        limit = self.limits.total_mib << 20
        with self._lock:
            while self._cache and self._total_bytes + size_bytes > limit:
                self._cache.popitem(last=False)
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
        """Cache a grammar, and remove the least recently used grammars beyond the limits.

        Does nothing if caching is off or the grammar alone exceeds the limit.
        """
        limits = self.limits
        self._cache.pop(key, None)
        if limits.cached < 1 or grammar.size_bytes > limits.cached_mib << 20:
            return
        self._cache[key] = grammar
        while (
            len(self._cache) > limits.cached
            or sum(cached.size_bytes for cached in self._cache.values()) > limits.cached_mib << 20
        ):
            self._cache.popitem(last=False)


def _compute_key(params: StructuredOutputsParams) -> bytes:
    """Return the SHA-256 digest of a form's JSON, the key of the cache.

    Raises:
        ModelError: The schema is not JSON.
    """
    try:
        return sha256(json.dumps(params.form).encode()).digest()
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"structured outputs: the schema is not JSON: {error}") from None
