"""Whatever comes back: one sentence or a comparison, never a traceback."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nkw.commands import main as run_model_command
from nkw.errors import InvalidArgument
from nkw.terminal import rendered
from simulate.bundle.compare import compare_bundle, make_document, make_report
from simulate.bundle.manifest import MANIFEST
from simulate.bundle.reading import MOST_JSON_BYTES, Fields
from simulate.bundle.result import load
from simulate.cli import main
from tests.bundle.returns import bring_back
from tests.bytecode_count import count_bytecodes
from tests.model.folders import write_folder

Json = dict[str, Any]


@pytest.fixture
def returned(carried: Path) -> Path:
    """Return the folder of a bundle whose result came back with equal values."""
    bring_back(carried)
    return carried


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle a generation by a model of one layer and return the bundle's folder, which no test writes to."""
    folder = tmp_path_factory.mktemp("story")
    model = write_folder(folder / "tiny", num_hidden_layers=1)
    words = [
        "bundle",
        str(model),
        "--max-new-tokens",
        "2",
        "--prompt",
        "a b",
        "--out",
        str(folder / "bundle"),
    ]
    assert run_model_command(words) == 0
    return folder / "bundle"


@pytest.fixture
def told(story: Path, tmp_path: Path) -> Path:
    """Return a copy of that bundle whose result came back with equal values."""
    folder = Path(shutil.copytree(story, tmp_path / "told"))
    bring_back(folder)
    return folder


def compare_or_refuse(folder: Path) -> str:
    """Return the comparison, or the sentence for which there is none; anything else fails the test."""
    try:
        seen = compare_bundle(folder)
    except InvalidArgument as error:
        refused = error
    else:
        json.dumps(make_document(seen), allow_nan=False)
        text = rendered(make_report(seen))
        assert max(map(len, text.splitlines())) <= 80
        return text
    assert refused.code == "NKW-BUNDLE"
    sentence = refused.message
    assert 0 < len(sentence) < 1200 and "\n" not in sentence and "Traceback" not in sentence
    return sentence


def test_as_run_py_writes_it_all_is_equal(returned: Path) -> None:
    assert compare_or_refuse(returned).startswith("all 4 cases are equal")


def changed(folder: Path, change: Callable[[Json], None]) -> str:
    path = folder / "result" / "result.json"
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps(result))
    return compare_or_refuse(folder)


def first_result(bundle: Json) -> Json:
    """Return the first argument of the second case of a generation, which the first case returns."""
    argument: Json = next(iter(bundle["cases"][1]["arguments"].values()))
    assert argument["kind"] == "result"
    return argument


def output_of(result: Json) -> Json:
    first_output: Json = result["cases"][0]["outputs"][0]
    return first_output


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda result: result.pop("cases"), "'cases' is missing; a list is wanted"),
        (lambda result: result.update(schema=3), "has schema 3; this version reads schema 2"),
        (
            lambda result: result.update(launcher="moon"),
            "'launcher' is 'moon'; one of nki, neuronxcc, torchneuron, torch_xla",
        ),
        (lambda result: result["cases"][0].update(name="other"), "'other' is not a case of the bundle"),
        (
            lambda result: result["cases"].append(result["cases"][0]),
            "is not a case of the bundle, or is there twice",
        ),
        (
            lambda result: result["cases"][0].update(status=True),
            "'status' is True; one of ran, failed, skipped",
        ),
        (
            lambda result: result["cases"][0]["times"].update(median_ns=-1),
            "'median_ns' is -1; a finite number",
        ),
        (
            lambda result: result["cases"][0]["times"].update(median_ns=float("nan")),
            "'median_ns' is nan; a finite",
        ),
        (
            lambda result: result["cases"][0]["times"].update(median_ns=10**400),
            "a finite number of at least 0",
        ),
        (lambda result: output_of(result).update(shape=[2**30, 2**30]), "a shape that fits into a memory"),
        (lambda result: output_of(result).update(dtype="object"), "'dtype' is 'object'; one of"),
        (lambda result: output_of(result).update(file="../../../etc/passwd"), "leads out of"),
        (lambda result: output_of(result).update(file="values/a\0b"), "is no path"),
        (lambda result: output_of(result).update(file="values"), "cannot be used: "),
        (
            lambda result: output_of(result).update(shape=[7], dtype="float32"),
            "expected is float32[200, 1000]",
        ),
        (lambda result: output_of(result).update(dtype="bfloat16"), "it is bfloat16[200, 1000]"),
        (
            lambda result: output_of(result).update(name="another"),
            "output-0 is missing: the result does not have it",
        ),
        (lambda result: output_of(result).update(file=None, tiles=None), "neither values nor digests"),
        (
            lambda result: output_of(result).update(file=None, tiles=["x"] * 4),
            "first tile (0, 0); 4 of 4 tiles",
        ),
    ],
)
def test_a_hostile_record_is_refused_or_compared(
    change: Callable[[Json], None], sentence: str, returned: Path
) -> None:
    assert sentence in " ".join(changed(returned, change).split())


def values_file(folder: Path) -> Path:
    return folder / "result" / "values" / "scaled" / "output-0.npy"


def broken_values(fault: str, path: Path) -> None:
    """Put something else in the place of an array."""
    array = np.load(path)
    if fault == "missing":
        path.unlink()
    elif fault == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    elif fault == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    elif fault == "pickled":
        np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    elif fault == "a pickle":
        path.write_bytes(pickle.dumps(array))
    elif fault == "another shape":
        np.save(path, array.T.copy())
    elif fault == "another dtype":
        np.save(path, array.astype(np.float64))
    elif fault == "a huge header":
        path.write_bytes(b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little"))
    elif fault == "a huge shape":
        path.write_bytes(path.read_bytes().replace(b"(200, 1000)", b"(2000000000, 1000)"))
    elif fault == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif fault == "a link out":
        outside = path.parents[4] / "outside.npy"
        np.save(outside, array)
        path.unlink()
        path.symlink_to(outside)
    elif fault == "a loop of links":
        path.unlink()
        path.symlink_to(path)


@pytest.mark.parametrize(
    "fault",
    [
        *("missing", "shorter", "longer", "pickled", "a pickle", "another shape", "another dtype"),
        *("a huge header", "a huge shape", "a pipe", "a link out", "a loop of links"),
    ],
)
def test_a_hostile_array_is_missing_and_the_others_are_compared(fault: str, returned: Path) -> None:
    broken_values(fault, values_file(returned))
    text = " ".join(compare_or_refuse(returned).split())
    assert text.startswith("3 of 4 cases agree")
    assert "scaled output-0 is missing" in text


def test_nan_in_values_is_compared(returned: Path) -> None:
    array = np.load(values_file(returned))
    array[3, 4] = np.nan
    np.save(values_file(returned), array)
    text = " ".join(compare_or_refuse(returned).split())
    assert "first element (3, 4): nan for" in text and "NaN or infinite" in text


@pytest.mark.parametrize("order", ["C", "F"])
def test_both_orders_of_an_array_are_read(order: Any, returned: Path) -> None:
    np.save(values_file(returned), np.asarray(np.load(values_file(returned)), order=order))
    assert compare_or_refuse(returned).startswith("all 4 cases are equal")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "holds no JSON object"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b" " * (MOST_JSON_BYTES + 1), "holds more than 32,000,000 bytes"),
    ],
    ids=["empty", "cut", "not UTF-8", "deep", "a list", "a huge number", "huge"],
)
@pytest.mark.parametrize("name", ["result/result.json", "bundle.json"])
def test_a_file_that_is_no_json_object_is_one_sentence(
    name: str, content: bytes, sentence: str, returned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (returned / name).write_bytes(content)
    assert main(["compare", str(returned)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: [NKW-BUNDLE] ") and sentence in " ".join(err.split())


def test_without_a_result_or_a_folder_the_sentence_says_so(
    carried: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(carried)]) == 2
    assert "has no result yet: run `python run.py` in it on the instance" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main(["compare", str(carried / "run.py")]) == 2
    assert "run.py is not a folder" in " ".join(capsys.readouterr().err.split())


# -- at random -------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**70, 1.5, float("nan"), float("inf"), "", "x", "\0", "..", "/", "a\nb"),
    *(
        [],
        {},
        [[]],
        [None],
        {"a": 1},
        "values/scaled/output-0.npy",
        "nki",
        "ran",
        "failed",
        "float32",
        [128, 512],
    ),
]


def mutated(tree: Any, rng: random.Random) -> None:
    """Change one member somewhere: another value, gone, twice, or of another name."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = rng.choice(keys)
        below = tree[key]
        if isinstance(below, (dict, list)) and below and rng.random() < 0.85:
            tree = below
            continue
        way = rng.randrange(4)
        if way == 0:
            tree.pop(key)
        elif way == 1 and isinstance(tree, list):
            tree.append(copy.deepcopy(below))
        elif way == 1:
            tree[rng.choice(keys)] = copy.deepcopy(below)
        else:
            tree[key] = copy.deepcopy(rng.choice(VALUES))
        return


def attempt(folder: Path, pristine: dict[str, bytes], rng: random.Random, case: str) -> None:
    """Change the files of a result or of a manifest, or the arrays of a case, and compare."""
    name = rng.choice(["result/result.json", "result/result.json", "bundle.json", "values", "expected"])
    if name in ("values", "expected"):
        name = f"{'result/' if name == 'values' else ''}{name}/{case}/output-0.npy"
        content = bytearray(pristine[name])
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(min(len(content), rng.choice([12, 200, 10**9])))] = rng.randrange(256)
        spoilt = bytes(content[: rng.choice([len(content), rng.randrange(len(content))])])
    elif rng.random() < 0.8:
        tree = json.loads(pristine[name])
        for _ in range(rng.randrange(1, 4)):
            mutated(tree, rng)
        spoilt = json.dumps(tree).encode()
    else:
        content = bytearray(pristine[name])
        for _ in range(rng.randrange(1, 6)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        spoilt = bytes(content)
    (folder / name).write_bytes(spoilt)
    compare_or_refuse(folder)
    (folder / name).write_bytes(pristine[name])


def fuzz(folder: Path, seeds: range, case: str = "scaled") -> None:
    # Small arrays alone, so that an attempt takes milliseconds.
    names = (
        "result/result.json",
        "bundle.json",
        f"result/values/{case}/output-0.npy",
        f"expected/{case}/output-0.npy",
    )
    for unused in ("sources", "inputs"):
        shutil.rmtree(folder / unused)
    pristine = {name: (folder / name).read_bytes() for name in names}
    for seed in seeds:
        try:
            attempt(folder, pristine, random.Random(seed), case)
        except Exception as escaped:
            raise AssertionError(f"seed {seed} escaped as {type(escaped).__name__}: {escaped}") from escaped


@pytest.mark.slow
def test_three_hundred_spoilt_results_give_one_sentence_or_a_comparison(returned: Path) -> None:
    fuzz(returned, range(300))


@pytest.mark.deep
def test_ten_thousand_spoilt_results_give_one_sentence_or_a_comparison(returned: Path) -> None:
    fuzz(returned, range(300, 10_300))


HEAD = "p1-t2-head-lm_head"


@pytest.mark.slow
def test_two_hundred_spoilt_results_of_a_generation_give_one_sentence_or_a_comparison(told: Path) -> None:
    fuzz(told, range(200), HEAD)


@pytest.mark.deep
def test_ten_thousand_spoilt_results_of_a_generation_give_one_sentence_or_a_comparison(told: Path) -> None:
    fuzz(told, range(200, 10_200), HEAD)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda case: None, "all 9 launches are equal"),
        (lambda case: case.update(inputs="moon"), "'inputs' is 'moon'; one of expected, own"),
        (lambda case: case.update(drift=[-1]), "'0' is -1; a finite number of at least 0"),
        (lambda case: case.update(token=-1), "'token' is -1; a whole number of at least 0"),
        (lambda case: case["outputs"][0].update(stray=3), "output-0 is wrong: it was changed at index 3"),
        (
            lambda case: case.update(token=77),
            "1 of 2 tokens are equal; the first other one is token 2, 77 for",
        ),
        (
            lambda case: case.update(token=None),
            "1 of 2 tokens are equal; the first other one is token 2, none",
        ),
    ],
)
def test_what_a_generation_brings_back_is_refused_or_compared(
    change: Callable[[Json], None], sentence: str, told: Path
) -> None:
    text = " ".join(changed(told, lambda result: change(result["cases"][-1])).split())
    assert sentence in text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda bundle: bundle.update(schema=2), "has schema 2; this version reads schema 3"),
        (lambda bundle: bundle["cases"][1].update(arguments=[]), "'arguments' is []; an object is wanted"),
        (lambda bundle: bundle["cases"][1]["arguments"].update(x=1), "'x' is 1; an object is wanted"),
        (lambda bundle: first_result(bundle).update(text="p9"), "that no earlier case has"),
        (lambda bundle: first_result(bundle).update(output=1), "that no earlier case has"),
        (lambda bundle: bundle["cases"][-1].update(step=2), "is of step 2, of 2 steps"),
        (lambda bundle: bundle["cases"][-1].update(like="p9"), "it is like 'p9', which is no earlier case"),
        (lambda bundle: bundle["generated"]["steps"].pop(), "is of step 1, of 1 steps"),
        (
            lambda bundle: bundle["generated"]["steps"][0].update(case=HEAD),
            "that chooses its token",
        ),
        (
            lambda bundle: bundle["generated"]["steps"][0].update(prompt=1),
            "a step is of a prompt beyond the 1 that there are",
        ),
        (lambda bundle: bundle.pop("generated"), "'generated' is missing; an object is wanted"),
    ],
)
def test_a_manifest_whose_launches_do_not_fit_together_is_refused(
    change: Callable[[Json], None], sentence: str, told: Path
) -> None:
    bundle = json.loads((told / "bundle.json").read_text())
    change(bundle)
    (told / "bundle.json").write_text(json.dumps(bundle))
    assert sentence in " ".join(compare_or_refuse(told).split())


@pytest.mark.parametrize(
    ("reader", "item"),
    [("read_numbers", 1.5), ("read_counts", 2), ("read_texts", "a"), ("read_rows", {"a": 1})],
)
def test_work_of_reading_a_list_grows_with_its_length(reader: str, item: Any) -> None:
    def count(length: int) -> int:
        fields = Fields({"items": [item] * length}, "result.json")
        return count_bytecodes(lambda: tuple(getattr(fields, reader)("items")))

    short, long = count(100), count(1000)
    assert long <= 10 * short


def test_work_of_reading_a_result_grows_with_its_cases(returned: Path) -> None:
    manifest, result = returned / MANIFEST, returned / "result" / "result.json"
    contents = {path: json.loads(path.read_text()) for path in (manifest, result)}

    def count(length: int) -> int:
        for path, content in contents.items():
            first = next(case for case in content["cases"] if case["name"] == "scaled")
            cases = [{**first, "name": f"case{number}"} for number in range(length)]
            path.write_text(json.dumps({**content, "cases": cases}))
        return count_bytecodes(lambda: load(returned))

    short, long = count(20), count(200)
    assert long <= 10 * short
