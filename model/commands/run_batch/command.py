"""Entry of `nkw run-batch`: each request of a file goes through the routes of the server, in this process."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING

from model.commands.run_batch.batch_file import (
    AnswerFile,
    BatchRequest,
    fingerprint,
    format_answer,
    parse_batch,
)
from model.commands.serve.command import check_extra
from model.config.folder import list_model_files
from model.engine import Engine
from model.errors import ModelError, read_text_file
from model.llm.llm import make_engine
from nkw.files import Outputs
from nkw.terminal import show_lines, working

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_CODE = "NKW-JSON-PATH"
_MAX_WAITING = 1024
"""Continuations that may wait beside those of a step; a request that asks for more is refused."""
_REQUESTS_PER_SEQUENCE = 2
"""Requests on their way for each sequence of a step, so that prompts are encoded while others are computed."""
_RETRY_SECONDS = 0.05
_MAX_FILE_BYTES = 2**30


def run_batch_command(options: argparse.Namespace) -> int:
    """Answer all requests of a file, write the output, and return the exit status 0.

    Raises:
        ModelError: A line of the file is no request, an option is refused, or the engine fails.
        InvalidArgument: The output cannot be written.
        KeyboardInterrupt: The run was interrupted; the same command continues from the collected answers.
    """
    check_extra("nkw run-batch")
    text = read_text_file(options.input_file, "NKW-MODEL-OPTION", _MAX_FILE_BYTES)
    requests = parse_batch(text, options.input_file)
    outputs = Outputs(lambda: [options.input_file, *list_model_files(options.model)])
    output = outputs.claim(options.output_file, "answers", _CODE)
    assert output is not None
    settings = {
        name: value for name, value in vars(options).items() if name not in ("output_file", "command")
    }
    answers = AnswerFile(output, requests, fingerprint(text, settings))
    if answers.count:
        show_lines(f"{answers.count:,} of {len(requests):,} answers are there already", sys.stderr)
    from model.serve.log import log_to_stderr
    from model.serve.serving import engine_args

    log_to_stderr("warning")
    options.max_queue = _MAX_WAITING
    options.lnc = 1  # no answer has a prediction
    engine = make_engine(engine_args(options))
    try:
        with working(lambda: f"{answers.count:,} of {len(requests):,} requests"):
            asyncio.run(_answer_all(options, engine, requests, answers))
    except KeyboardInterrupt as stopped:
        stopped.args = (
            f"{answers.count:,} of {len(requests):,} answers are in {answers.path}; the same command continues there",
        )
        raise
    answers.finish()
    return 0


async def _answer_all(
    options: argparse.Namespace, engine: Engine, requests: list[BatchRequest], answers: AnswerFile
) -> None:
    """Answer the requests that have no answer yet, twice as many at once as a step takes, and add the answers.

    Raises:
        ModelError: The engine has failed.
    """
    from model.serve.serving import run_application

    remaining = iter(list(enumerate(requests))[answers.count :])

    async with run_application(options, engine) as (app, _):

        async def answer_next() -> None:
            for index, request in remaining:
                answers.add(index, await _answer(app, request))

        count = _REQUESTS_PER_SEQUENCE * options.ep * options.max_num_seqs
        tasks = [asyncio.create_task(answer_next()) for _ in range(count)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(app: ASGIApp, request: BatchRequest) -> str:
    """Send a request through the routes and return the line that answers it; a full queue is tried again.

    Raises:
        ModelError: The engine has failed.
    """
    from model.serve.cluster.engine import answer_pieces
    from model.serve.replicas.backend import Call, collect_answer

    if request.refusal is not None:
        return format_answer(request, 400, None, request.refusal)
    content = json.dumps(request.body).encode()
    headers = [(b"content-type", b"application/json")]
    call = Call(request.url, "POST", request.url.encode(), headers=headers, body=content)
    while (answer := await collect_answer(answer_pieces(app, call))).status == 429:
        await asyncio.sleep(_RETRY_SECONDS)
    body = json.loads(answer.body)
    if answer.status == 200:
        return format_answer(request, 200, body, None)
    if body["error"]["code"] in ("engine_failed", "engine_stopped"):
        raise ModelError(f"the engine has failed at the request {request.custom_id!r:.60}")
    return format_answer(request, answer.status, None, body)
