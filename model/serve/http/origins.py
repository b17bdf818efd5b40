"""Origins of requests: the sites whose pages may call the server from a browser, and the server's host names.

A browser sends requests of any web page to any server, including loopback addresses. The headers Sec-Fetch-Site and
Origin name the site of the page; scripts cannot change them. Requests without these headers come from other programs.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from pydantic_core import Url
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from model.serve.errors import ApiError

ANY_ORIGIN = "*"
_SAME_ORIGIN_SITES = (b"same-origin", b"none")
"""Values of Sec-Fetch-Site for pages of this server, and for addresses that a user typed."""
_HOST = re.compile(r"[a-z0-9._~:\[\]-]+", re.IGNORECASE | re.ASCII)
"""Characters of a host with its port; the URL parser would also accept tabs, percent encoding, user names and paths."""


@dataclass(frozen=True)
class OriginPolicy:
    """Rule for the host names and the origins of requests.

    Args:
        hosts: Names by which the server may be called, or None for every name. A server without keys takes loopback
        names only, because a page can let the name of its site resolve to 127.0.0.1 (DNS rebinding).
        origins: Further origins whose pages may send requests, as browsers write them, or ANY_ORIGIN for all.
    """

    hosts: Collection[str] | None = None
    origins: Collection[str] = ()

    def check(self, scope: Scope) -> None:
        """Refuse a request with a wrong host name, or from a page of another site that is not allowed.

        Requests of programs other than browsers, and of the server's own page, pass.

        Raises:
            ApiError: The request is refused, with status 403.
        """
        host = b"".join(_list_values(scope, b"host")).decode("latin-1")
        self._check_host(host)
        if ANY_ORIGIN in self.origins or _is_navigation_to_page(scope):
            return
        origins = [value.decode("latin-1") for value in _list_values(scope, b"origin")]
        if origins and all(origin in self.origins for origin in origins):
            return
        sites = _list_values(scope, b"sec-fetch-site")
        if sites:
            is_same = all(site in _SAME_ORIGIN_SITES for site in sites)
        else:
            is_same = all(_is_same_origin(origin, host) for origin in origins)
        if not is_same:
            raise ApiError(
                403,
                "the request comes from a page of another site; to take requests of its pages, start nkw serve with "
                """--allowed-origins '["ORIGIN"]', ORIGIN as in the request's header Origin""",
                "cross_site",
            )

    def _check_host(self, host: str) -> None:
        if self.hosts is None:
            return
        url = _parse("http", host)
        name = None if url is None or url.host is None else url.host.strip("[]")
        if name not in self.hosts:
            raise ApiError(
                403,
                "a server without keys answers to loopback names only: call it by 127.0.0.1 or localhost",
                "wrong_host",
            )


def add_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Return an application that lets pages of `origins` read its answers, and that answers preflight requests.

    The headers are those of vLLM with the same --allowed-origins. Without origins `app` is returned unchanged.
    """
    if not origins:
        return app
    return CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])


def _is_navigation_to_page(scope: Scope) -> bool:
    """Return whether a browser opens the server's page in a tab, as through a link on another site."""
    modes, destinations = _list_values(scope, b"sec-fetch-mode"), _list_values(scope, b"sec-fetch-dest")
    is_page = scope["method"] == "GET" and scope["path"] == "/"
    return is_page and modes == [b"navigate"] and destinations == [b"document"]


def _is_same_origin(origin: str, host: str) -> bool:
    """Return whether an origin has the same host and port as the header Host; the scheme gives the default port.

    False for an origin of another scheme than http and https, or one that cannot be parsed.
    """
    scheme, separator, authority = origin.partition("://")
    if not separator or scheme not in ("http", "https"):
        return False
    page, server = _parse(scheme, authority), _parse(scheme, host)
    return page is not None and server is not None and (page.host, page.port) == (server.host, server.port)


def _parse(scheme: str, authority: str) -> Url | None:
    """Return the URL of a scheme and an authority, which is a host with an optional port.

    Returns:
        The URL, or None if `authority` is anything else.
    """
    if not _HOST.fullmatch(authority):
        return None
    try:
        return Url(f"{scheme}://{authority}")
    except ValueError:
        return None


def _list_values(scope: Scope, name: bytes) -> list[bytes]:
    """Return the values of all headers of a request with the given name, in their order."""
    return [value for header, value in scope["headers"] if header == name]
