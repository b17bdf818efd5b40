"""Shell script that checks a prediction on a real deployment: it starts a server of one model copy and measures it.

`nkw plan --bench-script` writes the script. The servers are `nkw serve` for the stack `this`; `vllm serve` of vLLM
0.33.0 for vllm-neuron and nxdi; `optimum-cli neuron serve` of optimum-neuron 0.4; and the server of vLLM 0.6 on
Transformers NeuronX, by the Neuron documentation 2.29. The measurement is `nkw bench serve` for `this`, else `vllm
bench serve` of vLLM 0.33.0; both have the same options and rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from model.config.published import PUBLISHED, list_published
from model.device import chip
from model.errors import ModelError
from model.layers import find_unsupported
from model.plan.cells import format_mesh, format_ms, format_plural, format_ratios
from model.plan.dry import Time
from model.plan.plan import Plan
from model.plan.recommend import Load, Offer, Recommendation
from model.plan.sizes import ModelSizes
from model.plan.stacks import METRICS, Stack
from nkw.targets import LNC_VARIABLE
from nkw.version import version

VLLM = "0.33.0"
"""Version of vLLM whose options the script has; a test compares it with that of the option table."""

_PORT = 8000
_LEAST_REQUESTS, _CYCLES = 64, 10
"""The least requests of a measurement; and the requests for each sequence that a copy decodes together."""

_SERVERS = {
    "this": "nkw serve",
    "vllm-neuron": f"vllm serve of vLLM {VLLM} with the plugin vLLM Neuron",
    "nxdi": f"vllm serve of vLLM {VLLM} on NxD Inference",
    "optimum": "optimum-cli neuron serve of optimum-neuron 0.4",
    "transformers-neuronx": "the server of vLLM 0.6 on Transformers NeuronX",
}
"""The server of each stack in words."""


def script_plan(plan: Plan, config: Path) -> str:
    """Return the text of the script that checks a plan, at the highest request rate that one copy can keep up with.

    Args:
        plan: a plan for an instance, not for an accelerator.
        config: path of the model's config.json or of its folder; the script finds the model from it.

    Raises:
        ModelError: The server of the plan's stack cannot run the mesh or the model.
    """
    placement, request = plan.placement, plan.request
    assert placement.instance is not None, "a server runs on an instance"
    load = Load(1.0, plan.prompt, plan.generate, request.level)
    offer = Offer(
        *(load, placement.instance, placement.lnc, placement.shape, placement.mesh.copies, request.batch),
        *(plan.first_token.served, plan.rate.step.served, plan.rate.step.predicted is not None, plan.price),
    )
    return _write_script(offer, plan.stack, plan.dtype, plan.model, config, offer.copy_requests_per_s)


def script_recommendation(recommendation: Recommendation, config: Path) -> str:
    """Return the text of the script that checks the chosen offer of a recommendation, at the request rate of one copy.

    Args:
        recommendation: a recommendation in which an offer keeps the service level.
        config: path of the model's config.json or of its folder; the script finds the model from it.

    Raises:
        ModelError: The server of the stack cannot run the mesh or the model.
    """
    offer = recommendation.chosen
    assert offer is not None, "an offer keeps the service level"
    rate = offer.utilisation * offer.copy_requests_per_s
    return _write_script(
        offer, recommendation.stack, recommendation.dtype, recommendation.model, config, rate
    )


def _write_script(
    offer: Offer, stack: Stack, dtype: str, model: ModelSizes, config: Path, rate: float
) -> str:
    """Return the text of the script for an offer.

    Args:
        offer: the mesh, batch and predicted times to check.
        stack: the serving stack whose server is started.
        dtype: dtype of weights and activations.
        model: sizes of the model, for the predictions in the comments.
        config: path of the model's config.json or of its folder.
        rate: requests per second that the script sends to the one copy.

    Raises:
        ModelError: The model is a speech model, or the server has no such mesh.
    """
    if model.config.spectrum is not None:
        raise ModelError(
            "--bench-script measures a server that continues texts, and this is a speech model: leave --bench-script "
            "out"
        )
    lines = [
        "#!/usr/bin/env bash",
        f"# Written by nkw {version()}: starts a copy of a model, measures it, and stops it.",
        "# Usage: bash SCRIPT [MODEL], with the folder or the Hugging Face id of the model.",
        "# With URL in the environment, the server there is measured, and none is started.",
        *(f"# {line}".rstrip() for line in _describe_promise(offer, stack, model, rate)),
        "set -euo pipefail",
        *_set_model(config),
        f"url=${{URL:-http://127.0.0.1:{_PORT}}}",
        'if [ -z "${URL:-}" ]; then',
        *(f"  {line}" for line in _start_server(offer, stack, dtype)),
        "fi",
        *_measure(offer, stack, rate),
    ]
    return "\n".join(lines) + "\n"


def _set_model(config: Path) -> Iterator[str]:
    """Yield the lines that set the shell variable `model` to a folder or a Hugging Face id.

    The script's first argument replaces this default. Without a default, because the path is no folder, config.json or
    published config, the script requires the argument.
    """
    if config.parent == PUBLISHED:
        name = quote(list_published()[config.stem].ids[0])
    elif config.is_dir() or config.name == "config.json":
        name = quote(str(config if config.is_dir() else config.parent))
    else:
        yield 'model=${1:?"give the folder or the id of the model"}'
        return
    yield f"model={name}"
    yield "if [ $# -gt 0 ]; then model=$1; fi"


def _start_server(offer: Offer, stack: Stack, dtype: str) -> Iterator[str]:
    """Yield the lines that start the server in the background and wait until it is healthy.

    The server is killed when the script exits.
    """
    if len(chip(offer.instance.target).logical_core_sizes) > 1:
        yield f"export {LNC_VARIABLE}={offer.lnc}"
    command, *options = _list_serve_options(offer, stack, dtype)
    yield f"{command} \\"
    yield from (f"  {option} \\" for option in options)
    yield f"  --port {_PORT} &"
    yield "server=$!"
    yield "trap 'kill \"$server\"' EXIT"
    yield 'until curl --silent --fail --output /dev/null "$url/health"; do'
    yield '  kill -0 "$server" || exit 1'
    yield "  sleep 2"
    yield "done"


def _list_serve_options(offer: Offer, stack: Stack, dtype: str) -> Iterator[str]:
    """Yield the command of the stack's server, then groups of its options; the option for the port is not among them.

    Raises:
        ModelError: The server has no pipeline stages or expert-parallel groups, and the mesh has some.
    """
    shape, length = offer.shape, offer.load.prompt + offer.load.generate
    has_stages, has_groups = stack.name in ("vllm-neuron", "nxdi"), stack.name != "optimum"
    has_groups = has_groups and stack.name != "transformers-neuronx"
    if (shape.pp > 1 and not has_stages) or (shape.ep > 1 and not has_groups):
        raise ModelError(
            f"--bench-script: {_SERVERS[stack.name]} has no mesh of {format_mesh(shape)}; plan with --pp 1"
            + ("" if has_groups else " --ep 1")
        )
    sizes = f"--max-num-seqs {offer.batch}", f"--max-model-len {length}"
    if stack.name == "this":
        yield 'nkw serve "$model"'
        yield f"--backend neuron --target {offer.instance.target}"
        yield f"--tp {shape.tp}" + (f" --ep {shape.ep}" if shape.ep > 1 else "")
        yield " ".join(sizes)
        yield f"--dtype {'float32' if dtype == 'float32' else 'bfloat16'}"
    elif stack.name == "optimum":
        yield 'optimum-cli neuron serve --model "$model"'
        yield f"--tensor_parallel_size {shape.tp} --batch_size {offer.batch} --sequence_length {length}"
        yield "--allow_non_cached_model"
    elif stack.name == "transformers-neuronx":
        yield 'python3 -m vllm.entrypoints.openai.api_server --model "$model"'
        yield f"--device neuron --tensor-parallel-size {shape.tp}"
        yield f"{' '.join(sizes)} --block-size {length}"
        yield f"--dtype {dtype}"
    else:
        yield 'vllm serve "$model"'
        yield f"--tensor-parallel-size {shape.tp}"
        if shape.pp > 1:
            yield f"--pipeline-parallel-size {shape.pp}"
        if shape.ep > 1:
            yield f"--data-parallel-size {shape.ep} --enable-expert-parallel"
        yield " ".join(sizes)
        yield f"--dtype {dtype}"


def _measure(offer: Offer, stack: Stack, rate: float) -> Iterator[str]:
    """Yield the lines of the benchmark command, which sends random prompts to the server.

    Args:
        offer: gives the lengths, the most concurrent requests, and the service level for the goodput.
        stack: selects `nkw bench serve` or `vllm bench serve`.
        rate: requests per second.
    """
    load = offer.load
    if stack.name == "this":
        yield "nkw bench serve \\"
    else:
        yield 'vllm bench serve --model "$model" \\'
    yield '  --backend openai --base-url "$url" --dataset-name random --seed 0 \\'
    yield f"  --random-input-len {load.prompt} --random-output-len {load.generate} --ignore-eos \\"
    yield f"  --num-prompts {max(_LEAST_REQUESTS, _CYCLES * offer.batch)} \\"
    yield f"  --request-rate {rate:.6g} --max-concurrency {offer.batch} \\"
    bounds = {"ttft": load.level.ttft, "tpot": load.level.itl, "e2el": load.level.e2e}
    goodput = " ".join(f"{name}:{bound / 1e6:g}" for name, bound in bounds.items() if bound is not None)
    if goodput:
        yield f"  --goodput {goodput} \\"
    yield "  --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99"


def _describe_promise(offer: Offer, stack: Stack, model: ModelSizes, rate: float) -> Iterator[str]:
    """Yield the predicted values to compare with the measured ones, as lines for comments of the script."""
    load, prompt, step = offer.load, offer.first_token.time, offer.step.time
    yield ""
    yield (
        f"Predicted for {offer.instance.name}: a copy of {format_mesh(offer.shape)} (LNC {offer.lnc}) with up to "
        f"{format_plural(offer.batch, 'sequence')}, a prompt of {load.prompt}, {load.generate} generated;"
    )
    yield f"served by {_SERVERS[stack.name]} (record of {stack.date}), {load.level}."
    if find_unsupported(model.config):
        yield "Times are rooflines, at least; in brackets from the roofline to the least share of the peaks."
    else:
        yield "Ranges in brackets are from the dataflow reading to the serial one."
    yield f"Mean TTFT (ms): {_format_range(prompt)}, without waiting for other requests"
    if load.generate > 1:
        between = prompt * ((offer.prompts - 1) / (load.generate - 1))
        yield f"Mean TPOT (ms): {_format_range(step)} while no other request has its prompt computed,"
        yield f"  {_format_range(step + between)} while all sequences are in use"
    cycle = prompt * offer.prompts + step * (load.generate - 1)
    tokens = offer.batch * load.generate * 1e9
    low, middle, high = (tokens / time for time in (cycle.serial_ns, cycle.program_ns, cycle.dataflow_ns))
    yield f"Output token throughput (tok/s): at most {middle:,.1f} ({low:,.1f}..{high:,.1f}), and at"
    yield f"  {rate:.6g} requests/s {min(rate * load.generate, middle):,.1f}"
    sizes = offer.instance.target, model.total / 1e9, offer.batch, load.prompt
    for metric in METRICS:
        ratios = format_ratios(stack.find_ratios(metric, *sizes))
        yield f"Published over predicted {metric} of this stack on {offer.instance.target}: {ratios}"
    if stack.note:
        yield stack.note
    yield ""


def _format_range(time: Time) -> str:
    """Return the program reading of a time in ms, then the dataflow and serial readings in brackets."""
    return f"{format_ms(time.program_ns)} ({format_ms(time.dataflow_ns)}..{format_ms(time.serial_ns)})"
