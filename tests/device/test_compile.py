"""`nkw compile`: which graphs an engine has, what their keys depend on, and that the engine launches no others."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model import LLM, SamplingParams
from model.commands.compile.command import MANIFEST, launch_all, list_engine_graphs, read_manifest
from model.commands.compile.graphs import CopyGraph, Environment, Graph, StepGraph, hash_graph
from model.commands.compile.sources import hash_sources
from model.errors import ModelError
from model.layers.paged import STATES
from model.llm.engine_args import EngineArgs, set_up_engine
from nkw.commands import main
from tests.device import site
from tests.device.core import Core
from tests.model.tiny_families import write_tiny

BUCKETS = "sequences=1,2 tokens=16,32 context=128"
SIZES: dict[str, Any] = dict(
    max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, num_pages=12, block_size=8, buckets=BUCKETS
)
OPTIONS = [
    "--max-num-seqs",
    "2",
    "--max-num-batched-tokens",
    "32",
    "--max-model-len",
    "64",
    "--num-pages",
    "12",
]
OPTIONS += ["--block-size", "8", "--buckets", BUCKETS]
HERE = Environment("trn2", 1, 1, {"nki": "0.7.0", "neuronx-cc": "2.28"})


def graphs(folder: Path, **changes: Any) -> list[Graph]:
    return list_engine_graphs(set_up_engine(EngineArgs(folder, **{"backend": "neuron", **SIZES, **changes})))


@pytest.mark.slow
def test_every_shape_of_the_buckets_is_a_graph_for_each_way_to_draw(tiny: Path) -> None:
    engine_parts = set_up_engine(EngineArgs(tiny, **SIZES))
    steps = [graph for graph in list_engine_graphs(engine_parts) if isinstance(graph, StepGraph)]
    shapes = engine_parts.buckets.shapes()
    assert {graph.label for graph in steps} == set(map(str, shapes))
    assert len(steps) == 5 * len(shapes)
    keys = {hash_graph(graph, HERE, hash_sources) for graph in list_engine_graphs(engine_parts)}
    assert len(keys) == len(list_engine_graphs(engine_parts))


@pytest.mark.parametrize(
    "changed",
    [
        replace(HERE, target="trn1"),
        replace(HERE, ranks=2),
        replace(HERE, logical_core=2),
        replace(HERE, versions={**HERE.versions, "neuronx-cc": "2.29"}),
    ],
)
def test_a_key_depends_on_chip_ranks_cores_and_compiler(tiny: Path, changed: Environment) -> None:
    graph = graphs(tiny)[0]
    assert hash_graph(graph, HERE, hash_sources) == hash_graph(graphs(tiny)[0], HERE, hash_sources)
    assert hash_graph(graph, changed, hash_sources) != hash_graph(graph, HERE, hash_sources)


@pytest.mark.parametrize("changes", [{"num_pages": 13}, {"dtype": "bfloat16"}, {"block_size": 16}])
def test_a_key_depends_on_shapes_and_dtypes(tiny: Path, changes: dict[str, Any]) -> None:
    same, other = graphs(tiny)[0], graphs(tiny, **changes)[0]
    assert hash_graph(same, HERE, hash_sources) != hash_graph(other, HERE, hash_sources)


def test_a_key_depends_on_the_sources_of_its_own_kernels(tiny: Path) -> None:
    graph = graphs(tiny)[0]
    used = {launch.kernel for launch in graph.launches}
    before = hash_graph(graph, HERE, lambda kernel: "before")
    for kernel in used:
        changed = {kernel: "after"}
        assert (
            hash_graph(
                graph, HERE, lambda kernel, changed_hashes=changed: changed_hashes.get(kernel, "before")
            )
            != before
        )
    assert hash_graph(graph, HERE, lambda kernel: "before" if kernel in used else "after") == before


def test_the_sources_of_a_kernel_are_its_file_and_what_this_imports(tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / "nki_kernels"
    (package / "parts").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "one.py": "from nki_kernels.parts.inner import x\n",
        "two.py": "import numpy\n",
        "parts/__init__.py": "",
        "parts/inner.py": "def x():\n    from nki_kernels import last\n",
        "last.py": "",
    }

    def digests() -> tuple[str, str]:
        hash_sources.cache_clear()
        return hash_sources("one"), hash_sources("two")

    for name, text in files.items():
        (package / name).write_text(text)
    monkeypatch.setattr("model.commands.compile.sources._find_root", lambda: package)
    before = digests()
    assert digests() == before
    for changed, differ in {
        "last.py": (True, False),
        "parts/inner.py": (True, False),
        "two.py": (False, True),
    }.items():
        (package / changed).write_text(files[changed] + "# changed\n")
        after = digests()
        assert tuple(one != other for one, other in zip(before, after)) == differ
        before = after
    hash_sources.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["native", "xla"])
def test_an_engine_launches_no_graph_that_was_not_compiled(
    on: Callable[..., Core], tiny: Path, framework: str
) -> None:
    core: Any = on(framework)
    arguments = {**SIZES, "buckets": "sequences=2 tokens=32 context=128"}
    prompts, params = (
        ["Once upon a time", "The", "Once upon a day"],
        SamplingParams(temperature=0, max_tokens=6),
    )
    wanted = LLM(tiny, **arguments).generate(prompts, params, use_tqdm=False)
    engine_parts = set_up_engine(EngineArgs(tiny, backend="neuron", **arguments))
    launch_all(engine_parts)
    if framework == "xla":
        compiled = list(core.executed)
        assert len(set(compiled)) == len(compiled) == len(list_engine_graphs(engine_parts))
    else:
        compiled = list(core.operators)
    core.forget()
    llm = LLM(tiny, backend="neuron", **arguments)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [
        output.outputs[0].token_ids for output in wanted
    ]
    launched = core.executed if framework == "xla" else core.operators
    assert launched
    assert set(launched) <= set(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "gemma3"])
def test_states_and_windows_have_graphs_too(tmp_path: Path, family: str) -> None:
    pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    sizes = {**SIZES, "buckets": "sequences=1 tokens=32 context=128", "mamba_block_size": 8}
    engine_parts = set_up_engine(EngineArgs(write_tiny(tmp_path, family), **sizes))
    groups = {graph.cache_group for graph in list_engine_graphs(engine_parts) if isinstance(graph, CopyGraph)}
    assert groups == ({STATES} if family == "mamba" else {None, engine_parts.pools[-1].window})
    model = engine_parts.load_model()
    graphs = list_engine_graphs(engine_parts)
    model.launch_padding(next(graph.shape for graph in graphs if graph.step == "prompts"))
    for graph in graphs:
        if isinstance(graph, CopyGraph):
            model.launch_copies(graph.count, graph.cache_group)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["compile", *arguments])
    told = capsys.readouterr()
    return status, told.out, told.err


@pytest.mark.slow
def test_without_packages_the_graphs_are_counted_and_what_is_missing_is_said(
    tiny: Path, tmp_path: Path, capsys: Any
) -> None:
    every = graphs(tiny)
    status, out, err = run(capsys, str(tiny), *OPTIONS, "--out", str(tmp_path / "cache"))
    assert status == 2
    assert err.startswith(
        f"nkw: error: none of {len(every)} graphs is compiled: the neuron backend needs nki,"
    )
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "cache").exists()
    lines = [re.fullmatch(r"([a-z ]+): (\d+) graphs, from (.+) to (.+)", line) for line in out.splitlines()]
    counts = {line[1]: (int(line[2]), line[3], line[4]) for line in lines if line}
    assert sum(count for count, _, _ in counts.values()) == len(every)
    # 2 sizes of decoding sequences with one context, each drawn in five ways; up to 8 of the 12 pages are spare.
    assert counts["decode"] == (10, "1 x 1 tokens, 128 positions", "2 x 1 tokens, 128 positions")
    assert counts["copies"] == (4, "1 page", "8 pages")


@pytest.mark.slow
def test_groups_that_divide_experts_are_refused_as_the_engine_refuses_them(
    tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    folder = str(write_tiny(tmp_path, "mixtral"))
    assert run(capsys, folder, *OPTIONS, "--ep", "1", "--list")[0] == 0
    status, out, err = run(capsys, folder, *OPTIONS, "--ep", "5", "--list")
    assert (status, out) == (2, "")
    assert "expert_parallel_size is 1 on the chip" in err


def test_slots_of_states_are_part_of_a_graph(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    folder = str(write_tiny(tmp_path, "mamba"))
    options = [*OPTIONS, "--mamba-block-size", "8", "--list"]
    few, more, same = (
        run(capsys, folder, *options, "--num-state-slots", count)[1] for count in ("3", "4", "3")
    )
    assert few and few == same and not set(few.splitlines()) & set(more.splitlines())


def test_a_list_has_a_line_with_a_key_for_every_graph(tiny: Path, capsys: Any) -> None:
    status, out, err = run(capsys, str(tiny), *OPTIONS, "--list")
    assert (status, err) == (0, "")
    keys = [line.split("  ")[0] for line in out.splitlines()]
    assert keys == [hash_graph(graph, Environment("trn2", 1, 1, {}), hash_sources) for graph in graphs(tiny)]


@pytest.mark.parametrize(
    ("variable", "words", "lnc"), [("2", [], 2), ("2", ["--lnc", "1"], 1), ("1", ["--lnc", "2"], 2)]
)
def test_keys_are_of_the_physical_cores_of_the_option_or_the_variable(
    tiny: Path, capsys: Any, monkeypatch: Any, variable: str, words: list[str], lnc: int
) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", variable)
    _, out, _ = run(capsys, str(tiny), *OPTIONS, "--list", *words)
    first = hash_graph(graphs(tiny)[0], Environment("trn2", 1, lnc, {}), hash_sources)
    assert out.startswith(f"{first}  ")


def test_the_graphs_of_an_engine_by_default_are_a_few_hundred_and_prompts_are_alone() -> None:
    engine_parts = set_up_engine(EngineArgs("stories", backend="neuron"))
    every = list_engine_graphs(engine_parts)
    assert 16 < len(every) <= 300
    steps = [graph for graph in every if isinstance(graph, StepGraph)]
    assert {graph.shape.decoding for graph in steps} == {None}
    simulated = set_up_engine(EngineArgs("stories"))
    assert len(simulated.buckets.shapes()) > 256
    bucketed = set_up_engine(EngineArgs("stories", backend="neuron", buckets="sequences=1,16"))
    assert bucketed.buckets == replace(engine_parts.buckets, sequences=(1, 16))


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `neuron_parallel_compile` on the path that records its arguments and exits with `status`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "neuron_parallel_compile"
    script.write_text(
        '#!/bin/sh\necho "$NEURON_COMPILE_CACHE_URL $NEURON_PLATFORM_TARGET_OVERRIDE $NEURON_LOGICAL_NC_CONFIG $*" '
        f">> {folder}/calls\n"
        f"exit $(cat {folder}/status)\n"
    )
    script.chmod(0o755)
    (folder / "status").write_text("0")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    site.install(tmp_path / "site", site.XLA, monkeypatch)
    return folder


def test_only_what_the_cache_lacks_is_compiled(tiny: Path, tmp_path: Path, tool: Path, capsys: Any) -> None:
    count, cache = len(graphs(tiny)), tmp_path / "cache"
    status, out, err = run(capsys, str(tiny), *OPTIONS, "--target", "inf2", "--tp", "2", "--out", str(cache))
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == f"{count} graphs compiled, 0 known; {cache / MANIFEST}"
    (call,) = (tool / "calls").read_text().splitlines()
    assert call.startswith(f"{cache} trn1 1 ")
    assert "torch.distributed.run --nproc-per-node 2 -m model compile" in call
    assert call.endswith(f"--max-model-len 64 --num-pages 12 --buckets {BUCKETS}")
    assert len(read_manifest(cache)) == count
    status, out, err = run(capsys, str(tiny), *OPTIONS, "--target", "inf2", "--tp", "2", "--out", str(cache))
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == f"0 graphs compiled, {count} known; {cache / MANIFEST}"
    run(capsys, str(tiny), *OPTIONS, "--target", "trn1", "--tp", "2", "--out", str(cache))
    assert len((tool / "calls").read_text().splitlines()) == 2
    assert len(read_manifest(cache)) == 2 * count


def test_the_compiling_process_quantises_as_the_engine_does(
    tiny: Path, tmp_path: Path, tool: Path, capsys: Any
) -> None:
    """Its launches have the weights, rows and caches of the graphs that are listed."""
    words = ["--kv-cache-dtype", "fp8", "--quantization", "w8a8", "--row-scales", "global"]
    status, _, err = run(capsys, str(tiny), *OPTIONS, *words, "--out", str(tmp_path / "cache"))
    assert (status, err) == (0, "")
    (call,) = (tool / "calls").read_text().splitlines()
    assert " ".join(words) in call and call.split()[-1] == BUCKETS.split()[-1]
    plain, quantised = (
        set(run(capsys, str(tiny), *OPTIONS, *more, "--list")[1].splitlines()) for more in ([], words)
    )
    assert len(plain) == len(quantised) and not plain & quantised


def test_a_compilation_that_fails_is_not_noted(tiny: Path, tmp_path: Path, tool: Path, capsys: Any) -> None:
    (tool / "status").write_text("3")
    status, _, err = run(capsys, str(tiny), *OPTIONS, "--out", str(tmp_path / "cache"))
    assert (status, len(err.splitlines())) == (2, 1)
    assert "ended with status 3" in err
    assert read_manifest(tmp_path / "cache") == {}


def test_what_compiling_needs_is_said(
    tiny: Path, tmp_path: Path, tool: Path, capsys: Any, monkeypatch: Any
) -> None:
    assert "--out is needed" in run(capsys, str(tiny), *OPTIONS)[2]
    out = ["--out", str(tmp_path / "cache")]
    assert run(capsys, str(tiny), *OPTIONS, *out, "--lnc", "2")[0] == 0
    assert (tool / "calls").read_text().startswith(f"{tmp_path / 'cache'} trn2 2 ")
    (tool / "neuron_parallel_compile").unlink()
    assert "neuron_parallel_compile is not on the path" in run(capsys, str(tiny), *OPTIONS, *out)[2]


def test_torchneuron_compiles_where_a_neuron_device_is(
    tiny: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install(tmp_path / "site", site.NATIVE, monkeypatch)
    status, _, err = run(capsys, str(tiny), *OPTIONS, "--out", str(tmp_path / "cache"))
    assert status == 2
    assert "compiles on an instance of Trn2 or Trn3 alone, and there is no Neuron device here" in err


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"schema": 2, "graphs": {}}', '{"schema": 1, "graphs": {"a": 1}}', "[" * 20000, "\0"],
)
def test_a_list_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ModelError, match="is no list of compiled graphs; remove it"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"schema": 1, "graphs": {"a": "one"}}))
    assert read_manifest(tmp_path) == {"a": "one"}
