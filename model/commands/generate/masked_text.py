"""`nkw generate` for a masked-diffusion text model: fills masks after prompts, checks tokens, predicts times."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from model.commands.generate.arguments import OPTIONS
from model.commands.generate.job import get_rank
from model.commands.generate.mesh import MOST_RANKS
from model.commands.generate.prompts import encode_prompts, read_prompts
from model.commands.generate.report import SCHEMA
from model.commands.generate.texts import escape_text, format_prompt, print_texts
from model.commands.unread import refuse_options
from model.config.folder import list_model_files
from model.config.masked_text import MaskedTextConfig
from model.errors import ModelError
from model.families import compose
from model.layers.precision import choose_activation_dtype
from model.llm.loaded import open_device
from model.loading.checkpoint import Checkpoint, open_checkpoint
from model.loading.tokenizer import Tokenizer
from model.loading.weights import check_ranks, choose_weight_dtypes, shard_weights
from model.runners.masked_text import KernelMaskPredictor, ReferenceMaskPredictor
from model.runners.unmasking import Remasking, UnmaskedTexts, UnmaskingOptions, unmask
from nkw.files import STDOUT, Outputs, json_document
from nkw.report import Hanging, Part
from nkw.terminal import progress, show, show_lines
from nkw.version import DISTRIBUTION, version

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.plan.masked_text import TextTimes

_UNREAD = (
    *("stop", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n"),
    *(
        "logprobs",
        "structured_outputs",
        "dp",
        "pp",
        "ep",
        "sp",
        "micro_batches",
        "quantization",
        "kv_cache_dtype",
    ),
    *("calibration", "replay_report", "trace", "profile", "explain", "html"),
)
"""Options that such models do not read."""


@dataclass(frozen=True)
class _Job:
    """Model with prompts, and the options of the unmasking."""

    options: argparse.Namespace
    config: MaskedTextConfig
    checkpoint: Checkpoint
    prompt_ids: list[list[int]]
    unmasking: UnmaskingOptions

    @property
    def activations(self) -> np.dtype:
        """Dtype of activations."""
        return choose_activation_dtype(self.options.dtype, self.config, self.checkpoint)

    def fill_masks(self) -> tuple[np.ndarray, list[UnmaskedTexts]]:
        """Return the new tokens of each prompt, [prompts, new tokens], and the results of each length of prompts.

        Prompts of one length are computed together. A sequence has the seed --seed plus the index of its prompt.
        """
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(self.prompt_ids):
            by_length.setdefault(len(ids), []).append(index)
        passes = range(0 if self.options.quiet else len(by_length) * self.unmasking.passes)
        steps = progress(passes, "passes")
        next(steps, None)
        new_ids = np.zeros((len(self.prompt_ids), self.unmasking.new_tokens), np.int64)
        groups = []
        for length, indices in by_length.items():
            predictor, reference = self._create_predictors(len(indices), length)
            texts = unmask(
                predictor,
                [self.prompt_ids[index] for index in indices],
                self.config.mask_token_id,
                self.unmasking,
                [self.options.seed + index for index in indices],
                reference,
                lambda done: _advance(steps),
            )
            new_ids[indices] = texts.ids[:, length:]
            groups.append(texts)
        return new_ids, groups

    def _create_predictors(
        self, prompts: int, length: int
    ) -> tuple[KernelMaskPredictor | ReferenceMaskPredictor, ReferenceMaskPredictor | None]:
        """Return the predictor of --backend for some prompts of a length, and the reference to compare with or None."""
        options, unmasking = self.options, self.unmasking
        reference = ReferenceMaskPredictor(
            self.config, self.checkpoint, options.dtype, options.tp, unmasking.reuses
        )
        if options.backend == "numpy":
            return reference, None
        device = open_device(
            options.backend, options.target, options.tp, exact=options.exact, verify=options.verify_replay
        )
        kernels = KernelMaskPredictor(
            self.config,
            shard_weights(
                self.config,
                self.checkpoint,
                options.tp,
                after_layer=self.checkpoint.release,
                dtype=options.dtype,
            ),
            device,
            prompts * (2 if unmasking.guidance else 1),
            length + unmasking.new_tokens,
            unmasking.reuses,
            1 + unmasking.blocks,
        )
        return kernels, reference if options.check else None

    def predict_times(self) -> TextTimes:
        """Return the predicted times of one text after the longest prompt."""
        from model.device import choose_lnc
        from model.plan.masked_text import TextPredictor

        options, activations = self.options, self.activations
        dtypes = choose_weight_dtypes(compose(self.config).weights, self.checkpoint, activations)
        lnc = choose_lnc(options.target, options.lnc)
        predictor = TextPredictor(self.config, dtypes, activations, options.target, options.tp, lnc)
        return predictor.predict(max(map(len, self.prompt_ids)), 1, self.unmasking)


def generate_masked_text(options: argparse.Namespace, config: MaskedTextConfig) -> int:
    """Fill masks, check, predict and report as the options ask, and return the exit status 0.

    Raises:
        ModelError: Options or files are refused, before the first pass.
        InvalidArgument: A file of the results cannot be written.
    """
    reason = f"a {config.model_type} fills masks in passes over a text, and does not read it; leave it out"
    refuse_options(options, OPTIONS, _UNREAD, reason)
    if get_rank() is not None:
        raise ModelError(
            f"torchrun starts a process for each rank; a {config.model_type} takes --tp in one process"
        )
    if options.tp > MOST_RANKS:
        raise ModelError(f"--tp {options.tp}; one run takes up to {MOST_RANKS} ranks")
    check_ranks(config, options.tp)
    new_tokens = options.max_new_tokens
    unmasking = UnmaskingOptions(
        new_tokens,
        options.passes or new_tokens,
        options.block_length or new_tokens,
        Remasking[options.remasking],
        options.temperature or 0.0,
        options.guidance,
        options.reuse_blocks,
    )
    tokenizer = Tokenizer(options.model, config.decoder.vocab_size)
    prompts = read_prompts(options)
    prompt_ids = encode_prompts(prompts, options, tokenizer, config.decoder)
    for ids in prompt_ids:
        unmasking.check(ids, config.mask_token_id, config.context)
    job = _Job(options, config, open_checkpoint(options.model, config), prompt_ids, unmasking)
    prompt_files = [options.prompt_file] if options.prompt_file not in (None, STDOUT) else []
    outputs = Outputs(lambda: [*list_model_files(options.model), *job.checkpoint.files, *prompt_files])
    with json_document(options.json, outputs, "generate", "NKW-GENERATE-FILE") as contents:
        new_ids, groups = job.fill_masks()
        texts = [tokenizer.decode(_cut_at_end(ids, config)) for ids in new_ids.tolist()]
        if len(texts) == 1:
            print(escape_text(format_prompt(prompts[0], options) + texts[0]))
        else:
            print_texts(prompts, texts, options)
        times = None
        if options.backend == "simulate" and not (options.quiet and options.json is None):
            times = job.predict_times()
        if options.quiet:
            for problem in _describe_differences(groups):
                show_lines(f"nkw generate: {problem}", sys.stderr)
        else:
            show(["", *_summarise(job, groups), *([] if times is None else ["", *times.describe()])])
        contents.update(_build_document(job, prompts, new_ids.tolist(), texts, groups, times))
    return 0


def _advance(steps: Iterator[int]) -> None:
    """Show one finished pass more."""
    next(steps, None)


def _cut_at_end(ids: Sequence[int], config: MaskedTextConfig) -> Sequence[int]:
    """Return the tokens before the first end token."""
    ends = (index for index, token in enumerate(ids) if token in config.decoder.eos_token_ids)
    return ids[: next(ends, len(ids))]


def _summarise(job: _Job, groups: Sequence[UnmaskedTexts]) -> Iterator[Part]:
    """Yield sentences about compared tokens, passes, and tokens that a pass keeps."""
    compared, unmasking = sum(texts.compared for texts in groups), job.unmasking
    if compared:
        yield Hanging(
            f"{sum(texts.equal for texts in groups)} of {compared} tokens equal to the numpy reference"
        )
    else:
        yield Hanging(f"{len(job.prompt_ids) * unmasking.new_tokens} tokens computed; nothing was compared")
    kept = sorted({record.kept for record in groups[0].passes})
    tokens = f"{kept[0]} to {kept[-1]} tokens" if len(kept) > 1 else f"{kept[0]} token{'s' * (kept[0] > 1)}"
    passes = f"{unmasking.passes} pass{'es' * (unmasking.passes > 1)}"
    yield Hanging(f"{passes} of {unmasking.new_tokens} masks; a pass keeps {tokens}")
    if unmasking.reuses:
        reusing = sum(record.start > 0 for record in groups[0].passes)
        yield Hanging(
            f"{reusing} of them reuse keys and values before their block, which are those of the block's first pass: "
            "an approximation, in the reference too"
        )


def _describe_differences(groups: Sequence[UnmaskedTexts]) -> Iterator[str]:
    """Yield a sentence about tokens that differ from the reference, if any."""
    compared, equal = sum(texts.compared for texts in groups), sum(texts.equal for texts in groups)
    if equal < compared:
        yield f"{compared - equal} of {compared} tokens differ from the numpy reference"


def _build_document(
    job: _Job,
    prompts: Sequence[str],
    new_ids: Sequence[list[int]],
    texts: Sequence[str],
    groups: Sequence[UnmaskedTexts],
    times: TextTimes | None,
) -> dict[str, Any]:
    """Return the document of --json as dicts and lists."""
    options = job.options
    return {
        "schema": SCHEMA,
        "model": str(options.model),
        "backend": options.backend,
        "target": options.target,
        "tp": options.tp,
        "dtype": job.activations.name,
        "seed": options.seed,
        "unmasking": {**asdict(job.unmasking), "strategy": job.unmasking.strategy.name},
        "passes": [asdict(record) for record in groups[0].passes],
        "texts": [
            {"prompt": prompt, "prompt_ids": prompt_ids, "generated_ids": ids, "text": text}
            for prompt, prompt_ids, ids, text in zip(prompts, job.prompt_ids, new_ids, texts)
        ],
        "checks": {
            "reference": "numpy",
            "tokens_compared": sum(group.compared for group in groups),
            "tokens_equal": sum(group.equal for group in groups),
        },
        "prediction": None if times is None else times.build_document(),
        "versions": {DISTRIBUTION: version(), "python": platform.python_version(), "numpy": np.__version__},
    }
