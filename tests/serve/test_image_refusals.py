"""What a server of images does not draw, and what it answers to hostile requests; each refusal has an accepted twin."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from fastapi.routing import APIRoute

from model.commands.serve.images import check_image_options
from model.errors import ModelError
from model.runners import rank_memory
from model.runners.denoise import MOST_SEED
from model.runners.pipelines import open_pipeline
from model.serve.errors import ApiError
from model.serve.http.app import router
from model.serve.images import serving
from model.serve.images.requests import (
    MOST_PROMPT_CHARACTERS,
    ImageGenerationRequest,
    check_work,
    choose_size,
)
from model.serve.openai.fields import KNOWN_FIELDS
from nkw.commands import main
from tests.serve.conftest import Served, ServedImages, options_of
from tests.serve.test_images import BODY, PATH, PROMPT
from tests.serve.test_refusals import posted

TEXT_ROUTES = [route for route in router.routes if isinstance(route, APIRoute)]
INTEGER, STRING = "Input should be a valid integer", "Input should be a valid string"
LONG_PROMPT = "x" * (MOST_PROMPT_CHARACTERS + 1)
SURROGATES = f"{STRING}, unable to parse raw data as a unicode string"
WORK = "; the limit of a request is 128,000: ask for fewer images or steps"
REFUSED: list[tuple[str, Any, str]] = [
    *(("n", count, "n: Input should be greater than or equal to 1") for count in (0, -1)),
    *(("n", count, "n: Input should be less than or equal to 10") for count in (11, 10**9)),
    *(("n", count, f"n: {INTEGER}") for count in (True, "1", 1.0)),
    *(
        ("size", size, f"size: {size!r} is no size of this model; its sizes are 16x16")
        for size in ("64x64x64", "0x0", "17x16", "16x16 ", "16X16", "")
    ),
    ("size", 16, f"size: {STRING}"),
    ("num_inference_steps", 0, "num_inference_steps: Input should be greater than or equal to 1"),
    ("num_inference_steps", True, f"num_inference_steps: {INTEGER}"),
    ("num_inference_steps", 501, f"n x pixels x steps is 1 x 256 x 501 = 128,256{WORK}"),
    *(
        (
            "num_inference_steps",
            steps,
            f"steps {steps!r:.60} must be a whole number from 1 to the number of training timesteps, 1000",
        )
        for steps in (1001, 10**4000)
    ),
    ("guidance_scale", 1000.5, "guidance 1000.5 must be between 0 and 1000"),
    ("guidance_scale", -0.5, "guidance -0.5 must be between 0 and 1000"),
    ("guidance_scale", float("nan"), "guidance nan must be between 0 and 1000"),
    ("guidance_scale", float("inf"), "guidance inf must be between 0 and 1000"),
    ("guidance_scale", True, "guidance_scale: Input should be a valid number"),
    ("seed", -1, "seed: Input should be greater than or equal to 0"),
    ("seed", MOST_SEED + 1, f"seed: Input should be less than or equal to {MOST_SEED}"),
    ("prompt", LONG_PROMPT, "prompt: String should have at most 4000 characters"),
    ("prompt", "\ud800\udfff\ud800", f"prompt: {SURROGATES}"),
    ("prompt", [PROMPT], f"prompt: {STRING}"),
    ("prompt", None, f"prompt: {STRING}"),
    ("negative_prompt", LONG_PROMPT, "negative_prompt: String should have at most 4000 characters"),
    ("negative_prompt", "\udc00", f"negative_prompt: {SURROGATES}"),
    (
        "response_format",
        "url",
        "response_format: images are not stored, so they have no URL: set response_format to b64_json",
    ),
    ("width", 16, "nkw serve does not take the argument width: leave it out"),
]
ACCEPTED: list[dict[str, Any]] = [
    {"model": None, "n": None, "size": None, "seed": None, "width": None},
    {"n": 10},
    {"size": "16x16"},
    {"size": "auto"},
    {"guidance_scale": 1000},
    {"guidance_scale": 0},
    {"seed": 0},
    {"seed": MOST_SEED},
    {"seed": MOST_SEED - 1, "n": 2},
    {"prompt": LONG_PROMPT[1:], "negative_prompt": LONG_PROMPT[1:]},
    {"prompt": "", "negative_prompt": ""},
    {"prompt": "\U0001f534 \0"},
    {"response_format": "b64_json"},
]


def describe(argument: Any) -> str:
    """Return the id of a test's argument."""
    return ascii(argument)[:30]


@pytest.mark.parametrize(("field", "argument", "message"), REFUSED, ids=describe)
def test_refusals_have_one_sentence(
    drawing: ServedImages,
    field: str,
    argument: Any,
    message: str,
) -> None:
    status, error = posted(drawing, PATH, BODY | {field: argument})
    assert (status, error["message"], error["type"]) == (400, message, "invalid_request_error")


@pytest.mark.parametrize("changes", ACCEPTED, ids=describe)
def test_the_twins_of_refusals_are_answered(drawing: ServedImages, changes: dict[str, Any]) -> None:
    assert posted(drawing, PATH, BODY | changes) == (200, {})


def test_several_fields_together_are_refused(drawing: ServedImages) -> None:
    status, error = posted(drawing, PATH, BODY | {"seed": MOST_SEED, "n": 2})
    assert (status, error["param"]) == (400, "seed")
    assert error["message"] == "seed: 2 images from this seed on exceed 2^64 - 1: give a smaller seed"
    status, error = posted(drawing, PATH, BODY | {"n": 10, "num_inference_steps": 51})
    assert (status, error["code"]) == (400, "image_work")
    assert error["message"] == f"n x pixels x steps is 10 x 256 x 51 = 130,560{WORK}"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the body: Field required"),
        (b"[]", 400, "the body: Input should be a valid dictionary or object to extract fields from"),
        (b"{", 400, "the body is no JSON: send a JSON object"),
        (b"[" * 100_000, 400, "the request cannot be read"),
        (b'{"prompt": "\xff"}', 400, "the request cannot be read"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", 400, "the request cannot be read"),
        (
            b'{"prompt": "' + b"x" * (2**20 - 14) + b'"}',
            400,
            "prompt: String should have at most 4000 characters",
        ),
        (
            b'{"prompt": "' + b"x" * (2**20 - 13) + b'"}',
            413,
            "the body has more than 1,048,576 bytes: shorten it, or start nkw serve with a larger --max-body",
        ),
    ],
    ids=describe,
)
def test_bodies_that_are_no_request_are_refused(
    drawing: ServedImages,
    body: bytes,
    status: int,
    message: str,
) -> None:
    refused, error = posted(drawing, PATH, body)
    assert (refused, error["message"]) == (status, message)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_other_methods_are_refused(drawing: ServedImages, method: str) -> None:
    response, body = drawing.send(method, PATH, json.dumps(BODY).encode())
    assert (response.status, response.headers["allow"]) == (405, "POST")
    assert json.loads(body)["error"]["message"] == "the path does not take this method"


def test_sizes_are_those_of_the_model(folders: dict[str, Path]) -> None:
    pipeline = open_pipeline(folders["size of images"])
    assert choose_size(pipeline, None) == choose_size(pipeline, "auto") == (256, 256)
    assert choose_size(pipeline, "512x128") == (128, 512)
    for size in ("128x128", "512x512", "128x512x3"):
        with pytest.raises(ApiError) as refused:
            choose_size(pipeline, size)
        assert refused.value.message.startswith(f"size: '{size}' is no size of this model; of its 33 sizes, ")


@pytest.mark.parametrize(("images", "steps"), [(1, 499), (1, 500), (10, 49), (10, 50)])
def test_work_up_to_the_limit_is_accepted(images: int, steps: int) -> None:
    check_work(images, (16, 16), steps, [(16, 16)])
    with pytest.raises(ApiError, match="the limit of a request is 128,000"):
        check_work(images, (16, 16), 500 // images + 1, [(16, 16)])


def test_known_fields_are_ignored_or_refused(drawing: ServedImages) -> None:
    assert not set(KNOWN_FIELDS["images"]) & set(ImageGenerationRequest.model_fields)
    known_fields = KNOWN_FIELDS["images"].items()
    ignored = {field: "any" for field, known in known_fields if known.refusal is None}
    neutral = {field: known.neutral[0] for field, known in known_fields if known.neutral}
    assert posted(drawing, PATH, BODY | ignored | neutral) == (200, {})
    for field, known in known_fields:
        if known.refusal is not None:
            status, error = posted(drawing, PATH, BODY | {field: "x"})
            assert (status, error["message"]) == (400, f"{field}: {known.refusal}")


@pytest.mark.parametrize("route", TEXT_ROUTES, ids=lambda route: route.path)
def test_routes_of_texts_are_refused(drawing: ServedImages, route: APIRoute) -> None:
    for method in route.methods:
        response, body = drawing.send(method, route.path.replace("{path:path}", "any"), b"{}")
        assert response.status == 400, method
        assert json.loads(body)["error"]["message"] == (
            "this model draws images: send a prompt to POST /v1/images/generations"
        )


def test_unknown_paths_and_other_models_are_not_found(drawing: ServedImages) -> None:
    status, error = posted(drawing, "/v1/pictures", BODY)
    assert (status, error["message"]) == (404, "there is no such path")
    status, error = posted(drawing, PATH, BODY | {"model": "other"})
    assert (status, error["message"]) == (404, "the model does not exist; this server has flow")
    assert posted(drawing, PATH, BODY | {"model": "flow"}) == (200, {})


def test_a_server_of_texts_refuses_images(server: Served) -> None:
    for path in (PATH, "/v1/images/edits"):
        status, error = posted(server, path, BODY)
        assert (status, error["message"]) == (
            400,
            "this model makes no images: start nkw serve with a folder of a diffusion model",
        )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--replicas", "2"], "--replicas: "),
        (["--cluster", "local"], "--cluster: "),
        (["--max-num-seqs", "8"], "--max-num-seqs: "),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
            "--speculative-config: ",
        ),
        (["--no-prefix-caching"], "--no-prefix-caching: "),
        (["--workers", "3"], "--workers: "),
        (["--backend", "neuron"], "--backend neuron: images are drawn by "),
        (["--tp", "65"], "--tp 65; "),
    ],
)
def test_options_of_texts_are_refused(words: list[str], named: str, folders: dict[str, Path]) -> None:
    model = ["--model", str(folders["flow"])]
    with pytest.raises(ModelError) as refused:
        check_image_options(options_of(*model, *words))
    assert str(refused.value).startswith(named)
    check_image_options(options_of(*model))


def test_schemes_that_denoisers_do_not_compute_are_refused(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", str(folders["flow"]), "--quantization", "w8a8", "--port", "0"]) == 2
    assert "products of rows of int8 take no gates of residuals" in capsys.readouterr().err


def test_a_folder_of_texts_is_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--backend", "numpy", "--port", "0"]) == 2
    assert "--backend numpy: it draws images" in capsys.readouterr().err


def test_a_malformed_folder_is_refused_before_the_port_is_opened(
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    index = json.loads((folders["flow"] / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"_class_name": "OtherPipeline"}))
    assert main(["serve", "--model", str(tmp_path), "--port", "0"]) == 2
    assert "OtherPipeline is not known" in capsys.readouterr().err


def test_weights_beyond_hbm_are_refused_at_the_start(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The servers of other tests hold the same weights in the HBM of trn2."""
    components = open_pipeline(folders["flow"]).components
    weight_bytes = rank_memory.RankMemory.measure(components, "trn2").weight_bytes
    monkeypatch.setattr(
        rank_memory, "chip", lambda target: SimpleNamespace(hbm_bytes_per_core=weight_bytes - 1)
    )
    monkeypatch.setattr(serving, "make_server", lambda *arguments: pytest.fail("a server is made"))
    assert main(["serve", "--model", str(folders["flow"]), "--port", "0"]) == 2
    message = (
        f"the weights take {weight_bytes:,} bytes of HBM; a rank of trn2 (LNC 1) has {weight_bytes - 1:,}"
    )
    assert message in capsys.readouterr().err
