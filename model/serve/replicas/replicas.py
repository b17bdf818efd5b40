"""`nkw serve --replicas N`: a process for each engine, and one in front of them that has the port (`router.py`).

A replica listens at a Unix socket in a folder that only its user can enter: others reach it through the router alone.
A pipe joins the two. Over it a replica says that it answers, or why it cannot, and its end tells either side that the
other has gone. So no replica outlives its router, however that one ended, and signals that a terminal sends to the
whole group are the router's to obey.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from model.errors import ModelError
from model.serve.replicas.replica import Replica
from model.serve.replicas.routing import Routing
from model.serve.serving import places, server_for

if TYPE_CHECKING:
    from model.serve.http.server import Server

_LONGEST_PATH = 100  # bytes of a Unix socket's; systems take 104 to 108


async def serve_replicas(
    options: argparse.Namespace,
    keys: list[str],
    bound: Callable[[int], None],
    server_made: Callable[[Server], None] = lambda server: None,
) -> None:
    """Serve with several replicas until the server is told to end; `server_made` gets it before it starts.

    ModelError, before the port is opened, where a replica cannot start.
    """
    from model.serve.replicas.router import Router
    from model.serve.replicas.sockets import Sockets

    with TemporaryDirectory(prefix="nkw-", ignore_cleanup_errors=True) as folder:
        _check_path(folder)
        replicas = [Replica(options, number, Path(folder)) for number in range(options.replicas)]
        tasks = [asyncio.create_task(each.start()) for each in replicas]
        try:
            await asyncio.gather(*tasks)
            positions = replicas[0].positions if options.prefix_caching else 0
            routing = Routing(options.max_num_seqs, places(options), positions)
            router = Router(Sockets(replicas), routing)
            tasks += [
                asyncio.create_task(each.keep(partial(routing.forget, each.number))) for each in replicas
            ]
            server = server_for(router, options, keys, bound, router.drain)
            server_made(server)
            await server.serve()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(each.stop() for each in replicas))


def _check_path(folder: str) -> None:
    if len(os.fsencode(folder)) > _LONGEST_PATH - len("/1234.sock"):
        raise ModelError(
            f"the folder for temporary files, {folder}, is too long for sockets: set TMPDIR to another"
        )
