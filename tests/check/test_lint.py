"""Lint rules: each speaks on the bad line and is silent on the good one; levels; what it leaves alone."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

import nki_kernels
from nkw.errors import InvalidArgument
from nkw.files import MOST_SOURCE_BYTES
from simulate.check import KINDS, Severity
from simulate.check.lint import lint_file, lint_source, load_rules
from simulate.cli import main
from simulate.level import LEVELS, NEWEST, Level

HEAD = """import nki
import nki.isa as nisa
import nki.language as nl
"""

BODY = """
@nki.jit
def kernel(x, n=4):
    t = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf)
    i = nl.ndarray((128, 8), dtype=nl.int32)
    p = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.psum)
    r = nisa.register_alloc(0)
    c = nl.program_id(0)
    out = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
    {}
    return out
"""

LINES = [
    ("NKI045", "nisa.tensor_scaler(dst=t, data=t)", "nisa.tensor_copy(dst=t, src=t)"),
    ("NKI045", "nl.swish(t)", "nl.silu(t)"),
    ("NKI046", "a = t.T", "a = t.shape"),
    ("NKI046", "a = x.shape, x.T", "a = x.T"),
    ("NKI046", "a = t.broadcast_to((128, 8))", "a = t[:, 0:1].broadcast(1, 8)"),
    ("NKI047", "nisa.tensor_copy(dst=t, src=x)", "nisa.dma_copy(dst=t, src=x)"),
    ("NKI047", "nisa.tensor_copy(dst=out, src=t[:, 0:4])", "nisa.dma_copy(dst=out, src=t)"),
    ("NKI043", "a = nl.tiles(x, tile_shape=(128, 4))", "a = x[0:128, 0:4]"),
    ("NKI044", "for j in nl.dynamic_range(r): pass", "nl.fori_loop(0, r, step)"),
    ("NKI001", "if n is True: pass", "if n == True: pass"),
    (
        "NKI006",
        "a = nl.ndarray((4, 4), dtype=nl.float32, buffer='sbuf')",
        "a = nl.ndarray((4, 4), nl.float32)",
    ),
    (
        "NKI007",
        "nisa.dma_copy(dst=out, src=t, dge_mode=2)",
        "nisa.dma_copy(out, t, dge_mode=nisa.dge_mode.hwdge)",
    ),
    ("NKI008", "other(x)", "helper(x)"),
    ("NKI009", "a = Plain()", "a = Sizes()"),
    ("NKI010", "a = {0: 1}", "a = {'p': 1}"),
    ("NKI011", "for j in nl.dynamic_range(r): pass", "nl.fori_loop(0, r, step)"),
    ("NKI012", "a = int(r)", "a = int(n)"),
    ("NKI013", "a = r * 128", "a = n * 128"),
    ("NKI014", "nl.fori_loop(0, 4, writes_counter)", "nl.fori_loop(0, 4, step)"),
    ("NKI015", "nl.fori_loop(0, 4, step, r)", "nl.fori_loop(0, 4, step, 2)"),
    ("NKI015", "nl.fori_loop(0, 4, step, 0)", "nl.fori_loop(0, 4, step, 1)"),
    ("NKI015", "nl.fori_loop(0, 4, step, -1)", "nl.fori_loop(0, 4, step)"),
    ("NKI017", "with nl.no_reorder(): nl.fori_loop(0, 4, step)", "with nl.no_reorder(): nl.load(x)"),
    ("NKI018", "nl.fori_loop(0, 4, returns)", "nl.while_loop(r, returns)"),
    ("NKI018", "nl.while_loop(r, step)", "nl.fori_loop(0, 4, step)"),
    ("NKI019", "a = t + t", "a = nl.add(t, t)"),
    ("NKI019", "t[:, 0:4] = 0.0", "t[:, 0:4] = x"),
    ("NKI019", "t[:, 0:4] = nisa.reciprocal(dst=t, data=t)", "t[:, 0:4] = nl.load(x)"),
    ("NKI019", "t += 1", "n += 1"),
    ("NKI020", "a = float(t[0:1, 0:1])", "a = float(n)"),
    ("NKI020", "if t[0:1, 0:1] > 0: pass", "if t.shape[0] > 0: pass"),
    ("NKI021", "nisa.reciprocal(dst=t, data=t, mask=n)", "nisa.reciprocal(dst=t[0:5], data=t[0:5])"),
    ("NKI022", "a = nisa.reciprocal(data=t)", "a = nisa.reciprocal(dst=t, data=t)"),
    ("NKI023", "a = nl.arange(128)", "a = range(128)"),
    ("NKI026", "for j in nl.affine_range(4): pass", "for j in range(4): pass"),
    ("NKI027", "a = nl.divide(t, t)", "a = nl.multiply(t, nl.reciprocal(t))"),
    ("NKI028", "a = nl.power(t, 2)", "a = nl.power(t, t)"),
    ("NKI029", "a = nl.matmul(t, t)", "a = nl.matmul(t, t, transpose_x=True)"),
    ("NKI030", "nl.random_seed(42)", "nl.random_seed(i[0:1, 0:1])"),
    ("NKI031", "a = TABLE[0]", "a = ROWS[0]"),
    ("NKI032", "a = [j for j in range(4)]", "a = list(range(4))"),
    ("NKI032", "for j, k in enumerate(range(4)): pass", "for j in range(4): pass"),
    ("NKI033", "nisa.dma_copy(dst=out, src=p)", "nisa.dma_copy(dst=out, src=t)"),
    ("NKI034", "nisa.memset(dst=i, value=1.0)", "nisa.memset(dst=i, value=1)"),
    ("NKI034", "nisa.memset(i[:, 0:4], 1.0)", "nisa.memset(t[:, 0:4], 1.0)"),
    (
        "NKI035",
        "if c == 0: nisa.core_barrier(data=out, cores=(0, 1))",
        "nisa.core_barrier(data=out, cores=(0, 1))",
    ),
    ("NKI037", "a = t.ap(pattern=[[16, 8], [1, 8]])", "a = t.ap(pattern=[[8, 8], [1, 8]])"),
    ("NKI038", "a = x.vector_select(0, i)[0:4]", "a = x.vector_select(0, i)[:, 0:4]"),
    ("NKI038", "a = x.vector_select(0, i).select(1, r)", "a = x.vector_select(0, i).select(1, 3)"),
    ("NKI038", "a = x.select(1, r).select(0, r)", "a = x.select(1, r).select(0, 2)"),
    ("NKI040", "nisa.tensor_copy(dst=out, src=t[:, 0:4])", "nisa.memset(t, 0.0); nisa.tensor_copy(out, t)"),
    ("NKI040", "nisa.tensor_tensor(dst=t, data1=t, data2=x, op=nl.add)", "nisa.tensor_copy(dst=t, src=x)"),
    ("NKI040", "nl.device_print('t', t)", "helper(t); nl.device_print('t', t)"),
    ("NKI039", "a = nisa.vector_engine", "a = nisa.engine.vector"),
    ("NKI039", "nisa.tensor_tensor(t, t, t, op=np.add)", "nisa.tensor_tensor(t, t, t, op=nl.add)"),
]

AROUND = """
TABLE = [1, 2]
ROWS = (1, 2)

class Plain:
    rows = 4

class Sizes(nl.NKIObject):
    rows = 4

@nki.jit
def other(x):
    return helper(x)

def helper(x):
    return x

def step(i):
    pass

def returns(i):
    return i

def writes_counter(i):
    nisa.register_move(i, 0)
"""

SOFTMAX = """
@nki.jit
def k(x, scores, largest):
    e, s, out = nl.load(x), nl.load(x), nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.activation(dst=e, op=nl.exp, data=scores{})
    {}
    nisa.reciprocal(dst=s, data=s)
    nisa.tensor_scalar(dst=e, data=e, op0=nl.multiply, operand0=s)
    nisa.dma_copy(dst=out, src=e)
    return out
"""
SUM = "nisa.tensor_reduce(dst=s, op=nl.add, data=e, axis=1)"

WHOLE = [
    ("NKI048", SOFTMAX.format("", SUM), SOFTMAX.format(", bias=largest", SUM)),
    (
        "NKI048",
        SOFTMAX.format(", reduce_op=nl.add, reduce_res=s", "pass"),
        SOFTMAX.format("", "nisa.tensor_scalar(dst=s, data=e, op0=nl.add, operand0=1.0)"),
    ),
    (
        "NKI048",
        SOFTMAX.format(", bias=None, scale=0.5", SUM),
        SOFTMAX.format("", "nisa.max8(dst=s, src=x)\n    " + SUM),
    ),
    (
        "NKI002",
        "@nki.jit\ndef k(x, *, a=1):\n    return nl.load(x)\n",
        "@nki.jit\ndef k(x, a=1):\n    return nl.load(x)\n",
    ),
    (
        "NKI003",
        "@nki.jit\ndef k(x, a=[1]):\n    return nl.load(x)\n",
        "@nki.jit\ndef k(x, a=(1,)):\n    return nl.load(x)\n",
    ),
    (
        "NKI003",
        "@nki.jit\ndef k(x, a):\n    return nl.load(x)\ndef run(x):\n    return k[2](x, a=[1])\n",
        "@nki.jit\ndef k(x, a):\n    return nl.load(x)\ndef run(x):\n    return k[2](x, a=(1,))\n",
    ),
    (
        "NKI010",
        "def k(x, n):\n    d = {}\n    for i in range(n):\n        d[i] = nl.load(x)\n",
        "def k(x, n):\n    d = {}\n    for i in range(n):\n        d[f'{i}'] = nl.load(x)\n",
    ),
    (
        "NKI013",
        "def k(x):\n    def body(i):\n        nl.load(x[i * 2])\n    nl.fori_loop(0, 4, body)\n",
        "def k(x):\n    for i in range(2):\n        nl.load(x[i * 2])\n    nl.fori_loop(0, 4, returns)\n",
    ),
    (
        "NKI031",
        "D = {}\ndef h(k):\n    D[k] = 1\n@nki.jit\ndef k(x):\n    h(1)\n    return nl.load(x)\n",
        "D = {1: 2}\ndef h(k):\n    return D[k]\n@nki.jit\ndef k(x):\n    h(1)\n    return nl.load(x)\n",
    ),
    (
        "NKI031",
        "D = [1]\ndef h():\n    return D[0]\n@nki.jit\ndef k(x):\n    h()\n    return nl.load(x)\nD[0] = 2\n",
        "D = [1]\nD[0] = 2\ndef h():\n    return D[0]\n@nki.jit\ndef k(x):\n    h()\n    return nl.load(x)\n",
    ),
    (
        "NKI031",
        "import numpy as np\n@nki.jit\ndef k(x):\n    np.random.rand()\n    return nl.load(x)\n",
        "import numpy as np\n@nki.jit\ndef k(x):\n    return nl.load(x)\ndef run():\n    k(np.random.rand(4, 4))\n",
    ),
    (
        "NKI004",
        "@nki.jit\ndef k(x):\n    y = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.hbm)\n    return y\n",
        "@nki.jit\ndef k(x):\n    y = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)\n    return y\n",
    ),
    ("NKI005", "@nki.jit\ndef k(x):\n    nl.load(x)\n", "def helper(x):\n    nl.load(x)\n"),
    (
        "NKI016",
        "def k(x, n):\n    for i in nl.dynamic_range(n):\n        t = nl.load(x)\n    nl.store(x, t)\n",
        "def k(x, n):\n    for i in range(n):\n        t = nl.load(x)\n    nl.store(x, t)\n",
    ),
    (
        "NKI024",
        "import neuronxcc.nki.language as old\n\ndef k(x):\n    return nl.load(x)\n",
        "def k(x):\n    return nl.load(x)\n",
    ),
    (
        "NKI025",
        "@nki.jit(platform_target='trn2')\ndef k(x):\n    return nl.load(x)\n",
        "@nki.jit()\ndef k(x):\n    return nl.load(x)\n",
    ),
    (
        "NKI036",
        "def k(s, v):\n    acc = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)\n    for m in range(2):\n"
        "        for k in range(4):\n            nisa.nc_matmul(dst=acc, stationary=s[k], moving=v[k])\n",
        "def k(s, v):\n    for m in range(2):\n        acc = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)\n"
        "        for k in range(4):\n            nisa.nc_matmul(dst=acc, stationary=s[k], moving=v[k])\n",
    ),
    (
        "NKI041",
        "def k(x, t):\n    a = nisa.memset(x, 0)\n    def body(i):\n        b = nisa.memset(t, 0)\n"
        "        a.depends_on(b)\n    nl.fori_loop(0, 4, body)\n",
        "def k(x, t):\n    a = nisa.memset(x, 0)\n    def body(i):\n        b = nisa.memset(t, 0)\n"
        "        b.depends_on(a)\n    nl.fori_loop(0, 4, body)\n",
    ),
    (
        "NKI042",
        "@nki.jit\ndef k(x):\n    return nl.load(x)\n\nk[4](1)\n",
        "@nki.jit\ndef k(x):\n    return nl.load(x)\n\nk[2](1)\n",
    ),
]


PARSED = Level(0, 6)
"""The last level whose compiler parses kernels, so that rules about Python hold."""


def codes(text: str, level: Level = PARSED) -> list[str]:
    return [finding.code for finding in lint_source(HEAD + text, "kernel.py", level)]


@pytest.mark.parametrize(("code", "bad", "good"), LINES)
def test_speaks_on_the_bad_line_and_not_on_the_good_one(code: str, bad: str, good: str) -> None:
    level = NEWEST if code == "NKI044" else PARSED
    assert codes(AROUND + BODY.format(bad), level).count(code) == 1
    assert code not in codes(AROUND + BODY.format(good), level)


@pytest.mark.parametrize(("code", "bad", "good"), WHOLE, ids=[code for code, _, _ in WHOLE])
def test_speaks_on_the_bad_kernel_and_not_on_the_good_one(code: str, bad: str, good: str) -> None:
    assert codes(bad).count(code) == 1
    assert code not in codes(good)


def test_every_rule_has_a_bad_and_a_good_example() -> None:
    load_rules()
    assert {code for code in KINDS if code.startswith("NKI")} == {code for code, _, _ in [*LINES, *WHOLE]}


def test_an_argument_that_may_be_a_number_is_no_operand_in_hbm() -> None:
    body = (
        "    t = nl.load(x)\n    nisa.tensor_scalar(dst=t, data=t, op0=nl.add, operand0={})\n    return out\n"
    )
    head = "@nki.jit\ndef k(x, factor):\n    out = nl.ndarray((4, 4), nl.float32, buffer=nl.shared_hbm)\n"
    assert codes(head + body.format("factor")) == []
    assert codes(head + body.format("out")) == ["NKI047"]


def test_a_finding_says_where_and_what_to_write() -> None:
    (finding,) = lint_source(HEAD + BODY.format("nisa.memset(dst=i, value=2.0)"), "kernel.py")
    assert str(finding) == (
        "error[NKI034] value=2.0 for nl.int32. Rule: nisa.memset fills an integer tile with an integer, not a float.\n"
        "  try: value=2\n  at kernel.py:13 in kernel"
    )


@pytest.mark.parametrize(
    ("code", "line", "first", "last"),
    [
        ("NKI011", "for j in nl.dynamic_range(r): pass", (0, 6), (0, 6)),
        ("NKI027", "a = nl.divide(t, t)", (0, 5), (0, 7)),
        ("NKI032", "a = [j for j in range(4)]", (0, 2), (0, 6)),
        ("NKI033", "nisa.dma_copy(dst=out, src=p)", (0, 3), (0, 7)),
        ("NKI039", "a = nl.tile_size.psum_fmax", (0, 4), (0, 7)),
        ("NKI043", "a = nl.tiles(x, tile_shape=(128, 4))", (0, 2), (0, 6)),
        ("NKI044", "for j in nl.dynamic_range(r): pass", (0, 7), (0, 7)),
    ],
)
def test_a_rule_holds_at_its_levels(
    code: str, line: str, first: tuple[int, int], last: tuple[int, int]
) -> None:
    speaking = [level for level in LEVELS if code in codes(AROUND + BODY.format(line), level)]
    assert speaking == [level for level in LEVELS if first <= level <= last]


def test_the_older_front_end_keeps_its_rules_at_0_7(monkeypatch) -> None:
    text = AROUND + BODY.format("a = [j for j in nl.dynamic_range(r)]")
    assert {"NKI032", "NKI011", "NKI044"} & set(codes(text, NEWEST)) == {"NKI044"}
    monkeypatch.setenv("NKI_COMPILER_FRONTEND", "custom")
    assert {"NKI032", "NKI011", "NKI044"} & set(codes(text, NEWEST)) == {"NKI032", "NKI011"}


def test_a_comparison_with_none_is_a_warning() -> None:
    (finding,) = lint_source(HEAD + BODY.format("a = n is not None"), "kernel.py", PARSED)
    assert (finding.code, finding.severity) == ("NKI001", Severity.warning)


@pytest.mark.parametrize("returned", ["return tile", "pass"])
def test_a_kernel_that_another_one_calls_may_return_tiles_or_nothing(returned: str) -> None:
    tile = "tile = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.sbuf)"
    helper = f"@nki.jit\ndef helper(x):\n    {tile}\n    {returned}\n"
    code = "NKI004" if returned.startswith("return") else "NKI005"
    assert code in codes(helper)
    assert code in codes(helper + "\ndef main(x):\n    helper(x)\n")  # a launch
    calling = "\ndef k(x):\n    helper(nl.load(x))\n    return x\n"
    assert code not in codes(helper + calling)
    assert lint_source(HEAD + helper, "kernel.py", called=frozenset({"helper"})) == []


@pytest.mark.parametrize("line", ["other(x)", "nisa.dma_copy(dst=out, src=t, dge_mode=2)"])
def test_what_compiles_against_the_guide_is_a_warning(line: str) -> None:
    (finding,) = lint_source(HEAD + AROUND + BODY.format("nisa.memset(t, 0.0); " + line), "kernel.py")
    assert finding.severity is Severity.warning


def test_plain_python_around_kernels_is_left_alone() -> None:
    assert codes("def reference(x):\n    return [y is x for y in x]\n") == []


@pytest.mark.slow
def test_the_kernels_of_this_project_have_no_errors() -> None:
    for path in sorted(Path(nki_kernels.__file__).parent.rglob("*.py")):
        findings = lint_file(path)
        assert {finding.code for finding in findings} <= {"NKI001", "NKW-DMA-RESHAPED"}, path.name
        assert all(finding.severity is Severity.warning for finding in findings)


def test_refuses_what_is_no_python(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"kernel\.py is not Python"):
        lint_source("def k(:\n", "kernel.py")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        lint_file(tmp_path / "missing.py")
    (tmp_path / "empty.py").write_text("")
    assert lint_file(tmp_path / "empty.py") == []


LONG = {
    "sum": "1" + "+1" * 30_000,
    "names": "x" + ".y" * 30_000,
    "signs": "-" * 30_000 + "1",
    "brackets": "f(" * 30_000 + ")" * 30_000,
}


@pytest.mark.parametrize("expression", LONG.values(), ids=LONG)
def test_one_expression_does_not_end_the_run_over_a_folder(tmp_path: Path, capsys, expression: str) -> None:
    (tmp_path / "a.py").write_text(
        f"{HEAD}@nki.jit\ndef kernel(x, f):\n    a = {expression}\n    nl.load(a)\n"
    )
    (tmp_path / "b.py").write_text(HEAD + BODY.format("nisa.memset(i, value=2.0)"))
    with pytest.raises(InvalidArgument) as refused:
        lint_file(tmp_path / "a.py")
    assert refused.value.code in ("NKW-LINT-DEPTH", "NKW-LINT-SYNTAX")
    assert main(["lint", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert refused.value.code in printed and "NKI034" in printed
    assert max(map(len, printed.splitlines())) < 1000


def test_lint_waits_for_no_pipe(tmp_path: Path, capsys) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "long.py").write_text("#" * (MOST_SOURCE_BYTES + 1))
    assert main(["lint", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "pipe.py cannot be read: [Errno 22] it is not a regular file" in printed
    assert "long.py cannot be read: [Errno 27] it holds more than 4,000,000 bytes" in printed


def test_a_file_of_the_older_dialect_has_only_warnings() -> None:
    kernel = "def k(x):\n    i = nl.arange(128)\n    return nisa.reciprocal(data=nl.load(x), mask=i)\n"
    older = "import neuronxcc.nki.isa as nisa\nimport neuronxcc.nki.language as nl\n\n" + kernel
    findings = lint_source(older, "kernel.py")
    assert {finding.code for finding in findings} == {"NKI021", "NKI022", "NKI023", "NKI024"}
    assert {finding.severity for finding in findings} == {Severity.warning}
    assert any(finding.severity is Severity.error for finding in lint_source(HEAD + kernel, "kernel.py"))


@pytest.mark.parametrize(
    "text",
    [
        "for j in range(2):\n        if j: nisa.tensor_copy(dst=out, src=u)\n        nisa.memset(u, 0.0)",
        "v = u[:, 0:2]\n    nisa.memset(v, 0.0)\n    nisa.tensor_copy(dst=out, src=u)",
        "print(u.shape)\n    nl.store(out, nl.load(x))",
        "tiles = [u]\n    nisa.tensor_copy(dst=out, src=u)",
    ],
)
def test_tiles_that_something_may_have_written_are_left_alone(text: str) -> None:
    body = BODY.format("u = nl.ndarray((128, 8), dtype=nl.float32)\n    " + text)
    assert "NKI040" not in codes(body)


def test_a_tile_that_is_only_read_in_a_loop_is_reported() -> None:
    body = BODY.format(
        "u = nl.ndarray((128, 8), dtype=nl.float32)\n    for k in range(2):\n        nisa.tensor_copy(dst=t, src=u)"
    )
    assert "NKI040" in codes(body)


@pytest.mark.parametrize(
    "guarded",
    [
        "if True:\n{}",
        "if False:\n    pass\nelse:\n{}",
        "try:\n{}\nexcept ImportError:\n    kernel = None",
        "try:\n    import nothing\nexcept ImportError:\n{}",
        "import contextlib\nwith contextlib.suppress(ImportError):\n{}",
    ],
)
def test_kernels_in_branches_of_a_module_are_seen(guarded: str) -> None:
    kernel = HEAD + BODY
    sick, healthy = (
        guarded.format(textwrap.indent(kernel.format(line), "    "))
        for line in ("nisa.memset(i, value=2.0)", "nisa.memset(i, value=2)")
    )
    assert [finding.code for finding in lint_source(sick, "kernel.py")] == ["NKI034"]
    assert lint_source(healthy, "kernel.py") == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("nisa.dma_copy(out.reshape((64, 16)), x)", ["NKW-DMA-RESHAPED"]),
        ("nisa.dma_copy(dst=out.reshape((64, 16))[0:4], src=x)", ["NKW-DMA-RESHAPED"]),
        ("flat = out.reshape((64, 16)); nisa.dma_copy(dst=flat[0:4], src=x)", ["NKW-DMA-RESHAPED"]),
        ("nisa.dma_copy(dst=out[0:4], src=x.reshape((4, 8)))", []),
        ("u = t.reshape((128, 2, 4)); nisa.dma_copy(dst=u, src=x)", []),
    ],
)
def test_a_dma_into_a_reshaped_tensor_of_hbm_is_warned_of(lines: str, expected: list[str]) -> None:
    findings = lint_source(HEAD + BODY.format(lines), "kernel.py")
    assert [finding.code for finding in findings] == expected
    assert all("a user report" in finding.message for finding in findings)
