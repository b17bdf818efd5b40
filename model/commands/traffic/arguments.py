"""Options of `nkw traffic`."""

from model.commands.options import option, options
from model.commands.options.device import PLANNED_LNC
from model.commands.options.readers import parse_counts

OPTIONS = options(
    "--hardware",
    option("--instance", help="instance type (default: trn2.48xlarge)"),
    option(
        "--tp",
        default=None,
        help="tensor-parallel ranks of a replica (default: of the cheapest mesh that meets --sla)",
    ),
    option("--lnc", help=PLANNED_LNC),
    "--stack",
    option(
        "--ep",
        default=None,
        help="groups of --tp ranks of a replica that divide the routed experts (default: as --tp, else 1)",
    ),
    option("--replicas", default=None, help="copies of the model (default: all that the instance holds)"),
    "--rate",
    option(
        "--load",
        help="instead, a share of the rate at which the service level breaks, or of images of the rate of full "
        "batches (default: 90%%, without a trace)",
    ),
    "--trace=REQUESTS --users --think --requests",
    "--prompt-lengths --output-lengths --shared-prefix --sla --compare --prefill-replicas",
    "--speculative-tokens --acceptance --acceptance-text --draft-model",
    option(
        "--max-num-seqs",
        default=None,
        help="sequences of a step (default: 256), or images of a batch (default: 4)",
    ),
    option("--max-num-batched-tokens", default=2048),
    option("--max-model-len", help="tokens of a request (default: those of the longest)"),
    "--block-size --buckets --no-chunked-prefill",
    option("--no-prefix-caching", help="compute every prompt whole"),
    option("--seed", help="of arrivals, lengths and steps (default: %(default)s)"),
    option(
        "--steps",
        metavar="N[,...]",
        type=parse_counts,
        default=(20,),
        help="steps of the noise schedule of an image; of several numbers, each request has one (default: 20)",
    ),
    "--guidance --size",
    option("--dp", help="groups of --tp ranks, which share the images of a batch (default: %(default)s)"),
    "config --as --dtype=PLANNED --quantization --kv-cache-dtype --price --prices --json",
    option(
        "--html", help="write it as a page, with distributions, the run over time, and latencies over rates"
    ),
)
