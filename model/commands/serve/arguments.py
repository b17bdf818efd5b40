"""Options of `nkw serve`; imports nothing of the extra `serve`."""

from model.commands.options import option, options
from model.commands.options.inputs import StoreModel

ENGINE = options(
    "--ep --max-model-len --max-num-seqs --max-num-batched-tokens",
    "--block-size --num-pages --num-state-slots --mamba-block-size --kv-cache-dtype --quantization --row-scales",
    "--speculative-config --buckets",
)
"""Options of an engine besides chip, ranks and dtype."""
OPTIONS = options(
    option("--model", action=StoreModel),
    "model=SERVED --served-model-name --host --port --api-key-file --allowed-origins --replicas --cluster",
    option(
        "--backend",
        choices=("simulate", "neuron", "numpy"),
        help="simulate or neuron; for images simulate or numpy (default: %(default)s)",
    ),
    "--target --tp --lnc --hardware --dtype",
    *ENGINE,
    "--calibration --no-prefix-caching --no-chunked-prefill --tool-call-parser",
    option("--seed", help="of requests that have none (default: %(default)s)"),
    "--max-queue --max-body --max-connections --header-timeout --body-timeout --write-timeout",
    "--workers --grammar-cpu-seconds --grammar-memory --mask-timeout --log-level",
)
