"""Options of clients of a server, and of files of requests: of `nkw bench serve`, `nkw chat` and `nkw run-batch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from model.commands.options.readers import (
    burstiness,
    count,
    json_object,
    parse_choices,
    parse_limit,
    parse_pair,
    parse_percentiles,
    request_rate,
    seed,
    share_below_one,
    tokens_or_dataset,
)
from model.loading.shipped import find_model_path
from nkw.options import Rows

BENCH_METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")

ROWS: Rows = {
    "--backend=API": dict(
        metavar="NAME",
        choices=("openai", "vllm", "openai-chat"),
        default="openai",
        help="openai or vllm: completions; openai-chat: chats (default: %(default)s)",
    ),
    "--base-url": dict(metavar="URL", help="the server, instead of --host and --port"),
    "--endpoint": dict(
        metavar="PATH",
        help="route of the requests (default: /v1/completions, or with openai-chat /v1/chat/completions)",
    ),
    "--model=NAME": dict(
        dest="model_name",
        metavar="NAME",
        help="the model to ask for (default: the first model of the server's /v1/models)",
    ),
    "--tokenizer": dict(
        metavar="DIR",
        type=find_model_path,
        help="folder with the tokenizer.json of the model (default: --model if it is a folder or a model that comes "
        "along, else the server's /tokenize)",
    ),
    "--header": dict(
        metavar="NAME=TEXT", type=parse_pair, nargs="+", action="extend", default=[], help="of all requests"
    ),
    "--dataset-name": dict(
        metavar="NAME",
        choices=("random", "custom", "stories"),
        default="random",
        help="random: words at random; custom: --dataset-path; stories: the stories that come along (default: "
        "%(default)s)",
    ),
    "--dataset-path": dict(
        metavar="FILE",
        type=Path,
        help='JSON objects, one on each line, with "prompt" and optional "output_tokens"',
    ),
    "--num-prompts": dict(metavar="N", type=count, default=1000, help="requests (default: %(default)s)"),
    "--input-len": dict(metavar="N", type=count, help="sets --random-input-len"),
    "--output-len": dict(
        metavar="N", type=count, help="new tokens of every dataset (default: its own; of stories 128)"
    ),
    "--random-input-len": dict(
        metavar="N", type=count, default=1024, help="tokens of a random prompt (default: %(default)s)"
    ),
    "--random-output-len": dict(
        metavar="N", type=count, default=128, help="new tokens after it (default: %(default)s)"
    ),
    "--random-range-ratio": dict(
        metavar="R",
        type=share_below_one,
        default=0.0,
        help="both lengths differ from the above by up to this share (default: %(default)g)",
    ),
    "--random-prefix-len": dict(
        metavar="N", type=seed, default=0, help="tokens before all random prompts (default: %(default)s)"
    ),
    "--custom-output-len": dict(
        metavar="N",
        type=tokens_or_dataset,
        default=256,
        help="new tokens of a custom prompt; -1: those of the file (default: %(default)s)",
    ),
    "--disable-shuffle": dict(action="store_true", help="take the prompts of a file in their order"),
    "--no-oversample": dict(action="store_true", help="send no prompt of a file twice"),
    "--skip-chat-template": dict(
        action="store_true", help="accepted: completions get prompts as they are in any case"
    ),
    "--request-rate": dict(
        metavar="R",
        type=request_rate,
        default=float("inf"),
        help="requests a second, at random intervals; inf: all at once (default: inf)",
    ),
    "--burstiness": dict(
        metavar="B",
        type=burstiness,
        default=1.0,
        help="shape of the gamma distribution of intervals; 1 is a Poisson process, less is burstier (default: 1)",
    ),
    "--max-concurrency": dict(metavar="N", type=count, help="requests on their way at once (default: all)"),
    "--num-warmups": dict(
        metavar="N", type=seed, default=0, help="requests before the measurement (default: %(default)s)"
    ),
    "--ready-check-timeout-sec": dict(
        metavar="S", type=seed, default=0, help="wait so long for the server's first answer (default: do not)"
    ),
    "--ignore-eos": dict(
        action=argparse.BooleanOptionalAction,
        help="let answers have all their tokens; not every server takes it (default: with random prompts)",
    ),
    "--extra-body": dict(
        metavar="JSON", type=json_object, default={}, help="further fields of every request"
    ),
    "--goodput": dict(
        metavar="NAME:MS",
        type=parse_limit(GOODPUT_METRICS),
        nargs="+",
        default=[],
        help="count the requests within these limits, such as ttft:500 tpot:50; also e2el",
    ),
    "--percentile-metrics": dict(
        metavar="NAMES",
        type=parse_choices(BENCH_METRICS),
        default="ttft,tpot,itl,e2el",
        help="the metrics to print, also client_queue_time and e2el_including_client_queue (default: %(default)s)",
    ),
    "--metric-percentiles": dict(
        metavar="NUMBERS",
        type=parse_percentiles,
        default="50,90,99",
        help="percentiles of these metrics (default: %(default)s)",
    ),
    "--save-result": dict(action="store_true", help="write the results as JSON with vLLM's keys"),
    "--save-detailed": dict(action="store_true", help="with the times, lengths and texts of every request"),
    "--append-result": dict(action="store_true", help="add the results to the file as a further line"),
    "--result-dir": dict(metavar="DIR", type=Path, help="of the file (default: this folder)"),
    "--result-filename": dict(
        metavar="FILE", help="name of the file (default: made of label, rate, concurrency, model and time)"
    ),
    "--label": dict(metavar="TEXT", help="of the results (default: --backend)"),
    "--metadata": dict(
        metavar="KEY=TEXT",
        type=parse_pair,
        nargs="+",
        action="extend",
        default=[],
        help="further keys of the results",
    ),
    "-i|--input-file": dict(
        metavar="FILE",
        type=Path,
        required=True,
        help="JSON objects, one on each line, with custom_id, method, url and body",
    ),
    "-o|--output-file": dict(
        metavar="FILE", type=Path, required=True, help="the answers, one on each line, once all are there"
    ),
    "--url=API": dict(
        dest="url",
        metavar="URL",
        help="the server's API (default: http://127.0.0.1:8000/v1, without --model)",
    ),
    "--model=LOCAL": dict(
        metavar="DIR",
        type=find_model_path,
        help="instead, a Hugging Face folder, or a model that comes along, in this process",
    ),
    "--model-name": dict(
        metavar="NAME", help="the server's model to ask for (default: the first of its /v1/models)"
    ),
    "--system-prompt": dict(metavar="TEXT", help="the system message before the conversation"),
    "-q|--quick": dict(metavar="MESSAGE", help="answer this message and exit"),
    "--max-tokens": dict(
        metavar="N", type=count, help="tokens of an answer (default: as many as the context has room for)"
    ),
    "--stats": dict(action="store_true", help="print time to first token and tokens a second of each answer"),
    "--disable-tqdm": dict(action="store_true", help="show no progress"),
}
