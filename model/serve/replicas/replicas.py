"""`nkw serve --replicas N`: a process for each engine, and a router that has the port (`router.py`).

A replica listens at a Unix socket in a folder that only its user can enter, so clients reach it through the router
alone. A pipe connects the router and a replica. Over the pipe a replica reports that it answers, or why it cannot. The
end of the pipe tells either process that the other has ended, so no replica outlives its router. Replicas ignore the
signals that a terminal sends to the whole process group; the router handles them.
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
from model.serve.serving import count_max_continuations, make_server

if TYPE_CHECKING:
    from model.serve.http.server import Server

_MAX_PATH_BYTES = 100  # of a Unix socket; systems take 104 to 108


async def serve_replicas(
    options: argparse.Namespace,
    keys: list[str],
    on_listening: Callable[[int], None],
    on_created: Callable[[Server], None] = lambda server: None,
) -> None:
    """Serve with one process for each engine until a signal stops the server; then end all processes.

    Args:
        options: The parsed options of `nkw serve`.
        keys: API keys of clients; with none, every client is admitted.
        on_listening: Called with the port once the server takes connections.
        on_created: Called with the server before it starts.

    Raises:
        ModelError: A replica cannot start, the folder for temporary files has too long a path, or the port is taken.
            The
        port is not opened then.
    """
    from model.serve.replicas.router import Router
    from model.serve.replicas.sockets import Sockets

    with TemporaryDirectory(prefix="nkw-", ignore_cleanup_errors=True) as folder:
        _check_path(folder)
        replicas = [Replica(options, number, Path(folder)) for number in range(options.replicas)]
        tasks = [asyncio.create_task(replica.start()) for replica in replicas]
        try:
            await asyncio.gather(*tasks)
            positions = replicas[0].positions if options.prefix_caching else 0
            routing = Routing(options.max_num_seqs, count_max_continuations(options), positions)
            router = Router(Sockets(replicas), routing)
            tasks += [
                asyncio.create_task(replica.supervise(partial(routing.forget, replica.number)))
                for replica in replicas
            ]
            server = make_server(router, options, keys, on_listening, router.drain)
            on_created(server)
            await server.serve()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(replica.stop() for replica in replicas))


def _check_path(folder: str) -> None:
    if len(os.fsencode(folder)) > _MAX_PATH_BYTES - len("/1234.sock"):
        raise ModelError(
            f"the folder for temporary files, {folder}, has a path too long for sockets: set TMPDIR to another folder"
        )
