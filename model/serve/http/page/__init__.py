"""HTML page of the server at `/`: a conversation with the model and the metrics, without outside requests."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files


def load_page() -> tuple[str, str]:
    """Return the HTML of the page and its Content-Security-Policy header.

    The policy admits the page's own script and style by their hashes, and requests to this server only.
    """
    style, script = _read_asset("page.css"), _read_asset("page.js")
    text = _read_asset("page.html").replace("%style%", style).replace("%script%", script)
    rules = (
        "default-src 'none'",
        f"script-src '{_csp_hash(script)}'",
        f"style-src '{_csp_hash(style)}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return text, "; ".join(rules)


def _read_asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
