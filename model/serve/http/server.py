"""The HTTP server: uvicorn, with limits on connections, slow clients, and the way it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from model.errors import ModelError
from model.serve.errors import ApiError, stopping_now
from model.serve.http.gate import error_bytes
from nkw.process import INTERRUPTED, TERMINATED

_MOST_HEADER_BYTES = 2**15


@dataclass(frozen=True)
class ConnectionLimits:
    """Connections at once, and seconds in which the header of a request has to come and a written piece to be read."""

    connections: int = 256
    header_seconds: float = 10.0
    write_seconds: float = 30.0


def protocol_of(limits: ConnectionLimits, stopping: Callable[[], bool]) -> type[H11Protocol]:
    """A protocol of uvicorn's that holds connections to limits, and takes none once the server is stopping."""

    class Limited(H11Protocol):
        _reading: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # so that any unread byte counts as a slow reader's
            if stopping():  # uvicorn tells only the connections that were there when it stopped to listen
                self._close(stopping_now())
            elif len(self.connections) > limits.connections:
                self._close(ApiError(503, "too many connections: try again later", "too_many_connections"))
            else:
                self._reading = self.loop.call_later(limits.header_seconds, self._late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_writing()
            self._stop_reading()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_reading()
            elif self._reading is None:
                self._reading = self.loop.call_later(limits.header_seconds, self._late)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._writing = self._writing or self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            self._stop_writing()
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            self._close(ApiError(400, "this is no HTTP request", "invalid_request"))

        def _stop_reading(self) -> None:
            if self._reading is not None:
                self._reading.cancel()
                self._reading = None

        def _stop_writing(self) -> None:
            if self._writing is not None:
                self._writing.cancel()
                self._writing = None

        def _late(self) -> None:
            self._reading = None
            self._close(
                ApiError(408, f"the header did not come within {limits.header_seconds:g} seconds", "timeout")
            )

        def _close(self, error: ApiError) -> None:
            """Answer outside of any request, and end the connection."""
            body = error_bytes(error)
            head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            self.transport.close()

    return Limited


def configured(app: Any, **own: Any) -> uvicorn.Config:
    """What all servers of this project tell uvicorn, and what one of them does beside."""
    return uvicorn.Config(
        app,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        **own,
    )


class Server(uvicorn.Server):
    """A server that drains at the first signal and ends the process at the second one.

    `bound` is called with the port once connections are taken, `drains` when they no longer are.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        limits: ConnectionLimits,
        bound: Callable[[int], None],
        drains: Callable[[], None],
    ) -> None:
        protocol = protocol_of(limits, lambda: self.should_exit)
        super().__init__(configured(app, host=host, port=port, http=protocol))
        self._bound = bound
        self._drains = drains

    async def startup(self, sockets: Any = None) -> None:
        """Take connections; ModelError where the address cannot be listened at."""
        await super().startup(sockets or _listen(self.config.host, self.config.port))
        self._bound(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: Any = None) -> None:
        """Take no more connections, and wait for the answers on their way."""
        self._drains()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first one drains; the second one ends the process, whose threads may be in a long step."""
        if self.should_exit:
            os._exit(INTERRUPTED if sig == signal.SIGINT else TERMINATED)
        self.should_exit = True


def _listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for every address of a host.

    The sockets name their protocol, because asyncio sets TCP_NODELAY only on connections of such sockets. Without the
    option an answer on a kept connection waits for the client's delayed acknowledgement, 40 ms on Linux.

    Raises: ModelError if an address cannot be listened at.
    """
    listening: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            created = socket.create_server(address[:2], family=family)
            descriptor = created.detach()
            listening.append(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, descriptor))
    except OSError as error:
        for opened in listening:
            opened.close()
        said = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ModelError(f"{host} port {port} cannot be listened at: {said}") from None
    return listening
