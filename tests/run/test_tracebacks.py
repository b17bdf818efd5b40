"""Tracebacks of user errors show the user's frames, the kernel's line last."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import simulate
from nkw.errors import NkwError
from simulate.lines import PACKAGE
from simulate.tracebacks import trim_traceback
from tests.deep import deep_except

pytest_plugins = ("pytester",)

KERNEL = """
    import numpy as np
    import nki
    import nki.isa as nisa
    import nki.language as nl

    @nki.jit
    def refused(x):
        rows = nl.load(x)
        return rows[0:9]

    @nki.jit
    def divides(x):
        return 1 // (x.shape[0] - 4)

    X = np.ones((4, 4), np.float32)
"""


def ran(tmp_path, lines, *command, **environment):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KERNEL) + textwrap.dedent(lines))
    done = subprocess.run(
        [sys.executable, *command, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "NKI_BACKEND": "simulate", **environment},
    )
    return done.returncode, done.stderr


INSTALL = "import simulate; simulate.install('simulate')\n"


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "line"), [("refused", "return rows[0:9]"), ("divides", "return 1 // (")])
def test_plain_python_shows_the_kernels_line_last(tmp_path, kernel, line) -> None:
    script = tmp_path / "main.py"
    script.write_text(INSTALL + "import script\n" + f"script.{kernel}(script.X)\n")
    (tmp_path / "script.py").write_text(textwrap.dedent(KERNEL))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    frames = [text for text in done.stderr.splitlines() if text.startswith("  File ")]
    assert done.returncode == 1
    assert len(frames) == 2 and "main.py" in frames[0] and "script.py" in frames[1]
    assert line in done.stderr
    full = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "NKW_TRACEBACK": "full"},
    )
    assert PACKAGE in full.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", deep_except(["run", "check", "time"], 3))
def test_commands_show_the_frames_of_the_script(tmp_path, command) -> None:
    status, stderr = ran(tmp_path, "divides(X)\n", "-m", "simulate", command)
    frames = [text for text in stderr.splitlines() if text.startswith("  File ")]
    assert status != 0 and "ZeroDivisionError" in stderr
    assert len(frames) == 2 and all("script.py" in frame for frame in frames)
    status, stderr = ran(tmp_path, "divides(X)\n", "-m", "simulate", command, NKW_TRACEBACK="full")
    assert PACKAGE in stderr


def frames(trace):
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename
        trace = trace.tb_next


def test_a_fault_of_the_simulator_keeps_its_frames() -> None:
    def slice_beyond(x):
        return x[0:9]

    with pytest.raises(NkwError) as refused:
        simulate.launch(slice_beyond, [((np.ones((4, 4), np.float32),), {})])
    assert set(frames(trim_traceback(refused.value))) == {__file__}
    with pytest.raises(TypeError, match="cannot unpack") as began_inside:
        simulate.launch(slice_beyond, [3])
    assert any(name.startswith(PACKAGE) for name in frames(trim_traceback(began_inside.value)))


@pytest.mark.slow
def test_pytest_shows_the_test_and_the_kernel(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        textwrap.dedent("import simulate; simulate.install('simulate')")
        + textwrap.dedent(KERNEL)
        + "\ndef test_it():\n    refused(X)\n"
    )
    result = pytester.runpytest_subprocess("-p", "simulate.pytest_plugin")
    assert PACKAGE not in result.stdout.str()
    result.stdout.fnmatch_lines(["*return rows[[]0:9[]]*", "*NKW-INDEX*"])


@pytest.mark.slow
def test_a_notebook_shows_the_cell_and_the_kernel() -> None:
    shells = pytest.importorskip("IPython.core.interactiveshell")
    code = textwrap.dedent(
        f"""
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance(colors="NoColor")
        shell.run_cell({(INSTALL + textwrap.dedent(KERNEL))!r})
        shell.run_cell("refused(X)")
        """
    )
    assert shells
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "NKW-INDEX" in done.stdout + done.stderr
    assert "rows[0:9]" in done.stdout and PACKAGE not in done.stdout
