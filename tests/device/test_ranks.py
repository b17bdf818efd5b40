"""Two ranks, each a process on a core of its own, against two simulated ranks of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nkw.commands import main
from tests.deep import deep_except
from tests.run.test_processes import torchrun


@pytest.mark.slow
@pytest.mark.parametrize("framework", deep_except(["native", "xla"], ["native"]))
def test_two_processes_generate_what_two_simulated_ranks_do(
    tmp_path: Path, tiny: Path, framework: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--model", str(tiny), "--prompt", "Once", "--max-new-tokens", "4", "--tp", "2"]
    simulated, neuron = tmp_path / "simulated.json", tmp_path / "neuron.json"
    assert main([*arguments, "--target", "trn2", "--json", str(simulated)]) == 0
    capsys.readouterr()
    command = [*arguments, "--backend", "neuron", "--json", str(neuron)]
    done = torchrun(2, "tests.device.ranks_program", framework, str(tmp_path / "site"), *command)
    assert done.returncode == 0, done.stderr
    wanted, device_document = (json.loads(path.read_text()) for path in (simulated, neuron))
    assert device_document["backend"] == "neuron"
    assert device_document["generations"] == wanted["generations"]
    assert device_document["generations"][0]["checks"]["tokens_equal"] == 4
