"""Options of `nkw generate`."""

from model.commands.options import option, options
from model.commands.options.inputs import FIRST_PROMPT
from model.commands.options.readers import count, temperature
from nkw.options import Option

_UNMASKING = "masked-diffusion text"
UNMASKING = ("passes", "block_length", "remasking", "guidance", "reuse_blocks")
"""Options that only models that fill masks read."""

OPTIONS = options(
    "--model",
    option(
        "--prompt",
        default=[],
        help=f"text to continue (default: {FIRST_PROMPT!r}); repeated, the texts are computed in one batch",
    ),
    "--prompt-file --chat --system --stop --max-new-tokens",
    "--target --tp --lnc --hardware --dp --pp --micro-batches",
    option("--ep", help="groups of --dp that divide routed experts (default: %(default)s)"),
    "--sp --backend --no-check --dtype --quantization --row-scales --kv-cache-dtype --calibration",
    "--temperature --top-k --top-p --min-p --presence-penalty --frequency-penalty --repetition-penalty --seed",
    "-n|--n --logprobs --structured-outputs",
    Option(
        "--passes",
        dict(metavar="N", type=count, help="passes over the text (default: as many as new tokens)"),
        _UNMASKING,
    ),
    Option(
        "--block-length",
        dict(
            metavar="N",
            type=count,
            help="masks of a block; blocks are filled from left to right (default: all)",
        ),
        _UNMASKING,
    ),
    Option(
        "--remasking",
        dict(
            metavar="NAME",
            choices=("low_confidence", "random"),
            default="low_confidence",
            help="tokens that a pass masks again: low_confidence or random (default: %(default)s)",
        ),
        _UNMASKING,
    ),
    Option(
        "--guidance",
        dict(
            metavar="S",
            type=temperature,
            default=0.0,
            help="scale of guidance by the text without its prompt, which doubles the texts of a pass (default: none)",
        ),
        _UNMASKING,
    ),
    Option(
        "--reuse-blocks",
        dict(
            action="store_true",
            help="passes after the first of a block reuse keys and values before it, an approximation",
        ),
        _UNMASKING,
    ),
    "--quiet --exact --verify-replay --replay-report",
    "--trace --profile --explain --html --json",
)
