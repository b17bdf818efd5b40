"""HTTP server: uvicorn with limits on connections and slow clients, and with graceful shutdown."""

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
from model.serve.errors import ApiError, server_stopping_error
from model.serve.http.admission import encode_error
from nkw.process import INTERRUPTED, TERMINATED

_MAX_HEADER_BYTES = 2**15


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections and slow clients.

    `connections` may be open at once. The header of a request must arrive within `header_seconds`, and the client must
    read an answer that was written within `write_seconds`.
    """

    connections: int = 256
    header_seconds: float = 10.0
    write_seconds: float = 30.0


def make_protocol(limits: ConnectionLimits, is_stopping: Callable[[], bool]) -> type[H11Protocol]:
    """Return a uvicorn protocol class that limits connections, slow headers and slow readers.

    Args:
        limits: The limits.
        is_stopping: Returns whether the server is stopping; new connections then get status 503 and are closed.
    """

    class LimitedProtocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # so that a single unread byte starts the write timer
            if is_stopping():  # uvicorn closes only connections that were open when it stopped listening
                self._close(server_stopping_error())
            elif len(self.connections) > limits.connections:
                message = (
                    f"{limits.connections} connections are open, the limit of this server: try again later"
                )
                self._close(ApiError(503, message, "too_many_connections"))
            else:
                self._header_timer = self.loop.call_later(limits.header_seconds, self._refuse_late_header)

        def connection_lost(self, exc: Exception | None) -> None:
            _cancel(self._write_timer)
            _cancel(self._header_timer)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                _cancel(self._header_timer)
                self._header_timer = None
            elif self._header_timer is None:
                self._header_timer = self.loop.call_later(limits.header_seconds, self._refuse_late_header)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_timer = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            _cancel(self._write_timer)
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            self._close(
                ApiError(
                    400,
                    "the bytes are not an HTTP/1.1 request: check the scheme of the URL, which is http",
                    "invalid_request",
                )
            )

        def _refuse_late_header(self) -> None:
            self._close(
                ApiError(408, f"the header did not come within {limits.header_seconds:g} seconds", "timeout")
            )

        def _close(self, error: ApiError) -> None:
            """Write a refusal outside of any request to the connection, and close the connection."""
            body = encode_error(error)
            head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            self.transport.close()

    return LimitedProtocol


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def make_config(app: Any, **settings: Any) -> uvicorn.Config:
    """Return uvicorn's configuration of an application.

    Args:
        app: The ASGI application.
        **settings: Settings of one server, in addition to those that all servers here share.
    """
    return uvicorn.Config(
        app,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        **settings,
    )


class Server(uvicorn.Server):
    """HTTP server that drains at the first signal and ends the process at the second one.

    Args:
        app: The ASGI application.
        host: Address to listen at.
        port: Port, or 0 for a free one.
        limits: Limits of connections.
        on_listening: Called with the port once the server takes connections.
        on_shutdown: Called when the server takes no more connections.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        limits: ConnectionLimits,
        on_listening: Callable[[int], None],
        on_shutdown: Callable[[], None],
    ) -> None:
        protocol = make_protocol(limits, lambda: self.should_exit)
        super().__init__(make_config(app, host=host, port=port, http=protocol))
        self._on_listening = on_listening
        self._on_shutdown = on_shutdown

    async def startup(self, sockets: Any = None) -> None:
        """Start to take connections at the address of the server, and call `on_listening` with the port.

        Raises:
            ModelError: The server cannot listen at its address.
        """
        await super().startup(sockets or _listen(self.config.host, self.config.port))
        self._on_listening(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: Any = None) -> None:
        """Call `on_shutdown`, stop taking connections, and wait until the answers in progress are sent."""
        self._on_shutdown()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain at the first signal; at the second one end the process at once, even during a long step.

        Args:
            sig: Number of the signal; the exit status is 130 for SIGINT and else 143.
            frame: Not used.
        """
        if self.should_exit:
            os._exit(INTERRUPTED if sig == signal.SIGINT else TERMINATED)
        self.should_exit = True


def _listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for every address of a host.

    The sockets name their protocol, because asyncio sets TCP_NODELAY only on connections of such sockets. Without the
    option an answer on a kept connection waits for the client's delayed acknowledgement, 40 ms on Linux.

    Raises:
        ModelError: The server cannot listen at an address.
    """
    listening: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            descriptor = socket.create_server(address[:2], family=family).detach()
            listening.append(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, descriptor))
    except OSError as error:
        for opened in listening:
            opened.close()
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ModelError(
            f"{host} port {port} cannot be listened at: {reason}; give another --host or --port"
        ) from None
    return listening
