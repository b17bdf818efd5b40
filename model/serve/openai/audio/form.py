"""Forms with files, `multipart/form-data` (RFC 7578), as clients send recordings: read strictly, from a whole body.

Headers of the parts are read by the standard library. Anything else than parts between one boundary is refused; so are
more parts, and longer headers, than any client sends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from email.utils import collapse_rfc2231_value
from typing import Any

from model.serve.errors import ApiError

_FORM = "multipart/form-data"
_MOST_PARTS = 64
_MOST_HEADER_BYTES = 4096
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")  # RFC 2046, 5.1.1
_PLAIN = (None, "7bit", "8bit", "binary")


@dataclass(frozen=True)
class FormPart:
    """A field of a form: its name, its content, and whether it is a file."""

    name: str
    content: bytes
    is_file: bool

    @property
    def text(self) -> str:
        """The content of a field that is no file."""
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            raise ApiError(400, "a field is not UTF-8", "invalid_form", self.name) from None


def form_parts(content_type: str, body: bytes) -> list[FormPart]:
    """The fields of a form in their order; ApiError for a body that is none."""
    delimiter = b"\r\n--" + _boundary(content_type).encode("ascii")
    before, *pieces = (b"\r\n" + body).split(delimiter, _MOST_PARTS + 2)
    if len(pieces) > _MOST_PARTS + 1:
        raise ApiError(400, f"the form has more than {_MOST_PARTS} fields", "invalid_form")
    if before or not pieces or pieces[-1].strip(b" \t\r\n") != b"--":
        raise _malformed("it does not begin and end with its boundary")
    return [_part(each) for each in pieces[:-1]]


def _boundary(content_type: str) -> str:
    header = Message()
    try:
        header["content-type"] = content_type
        if header.get_content_type() != _FORM:
            raise ApiError(415, f"the body is to be {_FORM} with a file", "unsupported_media_type")
        found = header.get_boundary()
    except (ValueError, LookupError):
        found = None
    if found is None or not _BOUNDARY.fullmatch(found):
        raise _malformed("the content type names no boundary")
    return found


def _part(piece: bytes) -> FormPart:
    """What stands between two boundaries: the end of the line of the first, headers, an empty line, the content."""
    head, _, rest = piece.partition(b"\r\n")
    lines, found, content = (b"\r\n" + rest).partition(b"\r\n\r\n")
    if head.strip(b" \t") or not found:
        raise _malformed("a field has no header")
    if len(lines) > _MOST_HEADER_BYTES:
        raise _malformed(f"a field has a header of more than {_MOST_HEADER_BYTES:,} bytes")
    header = BytesHeaderParser().parsebytes(lines[2:] + b"\r\n\r\n")
    if header.get_content_disposition() != "form-data" or len(header.get_all("content-disposition", [])) != 1:
        raise _malformed("a field has no content-disposition form-data")
    name = _word(header.get_param("name", header="content-disposition"))
    if not name:
        raise _malformed("a field has no name")
    encoding = header.get("content-transfer-encoding")
    if encoding is not None and str(encoding).strip().lower() not in _PLAIN:
        raise _malformed("a field has a content-transfer-encoding")
    return FormPart(name, content, header.get_filename() is not None)


def _word(given: Any) -> str:
    return "" if given is None else collapse_rfc2231_value(given)


def _malformed(what: str) -> ApiError:
    return ApiError(400, f"the body is no {_FORM}: {what}", "invalid_form")
