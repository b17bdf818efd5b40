"""Runs a job with vLLM for tools/peer_vllm.py, in the environment that has vLLM.

    python -I peer_vllm_worker.py JOB ANSWER

JOB is the JSON file of a `tools.peer_vllm.Job`, ANSWER the file to write with a `tools.peer_vllm.Answer`. Nothing of
this project is imported here. The exit status is 3 if this Python has no vllm.
"""

import json
import os
import platform
import sys
import time
from statistics import median

NO_VLLM = 3
NULL_PAGE = 1  # vLLM keeps one block that no request gets

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is asked for its time in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(job_path: str, answer_path: str) -> int:
    """Run a job, write its answer, and return the exit status: 0, or 3 if vllm cannot be imported."""
    os.environ.update(ENVIRONMENT)
    try:
        import torch
        import vllm
    except ImportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return NO_VLLM
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    arguments = dict(job["arguments"])
    pages = arguments.pop("num_pages") + NULL_PAGE
    llm = vllm.LLM(**arguments, enforce_eager=True, num_gpu_blocks_override=pages)
    answer = {
        "versions": {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
        },
        "cases": [computed(vllm, llm, case) for case in job["cases"]],
        "load": None if job["load"] is None else timed(vllm, llm, job["load"]),
    }
    with open(answer_path, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    return 0


def computed(vllm, llm, case):
    """Return the generated tokens and the number of cached prompt tokens of each request of a case.

    Raises RuntimeError if the prefix cache cannot be emptied before.
    """
    if not llm.reset_prefix_cache():
        raise RuntimeError("requests of the case before hold pages")
    params = vllm.SamplingParams(temperature=0, max_tokens=case["max_tokens"], ignore_eos=True)
    outputs = []
    for wave in case["waves"]:
        prompts = [{"prompt_token_ids": ids} for ids in wave]
        outputs += llm.generate(prompts, params, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }


def timed(vllm, llm, load):
    """Return counts and times of vLLM's scheduler alone, with a model that always chooses token 1.

    Times are in us: the mean of submitting a request, the medians of scheduling and of finishing a step.
    """
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    core = llm.llm_engine.engine_core.engine_core
    scheduler, clock = core.scheduler, time.perf_counter_ns
    llm.reset_prefix_cache()
    params = vllm.SamplingParams(temperature=0, max_tokens=load["max_tokens"], ignore_eos=True)
    params.update_from_generation_config({}, 0)
    began, requests = clock(), {}
    for number, ids in enumerate(load["prompts"]):
        request = Request(str(number), ids, params, None, block_hasher=core.request_block_hasher)
        requests[request.request_id] = request
        scheduler.add_request(request)
    submit = clock() - began
    schedule, finish, tokens = [], [], 0
    while scheduler.has_unfinished_requests():
        began = clock()
        batch = scheduler.schedule()
        scheduled = clock()
        names = list(batch.num_scheduled_tokens)
        done = [requests[name].num_computed_tokens >= requests[name].num_tokens for name in names]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[1] if is_sampled else [] for is_sampled in done],
        )
        computed_at = clock()
        scheduler.update_from_output(batch, output)
        finish.append(clock() - computed_at)
        schedule.append(scheduled - began)
        tokens += batch.total_num_scheduled_tokens
    return {
        "steps": len(schedule),
        "tokens": tokens,
        "submit_us": submit / 1e3 / len(requests),
        "schedule_us": median(schedule) / 1e3,
        "finish_us": median(finish) / 1e3,
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
