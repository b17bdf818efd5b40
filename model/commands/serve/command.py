"""Entry of `nkw serve`: checks options and keys, and starts one engine, several replicas, or engines on a cluster."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from model.device import chip, choose_lnc, read_process_rank
from model.errors import ModelError
from model.llm.llm import make_engine
from model.loading.pipeline import is_pipeline
from model.serve.http.keys import others_may_read, read_keys
from model.serve.serving import engine_args, serve
from nkw.terminal import show_lines

_EXTRA = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}
_KEY_VARIABLE = "VLLM_API_KEY"
"""Variable from which vllm serve takes a key; nkw serve never reads its value."""


def serve_command(options: argparse.Namespace) -> int:
    """Serve a model over HTTP until a signal stops the server, and return the exit status 0.

    Raises:
        ModelError: Options or files are refused, before the port is opened.
    """
    check_extra()
    divide_experts(options)
    if os.environ.get(_KEY_VARIABLE) and options.api_key_file is None:
        raise ModelError(
            f"{_KEY_VARIABLE} is set, but keys are read from files only: write the key to a file and give "
            f"--api-key-file FILE, or unset {_KEY_VARIABLE}"
        )
    keys = read_keys(options.api_key_file)
    if not keys and not is_loopback(options.host):
        raise ModelError(
            f"--host {options.host} is no loopback address, and without keys anybody could use the server: give "
            "--api-key-file FILE"
        )
    if options.port > 65535:
        raise ModelError(
            f"--port is {options.port}; ports end at 65535: give a smaller one, or 0 for a free one"
        )
    from model.serve.log import LOG, log_to_stderr

    log_to_stderr(options.log_level)
    if others_may_read(options.api_key_file):
        LOG.warning("every user of this machine may read the keys: chmod o-r the file")
    if is_pipeline(Path(options.model)):
        from model.commands.serve.images import serve_diffusion

        serve_diffusion(options, keys, show_url(options.host))
        return 0
    if options.backend == "numpy":
        raise ModelError(
            "--backend numpy: it draws images, and this folder has no diffusion model: leave it out"
        )
    if options.backend == "neuron":
        _check_core(options)
    lnc = choose_lnc(options.target, options.lnc)
    LOG.info("the predicted clock is that of %s (LNC %d)", chip(options.target).label, lnc)
    if options.cluster is not None:
        from model.serve.cluster.start import serve_cluster

        serve_cluster(options, keys, show_url(options.host))
        return 0
    if options.replicas > 1:
        from model.serve.replicas.replicas import serve_replicas

        asyncio.run(serve_replicas(options, keys, show_url(options.host)))
        return 0
    engine = make_engine(engine_args(options))
    shapes = [] if engine.use.buckets is None else engine.use.buckets.shapes()
    LOG.info("steps round up to %s: %d shapes", engine.use.buckets, len(shapes))
    for shape in shapes:
        LOG.debug("shape %s", shape)
    asyncio.run(serve(options, keys, engine, show_url(options.host)))
    return 0


def divide_experts(options: argparse.Namespace) -> None:
    """Turn the replicas of the options into groups of one engine that divide experts.

    Without --enable-expert-parallel, or for a single replica, nothing changes. Otherwise `options.ep` becomes the
    number of replicas, and `options.replicas` becomes 1. The attribute `expert_parallel` is removed.
    """
    if vars(options).pop("expert_parallel", False) and options.replicas > 1:
        options.ep, options.replicas = options.replicas, 1


def check_extra(command: str = "nkw serve") -> None:
    """Check that the packages of the extra `serve` are installed.

    Args:
        command: Name of the command, for the message.

    Raises:
        ModelError: A package is not installed; the message names it.
    """
    missing = [name for module, name in _EXTRA.items() if find_spec(module) is None]
    if missing:
        raise ModelError(
            f"{command} needs {', '.join(missing)}; pip install 'nki-workbench[serve]'", "NKW-SERVE-EXTRA"
        )


def _check_core(options: argparse.Namespace) -> None:
    """Check that a server on NeuronCores has one process and one replica.

    Raises:
        ModelError: Several replicas are asked for without a cluster, or torchrun started several processes.
    """
    if options.replicas > 1 and options.cluster is None:
        raise ModelError(
            f"--replicas is {options.replicas}; on NeuronCores start a server for each core, with "
            "NEURON_RT_VISIBLE_CORES, or give --cluster"
        )
    processes = 1 if read_process_rank() is None else int(os.environ["WORLD_SIZE"])
    if processes > 1:
        raise ModelError(
            f"nkw serve has one process, and torchrun started {processes}: start nkw serve without torchrun"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only; False for host names other than localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def show_url(host: str) -> Callable[[int], None]:
    """Return a function that prints the URL of the server's API on stdout, for the port that it is called with.

    Args:
        host: Address of the server.
    """
    shown = f"[{host}]" if ":" in host else host

    def show(port: int) -> None:
        """Print the URL with the port `port` on stdout."""
        show_lines(f"http://{shown}:{port}/v1")
        sys.stdout.flush()

    return show
