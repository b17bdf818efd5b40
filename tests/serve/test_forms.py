"""Forms with files: what clients write is read, anything else is one refusal."""

from __future__ import annotations

from contextlib import suppress
from email.message import EmailMessage
from email.policy import HTTP

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from hypothesis import given, settings
from hypothesis import strategies as st

from model.serve.errors import ApiError
from model.serve.openai.audio.form import FormField, parse_form

KIND = 'multipart/form-data; boundary="b"'
ONE = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n--b--\r\n'


def refused(body: bytes, content_type: str = KIND) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_form(content_type, body)
    return caught.value


def test_fields_and_files_are_read() -> None:
    body = (
        b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\nx\r\n'
        b'--b  \r\nContent-Disposition: form-data; name=f; filename="x.wav"\r\nContent-Type: audio/wav\r\n'
        b"Content-Transfer-Encoding: binary\r\n\r\n\r\n--c\r\n\0\xff\r\n"
        b'--b\r\nContent-Disposition: form-data; name="a[]"\r\n\r\n\r\n--b--'
    )
    fields = parse_form(KIND, body)
    assert fields == [
        FormField("a", b"x", False),
        FormField("f", b"\r\n--c\r\n\0\xff", True),
        FormField("a[]", b"", False),
    ]
    assert parse_form(KIND, b"--b--\r\n") == []


BOUNDARIES = st.text("abAB09-'()+_,./:=?", min_size=1, max_size=70)
CONTENTS = st.dictionaries(st.text("abcd_[]", min_size=1), st.binary(), max_size=6)


@pytest.mark.slow
@given(BOUNDARIES, CONTENTS)
@settings(deadline=None, derandomize=True, database=None)
def test_what_the_standard_library_writes_is_read(boundary: str, contents: dict[str, bytes]) -> None:
    pieces = []
    for name, content in contents.items():
        if b"--" + boundary.encode() in content:
            return
        header = EmailMessage(policy=HTTP)
        header.add_header("Content-Disposition", "form-data", name=name)
        pieces.append(header.as_bytes() + content)
    mark = b"--" + boundary.encode()
    body = b"".join(mark + b"\r\n" + piece + b"\r\n" for piece in pieces) + mark + b"--\r\n"
    fields = parse_form(f'multipart/form-data; boundary="{boundary}"', body)
    assert {field.name: field.content for field in fields} == contents


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "it does not begin and end with its boundary"),
        (b"before" + ONE, "it does not begin and end with its boundary"),
        (ONE + b"behind", "it does not begin and end with its boundary"),
        (ONE[:-4], "it does not begin and end with its boundary"),
        (ONE.replace(b"--b\r\nC", b"--bC"), "a field has no header"),
        (b"--b\r\nx\r\n--b--", "a field has no header"),
        (
            ONE.replace(b"Content-Disposition", b"Content-Type"),
            "a field has no content-disposition form-data",
        ),
        (ONE.replace(b"form-data;", b"attachment;"), "a field has no content-disposition form-data"),
        (
            ONE.replace(b'name="a"', b'name="a"\r\nContent-Disposition: form-data; name="b"'),
            "a field has no content-disposition form-data",
        ),
        (ONE.replace(b' name="a"', b""), "a field has no name"),
        (ONE.replace(b'"a"', b'""'), "a field has no name"),
        (
            ONE.replace(b'"a"', b'"a"\r\nContent-Transfer-Encoding: base64'),
            "a field has a content-transfer-encoding",
        ),
        (ONE.replace(b'"a"', b'"' + b"a" * 5000 + b'"'), "a field has a header of more than 4,096 bytes"),
    ],
)
def test_a_body_that_is_no_form_is_refused(body: bytes, message: str) -> None:
    assert [field.text for field in parse_form(KIND, ONE)] == ["x"]
    error = refused(body)
    assert (error.status, error.code) == (400, "invalid_form")
    assert error.message == f"the body is no multipart/form-data: {message}"


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "multipart/mixed; boundary=b", "application/json", "\udcff"]
)
def test_another_content_type_is_refused(content_type: str) -> None:
    assert refused(ONE, content_type).status == 415


@pytest.mark.parametrize("boundary", ["", '""', '"a\tb"', "ä", '"' + "b" * 71 + '"', "b*=utf-8''b"])
def test_a_boundary_that_is_none_is_refused(boundary: str) -> None:
    assert (
        len(parse_form(f'multipart/form-data; boundary="{"b" * 70}"', ONE.replace(b"--b", b"--" + b"b" * 70)))
        == 1
    )
    assert refused(ONE, f"multipart/form-data; boundary={boundary}").code == "invalid_form"


def test_more_fields_than_any_client_sends_are_refused() -> None:
    field = ONE[: -len(b"--b--\r\n")]
    assert len(parse_form(KIND, field * 64 + b"--b--")) == 64
    assert refused(field * 65 + b"--b--").message == "the form has more than 64 fields: send fewer"


def test_a_field_that_is_no_text_is_refused() -> None:
    (field,) = parse_form(KIND, ONE.replace(b"\r\nx\r\n", b"\r\n\xff\r\n"))
    with pytest.raises(ApiError) as caught:
        assert field.text
    assert (caught.value.message, caught.value.param) == (
        "a field of the form is not UTF-8: send texts in UTF-8",
        "a",
    )


@pytest.mark.slow
@given(st.binary(max_size=200), st.sampled_from([b"", b"--b\r\n", ONE]))
@settings(deadline=None, derandomize=True, database=None, max_examples=300)
def test_any_body_is_fields_or_one_refusal(body: bytes, before: bytes) -> None:
    with suppress(ApiError):
        assert all(field.name for field in parse_form(KIND, before + body))
