"""Routes of a server of images: OpenAI's /v1/images/generations, and refusals of the routes of texts."""

from __future__ import annotations

import time
from base64 import b64encode
from dataclasses import dataclass, field
from random import Random
from typing import Annotated, Literal

from fastapi import Depends, Request
from fastapi.routing import APIRoute, APIRouter
from pydantic import BaseModel, Field

from model.runners.pipelines.pipeline import ImagePipeline
from model.serve.errors import ApiError, check_model_name, server_stopping_error
from model.serve.http.app import router as text_router
from model.serve.http.shared_routes import ERRORS, get_service
from model.serve.http.shared_routes import router as shared_router
from model.serve.images.queue import DrawingQueue
from model.serve.images.requests import ImageGenerationRequest, plan_job
from model.serve.openai.generation import run_while_connected


@dataclass
class ImageService:
    """State shared by all routes of a server of images.

    `model` is the name by which clients ask for the model, `pipeline` the opened model, and `seeds` a generator of the
    seeds of requests that have none. `draining` is True once the server takes no further requests. `is_alive` stays
    True, because a drawing that fails does not end the thread that draws.
    """

    model: str
    pipeline: ImagePipeline
    queue: DrawingQueue
    seeds: Random
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    max_model_len: None = None
    is_alive: bool = True

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for a name that is not this server's model; None stands for the model."""
        check_model_name(name, self.model)

    def drain(self) -> None:
        """Refuse further requests; those that were accepted are drawn."""
        self.draining = True


class EncodedImage(BaseModel):
    """Image as a PNG file in Base64."""

    b64_json: str


class ImagesAnswer(BaseModel):
    """Answer of /v1/images/generations in OpenAI's format, which calls the images `data`; `size` is like 64x64."""

    created: int
    images: list[EncodedImage] = Field(serialization_alias="data")
    output_format: Literal["png"] = "png"
    size: str


Shared = Annotated[ImageService, Depends(get_service)]
router = APIRouter(responses=ERRORS)
IMAGE_ROUTERS = (router, shared_router)
"""Routes of a server of images."""


@router.post("/v1/images/generations")
async def generate_images(
    request: ImageGenerationRequest, raw_request: Request, service: Shared
) -> ImagesAnswer:
    """Draw images of a prompt; a client that disconnects ends the drawing before the next pass of the denoiser."""
    service.check_model(request.model)
    job = plan_job(request, service.pipeline, service.seeds)
    if service.draining:
        raise server_stopping_error()
    files = await run_while_connected(raw_request.receive, service.queue.draw(job))
    rows, columns = job.image_size
    return ImagesAnswer(
        created=int(time.time()),
        images=[EncodedImage(b64_json=b64encode(file).decode()) for file in files],
        size=f"{columns}x{rows}",
    )


async def refuse_texts() -> None:
    """Refuse the routes of texts and recordings with status 400, because the model draws images only."""
    raise ApiError(
        400, "this model draws images: send a prompt to POST /v1/images/generations", "unsupported"
    )


for _route in text_router.routes:
    if isinstance(_route, APIRoute):
        router.add_api_route(
            _route.path, refuse_texts, methods=list(_route.methods or ()), include_in_schema=False
        )
