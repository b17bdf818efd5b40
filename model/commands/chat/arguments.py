"""Options of `nkw chat`; those of `vllm chat` of vLLM 0.33.0 have its names."""

from model.commands.options import option, options

OPTIONS = options(
    "--url=API --model-name",
    option(
        "--api-key-file",
        help="a file whose first line is a key of the server (default: OPENAI_API_KEY of the environment)",
    ),
    "--system-prompt -q|--quick --stats --max-tokens",
    option("--temperature", help="of the sampler (default: the server's, or that of generation_config.json)"),
    "--top-p",
    option("--seed", default=None, help="of the sampler (default: another one for each answer)"),
    "--model=LOCAL",
    option("--target", help="with --model: trn1, inf2, trn2 or trn3 (default: %(default)s)"),
    "--tp --dtype --max-model-len --kv-cache-dtype --calibration",
)
