"""The API modules against the documented API: every function of NKI has its name, parameters and defaults here.

`nki_api.json` holds the documented signatures; its header names their source. A documented function that is not
simulated yet is listed in `simulate.nki.missing` and says so when it is called.
"""

from __future__ import annotations

import importlib
import inspect
import json
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simulate
from nkw.errors import NkwError
from simulate.nki.missing import NOT_YET

_API = json.loads((Path(__file__).parent / "nki_api.json").read_text(encoding="utf-8"))
_MODULES: dict[str, dict[str, list[list[str | None]]]] = _API["modules"]
_BETA1 = json.loads((Path(__file__).parent / "beta1_api.json").read_text(encoding="utf-8"))["functions"]
simulate.install("simulate")
_API_MODULES = {module: importlib.import_module(module) for module in {*_MODULES, *NOT_YET}}
_CLASSES = [(module, name) for module, classes in _API["classes"].items() for name in classes]
_FUNCTIONS = [(module, name) for module, functions in _MODULES.items() for name in functions]
_IMPLEMENTED = [(module, name) for module, name in _FUNCTIONS if name not in NOT_YET.get(module, {})]
_MISSING = [(module, name) for module, name in _FUNCTIONS if name in NOT_YET.get(module, {})]
_HIDDEN = "..."
_BEYOND = {("NkiTensor", "address"), ("NkiInstruction", "index")}  # of 0.7, and our own


def _text(default: Any) -> str | None:
    """Return a default value as the stubs write it: an enum member by its NKI name, an operator or dtype by its own."""
    if default is inspect.Parameter.empty:
        return None
    if isinstance(default, Enum):
        exported = [
            name
            for name, member in vars(_API_MODULES["nki.isa"]).items()
            if member is type(default) and name.islower()
        ]
        return f"{exported[0]}.{default.name}" if exported else default.name
    name = getattr(default, "name", None) or getattr(default, "__name__", None)
    if isinstance(name, str):
        return name
    return str(default) if type(default).__name__ == "DType" else repr(default)


def _signature(function: Any) -> list[list[str | None]]:
    parameters = inspect.signature(function).parameters.values()
    return [[p.name, p.kind.name.lower(), _text(p.default)] for p in parameters]


@pytest.mark.parametrize(("module", "name"), _IMPLEMENTED)
def test_a_function_has_the_documented_signature(module: str, name: str) -> None:
    documented = _MODULES[module][name]
    actual = _signature(getattr(_API_MODULES[module], name))
    hidden = {parameter for parameter, _, default in documented if default == _HIDDEN}
    assert [
        [p, parameter_kind, _HIDDEN if p in hidden else text] for p, parameter_kind, text in actual
    ] == documented


@pytest.mark.parametrize(("module", "name"), _CLASSES)
def test_a_class_has_the_documented_methods_attributes_and_members(module: str, name: str) -> None:
    value, documented = getattr(_API_MODULES[module], name), _API["classes"][module][name]
    cls = value if isinstance(value, type) else type(value)
    for method, parameters in documented.get("methods", {}).items():
        # The reference hides the fields of NKIObject behind **kwargs.
        if (name, method) != ("NKIObject", "__init__"):
            seen = [
                p for p in _signature(getattr(cls, method)) if p[0] != "self" and (name, p[0]) not in _BEYOND
            ]
            assert seen == parameters, method
    slots = {slot for base in cls.__mro__ for slot in getattr(base, "__slots__", ())}
    for attribute in documented.get("attributes", []):
        assert hasattr(cls, attribute) or attribute in slots, attribute
    assert {m: cls[m].value for m in documented.get("members", {})} == documented.get("members", {})


def test_no_documented_function_is_missing() -> None:
    assert _MISSING == []


def test_what_is_implemented_is_not_listed_as_missing() -> None:
    for module, names in NOT_YET.items():
        assert not set(names) & set(vars(_API_MODULES[module])), module


@pytest.mark.parametrize("module", sorted(NOT_YET))
def test_an_undocumented_name_is_an_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match=rf"module '{module}' has no attribute 'tensor_frobnicate'"):
        _ = _API_MODULES[module].tensor_frobnicate


def test_the_package_reports_the_version_it_was_compared_with() -> None:
    assert _API_MODULES["nki"].__version__ == _API["nki_version"]


@pytest.mark.parametrize("name", sorted(_BETA1))
def test_an_instruction_of_beta1_has_its_own_signature(name: str) -> None:
    def split(parameters: list[list[str | None]]) -> tuple[list[list[str | None]], list[str]]:
        by_keyword = [parameter for parameter in parameters if parameter[1] == "keyword_only"]
        return [p for p in parameters if p not in by_keyword], sorted(map(str, by_keyword))

    actual = _signature(getattr(importlib.import_module("simulate.beta1.isa"), name))
    assert split(actual) == split(_BETA1[name])


@pytest.mark.parametrize(
    ("args", "kwargs", "mismatch"),
    [
        ((), {}, "missing a required argument: 'data'"),
        ((1, 2), {}, "too many positional arguments"),
        ((1,), {"data": 1}, "multiple values for argument 'data'"),
    ],
)
def test_a_call_that_does_not_fit_a_derived_signature_is_refused(args, kwargs, mismatch) -> None:
    reciprocal = importlib.import_module("simulate.beta1.isa").reciprocal
    with pytest.raises(NkwError) as caught:
        reciprocal(*args, **kwargs)
    assert f"reciprocal: {mismatch}; its parameters are data, mask, dtype, name" in str(caught.value)


def test_a_derived_function_ignores_options_of_the_compiler() -> None:
    beta1 = importlib.import_module("simulate.beta1")

    def kernel(x):
        out = beta1.language.ndarray(x.shape, x.dtype, buffer=beta1.language.shared_hbm)
        beta1.language.store(out, beta1.isa.reciprocal(beta1.language.load(x), lowering="any"))
        return out

    assert (beta1.simulate_kernel(kernel, np.full((4, 8), 2, np.float32)) == 0.5).all()


def test_an_instruction_outside_of_a_kernel_is_refused() -> None:
    with pytest.raises(NkwError, match="NKW-NO-KERNEL"):
        _API_MODULES["nki.isa"].memset(None, 0)
