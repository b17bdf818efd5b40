"""Parser of forms with files, `multipart/form-data` (RFC 7578), in which clients send recordings.

The standard library parses the headers of the fields. A body with anything besides the fields is refused, and so are
more fields and longer headers than any client sends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from email.utils import collapse_rfc2231_value

from model.serve.errors import ApiError

_FORM = "multipart/form-data"
_MAX_FIELDS, _MAX_HEADER_BYTES = 64, 4096
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")  # RFC 2046, 5.1.1
_IDENTITY_ENCODINGS = ("7bit", "8bit", "binary")


@dataclass(frozen=True)
class FormField:
    """Field of a form: its name, its content, and whether it is a file."""

    name: str
    content: bytes
    is_file: bool

    @property
    def text(self) -> str:
        """Content of the field as text.

        Raises:
            ApiError: The content is not UTF-8.
        """
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            raise ApiError(
                400, "a field of the form is not UTF-8: send texts in UTF-8", "invalid_form", self.name
            ) from None


def parse_form(content_type: str, body: bytes) -> list[FormField]:
    """Return the fields of a form in their order.

    Raises:
        ApiError: The content type is not `multipart/form-data`, or the body is not a form.
    """
    delimiter = b"\r\n--" + _parse_boundary(content_type).encode("ascii")
    preamble, *pieces = (b"\r\n" + body).split(delimiter, _MAX_FIELDS + 2)
    if len(pieces) > _MAX_FIELDS + 1:
        raise ApiError(400, f"the form has more than {_MAX_FIELDS} fields: send fewer", "invalid_form")
    if preamble or not pieces or pieces[-1].strip(b" \t\r\n") != b"--":
        raise _malformed("it does not begin and end with its boundary")
    return [_parse_field(piece) for piece in pieces[:-1]]


def _parse_boundary(content_type: str) -> str:
    header = Message()
    try:
        header["content-type"] = content_type
        if header.get_content_type() != _FORM:
            raise ApiError(415, f"the body must be {_FORM} with a file", "unsupported_media_type")
        boundary = header.get_boundary() or ""
    except (ValueError, LookupError):
        boundary = ""
    if not _BOUNDARY.fullmatch(boundary):
        raise _malformed("the content type names no boundary")
    return boundary


def _parse_field(piece: bytes) -> FormField:
    """Return the field between two delimiters.

    Args:
        piece: The rest of the delimiter's line, the headers of the field, an empty line, and the content.

    Raises:
        ApiError: The header is missing, too long or not that of a form field; or the content is encoded.
    """
    delimiter_end, _, lines = piece.partition(b"\r\n")
    headers, empty_line, content = (b"\r\n" + lines).partition(b"\r\n\r\n")
    if delimiter_end.strip(b" \t") or not empty_line:
        raise _malformed("a field has no header")
    if len(headers) > _MAX_HEADER_BYTES:
        raise _malformed(f"a field has a header of more than {_MAX_HEADER_BYTES:,} bytes")
    header = BytesHeaderParser().parsebytes(headers[2:] + b"\r\n\r\n")
    if header.get_content_disposition() != "form-data" or len(header.get_all("content-disposition", [])) != 1:
        raise _malformed("a field has no content-disposition form-data")
    name = collapse_rfc2231_value(header.get_param("name", "", "content-disposition"))
    if not name:
        raise _malformed("a field has no name")
    if str(header.get("content-transfer-encoding", "binary")).strip().lower() not in _IDENTITY_ENCODINGS:
        raise _malformed("a field has a content-transfer-encoding")
    return FormField(name, content, header.get_filename() is not None)


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"the body is no {_FORM}: {reason}", "invalid_form")
