"""`/v1/images/generations`: the server draws the images of `nkw imagine`, in a queue that clients may leave."""

from __future__ import annotations

import base64
import io
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model.errors import ModelError
from model.runners.backends import ReferenceBackend
from model.runners.denoise import ImageRequest, ImageRunner, Sampling
from model.runners.pipelines import open_pipeline, pixart
from nkw.commands import main
from tests.serve.conftest import Reached, ServedImages, serving_images
from tests.serve.test_ends import metric, wait_until
from tests.serve.test_refusals import posted

openai = pytest.importorskip("openai", reason="openai is an extra of development (dev)")

PROMPT, NEGATIVE_PROMPT = "a red circle above a blue square", "a black square"
PATH = "/v1/images/generations"
BODY: dict[str, Any] = {"model": "flow", "prompt": PROMPT, "num_inference_steps": 1, "seed": 5}
LONG: dict[str, Any] = BODY | {"num_inference_steps": 500}
"""More passes than any test waits for."""
MADE = "nkw_image_requests_total{"


@contextmanager
def requested(server: Reached, body: dict[str, Any]) -> Iterator[None]:
    """Send a request for images, and leave without its answer at the end of the block."""
    content = json.dumps(body).encode()
    header = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"POST {PATH} HTTP/1.1\r\n{header}\r\n".encode() + content)
        yield


def request_files(server: Reached, **fields: Any) -> list[bytes]:
    """Return the PNG files of a request by OpenAI's client."""
    extra = {name: fields.pop(name) for name in list(fields) if name not in ("prompt", "n", "size")}
    arguments = {"model": "flow", "prompt": PROMPT, "response_format": "b64_json"} | fields
    answer = server.client().images.generate(extra_body={"num_inference_steps": 2} | extra, **arguments)
    return [base64.b64decode(image.b64_json) for image in answer.data]


def open_image(file: bytes) -> Image.Image:
    """Return the image of a PNG file."""
    return Image.open(io.BytesIO(file))


def request_images(server: Reached, **fields: Any) -> list[np.ndarray]:
    """Return the pixels of the images of a request by OpenAI's client."""
    return [np.asarray(open_image(file)) for file in request_files(server, **fields)]


def draw(folder: Path, requests: list[ImageRequest], sampling: Sampling) -> np.ndarray:
    """Return the images of the numpy model, drawn in one batch."""
    return ImageRunner(open_pipeline(folder), ReferenceBackend()).draw(requests, sampling).images


def test_images_are_those_of_the_runner(drawing: ServedImages, folders: dict[str, Path]) -> None:
    images = request_images(
        drawing, n=2, size="16x16", seed=7, negative_prompt=NEGATIVE_PROMPT, guidance_scale=3.0
    )
    requests = [ImageRequest(PROMPT, 7 + index, NEGATIVE_PROMPT) for index in range(2)]
    np.testing.assert_array_equal(images, draw(folders["flow"], requests, Sampling(2, 3.0)))
    assert (images[0] != images[1]).any()
    changed = {"seed": 8, "guidance_scale": 1, "negative_prompt": "", "num_inference_steps": 3}
    same = {"seed": 7, "guidance_scale": 3.0, "negative_prompt": NEGATIVE_PROMPT, "num_inference_steps": 2}
    for name, change in changed.items():
        (image,) = request_images(drawing, **(same | {name: change}))
        assert (image != images[0]).any(), name


@pytest.mark.parametrize(
    "words",
    [
        "--backend numpy",
        "--backend numpy --dtype bfloat16 --tp 2",
        "--backend numpy --quantization fp8",
        pytest.param("--tp 2 --quantization fp8", marks=pytest.mark.slow),
    ],
)
def test_files_are_those_of_the_command(
    words: str,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    model = ["--model", str(folders["flow"]), *words.split()]
    sampling = ["--steps", "2", "--guidance", "3", "--negative-prompt", NEGATIVE_PROMPT, "--no-check"]
    fields = {"guidance_scale": 3, "negative_prompt": NEGATIVE_PROMPT}
    with serving_images(*model) as served:
        both = request_files(served, n=2, seed=7, **fields)
        assert request_files(served, seed=8, **fields) == both[1:]
    for seed, file in zip((7, 8), both):
        path = tmp_path / f"{seed}.png"
        assert main(["imagine", PROMPT, *model, *sampling, "--seed", str(seed), "--out", str(path)]) == 0
        assert path.read_bytes() == file


def test_a_quantised_denoiser_draws_other_images(drawing: ServedImages, folders: dict[str, Path]) -> None:
    words = ("--model", str(folders["flow"]), "--backend", "numpy", "--quantization", "fp8")
    (plain,) = request_files(drawing, seed=7)
    with serving_images(*words) as served:
        (quantised,) = request_files(served, seed=7)
    images = [open_image(file) for file in (plain, quantised)]
    assert ["quantization: fp8" in image.info["settings"] for image in images] == [False, True]
    assert (np.asarray(images[0]) != np.asarray(images[1])).any()


def test_sizes_follow_each_other(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixart, "_SIDES_WITH_ASPECTS", (16,))
    with serving_images("--model", str(folders["flow"]), "--backend", "numpy") as served:
        sizes = ("32x8", "auto", "32x8", "8x32")
        wide, square, again, tall = (request_images(served, size=size, seed=1)[0] for size in sizes)
    assert (wide.shape, square.shape, tall.shape) == ((8, 32, 3), (16, 16, 3), (32, 8, 3))
    np.testing.assert_array_equal(wide, again)


def test_the_answer_has_the_form_of_openai(drawing: ServedImages) -> None:
    begun = int(time.time())
    answer = drawing.client().images.generate(model="flow", prompt=PROMPT, extra_body={"seed": 3})
    assert begun <= answer.created <= time.time()
    assert answer.size == "16x16" and answer.output_format == "png" and len(answer.data) == 1
    image = open_image(base64.b64decode(answer.data[0].b64_json))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (16, 16))
    assert image.info["prompt"] == PROMPT
    assert "steps: 20, guidance: 4.0" in image.info["settings"] and "seed: 3" in image.info["settings"]


def test_without_a_seed_images_differ_and_their_seed_draws_them_again(drawing: ServedImages) -> None:
    made = []
    for _ in range(2):
        answer = drawing.client().images.generate(
            model="flow", prompt=PROMPT, extra_body={"num_inference_steps": 2}
        )
        made.append(open_image(base64.b64decode(answer.data[0].b64_json)))
    assert (np.asarray(made[0]) != np.asarray(made[1])).any()
    seed = int(made[1].info["settings"].rpartition("seed: ")[2])
    np.testing.assert_array_equal(request_images(drawing, seed=seed)[0], np.asarray(made[1]))


def test_two_requests_at_once_equal_each_alone(drawing: ServedImages) -> None:
    fields = [{"prompt": PROMPT, "seed": 1, "n": 2}, {"prompt": "a green cross", "seed": 2, "n": 2}]
    alone = [request_images(drawing, **request) for request in fields]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda request: request_images(drawing, **request), fields))
    np.testing.assert_array_equal(together, alone)
    assert (alone[0][0] != alone[1][0]).any()


def test_the_model_is_named(drawing: ServedImages) -> None:
    (model,) = drawing.client().models.list().data
    assert model.id == "flow" and drawing.client().models.retrieve("flow").owned_by == "nki-workbench"
    assert "max_model_len" not in json.loads(drawing.send("GET", "/v1/models")[1])["data"][0]
    with pytest.raises(openai.NotFoundError, match="the model does not exist; this server has flow"):
        drawing.client().models.retrieve("other")
    for path in ("/health", "/ready", "/version"):
        assert drawing.send("GET", path)[0].status == 200


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        (ModelError("the device refuses"), 400, "the device refuses"),
        (RuntimeError("a bug"), 500, "the server could not answer"),
    ],
)
def test_a_drawing_that_fails_fails_its_request_only(
    drawing: ServedImages, monkeypatch: pytest.MonkeyPatch, fault: Exception, status: int, message: str
) -> None:
    failed = f'{MADE}model_name="flow",outcome="failed"'
    before = metric(drawing, failed)

    def fail(*arguments: Any, **options: Any) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(ImageRunner, "draw", fail)
        refused, error = posted(drawing, PATH, BODY)
    assert (refused, error["message"]) == (status, message)
    assert metric(drawing, failed) == before + 1
    assert posted(drawing, PATH, BODY) == (200, {})


def test_a_client_that_leaves_ends_its_drawing_between_passes(drawing: ServedImages) -> None:
    cancelled = f'{MADE}model_name="flow",outcome="cancelled"'
    before, passes = metric(drawing, cancelled), metric(drawing, "nkw_denoiser_passes_total")
    with requested(drawing, LONG), requested(drawing, LONG):
        wait_until(lambda: metric(drawing, "nkw_denoiser_passes_total") > passes)
        wait_until(lambda: metric(drawing, "nkw_num_requests_waiting") == 1)
        assert metric(drawing, "nkw_num_requests_running") == 1
    wait_until(lambda: metric(drawing, "nkw_num_requests_running") == 0)
    assert metric(drawing, cancelled) == before + 2
    assert metric(drawing, "nkw_num_requests_waiting") == 0
    assert metric(drawing, "nkw_denoiser_passes_total") - passes < 2 * 500
    assert posted(drawing, PATH, BODY) == (200, {})


def test_a_full_queue_is_answered_429(drawing: ServedImages) -> None:
    with requested(drawing, LONG), requested(drawing, LONG):
        wait_until(lambda: metric(drawing, "nkw_num_requests_waiting") == 1)
        response, body = drawing.send("POST", PATH, json.dumps(BODY).encode())
        assert response.status == 429 and int(response.headers["retry-after"]) >= 1
        assert json.loads(body)["error"]["code"] == "queue_full"
        assert drawing.send("GET", "/health")[0].status == 200
    wait_until(lambda: metric(drawing, "nkw_num_requests_running") == 0)
    assert posted(drawing, PATH, BODY) == (200, {})


def test_metrics_count_images_and_passes(drawing: ServedImages) -> None:
    names = ("nkw_images_total", "nkw_denoiser_passes_total", f'{MADE}model_name="flow",outcome="finished"')
    before = [metric(drawing, name) for name in names]
    seconds = metric(drawing, "nkw_drawing_seconds_total")
    request_images(drawing, n=2, seed=1)
    request_images(drawing, seed=1, guidance_scale=1)
    changes = [metric(drawing, name) - count for name, count in zip(names, before)]
    assert changes == [3, 2 * 2 * 2 + 2, 2]
    assert metric(drawing, "nkw_drawing_seconds_total") > seconds


def test_a_server_that_stops_finishes_what_it_accepted(folders: dict[str, Path]) -> None:
    words = ("--model", str(folders["flow"]), "--backend", "numpy")
    with ThreadPoolExecutor(2) as pool, serving_images(*words) as served:
        made = [pool.submit(request_images, served, seed=seed, num_inference_steps=40) for seed in (1, 2)]
        wait_until(lambda: metric(served, "nkw_num_requests_waiting") == 1)
        served.server.should_exit = True
        assert [len(images.result()) for images in made] == [1, 1]


def test_keys_are_asked_for(folders: dict[str, Path], key_file: Path) -> None:
    words = ("--model", str(folders["flow"]), "--backend", "numpy", "--api-key-file", str(key_file))
    with serving_images(*words) as served:
        assert posted(served, PATH, BODY)[0] == 401
        assert len(request_images(served, seed=1)) == 1
