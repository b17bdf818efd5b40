"""The page at `/`: a conversation with the model, and what the server does, in one file without outside requests."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files


def page() -> tuple[str, str]:
    """The page, and the Content-Security-Policy under which it runs: its own style and script, and this server."""
    style, script = _asset("page.css"), _asset("page.js")
    text = _asset("page.html").replace("%style%", style).replace("%script%", script)
    rules = (
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return text, "; ".join(rules)


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
