"""Options of the steps and caches of an engine."""

from __future__ import annotations

from pathlib import Path

from model.commands.options.readers import count, size
from model.loading.shipped import find_config_path
from model.state import INTERVAL
from nkw.options import Rows

ROW_SCALES = ("rank", "global")
"""Names of row scales, the default first; a test compares them with `model.config.quantization`."""

ROWS: Rows = {
    "--max-model-len": dict(
        metavar="N", type=size, help="longest sequence (default: the context, at most 2048)"
    ),
    "--max-num-seqs": dict(
        metavar="N", type=count, default=16, help="sequences of a step (default: %(default)s)"
    ),
    "--max-num-batched-tokens": dict(
        metavar="N", type=size, default=512, help="tokens of a step (default: %(default)s)"
    ),
    "--block-size": dict(
        metavar="N", type=count, default=16, help="positions of a page (default: %(default)s)"
    ),
    "--num-pages": dict(
        metavar="N", type=count, help="pages of the cache (default: as many as the sequences fill)"
    ),
    "--num-state-slots": dict(
        metavar="N",
        type=count,
        help="states of recurrent layers (default: two for each sequence of a step, three with drafts)",
    ),
    "--mamba-block-size": dict(
        metavar="N",
        type=count,
        default=INTERVAL,
        help="positions between snapshots of these states, a multiple of --block-size (default: %(default)s)",
    ),
    "--kv-cache-dtype": dict(
        metavar="NAME",
        default="auto",
        help="of cached keys and values: auto (the dtype of activations), bfloat16, fp8 or fp8_e4m3, fp8_e5m2, int8, "
        "and int4 for full pages of an engine (default: %(default)s)",
    ),
    "--calibration": dict(
        metavar="TEXT",
        type=Path,
        help="text whose first 2,048 tokens determine the scales of an fp8 or int8 cache (default: the checkpoint's)",
    ),
    "--quantization": dict(
        metavar="NAME",
        help="quantise plain weights of decoder layers, or of a denoiser's blocks, to fp8, int8, fp8-dynamic or w8a8 "
        "(which quantise rows too), or int4, with a scale for each output; of a quantised model, its quant_method "
        "(default: as config.json says)",
    ),
    "--row-scales": dict(
        choices=ROW_SCALES,
        default=ROW_SCALES[0],
        help="of rows that fp8-dynamic or w8a8 quantises and whose columns ranks divide: rank, from the columns of a "
        "rank, or global, from all columns, so that scales do not depend on --tp (default: %(default)s)",
    ),
    "--speculative-config": dict(
        metavar="JSON",
        help="drafts, as LLM takes them: '{\"num_speculative_tokens\": 3}' looks them up in the prompt",
    ),
    "--speculative-tokens": dict(
        metavar="N",
        type=count,
        default=0,
        help="drafts that a step verifies for each request (default: none)",
    ),
    "--acceptance": dict(
        metavar="SHARE[,...]",
        help="of the drafts that are right where those before them are: 0.7, or 0.7,0.5 by their place",
    ),
    "--acceptance-text": dict(
        metavar="FILE",
        type=Path,
        help="instead, what prompt lookup finds in a text, by the tokenizer of CONFIG's folder",
    ),
    "--draft-model": dict(
        metavar="CONFIG",
        type=find_config_path,
        help="the model that proposes drafts, which takes time and pages (default: prompt lookup, which takes none)",
    ),
    "--buckets": dict(
        metavar="SIZES",
        help="sizes to which steps are rounded up, such as 'sequences=1,16 tokens=64,512 context=2048', or in nkw "
        "traffic auto, which fits them to the requests (default: powers of two)",
    ),
    "--no-chunked-prefill": dict(
        dest="chunked_prefill",
        action="store_false",
        help="compute a prompt in one step, in which nothing decodes",
    ),
    "--no-prefix-caching": dict(
        dest="prefix_caching", action="store_false", help="do not share pages of prompts that begin alike"
    ),
}
