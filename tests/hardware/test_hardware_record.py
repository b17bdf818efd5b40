"""Every number of every record has an owner: a source, a confidence, a field of the record."""

from __future__ import annotations

import ast
import copy
import dataclasses
import pickle
from pathlib import Path

import pytest

from nkw.errors import InvalidArgument
from nkw.targets import DEFAULT_TARGET, GENERATIONS, TARGETS
from simulate.hardware import (
    INSTANCES,
    Confidence,
    Hardware,
    derived,
    documented,
    guessed,
    hardware,
    instance,
)
from simulate.hardware.record import build

RECORDS = [hardware(target) for target in TARGETS]
SEVERAL = instance("4 x trn2.48xlarge")
FIELDS = [field.name for field in dataclasses.fields(Hardware) if field.name != "provenance"]
UNITS = (
    "_ghz",
    "_ns",
    "_cycles",
    "_cycles_per_",
    "_bytes",
    "_gb_per_s",
    "_fraction",
    "_factor",
    "_elements",
    "_16bit",
    "_fp32",
)


@pytest.mark.parametrize("record", [*RECORDS, *INSTANCES.values(), SEVERAL], ids=lambda r: r.name)
def test_every_field_carries_source_and_confidence(record) -> None:
    names = [field.name for field in dataclasses.fields(record) if field.name != "provenance"]
    assert list(record.provenance) == names
    for name, number in record.provenance.items():
        assert number.value == getattr(record, name), name
        assert number.source.strip(), name
        assert number.confidence in ("documented", "derived", "guessed"), name
        assert number.note.strip() or number.confidence is not Confidence.guessed, (
            f"{name} is guessed without reason"
        )


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.name)
def test_every_measured_field_names_its_unit(record: Hardware) -> None:
    for name in FIELDS:
        if isinstance(getattr(record, name), float):
            assert any(unit in name for unit in UNITS), name


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.name)
def test_types_of_values_are_the_declared_ones(record: Hardware) -> None:
    plain = {"str": str, "int": int, "float": float, "bool": bool}
    for field in dataclasses.fields(Hardware):
        if field.type in plain:
            assert type(getattr(record, field.name)) is plain[str(field.type)], field.name


def test_hot_code_reads_plain_values() -> None:
    assert type(hardware("trn2").vector_clock_ghz) is float
    assert type(hardware("trn2").range_select) is bool


def test_records_cannot_be_changed() -> None:
    record = hardware("trn2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.partitions = 64  # type: ignore[misc]
    with pytest.raises(TypeError):
        record.provenance["partitions"] = documented(64, "nowhere")  # type: ignore[index]
    with pytest.raises(TypeError):
        hardware("trn1").collective_latency_ns[2] = 0.0  # type: ignore[index]


def test_refuses_missing_and_surplus_fields() -> None:
    numbers = dict(hardware("trn2").provenance)
    assert build(Hardware, numbers) == hardware("trn2")
    one_less = {name: number for name, number in numbers.items() if name != "dma_engines"}
    with pytest.raises(TypeError, match=r"missing \['dma_engines'\]"):
        build(Hardware, one_less)
    with pytest.raises(TypeError, match=r"surplus \['warp_size'\]"):
        build(Hardware, {**numbers, "warp_size": documented(32, "another vendor")})


def test_records_survive_copying_and_pickling() -> None:
    for record in RECORDS:
        assert pickle.loads(pickle.dumps(record)) == record
        assert copy.deepcopy(record) == record
        assert hash(copy.deepcopy(record)) == hash(record)


def test_a_changed_number_makes_another_record() -> None:
    slower = hardware("trn2").with_numbers(
        semaphore_ns=guessed(90.0, "a what-if", "twice the published time")
    )
    assert slower.semaphore_ns == 90.0
    assert slower != hardware("trn2")
    assert hardware("trn2").semaphore_ns == 45.0


def test_confidences_are_told_apart() -> None:
    made = [make(1, "s", "n").confidence.value for make in (documented, derived, guessed)]
    assert made == ["documented", "derived", "guessed"]


def test_targets_begin_with_the_chips_of_the_documentation() -> None:
    assert TARGETS[:4] == ("trn1", "inf2", "trn2", "trn3")
    assert DEFAULT_TARGET in TARGETS
    assert all(hardware(target).name == target for target in TARGETS)


@pytest.mark.parametrize(("alias", "name"), [("gen2", "trn1"), ("gen3", "trn2"), ("gen4", "trn3")])
def test_generations_name_their_training_chip(alias: str, name: str) -> None:
    assert hardware(alias) is hardware(name)


@pytest.mark.parametrize("target", ["trn4", "TRN2", "", None, 2])
def test_refuses_unknown_targets(target: object) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        hardware(target)  # type: ignore[arg-type]
    assert refusal.value.code == "NKW-TARGET"
    assert refusal.value.message == (
        f"{target!r} is no known target; known are {', '.join([*TARGETS, *GENERATIONS])}"
    )


@pytest.mark.slow
def test_every_field_is_read_by_a_rule_a_cost_or_a_report() -> None:
    """The records themselves and tests do not count."""
    root = Path(__file__).resolve().parents[2]
    tables = {
        root / "simulate" / "hardware" / f"{name}.py" for name in ("common", "gen2", "gen3", "gen4", "record")
    }
    read = {
        node.attr if isinstance(node, ast.Attribute) else node.value
        for folder in ("simulate", "model", "benchmarks")
        for file in (root / folder).rglob("*.py")
        if file not in tables
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.Attribute, ast.Constant))
    }
    assert [name for name in FIELDS if name not in read] == []


@pytest.mark.slow
def test_only_answers_to_a_kernel_read_the_generation() -> None:
    """Everything else asks for a capability; the tuner writes a table whose keys are what kernels are told."""
    root = Path(__file__).resolve().parents[2]
    read = {
        str(file.relative_to(root / "simulate"))
        for file in (root / "simulate").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("generation", "sub_version")
    }
    assert read == {"beta1/isa.py", "nki/isa.py", "tune/command.py"}
