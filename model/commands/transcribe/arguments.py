"""Options of `nkw transcribe`."""

from pathlib import Path

from model.commands.options import option, options

OPTIONS = options(
    "file",
    option("--model", type=Path, default=None, required=True, help="Hugging Face folder of a Whisper"),
    "--language --timestamps",
    option(
        "--max-new-tokens",
        default=128,
        help="at most so many tokens for a window (default: %(default)s)",
    ),
    option("--target", default="trn1"),
    "--tp --lnc --hardware --backend --no-check --dtype --json",
)
