"""Commands of both command lines, `nkw` and the simulator's: their help, and where their options and functions are.

`nkw.commands` imports the modules of a command when the command is asked for, so this module imports none of them. A
function or an object is named by a text MODULE:NAME.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_KERNEL = "nki_kernels:matmul 'f32[128,128]' 'f32[128,512]'"
_RUN_ENDS = (
    "the script's; 1 if it or a kernel failed, 2 if the command could not run, "
    "3 if a kernel's code ended the launch, or failed in a kernel by name"
)
_TIME_ENDS = (
    "the script's; 1 if it or a kernel failed, or --fail-above found a longer time, "
    "2 if the command could not run, 3 if a kernel's code ended the launch, or failed in a kernel by name"
)
_DONE = "0 done, 2 wrong input"
_ANSWERED = "0 done, 1 no request was answered, 2 wrong input"


class Verb(NamedTuple):
    """One command.

    Attributes:
        sentence: What the command does, for the list of commands.
        example: Words that follow the name of the command line.
        ends: Exit statuses, for the help.
        function: MODULE:NAME of the function that runs the command; it takes the options and returns the exit status.
        options: MODULE:NAME of the options, a tuple of `nkw.options.Option`; empty for a command that reads its words
        itself.
        description: First paragraph of the command's help; the sentence if empty.
        verbs: Commands of a second word, by name; such a command has no function and no options of its own.
    """

    sentence: str
    example: str
    ends: str
    function: str
    options: str = ""
    description: str = ""
    verbs: Mapping[str, Verb] | None = None


SIMULATOR = "simulate.cli:main"
"""The simulator's command line."""
IS_MODEL = "model.commands.bundle.arguments:names_a_model"
"""Whether words after `nkw bundle` ask for a model and not for a kernel."""
OVERLAY = "model.commands.overlay:apply_overlay"
"""Applies --hardware of a command of the model."""

VLLM_OPTIONS = "model.commands.options.vllm:add_vllm_options"
"""Adds options of vLLM to the parser of a command of the model."""

BENCH_VERBS = {
    "serve": Verb(
        "measure a server of OpenAI's API: latencies, throughput, goodput",
        "serve --dataset-name stories --num-prompts 64 --request-rate 4",
        _ANSWERED,
        function="model.commands.bench.command:bench_serve_command",
        options="model.commands.bench.arguments:SERVE_OPTIONS",
        description="Send requests to any server of OpenAI's API, at a rate or all at once, and print what vllm bench "
        "serve prints: times to the first token (TTFT), per output token (TPOT), between tokens (ITL) and end to end "
        "(E2EL), throughput and goodput.",
    ),
}
"""Commands after `nkw bench`."""
MODEL_VERBS = {
    "generate": Verb(
        "continue a prompt, check every token, predict the time",
        "generate --max-new-tokens 8",
        _DONE,
        function="model.commands.generate.command:generate_command",
        options="model.commands.generate.arguments:OPTIONS",
        description="Continue a prompt with a language model whose layers are NKI kernels: the shipped story model, or "
        "the folder of any family that writes text (docs/families.md). Every token is compared with a plain numpy "
        "model, and the time on each chip is predicted.",
    ),
    "transcribe": Verb(
        "transcribe a recording, check it, predict the time",
        "transcribe speech.wav --model whisper-tiny",
        _DONE,
        function="model.commands.transcribe.command:transcribe_command",
        options="model.commands.transcribe.arguments:OPTIONS",
        description="Transcribe a recording with a Whisper whose layers are NKI kernels, in windows of 30 seconds one "
        "after another, each on its own. Every token is compared with a plain numpy model, and the time on "
        "each chip is predicted.",
    ),
    "imagine": Verb(
        "draw an image of a text, check it, predict the time",
        "imagine 'a red circle above a blue square' --out picture.png",
        _DONE,
        function="model.commands.imagine.command:imagine_command",
        options="model.commands.imagine.arguments:OPTIONS",
        description="Draw images with a diffusion model whose layers are NKI kernels: the shipped model of coloured "
        "shapes, or a folder in the layout of diffusers. Text encoder, denoiser and autoencoder are compared with a "
        "plain numpy model, and the time of each on each chip is predicted.",
    ),
    "serve": Verb(
        "answer OpenAI's HTTP API with a model, many requests at once",
        "serve --port 8000 --target trn2 --tp 2",
        _DONE,
        function="model.commands.serve.command:serve_command",
        options="model.commands.serve.arguments:OPTIONS",
        description="Serve a model with OpenAI's HTTP API: completions and chats of many clients, computed together by "
        "NKI kernels on simulated cores or NeuronCores. SIGTERM or Ctrl-C finishes what was begun; a second "
        "one stops.",
    ),
    "chat": Verb(
        "talk with a model: a server's, or a folder's in this process",
        "chat --model stories --quick 'Once upon a time'",
        _DONE,
        function="model.commands.chat.command:chat_command",
        options="model.commands.chat.arguments:OPTIONS",
        description="Talk with the model of any server of OpenAI's API, or with a folder's model in this process. "
        "/reset starts a new conversation, /exit ends the command, and Ctrl-C ends an answer.",
    ),
    "run-batch": Verb(
        "answer a file of requests in the format of OpenAI's batches",
        "run-batch -i requests.jsonl -o answers.jsonl",
        _DONE,
        function="model.commands.run_batch.command:run_batch_command",
        options="model.commands.run_batch.arguments:OPTIONS",
        description="Answer the completions and chats of a JSONL file in this process, with the checks of nkw serve. "
        "Each line gets an answer or an error. The output appears once it is whole; a run that was interrupted "
        "continues if the same command is given again.",
    ),
    "quantize": Verb(
        "write a model whose weights have fewer bits, and report what it costs",
        "quantize stories --scheme fp8 --out stories-fp8",
        _DONE,
        function="model.commands.quantize.command:quantize_command",
        options="model.commands.quantize.arguments:OPTIONS",
        description="Quantise the linear weights of a folder layer by layer, in numpy: to fp8, int8, int4 or MX, "
        "rounded to nearest, by GPTQ, AWQ, SmoothQuant or LLM.int8. The report has bytes, losses on held-out texts, "
        "errors by layer, and predicted step times on each chip. With --plan nothing is written: sizes and times of "
        "a config.",
    ),
    "compile": Verb(
        "compile the graphs of an engine for NeuronCores, or list them",
        "compile stories --list --buckets 'sequences=1 tokens=64 context=256' --max-model-len 256",
        _DONE,
        function="model.commands.compile.command:compile_command",
        options="model.commands.compile.arguments:OPTIONS",
        description="Compile the graphs of an engine for NeuronCores: every step that its buckets allow. Without AWS "
        "Neuron's packages the graphs are counted, and what is missing is said. Written to the vendor's "
        "documentation; it has not run on a chip.",
    ),
    "peer": Verb(
        "compare a folder with what one of AWS Neuron's own inference libraries makes of it",
        "peer FOLDER --with transformers-neuronx --prompt 'Once upon a time'",
        _DONE,
        function="model.commands.peer.command:peer_command",
        options="model.commands.peer.arguments:OPTIONS",
        description="Run a folder and prompts through one of AWS Neuron's own inference libraries, where it is "
        "installed, and compare tokens and logits with ours. Written to the vendor's documentation; it has "
        "not run on a chip.",
    ),
    "top": Verb(
        "show what a server does",
        "top --url http://127.0.0.1:8000",
        _DONE,
        function="model.commands.top.command:top_command",
        options="model.commands.top.arguments:OPTIONS",
        description="Requests, pages, tokens and times of a server that nkw serve runs.",
    ),
    "bench": Verb(
        "measure a server; without a further word, list what can be measured",
        "bench serve --dataset-name stories --num-prompts 64",
        _ANSWERED,
        function="",
        verbs=BENCH_VERBS,
    ),
    "plan": Verb(
        "what a model needs and would do on a chip, from its config.json",
        "plan model/pretrained --tp 2",
        "0 done, 1 the batch does not fit there, or no instance keeps the load, 2 wrong input",
        function="model.commands.plan.command:plan_command",
        options="model.commands.plan.arguments:OPTIONS",
        description="From a config.json alone: parameters, bytes, what fits where, and the predicted times of a prompt "
        "and of a decode step, composed of dry runs of this project's kernels.",
    ),
    "traffic": Verb(
        "what a stream of users would see, from a config.json",
        "traffic model/pretrained --users 8 --prompt-lengths 64 --output-lengths 32",
        _DONE,
        function="model.commands.traffic.command:traffic_command",
        options="model.commands.traffic.arguments:OPTIONS",
        description="The scheduler of the engine serves requests on the clock of predicted steps: times to first "
        "token, between tokens and end to end, throughput, goodput, pages, and the rate at which the service "
        "level breaks. Of a diffusion model: batches of images, waiting, latencies, images a second and prices.",
    ),
}
"""The model's commands by name, in the order of the help of `nkw`."""

SIMULATOR_VERBS = {
    "run": Verb(
        "run a script, or a kernel by name, with `import nki` bound to the simulator",
        "run --target trn1 script.py --size 3",
        _RUN_ENDS,
        function="simulate.commands.run:run",
        options="simulate.options:RUN",
    ),
    "time": Verb(
        "run a script and print the predicted time of every kernel launch",
        f"time {_KERNEL}",
        _TIME_ENDS,
        function="simulate.commands.time:time",
        options="simulate.options:TIME",
    ),
    "memory": Verb(
        "run a script and print what every kernel launch has in SBUF and PSUM",
        f"memory {_KERNEL}",
        _RUN_ENDS,
        function="simulate.commands.memory:memory",
        options="simulate.options:MEMORY",
    ),
    "check": Verb(
        "run a script and look for faults in every kernel launch",
        f"check {_KERNEL}",
        "0 no findings, 1 findings, 2 nothing could be checked, 3 the script or a kernel by name failed "
        "before its end (findings until then are printed)",
        function="simulate.commands.check:check",
        options="simulate.options:CHECK",
    ),
    "verify": Verb(
        "judge a kernel by its reference: right, clean, how fast, and what bounds it",
        "verify nki_kernels:rmsnorm 'f32[128,512]' 'f32[1,512]' 1e-5",
        "0 right and clean, 1 wrong or with findings, 2 the command could not run, 3 no verdict: kernel or "
        "reference failed or ended",
        function="simulate.verification.command:verify_command",
        options="simulate.options:VERIFY",
    ),
    "tune": Verb(
        "search the values of a kernel's parameters with which it is predicted to be fastest",
        "tune nki_kernels:matmul 'f32[8,64]' 'f32[64,8]' --trials 9",
        "0 done, 1 the kernel breaks a rule with its defaults, 2 the command could not run, 3 its code "
        "failed; an interrupt ends the search with the best so far",
        function="simulate.tune.command:tune",
        options="simulate.options:TUNE",
    ),
    "bundle": Verb(
        "write a folder that carries kernels to a chip: sources, inputs, expected results, predicted times, "
        "run.py",
        "bundle nki_kernels:matmul 'f32[8,64]' 'f32[64,8]' --out m8",
        "0 written, 1 the kernel breaks a rule, 2 nothing could be bundled, 3 its code failed or ended",
        function="simulate.bundle.command:bundle_command",
        options="simulate.options:BUNDLE",
    ),
    "compare": Verb(
        "compare what a bundle brought back from a chip with what was expected and predicted",
        "compare m8",
        "0 all cases ran and agree, 1 something differs or failed, 2 there is no result that can be read",
        function="simulate.bundle.command:compare_command",
        options="simulate.options:COMPARE",
    ),
    "lint": Verb(
        "look for Python that the NKI compiler refuses, without running it",
        "lint script.py",
        "0 no errors (warnings may be printed), 1 errors, 2 nothing could be read",
        function="simulate.check.commands:lint",
        options="simulate.options:LINT",
    ),
    "doctor": Verb(
        "print what is installed, what works and how to mend the rest",
        "doctor",
        "0 everything works, 1 something is to be mended, 2 the document cannot be written",
        function="simulate.doctor:doctor",
        options="simulate.options:DOCTOR",
    ),
    "explain": Verb(
        "print what a code of a message means, with an example and its source; also codes of neuronx-cc",
        "explain NKW-UNWRITTEN",
        "0 done, 2 no such code",
        function="simulate.explain.command:explain",
        options="simulate.options:EXPLAIN",
    ),
    "fidelity": Verb(
        "compare predicted with published times; needs a checkout of the repository",
        "fidelity --quick --family instr",
        "0 done, 2 no checkout, or a file that cannot be used",
        function="simulate.commands.fidelity:fidelity",
    ),
    "calibrate": Verb(
        "show which numbers of the hardware records measured times contradict",
        "calibrate measured.json --out overlay.json",
        "0 done, 2 nothing that can be used, 3 a kernel ended the process",
        function="simulate.calibrate.command:calibrate_command",
        options="simulate.options:CALIBRATE",
    ),
    "targets": Verb(
        "print what is simulated of each chip",
        "targets",
        "0 done",
        function="simulate.hardware.command:targets",
        options="simulate.options:TARGETS_OPTIONS",
    ),
}
"""The simulator's commands by name, in the order of the help."""

MODEL_BUNDLE = Verb(
    SIMULATOR_VERBS["bundle"].sentence,
    "bundle stories --layer 3 --out layer-3",
    _DONE,
    function="model.commands.bundle.command:bundle_command",
    options="model.commands.bundle.arguments:OPTIONS",
    description="Write a folder that carries a model to a chip: every kernel launch of a generation, with expected "
    "results, tokens and predicted times; the weights are taken from a folder there. With --layer, "
    "every launch of one layer, in a prompt and in the token behind it, with its weights. `nkw bundle` "
    "with MODULE:NAME or FILE.py:NAME carries kernels.",
)
"""`nkw bundle` for a model or a layer of it."""
