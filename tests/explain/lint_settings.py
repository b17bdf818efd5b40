"""The files around examples that lint judges, by code."""

from __future__ import annotations

from tests.explain.settings import Setting

_NAMES = """    a = b = y = tile = mask = nl.load(x)
    register = nisa.register_alloc(0)
    row = nisa.register_alloc(0)
    sums = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.psum)
    out = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
"""


def _lint(
    line: str = "{}", end: str = "    return out", level: str = "0.7", filler: str = "data=tile"
) -> Setting:
    head = "@nki.jit\ndef kernel(x, n=4, rows=4, limit=4, shape=(128, 8)):\n"
    return Setting(f"{head}{_NAMES}    {line}\n{end}\n", level=level, filler=filler)


LINT: dict[str, Setting] = {
    "NKI001": _lint(level="0.6"),
    "NKI002": Setting("@nki.jit\n{}\n", level="0.6"),
    "NKI003": Setting("@nki.jit\n{}\n", level="0.6"),
    "NKI004": Setting("@nki.jit\ndef kernel(x, shape=(4, 4)):\n    nl.load(x)\n    {}\n"),
    "NKI005": Setting("@nki.jit\n{}\n"),
    "NKI006": _lint(),
    "NKI007": _lint(),
    "NKI011": _lint(level="0.6"),
    "NKI012": _lint(),
    "NKI013": _lint(level="0.6"),
    "NKI015": _lint(),
    "NKI017": _lint(),
    "NKI019": _lint(),
    "NKI020": _lint(),
    "NKI021": _lint(),
    "NKI022": _lint(),
    "NKI023": _lint(),
    "NKI024": Setting("{}\n\n@nki.jit\ndef kernel(x):\n    return nl.load(x)\n"),
    "NKI025": Setting("{}\ndef kernel(x):\n    return nl.load(x)\n"),
    "NKI027": _lint(),
    "NKI028": _lint(),
    "NKI029": _lint(),
    "NKI030": _lint(),
    "NKI033": _lint(),
    "NKI035": _lint(filler="data=out"),
    "NKI038": _lint(),
    "NKI042": Setting("@nki.jit\ndef kernel(x):\n    return nl.load(x)\n\n{}\n", level="0.6"),
    "NKI044": _lint(),
    "NKI045": _lint("t = tile\n    {}"),
    "NKI046": _lint("t = nl.load(x)\n    {}"),
    "NKI047": _lint("t = tile\n    {}"),
    "NKW-DMA-RESHAPED": _lint(),
}
