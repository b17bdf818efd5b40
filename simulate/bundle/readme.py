"""README of a bundle, for readers who do not know this project."""

from __future__ import annotations

from simulate.bundle.manifest import ARRAYS, LAYER, Bundle, Case

_TEXT = """# Kernels for {target}

This folder was written by NKI Workbench, which runs, checks and times NKI kernels without a chip. It holds {count}
to be run on a chip once, so that what was computed and predicted here can be compared with what the chip does. Nothing
of NKI Workbench is needed: only Python 3.10 or later, numpy and AWS's Neuron SDK.

**Nothing in this folder has run on a chip.** `run.py` was written after AWS's documentation; the top of the file names
the page and the SDK release behind each call.

## What to do

On an instance with a {target} chip ({instances}), in the Python environment of the Neuron SDK, where
`python -c "import {imports}"` works:

```sh
{command}
```

{weights}A case takes a minute or two, most of it for the compiler. The command prints what becomes of the cases and
writes `result/`, also where something fails: failures are results, too. Then take the whole folder home, with
`result/`:

```sh
tar czf result.tar.gz --exclude=build .
```

There, `nkw compare FOLDER` tells whether the chip computed the same, and how the times compare.

`python run.py --only NAME` runs one case, `--help` shows more. Where nrtpy is installed in a Python environment of its
own, `--nrtpy PYTHON` takes the times on the device; without it they are taken by the clock of the host and include the
start of the kernel and the copies to the device and back. Profiles are taken where neuron-explorer or neuron-profile is
installed (aws-neuronx-tools).

## What it expects

| | |
|---|---|
| instance | {instances} |
| kernels import | `{imports}`, written for NKI {nki} (SDK {sdk}) |
| Python | {python} |
| further packages | {packages} |

Another release is no reason to stop: what then fails is recorded.

## What is here

| file | what it is |
|---|---|
| `run.py` | the program to run; Python's standard library and numpy only{second} |
| `bundle.json` | the cases: arguments, outputs, tolerances, predicted times, digests |
| `sources/` | the kernels as they are, with what they import |
| `inputs/`, `expected/` | arrays; bfloat16 and float8 as the integers of their bits |
| `result/` | written by `run.py`: `result.json`, `values/`, `logs/`, `profiles/`, `build/` |

## The cases

{order}Predicted times in us, from the shortest to the longest reading of the instruction stream, without starting the
kernel.

| {columns} | kernel | arguments | cores | predicted | instructions |
|---|---|---|---|---|---|
{cases}
"""

_ORDER = """The kernel launches of one layer of a model, in their order: first those of a prompt, then those of one more
token. Each is given what the launches before it returned where the bundle was made: an error does not pass on.

"""

_WEIGHTS = """FOLDER holds the model's weights: {files}, with the SHA-256 that `bundle.json` has.

"""

_CHAIN = """Every launch of {prompts} is made in its order, with what the launches before it returned there.

"""

_PROGRAMS = """The kernel launches of a generation, each kernel with the shapes of its arguments once. `bundle.json`
lists all of them in their order, with what each is given: weights, what comes with a step, what earlier ones return.

"""


def make_readme(bundle: Bundle) -> str:
    """Return the README of a bundle, in Markdown: what to run on the instance, and which cases there are."""
    expects, generation = bundle.expects, bundle.generated
    count = len(bundle.cases)
    shown = [case for case in bundle.cases if not case.like]
    weights = ""
    has_files = bundle.weights is not None and bool(bundle.weights.files)
    if bundle.weights is not None and has_files:
        weights += _WEIGHTS.format(files=", ".join(f"`{file.name}`" for file in bundle.weights.files))
    if generation is not None:
        prompts = len(generation.prompts)
        weights += _CHAIN.format(prompts="a prompt" if prompts == 1 else f"{prompts} prompts")
    return _TEXT.format(
        target=bundle.target,
        order=_ORDER if bundle.bundle_kind == LAYER else _PROGRAMS if generation is not None else "",
        command="python run.py" + (" --weights FOLDER" if has_files else ""),
        weights=weights,
        second="; so are the other files beside it" if bundle.weights is not None else "",
        columns="case" if generation is None else "first launch",
        count=f"{count} kernel launch{'' if count == 1 else 'es'}",
        instances=", ".join(expects.instances) or "any",
        imports=" and ".join(sorted({case.imports for case in bundle.cases})) or "nki",
        nki=expects.nki,
        sdk=expects.sdk,
        python=expects.python,
        packages=", ".join(expects.packages) or "none",
        cases="\n".join(map(_make_row, shown)),
    )


def _make_row(case: Case) -> str:
    """Return the row of a case in the Markdown table of cases."""
    arguments = " ".join(
        f"{argument.dtype}[{','.join(map(str, argument.shape))}]"
        if argument.argument_kind in ARRAYS
        else f"`{argument.text}`"
        for argument in case.arguments
    )
    low, high = (f"{time_ns / 1e3:.1f}" for time_ns in case.predicted.bracket_ns)
    kernel = f"{case.module}.{case.function}"
    return (
        f"| {case.name} | {kernel} | {arguments} | {case.lnc} | {low} to {high} | {case.instructions.count} |"
    )
