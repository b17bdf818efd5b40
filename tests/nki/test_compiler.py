"""`nki.compiler`: configurations of kernels, their checks, and nested kernels with another one."""

from __future__ import annotations

import numpy as np
import pytest

from nkw.errors import InvalidArgument, RuleViolation
from simulate import nki
from simulate.nki import language as nl
from simulate.nki.compiler import AddressRotation, CompileConfig, SpecializationConfig

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def copied(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    return out


CONFIG = CompileConfig(non_ssa_legalization=True)


def test_a_configuration_changes_no_value() -> None:
    import nki as bound
    from nki.compiler import CompileConfig as Bound

    assert Bound is CompileConfig and bound.compiler.AddressRotation is AddressRotation
    everything = CompileConfig(AddressRotation.DISABLE, True, False, True, True, False)
    for decorated in (
        nki.jit(copied, compile_config=everything),
        nki.jit(compile_config=CONFIG, specialization_config=SpecializationConfig())(copied),
        nki.jit(mode="auto", compile_config=CONFIG)(copied),
    ):
        np.testing.assert_array_equal(decorated(X), X)
    assert CompileConfig() == CompileConfig(prefetch_auto=False, nki_alloc_fallback=True)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: CompileConfig(address_rotation="auto"),
        lambda: CompileConfig(prefetch_auto=1),
        lambda: CompileConfig(nki_alloc_fallback=None),
        lambda: SpecializationConfig(allow_nested_config_override="yes"),
        lambda: nki.jit(copied, compile_config={"dead_code_elim": True}),
        lambda: nki.jit(copied, specialization_config=CONFIG),
    ],
)
def test_what_is_no_configuration_is_refused(wrong) -> None:
    with pytest.raises(InvalidArgument, match="NKW-COMPILE-CONFIG"):
        wrong()


def test_a_prefetch_ring_is_sized_once(monkeypatch) -> None:
    monkeypatch.setenv("NKI_PREFETCH_RING_SIZE", "4")
    with pytest.raises(
        InvalidArgument, match="prefetch_auto=True and NKI_PREFETCH_RING_SIZE=4 exclude each other"
    ):
        CompileConfig(prefetch_auto=True)
    assert not CompileConfig().prefetch_auto


def _nested(inner_config, **options):
    inner = nki.jit(copied, compile_config=inner_config)

    @nki.jit(**options)
    def outer(x):
        return inner(x)

    return outer


@pytest.mark.parametrize(
    ("inner", "outer"), [(None, CONFIG), (CONFIG, CONFIG), (None, None), (CompileConfig(), CompileConfig())]
)
def test_a_nested_kernel_may_have_the_same_configuration(inner, outer) -> None:
    np.testing.assert_array_equal(_nested(inner, compile_config=outer)(X), X)


@pytest.mark.parametrize("outer", [None, CompileConfig(dead_code_elim=True)])
def test_a_nested_kernel_with_another_configuration_is_refused_or_warned_of(outer) -> None:
    with pytest.raises(InvalidArgument, match="nested kernel copied has CompileConfig"):
        _nested(CONFIG, compile_config=outer)(X)
    allowed = SpecializationConfig(allow_nested_config_override=True)
    with pytest.warns(UserWarning, match="nested kernel copied has"):
        np.testing.assert_array_equal(
            _nested(CONFIG, compile_config=outer, specialization_config=allowed)(X), X
        )


@pytest.mark.parametrize("make", [CompileConfig, SpecializationConfig])
def test_configurations_exist_from_0_7_on(monkeypatch, make) -> None:
    made = make()
    name = "compile_config" if make is CompileConfig else "specialization_config"
    nki.jit(copied, **{name: made})
    monkeypatch.setenv("NKI_LEVEL", "0.6")
    with pytest.raises(RuleViolation, match=rf"nki.compiler.{make.__name__} exists from level 0.7 on"):
        make()
    with pytest.raises(RuleViolation, match=rf"nki.jit\({name}=…\) exists from level 0.7 on"):
        nki.jit(copied, **{name: made})
    np.testing.assert_array_equal(nki.jit(copied)(X), X)
