"""Options of `nkw bench serve`, named as those of `vllm bench serve` of vLLM 0.33.0."""

from model.commands.options import option, options

SERVE_OPTIONS = options(
    "--backend=API --base-url",
    option("--host", help="of the server (default: %(default)s)"),
    option("--port", help="of the server (default: %(default)s)"),
    "--endpoint --model=NAME",
    option("--served-model-name", help="what the server calls it (default: --model)"),
    "--tokenizer",
    option(
        "--api-key-file",
        help="a file whose first line is a key of the server (default: OPENAI_API_KEY of the environment)",
    ),
    "--header",
    "--dataset-name --dataset-path --num-prompts --input-len --output-len",
    "--random-input-len --random-output-len --random-range-ratio --random-prefix-len",
    "--custom-output-len --disable-shuffle --no-oversample --skip-chat-template",
    option("--seed", help="of prompts and arrivals (default: %(default)s)"),
    "--request-rate --burstiness --max-concurrency --num-warmups --ready-check-timeout-sec",
    "--ignore-eos",
    option("--temperature", help="of all requests (default: the server's)"),
    "--top-p",
    "--top-k",
    "--min-p",
    option("--presence-penalty", default=None, help="of all requests (default: the server's)"),
    option("--frequency-penalty", default=None, help="of all requests (default: the server's)"),
    option("--repetition-penalty", default=None, help="of all requests (default: the server's)"),
    "--extra-body --goodput --percentile-metrics --metric-percentiles",
    "--save-result --save-detailed --append-result --result-dir --result-filename --label --metadata",
    "--disable-tqdm",
)
