"""Client of OpenAI's HTTP API for `nkw bench serve` and `nkw chat`, on asyncio's streams and h11 (extra `serve`).

A benchmark needs the time of every piece of an answer, with little work of its own in between.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from model.errors import ModelError
from model.serve.http.keys import read_keys
from nkw.errors import shown
from nkw.version import version

if TYPE_CHECKING:
    import h11

_CONNECT_SECONDS = 30
_READ_BYTES = 2**16
_MAX_BODY_BYTES = 2**26
_KEY_VARIABLE = "OPENAI_API_KEY"
_URL = re.compile(r"https?://[\w.:\[\]-]+(?:/[\w.~%/-]*)?", re.ASCII)


@dataclass
class RequestFailed(Exception):
    """Error of a request without a whole answer.

    `status` is the HTTP status if the server refused the request, or None.
    """

    message: str
    status: int | None = None

    def __str__(self) -> str:
        return self.message


def check_client(command: str) -> None:
    """Check that h11, which the client needs, is installed.

    Args:
        command: Name of the command, for the message.

    Raises:
        ModelError: h11 is not installed.
    """
    if find_spec("h11") is None:
        raise ModelError(f"{command} needs h11; pip install 'nki-workbench[serve]'", "NKW-SERVE-EXTRA")


def read_client_key(path: Path | None) -> str | None:
    """Return the API key that a client sends: the first key of a file, or OPENAI_API_KEY of the environment.

    Returns:
        The key, or None if `path` is None and the variable is not set.

    Raises:
        ModelError: The file cannot be read, has no key, or has a key that cannot be sent.
    """
    return read_keys(path)[0] if path is not None else os.environ.get(_KEY_VARIABLE)


@dataclass(frozen=True)
class Address:
    """Address of a server: the parts of its URL. `path` ends neither in a slash nor in the /v1 of OpenAI's API."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str, option: str) -> Address:
        """Return the address of an HTTP or HTTPS URL.

        Args:
            url: The URL.
            option: Name of the option that gave the URL, for the message.

        Raises:
            ModelError: The text is no such URL.
        """
        try:
            url_parts = urlsplit(url)
            port = url_parts.port or {"http": 80, "https": 443}.get(url_parts.scheme, 0)
            host = url_parts.hostname or ""
        except ValueError:  # an unfinished [ of IPv6, or a port beyond 65535
            host, port = "", 0
        if not _URL.fullmatch(url) or not host or not port:
            raise ModelError(f"{option} is {url!r:.200}; it must be like http://127.0.0.1:8000")
        return cls(url_parts.scheme, host, port, url_parts.path.rstrip("/").removesuffix("/v1"))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Host and port as in a URL, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass
class ApiClient:
    """Client of one server, which keeps connections open between requests.

    Attributes:
        address: Address of the server; paths of requests follow its path.
        key: API key, or None.
        headers: Further headers of every request.
    """

    address: Address
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    _idle: list[_Connection] = field(default_factory=list)

    async def fetch(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the parsed JSON of its whole answer.

        Args:
            method: HTTP method.
            path: Path after the path of the address.
            body: Body to send as JSON, or None for no body.

        Raises:
            RequestFailed: The status is not 200, the answer is no JSON, or the server does not answer.
        """
        async with self._request(method, path, body) as response:
            content = await response.read()
            if response.status != 200:
                raise RequestFailed(_describe_refusal(response.status, content), response.status)
        try:
            return json.loads(content)
        except ValueError:
            raise RequestFailed(f"the answer to {method} {path} is no JSON") from None

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Send a POST request and yield the parsed events of its streamed answer; [DONE] is skipped.

        Raises:
            RequestFailed: The status is not 200, an event has an error or is no JSON, or the answer breaks off.
        """
        async with self._request("POST", path, body) as response:
            if response.status != 200:
                raise RequestFailed(
                    _describe_refusal(response.status, await response.read()), response.status
                )
            async with aclosing(response.iterate_events()) as events:
                async for event in events:
                    if event == "[DONE]":
                        continue
                    try:
                        document = json.loads(event)
                    except ValueError:
                        raise RequestFailed("an event of the stream is no JSON") from None
                    if not isinstance(document, dict) or document.get("error"):
                        raise RequestFailed(_describe_refusal(response.status, event.encode()))
                    yield document

    async def find_model(self) -> dict[str, Any]:
        """Return the first entry of the server's /v1/models, an object with an `id`.

        Raises:
            RequestFailed: There is no such entry, or the server does not answer.
        """
        answer = await self.fetch("GET", "/v1/models")
        try:
            model: dict[str, Any] = answer["data"][0]
            model["id"]
        except (LookupError, TypeError):
            raise RequestFailed(f"{self.address}/v1/models lists no model") from None
        return model

    def close(self) -> None:
        """Close the idle connections; those of requests in progress are closed after their requests."""
        while self._idle:
            self._idle.pop().writer.close()

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: Any) -> AsyncIterator[_Response]:
        """Send a request and yield its response, whose body is not read yet.

        The connection is kept for a later request if the response was read to its end, and closed otherwise.

        Raises:
            RequestFailed: The server does not answer.
        """
        import h11

        content = b"" if body is None else json.dumps(body).encode()
        headers = {
            "host": self.address.authority,
            "user-agent": f"nkw/{version()}",
            "accept": "*/*",
            "content-length": str(len(content)),
            **({"content-type": "application/json"} if content else {}),
            **({"authorization": f"Bearer {self.key}"} if self.key else {}),
            **self.headers,
        }
        connection = await self._connect()
        try:
            with _convert_errors(self.address):
                request = h11.Request(
                    method=method, target=self.address.path + path, headers=[*headers.items()]
                )
            await connection.send(request, h11.Data(data=content), h11.EndOfMessage())
            event = await connection.next_event()
            while isinstance(event, h11.InformationalResponse):
                event = await connection.next_event()
            assert isinstance(event, h11.Response)
            yield _Response(event.status_code, connection)
        finally:
            if connection.is_reusable:
                connection.protocol.start_next_cycle()
                self._idle.append(connection)
            else:
                connection.writer.close()

    async def _connect(self) -> _Connection:
        """Return an idle connection that is still open, or a new one.

        Raises:
            RequestFailed: The server does not take a connection within 30 s.
        """
        import h11

        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof():
                return connection
            connection.writer.close()
        with _convert_errors(self.address):
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(
                    self.address.host, self.address.port, ssl=self.address.scheme == "https" or None
                ),
                _CONNECT_SECONDS,
            )
        return _Connection(self.address, reader, writer, h11.Connection(h11.CLIENT))


@dataclass
class _Connection:
    """Connection to a server, with the state of its HTTP in `protocol`."""

    address: Address
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    protocol: h11.Connection

    @property
    def is_reusable(self) -> bool:
        """Whether request and response have ended, and the server keeps the connection open."""
        import h11

        return self.protocol.our_state is h11.DONE and self.protocol.their_state is h11.DONE

    async def send(self, *events: h11.Event) -> None:
        """Write the h11 events of a request to the connection.

        Raises:
            RequestFailed: The connection is broken.
        """
        with _convert_errors(self.address):
            self.writer.write(b"".join(self.protocol.send(event) or b"" for event in events))
            await self.writer.drain()

    async def next_event(self) -> Any:
        """Wait for the next h11 event of a response and return it.

        Raises:
            RequestFailed: The connection ends before the event.
        """
        import h11

        with _convert_errors(self.address):
            while (event := self.protocol.next_event()) is h11.NEED_DATA:
                self.protocol.receive_data(await self.reader.read(_READ_BYTES))
        if isinstance(event, h11.ConnectionClosed):
            raise RequestFailed(f"{self.address} has closed the connection")
        return event


@dataclass
class _Response:
    """Response of a server, whose body is read piece by piece."""

    status: int
    _connection: _Connection

    async def read_piece(self) -> bytes | None:
        """Return the next bytes of the body as they arrive, or None at its end.

        Raises:
            RequestFailed: The connection ends before the body does.
        """
        import h11

        event = await self._connection.next_event()
        return None if isinstance(event, h11.EndOfMessage) else bytes(event.data)

    async def read(self) -> bytes:
        """Return the whole remaining body.

        Raises:
            RequestFailed: The body has more than 64 MiB, or the connection ends before it.
        """
        body = bytearray()
        while (piece := await self.read_piece()) is not None:
            body += piece
            if len(body) > _MAX_BODY_BYTES:
                raise RequestFailed(f"the answer has more than {_MAX_BODY_BYTES:,} bytes")
        return bytes(body)

    async def iterate_events(self) -> AsyncGenerator[str, None]:
        """Yield the data of each server-sent event of the body as text; comments are skipped.

        Raises:
            RequestFailed: The connection ends before the body does.
        """
        buffer, data = b"", list[bytes]()
        while (piece := await self.read_piece()) is not None:
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                line = line.removesuffix(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                elif not line and data:
                    yield b"\n".join(data).decode(errors="replace")
                    data.clear()


@contextmanager
def _convert_errors(address: Address) -> Iterator[None]:
    """Convert errors of the network and of HTTP in the block to RequestFailed, with the address in the message."""
    import h11

    try:
        yield
    except asyncio.TimeoutError:
        raise RequestFailed(f"{address} does not answer within {_CONNECT_SECONDS} seconds") from None
    except (OSError, h11.ProtocolError) as error:
        raise RequestFailed(f"{address} does not answer: {shown(str(error))}") from None


def _describe_refusal(status: int, body: bytes) -> str:
    """Return the message of an error in OpenAI's format, or else the text of the body.

    The status precedes the message unless it is 200. Control characters are escaped.
    """
    text = body.decode(errors="replace").strip()
    try:
        error = json.loads(text)
        error = error.get("error", error)
        text = error if isinstance(error, str) else error["message"]
    except (ValueError, LookupError, AttributeError, TypeError):
        pass
    return shown(str(text)) if status == 200 else f"{status}: {shown(str(text))}"
