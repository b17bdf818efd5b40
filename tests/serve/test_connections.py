"""Options of the sockets that a server accepts, for one engine and for a router."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model.serve.replicas.router import Router
from model.serve.replicas.routing import Routing
from model.serve.replicas.sockets import Sockets
from model.serve.serving import make_server
from tests.serve.conftest import options_of


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with an empty body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def read_options(app: Any, host: str) -> list[int]:
    """Return TCP_NODELAY of every connection that the server has accepted, after one request."""
    ports: list[int] = []
    server = make_server(app, options_of("--host", host), [], ports.append, lambda: None)
    serving = asyncio.create_task(server.serve())
    while not ports:
        await asyncio.sleep(0)
        assert not serving.done()
    reader, writer = await asyncio.open_connection(host, ports[0])
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await reader.readline()
    connections = server.server_state.connections
    sockets = [connection.transport.get_extra_info("socket") for connection in connections]
    options = [accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for accepted in sockets]
    writer.close()
    server.should_exit = True
    await serving
    return options


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("app", [answer, Router(Sockets([]), Routing(1, 1, 0))], ids=["server", "router"])
def test_accepted_connections_send_every_answer_at_once(app: Any, host: str) -> None:
    if host == "::1":
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"this machine has no address ::1: {error}")
    options = asyncio.run(read_options(app, host))
    assert len(options) == 1 and all(options)
