"""Arguments of an engine, and the making of an engine from them: folder, pages, buckets, drafts and device.

`LLM` and the server call `make_engine`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.config.quantization import RANK, quantise_config
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
from model.families.packed_pages import check_packed_pages
from model.layers.cache_formats import CACHE_FORMATS, check_cache_dtype
from model.layers.paged import NEWEST
from model.llm.loaded import LoadedModel, open_device
from model.loading.shipped import PRETRAINED, find_model_path
from model.loading.tokenizer import Tokenizer
from model.loading.weights import check_ranks
from model.mesh import Mesh, check_expert_groups, collect_expert_counts
from model.runners.paged import PagedModel
from model.runners.window import make_input_check
from model.state import INTERVAL, PagePool, SlotPool, WindowPool, check_block_size, count_window_pages


@dataclass(frozen=True)
class EngineArgs:
    """Arguments of an engine, with the names of vLLM where it has them.

    model                 a Hugging Face folder
    tensor_parallel_size  simulated cores of `target` that run the kernels; with `backend` neuron, NeuronCores, each
                          with a process of torchrun
    expert_parallel_size  simulated groups of such cores that divide the routed experts. Each group has its requests,
                          and the limits of a step and the cache below. (vLLM has `data_parallel_size` groups with
                          `enable_expert_parallel`; its ranks hold whole experts, here ranks hold a shard of each
                          expert of their group.)
    kv_cache_dtype        a name of `model.layers.cache.CACHE_FORMATS`, in which pages hold keys and values; auto is
                          `dtype`
    calibration           text file whose tokens determine the scales of an fp8 or int8 cache; None for the scales of
                          the checkpoint, or 1
    lnc                   physical cores of a rank of `target` in predictions, 1 or 2; None for those of
                          NEURON_LOGICAL_NC_CONFIG, else 1. Values are computed on one.
    quantization          scheme by which plain weights are quantised when they are loaded, fp8 or int8; or the
                          `quant_method` of config.json; None for the weights as they are
    row_scales            whether rows that are quantised, and whose columns ranks divide, have the scale of the columns
                          of each rank, "rank", or of all columns, "global"
    max_model_len         most positions of a sequence; None for the context of the model, at most 2048. Above the
                          limit of longrope's short factors, sequences of all lengths have the long factors.
    block_size            positions of a page
    num_pages             pages of the cache; None for the pages of `max_num_seqs` sequences of `max_model_len`
                          positions, at most 4096. Layers with a window have no more than these sequences can hold.
    num_state_slots       states of recurrent layers; None for two for each of these sequences
    mamba_block_size      positions between snapshots of these states, a multiple of `block_size`
    speculative_config    `num_speculative_tokens`, and the folder of a draft `model`, or `method` ngram with
                          `prompt_lookup_max` and `prompt_lookup_min`
    buckets               sizes to which steps are rounded up, such as "sequences=1,16 tokens=64,512 context=2048";
                          None for powers of two, and for `BucketLimits.compiled` on NeuronCores, where every shape is
                          compiled
    grammar_cpu_seconds   most CPU time to compile a grammar of structured outputs
    grammar_memory_mib    most memory in MiB to compile a grammar
    mask_seconds          most time for a mask; a longer computation ends the request with an error
    """

    model: str | Path = PRETRAINED
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    calibration: str | Path | None = None
    quantization: str | None = None
    row_scales: str = RANK
    target: str = "trn2"
    lnc: int | None = None
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
        """Check types and convert NumPy integers to int.

        Raises:
            ModelError: A value has a wrong type or is out of range.
        """
        if not isinstance(self.model, str | Path):
            raise ModelError(f"model is {display_value(self.model)}; it must be a text or a Path")
        for check, names in _TYPES:
            for name in names:
                object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.quantization is not None:
            check_text("quantization", self.quantization)
        check_range("seed", self.seed, 0, 2**63 - 1)
        check_cache_dtype(self.kv_cache_dtype)
        if not isinstance(self.calibration, str | Path | None):
            raise ModelError(f"calibration is {display_value(self.calibration)}; it must be a text or a Path")
        if not isinstance(self.speculative_config, Mapping | None):
            raise ModelError(
                f"speculative_config is {display_value(self.speculative_config)}; it must be a mapping of names"
            )
        if not isinstance(self.buckets, str | Buckets | None):
            raise ModelError(f"buckets is {display_value(self.buckets)}; it must be a text or Buckets")
        _ = self.grammar_limits  # which checks them

    @property
    def grammar_limits(self) -> GrammarLimits:
        """Limits of the grammars of structured outputs.

        Raises:
            ModelError: A limit is not above 0.
        """
        return GrammarLimits(self.grammar_cpu_seconds, self.grammar_memory_mib, self.mask_seconds)


_SIZES = ("tensor_parallel_size", "expert_parallel_size", "max_num_seqs", "max_num_batched_tokens")
_TYPES: Sequence[tuple[Callable[[str, Any], Any], Sequence[str]]] = (
    (
        check_integer,
        (*_SIZES, "block_size", "mamba_block_size", "seed", "grammar_cpu_seconds", "grammar_memory_mib"),
    ),
    (check_optional_integer, ("lnc", "max_model_len", "num_pages", "num_state_slots")),
    (check_flag, ("enable_prefix_caching", "enable_chunked_prefill")),
    (check_text, ("dtype", "kv_cache_dtype", "row_scales", "target", "backend")),
)


def read_engine_args(options: argparse.Namespace, **more: Any) -> EngineArgs:
    """Return engine arguments from the parsed options of a command.

    Args:
        options: Parsed options, those of `ENGINE` among them.
        more: Arguments that have no option.

    Raises:
        ModelError: A value is out of range, or --speculative-config is no JSON object.
    """
    return EngineArgs(
        model=options.model,
        tensor_parallel_size=options.tp,
        expert_parallel_size=options.ep,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        calibration=getattr(options, "calibration", None),
        quantization=options.quantization,
        row_scales=options.row_scales,
        target=options.target,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        num_pages=options.num_pages,
        num_state_slots=options.num_state_slots,
        mamba_block_size=options.mamba_block_size,
        speculative_config=_parse_object(options.speculative_config),
        buckets=options.buckets,
        **more,
    )


def _parse_object(text: str | None) -> dict[str, Any] | None:
    """Return the JSON object that is the value of --speculative-config; None for None.

    Raises:
        ModelError: The text is no JSON object.
    """
    if text is None:
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ModelError("--speculative-config is no JSON object, such as '{\"num_speculative_tokens\": 3}'")
    return config


@dataclass(frozen=True)
class EngineSetup:
    """Model, limits, caches and buckets that follow from the arguments of an engine.

    `length` is the most positions of a sequence. `pools` and `slots` are those of one group.
    """

    args: EngineArgs
    folder: Path
    config: ModelConfig
    length: int
    speculation: _Speculation
    options: SchedulerOptions
    pools: tuple[PagePool, ...]
    slots: SlotPool | None
    buckets: Buckets

    @property
    def mesh(self) -> Mesh:
        """Mesh of all ranks: groups of ranks that divide the routed experts.

        If the config has no routed experts, as that of a draft model, each group computes all of the model.
        """
        groups = self.args.expert_parallel_size
        expert_groups = groups if collect_expert_counts(self.config) else 1
        return Mesh(self.args.tensor_parallel_size, groups, expert=expert_groups)

    def load_model(self) -> PagedModel:
        """Return the model runner, with weights, pages and slots on the device.

        Raises:
            ModelError: The weights do not fit the config, or weights or pages do not fit into memory.
        """
        model = LoadedModel.open(self.folder, self.args.dtype, self.config, self.args.target)
        device = open_device(self.args.backend, self.args.target, self.mesh.ranks)
        return PagedModel(
            model.config,
            model.load_shards(self.mesh, device.local_ranks),
            device,
            self.pools,
            self.buckets,
            slots=self.slots,
            mesh=self.mesh,
            kv_cache_dtype=model.choose_cache_format(self.args.kv_cache_dtype),
            cache_scales=model.choose_cache_scales(self.args.kv_cache_dtype, self.args.calibration),
        )


def set_up_engine(args: EngineArgs) -> EngineSetup:
    """Return the setup of an engine, without loading weights.

    Raises:
        ModelError: The model folder or the arguments do not allow it.
    """
    if args.lnc is not None:
        from model.device import choose_lnc  # loads the simulator

        choose_lnc(args.target, args.lnc)
    folder = find_model_path(args.model)
    config = quantise_config(load_config(folder, TEXT, SPEECH), args.quantization, args.row_scales)
    length = min(2048, config.context) if args.max_model_len is None else args.max_model_len
    if not 1 < length <= config.context:
        raise ModelError(f"max_model_len is {length}; this model takes 2 to {config.context} positions")
    config = config.fix_rope_length(length)
    _check_groups(config, args)
    check_block_size(args.block_size)
    speculation = _Speculation.from_config(args.speculative_config)
    packs_pages = CACHE_FORMATS[args.kv_cache_dtype].packs_pages
    check_packed_pages(config, args.kv_cache_dtype)
    if packs_pages:
        _check_packing(args, speculation)
    options = SchedulerOptions(
        args.max_num_seqs,
        args.max_num_batched_tokens,
        chunked_prefill=args.enable_chunked_prefill,
        prefix_caching=args.enable_prefix_caching,
        speculative_tokens=speculation.tokens,
        whole_pages=packs_pages,
    )
    if config.cross_positions:
        if speculation.tokens:
            raise ModelError(
                f"drafts are for texts; a {config.model_type} transcribes speech: leave speculative_config out"
            )
        options = options.for_windows(length)
        args = replace(args, max_num_batched_tokens=options.max_num_batched_tokens)
    if any(draft.is_recurrent for draft in speculation.configs):
        raise ModelError(NO_RECURRENT_DRAFTS)
    pools = _create_pools([config, *speculation.configs], args, length)
    slots = _create_slots(config, args, speculation)
    most = BucketLimits(args.max_num_seqs, args.max_num_batched_tokens, length, speculation.tokens)
    buckets = _read_buckets(args.buckets, most, args.backend)
    return EngineSetup(args, folder, config, length, speculation, options, pools, slots, buckets)


def make_engine(args: EngineArgs) -> Engine:
    """Return a new engine for a model folder, with weights loaded.

    Raises:
        ModelError: The folder, the arguments or the memory of this machine do not allow it.
    """
    setup, *more_groups = (set_up_engine(args) for _ in range(max(1, args.expert_parallel_size)))
    config = setup.config
    tokenizer = Tokenizer(setup.folder, config.vocab_size)
    groups = [Scheduler(list(group.pools), group.options, group.slots) for group in (setup, *more_groups)]
    return Engine(
        setup.load_model(),
        groups[0] if len(groups) == 1 else GroupScheduler(groups),
        tokenizer,
        EngineLimits(
            config.eos_token_ids, config.vocab_size, setup.length, args.seed, make_input_check(config)
        ),
        time.monotonic,
        setup.speculation.create_proposer(setup),
        Grammars.from_tokenizer(tokenizer, config.vocab_size, config.eos_token_ids, args.grammar_limits),
        isolates=args.backend != "neuron",  # torchrun starts other processes, which have computed the step
    )


def _check_groups(config: ModelConfig, args: EngineArgs) -> None:
    """Check that ranks and groups can share the model.

    Raises:
        ModelError: They cannot, or there are several groups with the backend neuron.
    """
    check_ranks(config, args.tensor_parallel_size)
    if args.expert_parallel_size < 1:
        raise ModelError(f"expert_parallel_size is {args.expert_parallel_size}; at least 1 is needed")
    check_expert_groups(config, args.expert_parallel_size)
    if args.expert_parallel_size > 1 and args.backend == "neuron":
        raise ModelError(
            "groups that divide experts are simulated only: expert_parallel_size is 1 on the chip"
        )


def _create_pools(configs: Sequence[ModelConfig], args: EngineArgs, length: int) -> tuple[PagePool, ...]:
    """Return one empty page pool for each attention window of the models' layers, and one for layers without a window.

    A cache format that packs full pages has one more, for the pages that new tokens fill.
    A window has no more pages than `max_num_seqs` sequences can use.

    Args:
        configs: The model, and the draft model if there is one.
        args: The arguments of the engine.
        length: Most positions of a sequence.

    Raises:
        ModelError: num_pages is below 1.
    """
    pages_per_sequence = -(-length // args.block_size)
    most = min(4096, args.max_num_seqs * pages_per_sequence) if args.num_pages is None else args.num_pages
    if most < 1:
        raise ModelError(f"num_pages is {most}; at least 1 is needed")
    windows = dict.fromkeys(window for config in configs for window in config.list_windows(length))
    if CACHE_FORMATS[args.kv_cache_dtype].packs_pages:
        windows[NEWEST] = None
    limits = args.block_size, args.max_num_seqs, args.max_num_batched_tokens
    counts = (
        most if window is None else min(most, count_window_pages(window, *limits)) for window in windows
    )
    return tuple(PagePool(count, args.block_size, window) for count, window in zip(counts, windows))


def _check_packing(args: EngineArgs, speculation: _Speculation) -> None:
    """Check that steps of an engine suit pages of four bits.

    Raises:
        ModelError: There are draft tokens, or a step that decodes has no room for a page of a prompt.
    """
    if speculation.tokens:
        raise ModelError(
            f"kv_cache_dtype is '{args.kv_cache_dtype}', and pages of four bits take one new token of a sequence in a "
            "step: leave speculative_config out, or use int8 or fp8",
            "NKW-MODEL-OPTION",
        )
    least = args.max_num_seqs - 1 + args.block_size
    if args.max_num_batched_tokens < least:
        raise ModelError(
            f"kv_cache_dtype is '{args.kv_cache_dtype}', and prompts are computed in whole pages of {args.block_size} "
            f"positions: max_num_batched_tokens is {args.max_num_batched_tokens}; give {least} or more, or lower "
            "block_size or max_num_seqs",
            "NKW-MODEL-OPTION",
        )


def _create_slots(config: ModelConfig, args: EngineArgs, speculation: _Speculation) -> SlotPool | None:
    """Return the slots for recurrent states or for encoded windows of speech; None for a model without either.

    Raises:
        ModelError: mamba_block_size is no multiple of block_size, or num_state_slots is below 1.
    """
    if config.cross_positions:
        return WindowPool(args.max_num_seqs, args.block_size, args.block_size)
    if not config.is_recurrent:
        return None
    if args.mamba_block_size < 1 or args.mamba_block_size % args.block_size:
        raise ModelError(
            f"mamba_block_size is {args.mamba_block_size}; snapshots are whole pages of {args.block_size} positions "
            "apart: give a multiple of block_size"
        )
    states = 3 if speculation.tokens else 2  # of a sequence; the third is the state before drafts
    count = args.max_num_seqs * states if args.num_state_slots is None else args.num_state_slots
    if count < 1:
        raise ModelError(f"num_state_slots is {count}; at least 1 is needed")
    return SlotPool(count, args.block_size, args.mamba_block_size)


def _read_buckets(buckets: str | Buckets | None, limits: BucketLimits, backend: str) -> Buckets:
    """Return the buckets of an engine.

    If none are given, sizes are powers of two; on the backend neuron, which compiles every shape, they are few.

    Raises:
        ModelError: The buckets are "auto", have another form, or do not cover the limits.
    """
    if buckets == AUTO:
        raise ModelError(
            "buckets are auto, but which requests will come is not known; nkw traffic --buckets auto says the sizes "
            "for a trace or for lengths"
        )
    default = limits.compiled if backend == "neuron" else limits.powers
    return default if buckets is None else read_buckets(str(buckets), limits, default)


@dataclass(frozen=True)
class _Speculation:
    """Checked speculative_config of an engine.

    | field | meaning |
    |---|---|
    | `tokens` | draft tokens that a step verifies for each request; 0 for no drafts |
    | `most`, `least` | longest and shortest n-gram that prompt lookup matches |
    | `model` | folder of the draft model; None for prompt lookup |
    """

    tokens: int = 0
    most: int = 4
    least: int = 2
    model: Path | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> _Speculation:
        """Return the checked speculative_config; the one without drafts for None.

        Raises:
            ModelError: The config has an unknown name or a wrong value.
        """
        if config is None:
            return cls()
        names = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "model")
        unknown = [name for name in config if name not in names]
        method = config.get("method", "draft_model" if "model" in config else "ngram")
        tokens = check_integer("num_speculative_tokens", config.get("num_speculative_tokens"))
        if unknown:
            raise ModelError(f"speculative_config takes no {unknown[0]}; it takes {', '.join(names)}")
        if method not in ("ngram", "draft_model"):
            raise ModelError(f"method of speculative_config is {method!r}; known are ngram and draft_model")
        if not 1 <= tokens < MOST_ROWS:
            raise ModelError(f"num_speculative_tokens is {tokens}; it must be between 1 and {MOST_ROWS - 1}")
        if (method == "draft_model") != ("model" in config):
            raise ModelError(
                f"speculative_config has method {method!r} {'with' if 'model' in config else 'without'} a model; "
                "draft_model needs the folder of one, and ngram takes none"
            )
        most = check_integer("prompt_lookup_max", config.get("prompt_lookup_max", 4))
        least = check_integer("prompt_lookup_min", config.get("prompt_lookup_min", min(2, most)))
        return cls(tokens, most, least, find_model_path(config["model"]) if "model" in config else None)

    @property
    def configs(self) -> Sequence[ModelConfig]:
        """Config of the draft model; empty without one."""
        return () if self.model is None else (load_config(self.model),)

    def create_proposer(self, setup: EngineSetup) -> Proposer | None:
        """Return the proposer of draft tokens; None without drafts. A draft model is loaded.

        Args:
            setup: The setup of the engine, whose pages the draft model shares.

        Raises:
            ModelError: The draft model has a different vocabulary, or a shorter context than the engine.
        """
        if not self.tokens:
            return None
        if self.model is None:
            return PromptLookup(self.most, self.least)
        (draft,) = self.configs
        if draft.vocab_size != setup.config.vocab_size:
            raise ModelError(
                f"{self.model}: the draft model has {draft.vocab_size} tokens, the model {setup.config.vocab_size}; "
                "take a draft model with the same vocabulary"
            )
        if draft.context < min(setup.buckets.context[-1], setup.config.context):
            raise ModelError(
                f"{self.model}: the draft model has a context of {draft.context} positions, the engine "
                f"{min(setup.buckets.context[-1], setup.config.context)}; take another draft model or a smaller "
                "max_model_len"
            )
        config = draft.fix_rope_length(setup.length)
        return DraftModel(replace(setup, folder=self.model, config=config, slots=None).load_model())
