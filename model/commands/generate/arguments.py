"""Options of `nkw generate`."""

from model.commands.options import option, options
from model.commands.options.inputs import FIRST_PROMPT

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
    "--quiet --exact --verify-replay --replay-report",
    "--trace --profile --explain --html --json",
)
