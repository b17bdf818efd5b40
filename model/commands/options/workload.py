"""Options of a predicted workload: requests, their arrivals and lengths, and the service level."""

from __future__ import annotations

from pathlib import Path

from model.commands.options.readers import count, load, pause, rate
from nkw.options import Rows

ROWS: Rows = {
    "--batch": dict(
        metavar="N", type=count, default=1, help="sequences decoded together (default: %(default)s)"
    ),
    "--generate": dict(
        metavar="N",
        type=count,
        help="tokens generated (default: an eighth of 1,024; of a window of speech 128)",
    ),
    "--rate": dict(
        metavar="R", type=rate, help="requests a second, at random; of a trace, its times stretched"
    ),
    "--load": dict(
        metavar="SHARE",
        type=load,
        help="instead, a share of the rate at which the service level breaks (default: 90%%, without a trace)",
    ),
    "--trace=REQUESTS": dict(
        metavar="FILE",
        type=Path,
        help="requests of a CSV file with TIMESTAMP, ContextTokens, GeneratedTokens, or of a ShareGPT JSON file",
    ),
    "--users": dict(
        metavar="N",
        type=count,
        help="instead, users that each wait for the answer before they go on",
    ),
    "--think": dict(
        metavar="SECONDS", type=pause, default=0.0, help="for so long, with --users (default: 0)"
    ),
    "--requests": dict(metavar="N", type=count, help="requests (default: 1,000, or the whole trace)"),
    "--prompt-lengths": dict(
        metavar="LENGTHS",
        help="tokens: 512, 128..1024, exp:512 or lognormal:512,0.8 (default: 512; of a Whisper 4, beside its window)",
    ),
    "--output-lengths": dict(metavar="LENGTHS", default="128", help="the same (default: %(default)s)"),
    "--shared-prefix": dict(
        metavar="N[:GROUPS]",
        help="tokens before every prompt, the same for all requests of a group",
    ),
    "--sla": dict(
        metavar="BOUNDS",
        default="ttft=500ms,itl=50ms",
        help="the service level of a request: ttft, itl (its mean) and e2e (default: %(default)s)",
    ),
    "--recommend": dict(
        action="store_true",
        help="compare instances for the load of --rate: how many of each keep --sla, and what they cost",
    ),
    "--schemes": dict(
        action="store_true",
        help="compare weights of 8 and 4 bits and caches of 8 bits: bytes, the step of --batch, accuracy",
    ),
    "--compare": dict(
        action="store_true",
        help="serve the same requests in other ways: static batches, whole prompts, no prefix cache, half the "
        "buckets, no drafts, prompts on replicas of their own, other tp",
    ),
    "--prefill-replicas": dict(
        metavar="N",
        type=count,
        default=0,
        help="replicas that compute prompts and hand their pages over to the others, which decode (default: none)",
    ),
}
