"""The variables that torchrun sets: what it would not set is named."""

from __future__ import annotations

import pytest

from nkw.errors import InvalidArgument
from simulate.run.environment import check_environment, read_rank

SOUND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in SOUND.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_what_torchrun_sets_is_taken(variables: pytest.MonkeyPatch) -> None:
    check_environment()
    assert read_rank() == 1
    variables.setenv("RANK", "0")
    assert read_rank() == 0


@pytest.mark.parametrize(
    ("name", "value", "range"),
    [
        *(("RANK", value, "0 to 1") for value in ("x", "", "-1", "2", "1_0", " 1", "\u0661", "9" * 5000)),
        *(("WORLD_SIZE", value, "1 to 1048576") for value in ("0", "two", "1048577")),
        *(("MASTER_PORT", value, "1 to 65535") for value in ("abc", "0", "65536")),
    ],
)
def test_another_number_is_refused(variables: pytest.MonkeyPatch, name: str, value: str, range: str) -> None:
    variables.setenv(name, value)
    with pytest.raises(InvalidArgument) as refused:
        check_environment()
    assert refused.value.message == f"{name} is {value!r:.60}; torchrun sets a whole number from {range}"


def test_a_host_that_no_name_server_knows_is_refused(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("MASTER_ADDR", "nowhere.invalid")
    with pytest.raises(InvalidArgument, match=r"MASTER_ADDR is 'nowhere.invalid', which names no host"):
        check_environment()


def test_absent_variables_are_named(variables: pytest.MonkeyPatch) -> None:
    variables.delenv("RANK")
    with pytest.raises(InvalidArgument, match="RANK not set: start the processes with torchrun"):
        check_environment()
