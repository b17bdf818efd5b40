"""The commands of simulator and model, for the help of the command lines; imports nothing of either."""

from __future__ import annotations

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


class Verb(NamedTuple):
    """One command: what it does, words that follow the name of the command line as an example, its exit statuses."""

    sentence: str
    example: str
    ends: str


_DONE = "0 done, 2 wrong input"
MODEL_VERBS = {
    "generate": Verb(
        "continue a prompt, check every token, predict the time", "generate --max-new-tokens 8", _DONE
    ),
    "transcribe": Verb(
        "transcribe a recording, check it, predict the time",
        "transcribe speech.wav --model whisper-tiny",
        _DONE,
    ),
    "serve": Verb(
        "answer OpenAI's HTTP API with a model, many requests at once",
        "serve --port 8000 --target trn2 --tp 2",
        _DONE,
    ),
    "compile": Verb(
        "compile the graphs of an engine for NeuronCores, or list them",
        "compile stories --list --buckets 'sequences=1 tokens=64 context=256' --max-model-len 256",
        _DONE,
    ),
    "peer": Verb(
        "compare a folder with what one of AWS Neuron's own inference libraries makes of it",
        "peer FOLDER --with transformers-neuronx --prompt 'Once upon a time'",
        _DONE,
    ),
    "top": Verb("show what a server does", "top --url http://127.0.0.1:8000", _DONE),
    "plan": Verb(
        "what a model needs and would do on a chip, from its config.json",
        "plan model/pretrained --tp 2",
        _DONE,
    ),
    "traffic": Verb(
        "what a stream of users would see, from a config.json",
        "traffic model/pretrained --users 8 --prompt-lengths 64 --output-lengths 32",
        _DONE,
    ),
}
"""The model's commands by name, in the order of the help of `nkw`."""

VERBS = {
    "run": Verb(
        "run a script, or a kernel by name, with `import nki` bound to the simulator",
        "run --target trn1 script.py --size 3",
        _RUN_ENDS,
    ),
    "time": Verb(
        "run a script and print the predicted time of every kernel launch", f"time {_KERNEL}", _TIME_ENDS
    ),
    "memory": Verb(
        "run a script and print what every kernel launch has in SBUF and PSUM", f"memory {_KERNEL}", _RUN_ENDS
    ),
    "check": Verb(
        "run a script and look for faults in every kernel launch",
        f"check {_KERNEL}",
        "0 no findings, 1 findings, 2 nothing could be checked, 3 the script or a kernel by name failed before its "
        "end (findings until then are printed)",
    ),
    "verify": Verb(
        "judge a kernel by its reference: right, clean, how fast, and what bounds it",
        "verify nki_kernels:rmsnorm 'f32[128,512]' 'f32[1,512]' 1e-5",
        "0 right and clean, 1 wrong or with findings, 2 the command could not run, 3 no verdict: kernel or reference "
        "failed or ended",
    ),
    "tune": Verb(
        "search the values of a kernel's parameters with which it is predicted to be fastest",
        "tune nki_kernels:matmul 'f32[8,64]' 'f32[64,8]' --trials 9",
        "0 done, 1 the kernel breaks a rule with its defaults, 2 the command could not run, 3 its code failed; "
        "an interrupt ends the search with "
        "the best so far",
    ),
    "bundle": Verb(
        "write a folder that carries kernels to a chip: sources, inputs, expected results, predicted times, run.py",
        "bundle nki_kernels:matmul 'f32[8,64]' 'f32[64,8]' --out m8",
        "0 written, 1 the kernel breaks a rule, 2 nothing could be bundled, 3 its code failed or ended",
    ),
    "compare": Verb(
        "compare what a bundle brought back from a chip with what was expected and predicted",
        "compare m8",
        "0 all cases ran and agree, 1 something differs or failed, 2 there is no result that can be read",
    ),
    "lint": Verb(
        "look for Python that the NKI compiler refuses, without running it",
        "lint script.py",
        "0 no errors (warnings may be printed), 1 errors, 2 nothing could be read",
    ),
    "doctor": Verb(
        "print what is installed, what works and how to mend the rest",
        "doctor",
        "0 everything works, 1 something is to be mended, 2 the document cannot be written",
    ),
    "explain": Verb(
        "print what a code of a message means, with an example and its source; also codes of neuronx-cc",
        "explain NKW-UNWRITTEN",
        "0 done, 2 no such code",
    ),
    "fidelity": Verb(
        "compare predicted with published times; needs a checkout of the repository",
        "fidelity --quick --family instr",
        "0 done, 2 no checkout, or a file that cannot be used",
    ),
    "calibrate": Verb(
        "show which numbers of the hardware records measured times contradict",
        "calibrate measured.json --out overlay.json",
        "0 done, 2 nothing that can be used, 3 a kernel ended the process",
    ),
    "targets": Verb("print what is simulated of each chip", "targets", "0 done"),
}
"""The simulator's commands by name, in the order of the help."""
