"""Entry of `nkw bench serve`: draws prompts, sends them to a server of OpenAI's API, and reports its latencies."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime
from math import isinf
from pathlib import Path
from typing import Any

from model.commands.api_client import Address, ApiClient, RequestFailed, check_client, read_client_key
from model.commands.bench.datasets import Encoder, FolderEncoder, Prompt, ServerEncoder, draw_prompts
from model.commands.bench.load import CHAT_BACKEND, Target, draw_arrivals, send_load
from model.commands.bench.report import DETAILS, Measurement, Selection
from model.errors import ModelError, read_text_file
from model.loading.shipped import find_model_path
from nkw.files import OutputFile, Outputs, is_file
from nkw.terminal import error, show_lines, working

_RETRY_SECONDS = 1.0
_MAX_SHOWN_ERRORS = 10
_CODE = "NKW-JSON-PATH"
_SAMPLING = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty".split()
)  # fields that are sent only where an option sets them


def bench_serve_command(options: argparse.Namespace) -> int:
    """Measure a server, print the table and write the results that the options ask for.

    Returns:
        The exit status: 0, or 1 if no request was answered.

    Raises:
        ModelError: Options or files cannot be used, or the server does not answer before the measurement.
        InvalidArgument: The file of the results cannot be written.
    """
    check_client("nkw bench serve")
    if options.dataset_path is not None and options.dataset_name != "custom":
        raise ModelError(f"--dataset-path is for --dataset-name custom; it is {options.dataset_name}")
    try:
        return asyncio.run(_measure(options))
    except RequestFailed as failed:
        raise ModelError(failed.message) from None


async def _measure(options: argparse.Namespace) -> int:
    """Find the model, draw the prompts, send them, and report; return the exit status.

    Raises:
        RequestFailed: The server has no model, or does not answer before the measurement.
        ModelError: An option or a file cannot be used.
    """
    url = options.base_url or str(Address("http", options.host, options.port, ""))
    address = Address.parse(url, "--base-url" if options.base_url else "--host")
    client = ApiClient(address, read_client_key(options.api_key_file), dict(options.header))
    name = options.served_model_name or options.model_name or (await client.find_model())["id"]
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    output = _claim_result(options, name, date)
    encoder, tokenizer = _choose_encoder(options, client, name)
    prompts = await _draw_prompts(options, encoder)
    target = _make_target(options, client, name)
    await _warm_up(target, prompts[0], options)
    done = 0

    def count_answer() -> None:
        nonlocal done
        done += 1

    shows = nullcontext() if options.disable_tqdm else working(lambda: f"{done} of {len(prompts)} requests")
    with shows:
        arrivals = draw_arrivals(len(prompts), options.request_rate, options.burstiness, options.seed)
        records, seconds = await send_load(target, prompts, arrivals, options.max_concurrency, count_answer)
    client.close()
    selection = Selection(
        options.percentile_metrics,
        options.metric_percentiles,
        dict(options.goodput),
        options.request_rate,
        options.max_concurrency,
    )
    measurement = Measurement(records, seconds, selection)
    print(measurement.format_table(), flush=True)
    failures = [(number, record.error) for number, record in enumerate(records) if record.error]
    for number, message in failures[:_MAX_SHOWN_ERRORS]:
        error(f"request {number}: {message}")
    if len(failures) > _MAX_SHOWN_ERRORS:
        error(f"{len(failures) - _MAX_SHOWN_ERRORS:,} further requests have failed")
    if output is not None:
        _write_result(options, output, _describe_run(options, name, tokenizer, date), measurement)
    return 0 if measurement.answered else 1


def _choose_encoder(options: argparse.Namespace, client: ApiClient, name: str) -> tuple[Encoder, str | None]:
    """Return the tokenizer of the benchmark, and the path of its folder or None for the server's tokenizer.

    It is that of --tokenizer, else of --model if this is a folder with a tokenizer.json, else the server's /tokenize.

    Args:
        options: The parsed options.
        client: Client of the server.
        name: Name by which the server knows the model.
    """
    folder = options.tokenizer
    if folder is None and options.model_name is not None:
        named = find_model_path(options.model_name)
        folder = named if is_file(named / "tokenizer.json") else None
    if folder is None:
        return ServerEncoder(client, name), None
    return FolderEncoder(folder), str(folder)


async def _draw_prompts(options: argparse.Namespace, encoder: Encoder) -> list[Prompt]:
    """Return the prompts of the dataset that the options name.

    Raises:
        ModelError: The server has no tokenizer for random prompts, or the dataset cannot be used.
    """
    try:
        return await draw_prompts(options, encoder)
    except RequestFailed as failed:
        raise ModelError(
            "--dataset-name random needs the tokenizer of the model; give --tokenizer DIR, because the server's "
            f"/tokenize says: {failed.message}"
        ) from None


def _make_target(options: argparse.Namespace, client: ApiClient, name: str) -> Target:
    """Return the route to measure, with the fields that all requests have in their bodies.

    Args:
        options: The parsed options.
        client: Client of the server.
        name: Name by which the server knows the model.
    """
    is_chat = options.backend == CHAT_BACKEND
    ignores_end = options.dataset_name == "random" if options.ignore_eos is None else options.ignore_eos
    fields = {
        "model": name,
        **({"ignore_eos": True} if ignores_end else {}),
        **{key: getattr(options, key) for key in _SAMPLING if getattr(options, key) is not None},
        **options.extra_body,
    }
    path = options.endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions")
    return Target(client, path, is_chat, fields)


async def _warm_up(target: Target, prompt: Prompt, options: argparse.Namespace) -> None:
    """Wait for the first answer if --ready-check-timeout-sec asks for it, then send the requests of --num-warmups.

    The warm-up requests all have the same prompt and are not measured.

    Raises:
        ModelError: No answer comes in time.
    """
    deadline = time.monotonic() + options.ready_check_timeout_sec
    while options.ready_check_timeout_sec and (failure := (await target.send(prompt)).error):
        if time.monotonic() >= deadline:
            raise ModelError(
                f"the server is not ready after {options.ready_check_timeout_sec} seconds: {failure}; start it, or "
                "give a longer --ready-check-timeout-sec"
            )
        await asyncio.sleep(_RETRY_SECONDS)
    slots = asyncio.Semaphore(options.max_concurrency or max(1, options.num_warmups))

    async def send() -> None:
        async with slots:
            await target.send(prompt)

    await asyncio.gather(*(send() for _ in range(options.num_warmups)))


def _claim_result(options: argparse.Namespace, model: str, date: str) -> OutputFile | None:
    """Return the file of the results, whose folder is created, or None if the options ask for none.

    Raises:
        InvalidArgument: The file cannot be written.
    """
    if not (options.save_result or options.append_result):
        return None
    concurrency = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    label = options.label or options.backend
    base = model.rsplit("/", 1)[-1]
    name = options.result_filename or f"{label}-{options.request_rate}qps{concurrency}-{base}-{date}.json"
    folder = options.result_dir or Path()
    folder.mkdir(parents=True, exist_ok=True)
    inputs = [path for path in (options.dataset_path, options.api_key_file) if path is not None]
    return Outputs(lambda: inputs).claim(folder / name, "results", _CODE)


def _describe_run(
    options: argparse.Namespace, model: str, tokenizer: str | None, date: str
) -> dict[str, Any]:
    """Return the keys of vLLM's results that say what was measured, and those of --metadata.

    Args:
        options: The parsed options.
        model: Name of the model.
        tokenizer: Folder of the tokenizer, or None for the server's.
        date: Time of the run.
    """
    return {
        "date": date,
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": tokenizer or model,
        "num_prompts": options.num_prompts,
        **dict(options.metadata),
        "request_rate": "inf" if isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def _write_result(
    options: argparse.Namespace, output: OutputFile, run: Mapping[str, Any], measurement: Measurement
) -> None:
    """Write the results as one line of JSON; with --append-result, after the lines of the file.

    Without --save-detailed the keys with a value for each request are left out. Prints the path on stderr.
    """
    results = measurement.summarise()
    if not options.save_detailed:
        results = {key: entry for key, entry in results.items() if key not in DETAILS}
    before = ""
    if options.append_result and output.path.exists():
        before = read_text_file(output.path, _CODE)
        before += "\n" if before and not before.endswith("\n") else ""
    with output.writing() as file:
        file.write(before + json.dumps({**run, **results}, allow_nan=False) + "\n")
    show_lines(f"results: {output.path}", sys.stderr)
