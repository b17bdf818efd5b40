"""The kinds of cases: each writes sound files into a folder, spoils some of them, and gives a command line to run."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy

import benchmarks.fidelity.__main__ as fidelity
from model.config.published import PUBLISHED
from model.families import FAMILIES as MODEL_TYPES
from nkw import commands as model_cli
from simulate import cli as simulate_cli
from tests.hostile import mutate
from tests.hostile.judge import Case
from tests.model.family_folders import write_family
from tests.model.folders import write_folder
from tests.model.random_families import FAMILIES

KERNELS = Path(__file__).resolve().parents[2] / "nki_kernels"
INDEX = "model.safetensors.index.json"
_FILES = ("config.json", "tokenizer.json", "model.safetensors", "generation_config.json", INDEX)
_ROPES = ("linear", "dynamic", "llama3", "yarn")
_ROPE_FIELDS = (
    "factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast beta_slow mscale "
    "mscale_all_dim attention_factor rope_theta"
).split()

Maker = Callable[[random.Random, Path], Case]


def _generate(name: str, draw: random.Random, folder: Path, *words: str, backend: str = "") -> Case:
    used = backend or ("numpy" if draw.random() < 0.9 else "simulate")
    line = [
        "generate",
        "--model",
        "m",
        "--backend",
        used,
        "--max-new-tokens",
        "3",
        "--json",
        "out.json",
        *words,
    ]
    return Case(name, model_cli.main, line, json_output=folder / "out.json")


def config(draw: random.Random, folder: Path) -> Case:
    """Build a case of generate with a spoilt config.json."""
    path = write_folder(folder / "m") / "config.json"
    path.write_bytes(mutate.document(draw, json.loads(path.read_text())))
    return _generate("config", draw, folder)


def family(draw: random.Random, folder: Path) -> Case:
    """Build a case of generate with a spoilt config.json or spoilt weights of a random configuration."""
    model = write_family(folder / "m", draw.choice(FAMILIES), draw.randrange(1000))
    path = model / draw.choice(("config.json", "config.json", "model.safetensors", "generation_config.json"))
    content = path.read_bytes()
    if path.suffix == ".json":
        path.write_bytes(mutate.document(draw, json.loads(content)))
    else:
        path.write_bytes(mutate.safetensors(draw, content))
    return _generate("family", draw, folder)


def chat(draw: random.Random, folder: Path) -> Case:
    """Build a case of a chat with a spoilt tokenizer_config.json or a template that asks for forbidden names."""
    model = write_folder(folder / "m")
    template = draw.choice(
        (
            "{{ messages[0].content }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ self.__init__.__globals__ }}",
            "{{ lipsum.__globals__['os'].system('touch pwned') }}",
            "{{ ('{0.__class__}').format(messages) }}",
            "{{ messages | map(attribute='__class__') | list }}",
            "{{ 'x' * 10 ** 11 }}",
            "{% for a in range(10 ** 5) %}{{ 'y' * 10 ** 5 }}{% endfor %}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{{ '%10000000000d' % 1 }}",
            "{% include '/etc/passwd' %}",
            "{{ messages.clear() }}",
            draw.choice(mutate.WORDS),
        )
    )
    sound = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    spoilt = draw.random() < 0.5
    (model / "tokenizer_config.json").write_bytes(
        mutate.document(draw, sound) if spoilt else json.dumps(sound).encode()
    )
    return _generate("chat", draw, folder, "--chat", "--prompt", "Hi")


def rope(draw: random.Random, folder: Path) -> Case:
    """Build a case of generate with numbers of rotary positions that overflow float64."""
    scaling: dict[str, object] = {"rope_type": draw.choice(_ROPES), "factor": draw.choice(mutate.FLOATS)}
    for name in draw.sample(_ROPE_FIELDS, draw.randint(1, 5)):
        scaling[name] = draw.choice((*mutate.FLOATS, *mutate.NUMBERS[:8], 2.0, 64))
    field = draw.choice(("rope_scaling", "rope_parameters"))
    write_folder(folder / "m", **{field: scaling}, rope_theta=draw.choice((10000.0, *mutate.FLOATS)))
    return _generate("rope", draw, folder)


def tokenizer(draw: random.Random, folder: Path) -> Case:
    """Build a case of generate with a spoilt tokenizer.json."""
    path = write_folder(folder / "m") / "tokenizer.json"
    document = json.loads(path.read_text())
    replacements = {
        "normalizer": [
            {"type": "Precompiled", "precompiled_charsmap": draw.choice(("", "AAAA", "/////w=="))},
            {"type": "Prepend", "prepend": draw.choice(("", "a"))},
            {"type": "Replace", "pattern": {"String": draw.choice(("", "o"))}, "content": draw.choice(mutate.WORDS)},
        ],
        "pre_tokenizer": [{"type": "FixedLength", "length": draw.choice((0, 1, 2**40))}, None],
        "post_processor": [
            {"type": "BertProcessing", "sep": ["a", draw.choice((5, 300, 2**32 - 1))], "cls": ["b", 1]},
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}], "pair": [],
             "special_tokens": draw.choice(({}, {"<x>": {"id": "<x>", "ids": [2**31], "tokens": ["<x>"]}}))},
        ],
        "decoder": [{"type": "Strip", "content": "a", "start": draw.choice((0, 2**40)), "stop": 2**40}, None],
        "model": [
            {"type": "Unigram", "vocab": draw.choice(([], [["a", -1.0]], [["a", 1e308]])), "unk_id": None},
            {"type": "WordLevel", "vocab": {"a": draw.choice((0, 299, 300))}, "unk_token": "<unk>"},
        ],
    }  # fmt: skip
    if draw.random() < 0.5:
        section = draw.choice(list(replacements))
        document[section] = draw.choice(replacements[section])
        path.write_text(json.dumps(document))
    else:
        path.write_bytes(mutate.document(draw, document))
    return _generate(
        "tokenizer", draw, folder, "--prompt", draw.choice(("Once", "é", "\x00", " ", "a" * 100))
    )


def weights(draw: random.Random, folder: Path) -> Case:
    """Build a case of generate with a spoilt file of weights."""
    path = write_folder(folder / "m") / "model.safetensors"
    path.write_bytes(mutate.safetensors(draw, path.read_bytes()))
    return _generate("weights", draw, folder)


def values(draw: random.Random, folder: Path) -> Case:
    """Build a case of generate with weights that are no numbers or overflow."""
    path = write_folder(folder / "m") / "model.safetensors"
    weights = safetensors.numpy.load_file(path)
    with np.errstate(all="ignore"):
        for name in draw.sample(sorted(weights), draw.randint(1, 4)):
            weights[name] = weights[name] * np.float32(
                draw.choice((0, 1e30, 1e38, -1e38, 1e-45, np.inf, np.nan))
            )
    safetensors.numpy.save_file(weights, path)
    return _generate("values", draw, folder, backend=draw.choice(("numpy", "simulate")))


def shards(draw: random.Random, folder: Path) -> Case:
    """Build a case of generate with a spoilt index of shards."""
    model = write_folder(folder / "m")
    weights = safetensors.numpy.load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    where = {}
    for number in (0, 1):
        shard = {name: weights[name] for name in sorted(weights)[number::2]}
        safetensors.numpy.save_file(shard, model / f"part-{number}.safetensors")
        where |= dict.fromkeys(shard, f"part-{number}.safetensors")
    (model / INDEX).write_bytes(mutate.document(draw, {"metadata": {}, "weight_map": where}))
    return _generate("shards", draw, folder)


def special(draw: random.Random, folder: Path) -> Case:
    """Build a case of generate with a pipe, a device, a folder or a broken link instead of a file."""
    path = write_folder(folder / "m") / draw.choice(_FILES)
    put_special(draw, path)
    return _generate("special", draw, folder)


def put_special(draw: random.Random, path: Path) -> None:
    """Replace a file by something that is none."""
    path.unlink(missing_ok=True)
    how = draw.randrange(4)
    if how == 0:
        os.mkfifo(path)
    elif how == 1:
        path.mkdir()
    else:
        path.symlink_to(draw.choice(("/dev/zero", "/dev/null", "nowhere", path.name)))


def outputs(draw: random.Random, folder: Path) -> Case:
    """Build a case whose output is an input, or another output, by one of its names."""
    model = write_folder(folder / "m")
    (model / "generation_config.json").write_text("{}")
    target = model / draw.choice(_FILES[:4])
    for name, make in (("soft", os.symlink), ("hard", os.link)):
        make(target, folder / name)
    output = draw.choice(
        (str(target), "soft", "hard", f"m/../m/{target.name}", "m", "/dev/null", "nowhere/x")
    )
    option = draw.choice(("--json", "--trace", "--html"))
    if draw.random() < 0.3:
        words = ["plan", draw.choice(("m", "m/config.json")), "--json", output]
        return Case("outputs", model_cli.main, words, statuses=(2,))
    words = ["generate", "--model", "m", "--max-new-tokens", "1", option, output]
    return Case("outputs", model_cli.main, words, statuses=(2,))


def plan(draw: random.Random, folder: Path) -> Case:
    """Build a case of plan with a spoilt config.json of any family."""
    sound = json.loads(draw.choice(sorted(PUBLISHED.glob("*.json"))).read_text())
    (folder / "c.json").write_bytes(mutate.document(draw, sound))
    words = ["plan", "c.json", "--json", "out.json"]
    if draw.random() < 0.4:
        words += ["--as", draw.choice((*MODEL_TYPES, "none"))]
    return Case("plan", model_cli.main, words, json_output=folder / "out.json", statuses=(0, 1, 2))


def plan_words(draw: random.Random, folder: Path) -> Case:
    """Build a case of plan or generate with spoilt options."""
    write_folder(folder / "m")
    numbers = [
        str(literal) for literal in (*mutate.NUMBERS, *mutate.FLOATS, *mutate.WORDS) if literal != "\x00"
    ]
    options = {
        "plan": "--instance --accelerator --tp --batch --prompt --generate --dtype --price".split(),
        "generate": "--max-new-tokens --target --tp --dtype --temperature --top-k --top-p --seed --prompt".split(),
    }
    command = draw.choice(list(options))
    words = ["plan", "m"] if command == "plan" else ["generate", "--model", "m", "--backend", "numpy"]
    for option in draw.sample(options[command], draw.randint(1, 3)):
        words += [f"{option}={draw.choice(numbers)}".replace("\x00", "")]
    words += ["--json", "out.json"]
    # 1 for a plan whose batch does not fit.
    return Case("words", model_cli.main, words, json_output=folder / "out.json", statuses=(0, 1, 2))


def environment(draw: random.Random, folder: Path) -> Case:
    """Build a case of generate with spoilt variables of the environment."""
    write_folder(folder / "m")
    bad = ("x", "-1", "", "1e3", "9" * 400, "\u0663", " 0", "0_0", "trn9")
    variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
    name = draw.choice(("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if draw.random() < 0.5:
        name = draw.choice(("NKI_BACKEND", "NKW_EXACT_REPLAY", "NKW_VERIFY_REPLAY", "NKW_SPEED"))
        variables = {}
    variables[name] = draw.choice(bad)
    words = ["generate", "--model", "m", "--backend", "simulate", "--max-new-tokens", "1", "--tp", "2"]
    return Case("environment", model_cli.main, words, variables)


def lint(draw: random.Random, folder: Path) -> Case:
    """Build a case of lint of a folder with a spoilt source, or something that is no file."""
    sound = draw.choice(sorted(KERNELS.glob("*.py"))).read_text()
    (folder / "bad.py").write_bytes(mutate.source(draw, sound))
    if draw.random() < 0.2:
        put_special(draw, folder / "bad.py")
    return Case("lint", simulate_cli.main, ["lint", "."], statuses=(0, 1, 2))


def kernel(draw: random.Random, folder: Path) -> Case:
    """Build a case of time or memory of a kernel by name, with spoilt arguments."""
    tensors = [
        "f32[128,512]",
        "f32[0]",
        "f32[-1]",
        f"f32[{10**30}]",
        "f32[" + "1," * 70 + "1]",
        "f99[3]",
        "f32[",
        "bf16[1,64]",
    ]
    words = [
        draw.choice((*tensors, *mutate.WORDS, *map(str, mutate.NUMBERS))) for _ in range(draw.randint(0, 4))
    ]
    command = draw.choice(("time", "memory"))
    line = [
        command,
        f"{KERNELS / draw.choice(('add', 'rmsnorm', 'softmax'))}.py:{draw.choice(('add', 'rmsnorm', 'no'))}",
    ]
    words = [word.replace("\x00", "") for word in words if not word.startswith("-")]
    return Case("kernel", simulate_cli.main, [*line, *words], statuses=(0, 1, 2))


def sources(draw: random.Random, folder: Path) -> Case:
    """Build a case of fidelity with spoilt times of public sources and a clone that lacks their files."""
    (folder / "clone" / "src" / "nkilib_src" / "nkilib").mkdir(parents=True)
    entry = {
        "kernel": "attention_cte",
        "lnc": 2,
        "heads": 1,
        "kv_len": 8,
        "dtype": "float32",
        "measured_us": 3.5,
    }
    sound = {"default_repo": "aws-neuron/nki-library (commit 0)", "target": "gen3", "entries": [entry]}
    path = folder / "times.json"
    path.write_bytes(mutate.document(draw, sound))
    if draw.random() < 0.2:
        put_special(draw, path)
    line = ["--measurements", path.name, "--sources", "clone", "--json", "out.json"]
    return Case("sources", fidelity.main, line, json_output=folder / "out.json")


def measurements(draw: random.Random, folder: Path) -> Case:
    """Build a case of fidelity with a spoilt file of measurements, or one that its output names."""
    sound = [{
        "id": "a", "family": "matmul", "kernel": "nki matmul", "shapes": "M=128 K=128 N=512", "dtype": "bf16",
        "target": "trn2", "instance": "trn2", "cores": 1, "latency_us": 10.0, "measured": "latency", "source": "a page",
        "confidence": "high", "metrics": {}, "notes": "",
    }]  # fmt: skip
    path = folder / "measurements.json"
    path.write_bytes(mutate.document(draw, sound))
    line = ["--measurements", path.name, "--quick", "--json", "out.json"]
    if draw.random() < 0.3:
        path.write_text("[]")
        return Case("measurements", fidelity.main, [*line[:-1], path.name], statuses=(2,))
    if draw.random() < 0.2:
        put_special(draw, path)
    return Case("measurements", fidelity.main, line, json_output=folder / "out.json")


KINDS: tuple[Maker, ...] = (
    config, rope, tokenizer, weights, values, shards, special, outputs, plan, plan_words, environment, lint, kernel,
    measurements, sources, family, chat,
)  # fmt: skip
