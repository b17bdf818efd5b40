"""The arguments of an engine, and the engine that they make: folder, pages, buckets, drafts and device."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.engine import Engine, EngineLimits, GroupScheduler, Scheduler, SchedulerOptions
from model.engine.bucket_sizes import AUTO, BucketLimits, read_buckets
from model.engine.buckets import MOST_ROWS, Buckets
from model.engine.checks import (
    check_flag,
    check_integer,
    check_optional_integer,
    check_range,
    check_text,
    display_value,
)
from model.engine.grammars import GrammarLimits, Grammars
from model.engine.speculation import NO_RECURRENT_DRAFTS, DraftModel, PromptLookup, Proposer
from model.errors import ModelError
from model.families import SPEECH, TEXT, load_config
from model.layers.cache import check_cache_dtype
from model.llm.loaded import LoadedModel, open_device
from model.loading.shipped import PRETRAINED, model_path
from model.loading.tokenizer import Tokenizer
from model.loading.weights import check_ranks
from model.mesh import Mesh, check_expert_groups, routed_experts
from model.runners.paged import PagedModel
from model.runners.window import make_input_check
from model.state import INTERVAL, PagePool, SlotPool, WindowPool, check_block_size, window_pages


@dataclass(frozen=True)
class EngineArgs:
    """The arguments of an engine, with vLLM's names where it has them.

    `model` is a Hugging Face folder. The kernels run on `tensor_parallel_size` simulated cores of `target`, or
    with `backend` neuron on as many NeuronCores, each of a process that torchrun started; or on
    `expert_parallel_size` simulated groups of as many, which divide the routed experts: each computes requests of its
    own, with the limits of a step and the cache that are said here. (In vLLM these are as many `data_parallel_size`
    groups with `enable_expert_parallel`; there tensor-parallel ranks hold whole experts, here each holds its part of
    every expert of its group.) The cache
    has `num_pages` pages of `block_size` positions; by default as many as `max_num_seqs` sequences of `max_model_len`
    positions fill, at most 4096, and of layers with a window no more than those sequences can hold. Recurrent layers
    have `num_state_slots` states, by default two for each of these sequences, and snapshots every `mamba_block_size`
    positions, a multiple of `block_size`. `max_model_len` is
    the context of the model, at most 2048, by default; where it is above the length up to which longrope takes short
    factors, sequences of all lengths take the long ones. `speculative_config` has `num_speculative_tokens`, and the
    folder of a draft `model`, or `method` ngram with `prompt_lookup_max` and `prompt_lookup_min`. `buckets` are the
    sizes to which steps are rounded up, such as "sequences=1,16 tokens=64,512 context=2048", by default powers of two,
    and fewer of them on NeuronCores, where every shape is compiled (`BucketLimits.compiled`). `kv_cache_dtype` is one
    of `model.layers.cache.CACHE_FORMATS`, in which pages hold keys and values: auto is `dtype`.

    A grammar of structured outputs that takes more than `grammar_cpu_seconds` of CPU time or `grammar_memory_mib` MiB
    to compile is refused. A mask that takes more than `mask_seconds` ends its request with an error.
    """

    model: str | Path = PRETRAINED
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    target: str = "trn2"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    block_size: int = 16
    num_pages: int | None = None
    num_state_slots: int | None = None
    mamba_block_size: int = INTERVAL
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    speculative_config: Mapping[str, Any] | None = None
    seed: int = 0
    buckets: str | Buckets | None = None
    backend: str = "simulate"
    grammar_cpu_seconds: int = 2
    grammar_memory_mib: int = 512
    mask_seconds: float = 1.0

    def __post_init__(self) -> None:
        """Raise ModelError for a value of another type; NumPy's integers become int."""
        if not isinstance(self.model, str | Path):
            raise ModelError(f"model is {display_value(self.model)}; it must be a text or a Path")
        for check, names in _TYPES:
            for name in names:
                object.__setattr__(self, name, check(name, getattr(self, name)))
        check_range("seed", self.seed, 0, 2**63 - 1)
        check_cache_dtype(self.kv_cache_dtype)
        if not isinstance(self.speculative_config, Mapping | None):
            raise ModelError(
                f"speculative_config is {display_value(self.speculative_config)}; it must be a mapping of names"
            )
        if not isinstance(self.buckets, str | Buckets | None):
            raise ModelError(f"buckets is {display_value(self.buckets)}; it must be a text or Buckets")
        _ = self.grammar_limits  # which checks them

    @property
    def grammar_limits(self) -> GrammarLimits:
        """Limits of the grammars of structured outputs. Raises ModelError for a limit that is not above 0."""
        return GrammarLimits(self.grammar_cpu_seconds, self.grammar_memory_mib, self.mask_seconds)


_SIZES = ("tensor_parallel_size", "expert_parallel_size", "max_num_seqs", "max_num_batched_tokens")
_TYPES: Sequence[tuple[Callable[[str, Any], Any], Sequence[str]]] = (
    (
        check_integer,
        (*_SIZES, "block_size", "mamba_block_size", "seed", "grammar_cpu_seconds", "grammar_memory_mib"),
    ),
    (check_optional_integer, ("max_model_len", "num_pages", "num_state_slots")),
    (check_flag, ("enable_prefix_caching", "enable_chunked_prefill")),
    (check_text, ("dtype", "kv_cache_dtype", "target", "backend")),
)


def args_of(options: argparse.Namespace, **more: Any) -> EngineArgs:
    """Return the arguments of an engine from the options `ENGINE` of serve; `more` are arguments without an option."""
    return EngineArgs(
        model=options.model,
        tensor_parallel_size=options.tp,
        expert_parallel_size=options.ep,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        target=options.target,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        num_pages=options.num_pages,
        num_state_slots=options.num_state_slots,
        mamba_block_size=options.mamba_block_size,
        speculative_config=_object(options.speculative_config),
        buckets=options.buckets,
        **more,
    )


def _object(text: str | None) -> dict[str, Any] | None:
    """A JSON object on the command line."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelError("--speculative-config is no JSON object, such as '{\"num_speculative_tokens\": 3}'")
    return found


@dataclass(frozen=True)
class EngineParts:
    """What the arguments of an engine say, read: the model, and the shapes of its steps and of its caches."""

    args: EngineArgs
    folder: Path
    config: ModelConfig
    speculation: _Speculation
    options: SchedulerOptions
    pools: tuple[PagePool, ...]
    slots: SlotPool | None
    buckets: Buckets

    @property
    def length(self) -> int:
        """The longest sequence."""
        return self.args.max_model_len or min(2048, self.config.context)

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        return _mesh(self.config, self.args)

    def model(self) -> PagedModel:
        """The model with its weights on a device."""
        return _paged_model(self.folder, self.config, self.args, self.pools, self.buckets, self.slots)


def engine_parts(args: EngineArgs) -> EngineParts:
    """What arguments say; ModelError for what the folder or the arguments do not allow."""
    folder = model_path(args.model)
    config = load_config(folder, TEXT, SPEECH)
    length = min(2048, config.context) if args.max_model_len is None else args.max_model_len
    if not 1 < length <= config.context:
        raise ModelError(f"max_model_len is {length}; this model takes 2 to {config.context} positions")
    config = config.fix_rope_length(length)
    _check_groups(config, args)
    check_block_size(args.block_size)
    speculation = _Speculation.of(args.speculative_config)
    options = SchedulerOptions(
        args.max_num_seqs,
        args.max_num_batched_tokens,
        chunked_prefill=args.enable_chunked_prefill,
        prefix_caching=args.enable_prefix_caching,
        speculative_tokens=speculation.tokens,
    )
    if config.cross_positions:
        if speculation.tokens:
            raise ModelError(f"drafts are for texts; a {config.model_type} transcribes speech")
        options = options.of_windows(length)
        args = replace(args, max_num_batched_tokens=options.max_num_batched_tokens)
    if any(each.is_recurrent for each in speculation.configs):
        raise ModelError(NO_RECURRENT_DRAFTS)
    pools, slots = _pools([config, *speculation.configs], args, length), _slots(config, args, speculation)
    most = BucketLimits(args.max_num_seqs, args.max_num_batched_tokens, length, speculation.tokens)
    buckets = _buckets(args.buckets, most, args.backend)
    return EngineParts(args, folder, config, speculation, options, tuple(pools), slots, buckets)


def make_engine(args: EngineArgs) -> Engine:
    """The engine of a model folder; ModelError for what the folder, the arguments or this machine do not allow."""
    parts = engine_parts(args)
    config = parts.config
    tokenizer = Tokenizer(parts.folder, config.vocab_size)
    groups = [Scheduler(list(parts.pools), parts.options, parts.slots)]
    for _ in range(1, args.expert_parallel_size):
        own = engine_parts(args)  # pages and slots of its own
        groups.append(Scheduler(list(own.pools), own.options, own.slots))
    return Engine(
        parts.model(),
        groups[0] if len(groups) == 1 else GroupScheduler(groups),
        tokenizer,
        EngineLimits(
            config.eos_token_ids, config.vocab_size, parts.length, args.seed, make_input_check(config)
        ),
        time.monotonic,
        parts.speculation.proposer(config, args, parts.pools, parts.buckets, parts.length),
        Grammars.from_tokenizer(tokenizer, config.vocab_size, config.eos_token_ids, args.grammar_limits),
        isolates=args.backend != "neuron",  # torchrun starts other processes, which have computed the step
    )


def _check_groups(config: ModelConfig, args: EngineArgs) -> None:
    """ModelError for ranks or groups that cannot share a model, or for groups on a chip."""
    check_ranks(config, args.tensor_parallel_size)
    if args.expert_parallel_size < 1:
        raise ModelError(f"expert_parallel_size is {args.expert_parallel_size}; at least 1 is needed")
    check_expert_groups(config, args.expert_parallel_size)
    if args.expert_parallel_size > 1 and args.backend == "neuron":
        raise ModelError(
            "groups that divide experts are simulated only: expert_parallel_size is 1 on the chip"
        )


def _pools(configs: Sequence[ModelConfig], args: EngineArgs, length: int) -> list[PagePool]:
    """Pages of every kind that one of some models has: of windows no more than sequences can hold."""
    of_each = -(-length // args.block_size)
    most = min(4096, args.max_num_seqs * of_each) if args.num_pages is None else args.num_pages
    if most < 1:
        raise ModelError(f"num_pages is {most}; at least 1 is needed")
    pools = []
    for window in dict.fromkeys(window for config in configs for window in config.windows(length)):
        count = most
        if window is not None:
            limits = args.max_num_seqs, args.max_num_batched_tokens
            count = min(most, window_pages(window, args.block_size, *limits))
        pools.append(PagePool(count, args.block_size, window))
    return pools


def _slots(config: ModelConfig, args: EngineArgs, speculation: _Speculation) -> SlotPool | None:
    """Slots of states, where layers are recurrent, or of windows of speech."""
    if config.cross_positions:
        return WindowPool(args.max_num_seqs, args.block_size, args.block_size)
    if not config.is_recurrent:
        return None
    if args.mamba_block_size < 1 or args.mamba_block_size % args.block_size:
        raise ModelError(
            f"mamba_block_size is {args.mamba_block_size}; snapshots are whole pages of {args.block_size} positions "
            "apart"
        )
    of_each = 3 if speculation.tokens else 2  # one more for the state before drafts
    count = args.max_num_seqs * of_each if args.num_state_slots is None else args.num_state_slots
    if count < 1:
        raise ModelError(f"num_state_slots is {count}; at least 1 is needed")
    return SlotPool(count, args.block_size, args.mamba_block_size)


def _buckets(given: str | Buckets | None, limits: BucketLimits, backend: str) -> Buckets:
    """The bucket sizes of an engine: by default few where the backend compiles each shape.

    ModelError where the given ones do not cover its limits.
    """
    if given == AUTO:
        raise ModelError(
            "buckets are auto, but which requests will come is not known; nkw traffic --buckets auto says the sizes "
            "for a trace or for lengths"
        )
    default = limits.compiled if backend == "neuron" else limits.powers
    return default if given is None else read_buckets(str(given), limits, default)


def _paged_model(
    folder: Path,
    config: ModelConfig,
    args: EngineArgs,
    pools: Sequence[PagePool],
    buckets: Buckets,
    slots: SlotPool | None = None,
) -> PagedModel:
    model = LoadedModel.open(folder, args.dtype, config)
    mesh = _mesh(config, args)
    device = open_device(args.backend, args.target, mesh.ranks)
    weights = model.shards(mesh, device.local_ranks)
    return PagedModel(
        config,
        weights,
        device,
        pools,
        buckets,
        slots=slots,
        mesh=mesh,
        kv_cache_dtype=args.kv_cache_dtype,
    )


def _mesh(config: ModelConfig, args: EngineArgs) -> Mesh:
    """Groups of ranks that divide experts; a draft model without experts is computed by each group alone."""
    groups = args.expert_parallel_size
    return Mesh(args.tensor_parallel_size, groups, expert=groups if routed_experts(config) else 1)


@dataclass(frozen=True)
class _Speculation:
    """`speculative_config`, read: how many drafts a step verifies, and where they come from."""

    tokens: int = 0
    most: int = 4
    least: int = 2
    model: Path | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> _Speculation:
        """ModelError for a name or a value that is not known."""
        if given is None:
            return cls()
        names = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "model")
        unknown = [name for name in given if name not in names]
        method = given.get("method", "draft_model" if "model" in given else "ngram")
        tokens = check_integer("num_speculative_tokens", given.get("num_speculative_tokens"))
        if unknown:
            raise ModelError(f"speculative_config takes no {unknown[0]}; it takes {', '.join(names)}")
        if method not in ("ngram", "draft_model"):
            raise ModelError(f"method of speculative_config is {method!r}; known are ngram and draft_model")
        if not 1 <= tokens < MOST_ROWS:
            raise ModelError(f"num_speculative_tokens is {tokens}; it must be between 1 and {MOST_ROWS - 1}")
        if (method == "draft_model") != ("model" in given):
            raise ModelError("speculative_config has a model where its method is draft_model, and only there")
        most = check_integer("prompt_lookup_max", given.get("prompt_lookup_max", 4))
        least = check_integer("prompt_lookup_min", given.get("prompt_lookup_min", min(2, most)))
        return cls(tokens, most, least, model_path(given["model"]) if "model" in given else None)

    @property
    def configs(self) -> Sequence[ModelConfig]:
        """The draft model, where there is one."""
        return () if self.model is None else (load_config(self.model),)

    def proposer(
        self,
        config: ModelConfig,
        args: EngineArgs,
        pools: Sequence[PagePool],
        buckets: Buckets,
        length: int,
    ) -> Proposer | None:
        """What proposes drafts; ModelError for a draft model of another vocabulary."""
        if not self.tokens:
            return None
        if self.model is None:
            return PromptLookup(self.most, self.least)
        (own,) = self.configs
        if own.vocab_size != config.vocab_size:
            raise ModelError(
                f"{self.model}: the draft model has {own.vocab_size} tokens, the model {config.vocab_size}"
            )
        if own.context < buckets.context[-1] and own.context < config.context:
            raise ModelError(f"{self.model}: the draft model has a context of {own.context} positions")
        return DraftModel(_paged_model(self.model, own.fix_rope_length(length), args, pools, buckets))
