"""`nkw plan` for a masked-diffusion text model: its weights, and the passes of a text beside decoding it."""

from __future__ import annotations

import argparse
from math import prod

import ml_dtypes
import numpy as np

from model.commands.plan.arguments import OPTIONS
from model.commands.unread import refuse_options
from model.config.folder import list_model_files
from model.config.masked_text import MaskedTextConfig
from model.config.published import describe_config
from model.device import choose_lnc, find_instance
from model.errors import ModelError
from model.families import compose
from model.layers.launch import WeightDtypes
from model.loading.weights import check_ranks
from model.plan.masked_text import TextPredictor
from model.plan.plan import DEFAULT_INSTANCE
from model.runners.unmasking import UnmaskingOptions
from nkw.files import Outputs, json_document
from nkw.terminal import show, show_lines, working

UNPLANNED = (
    *(
        "accelerator",
        "pp",
        "ep",
        "sp",
        "kv_cache_dtype",
        "row_scales",
        "price",
        "prices",
        "sla",
        "stack",
        "recommend",
        "rate",
    ),
    *("bench_script", "quantization", "schemes"),
)
"""Options that plans of passes do not read."""
_PROMPT, _NEW_TOKENS = 128, 128
"""Default sizes of a text, where the context has room for them."""


def plan_masked_text(options: argparse.Namespace, config: MaskedTextConfig) -> int:
    """Print the plan of texts: a quarter as many passes as new tokens, with and without reuse; return status 0.

    With reuse, a text has four blocks, or as few as its tokens divide into.

    Raises:
        ModelError: An option is given that such a plan does not read, the config describes what no layer computes, or
            texts do not fit into the context.
    """
    refuse_options(
        options,
        OPTIONS,
        UNPLANNED,
        f"passes of a {config.model_type} are planned on tensor ranks of one instance",
    )
    if config.refusals:
        raise ModelError(config.refusals[0])
    instances = [name.strip() for names in options.instance or () for name in names.split(",")]
    if len(instances) > 1:
        raise ModelError(
            f"passes of a {config.model_type} are planned on one instance, not on {len(instances)}"
        )
    target, ranks = find_instance(next(iter(instances), DEFAULT_INSTANCE)).target, options.tp or 1
    check_ranks(config, ranks)
    prompt = options.prompt or min(_PROMPT, config.context // 2)
    new_tokens = options.generate or min(_NEW_TOKENS, config.context - prompt)
    blocks = next(count for count in (4, 3, 2, 1) if new_tokens % count == 0)
    passes = max(1, new_tokens // 4 // blocks) * blocks
    plain = UnmaskingOptions(new_tokens, passes, new_tokens)
    reusing = UnmaskingOptions(new_tokens, passes, new_tokens // blocks, reuses=True)
    plain.check([(config.mask_token_id + 1) % 2] * prompt, config.mask_token_id, config.context)
    activations = np.dtype(np.float32 if options.dtype == "float32" else ml_dtypes.bfloat16)
    parameters = sum(map(prod, compose(config).list_tensor_shapes().values()))
    name, lnc = describe_config(options.config), choose_lnc(target, options.lnc, largest=True)
    predictor = TextPredictor(config, WeightDtypes(activations), activations, target, ranks, lnc)
    sequences, outputs = options.batch or 1, Outputs(lambda: list_model_files(options.config))
    with json_document(options.json, outputs, "plan", "NKW-PLAN-FILE", "plan") as contents:
        with working(lambda: f"plan of {name}: dry runs of its kernels"):
            times = [predictor.predict(prompt, sequences, unmasking) for unmasking in (plain, reusing)]
        contents.update(
            model=name,
            parameters=parameters,
            weight_bytes=parameters * activations.itemsize,
            prompt=prompt,
            new_tokens=new_tokens,
            batch=sequences,
            texts=[
                {"block_length": unmasking.block_length, "reuses": unmasking.reuses, **time.build_document()}
                for unmasking, time in zip((plain, reusing), times)
            ],
        )
        weight_bytes = parameters * activations.itemsize
        show_lines(
            f"{name}: {parameters:,} parameters, {weight_bytes:,} bytes; it fills masks, and decodes no tokens"
        )
        batch = "" if sequences == 1 else f"{sequences} texts of "
        for unmasking, time in zip((plain, reusing), times):
            blocks = unmasking.blocks
            how = (
                f"{blocks} blocks, whose later passes reuse keys and values"
                if unmasking.reuses
                else "one block"
            )
            show_lines(f"\n{batch}{new_tokens} tokens after {prompt} in {passes} passes, {how}:")
            show(time.describe())
    return 0
