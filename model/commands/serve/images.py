"""`nkw serve` for a folder of a diffusion model: checks the options, opens the model, and starts the server."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable

from model.commands.generate.mesh import MOST_RANKS
from model.commands.serve.arguments import OPTIONS
from model.commands.unread import refuse_options
from model.errors import ModelError
from model.serve.images.serving import open_served_pipeline, serve_images

_UNREAD = (
    "replicas cluster lnc hardware ep max_model_len max_num_seqs max_num_batched_tokens block_size num_pages "
    "num_state_slots mamba_block_size kv_cache_dtype row_scales speculative_config buckets calibration "
    "tool_call_parser workers grammar_cpu_seconds grammar_memory mask_timeout"
).split()
"""Options that a server of images does not read."""
_SWITCHES = {"prefix_caching": "--no-prefix-caching", "chunked_prefill": "--no-chunked-prefill"}
"""Switches that a server of images does not read, by their names in the options."""


def serve_diffusion(
    options: argparse.Namespace, keys: list[str], on_listening: Callable[[int], None]
) -> None:
    """Serve a diffusion model until a signal stops the server.

    Args:
        options: The parsed options of `nkw serve`.
        keys: API keys of clients.
        on_listening: Called with the port once the server takes connections.

    Raises:
        ModelError: Options or files are refused, before the port is opened.
    """
    check_image_options(options)
    asyncio.run(serve_images(options, keys, open_served_pipeline(options), on_listening))


def check_image_options(options: argparse.Namespace) -> None:
    """Refuse options that a server of images does not read.

    Raises:
        ModelError: An option is given, or there are too many ranks.
    """
    reason = "it is for models of texts, and this folder has a diffusion model: leave it out"
    refuse_options(options, OPTIONS, _UNREAD, reason)
    for name, flag in _SWITCHES.items():
        if not getattr(options, name):
            raise ModelError(f"{flag}: {reason}")
    if options.backend == "neuron":
        raise ModelError("--backend neuron: images are drawn by --backend simulate or numpy")
    if options.tp > MOST_RANKS:
        raise ModelError(
            f"--tp {options.tp}; a server of images takes {MOST_RANKS} ranks at most: give a smaller --tp"
        )
