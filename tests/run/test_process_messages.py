"""Messages between ranks in processes of their own are JSON whose values are checked; nothing of them is executed."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nkw.errors import InvalidArgument, Location, NkwError
from simulate.isa.plan import Rendezvous
from simulate.run.messages import ArraysMessage, ArrivalMessage, ProcessMessage, StateMessage
from simulate.run.processes import Processes

WHERE = ["kernel.py", 3, "kernel"]
MESSAGES: dict[Any, Any] = {
    ProcessMessage: ["host", 1],
    StateMessage: [1, "waits", "all_reduce at kernel.py:3", [["1/1/place/0", "1/1/place/2"], []]],
    ArrivalMessage: [{"operation": "all_reduce"}, WHERE, [[[2, 3], "<f4"], [[], "bfloat16"]]],
    ArraysMessage: [[[2, 3], "<f4"], [[], "bfloat16"]],
}
WRONG: list[tuple[Any, Any]] = [
    (ProcessMessage, ["host"]),
    (ProcessMessage, ["host", 0]),
    (ProcessMessage, ["host", 2**31]),
    (ProcessMessage, ["host", True]),
    (ProcessMessage, ["host", "1"]),
    (ProcessMessage, {"host": 1}),
    (StateMessage, [1, "sleeps", "", []]),
    (StateMessage, [-1, "runs", "", []]),
    (StateMessage, [1, ["runs"], "", []]),
    (StateMessage, [1, "waits", 7, []]),
    (StateMessage, [1, "waits", "", [["1/1/place/x"]]]),
    (StateMessage, [1, "waits", "", [["1/1/place/-1"]]]),
    (StateMessage, [1, "waits", "", ["1/1/place/0"]]),
    (ArrivalMessage, [{"operation": 3}, WHERE, []]),
    (ArraysMessage, [[[2, -3], "<f4"]]),
    (ArraysMessage, [[[2], "|O8"]]),
    (ArrivalMessage, [["operation"], WHERE, []]),
    (ArrivalMessage, [{}, ["kernel.py", "3", "kernel"], []]),
    (ArrivalMessage, [{}, WHERE, [[[-1], "<f4"]]]),
    (ArrivalMessage, [{}, WHERE, [[[1.0], "<f4"]]]),
    (ArrivalMessage, [{}, WHERE, [[[1], "|O"]]]),
    (ArrivalMessage, [{}, WHERE, [[[1], "<f3"]]]),
    (ArrivalMessage, [{}, WHERE, [[[1], "f4,f4"]]]),
    (ArrivalMessage, [{}, WHERE, [[[1], ["<f4"]]]]),
    (ArrivalMessage, [{}, WHERE, [[[1], 4]]]),
]


@pytest.mark.parametrize("message_type", MESSAGES, ids=lambda message_type: message_type.__name__)
def test_a_message_is_read_as_it_was_written(message_type: Any) -> None:
    content = json.dumps(MESSAGES[message_type])
    assert json.loads(message_type.decode(content.encode(), 1).encode()) == json.loads(content)


@pytest.mark.parametrize(("message_type", "value"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_message_is_an_error_that_names_the_rank(message_type: Any, value: Any) -> None:
    with pytest.raises(
        NkwError, match=r"NKW-PROCESS-LOST.* the message of rank 1 cannot be read: start all ranks"
    ):
        message_type.decode(json.dumps(value).encode(), 1)


@pytest.mark.parametrize("message_type", MESSAGES, ids=lambda message_type: message_type.__name__)
@pytest.mark.parametrize("content", [b"", b"\xff", b"[", b"[" * 100_000, b"NaN", b"null", b"[1, 2, 3, 4, 5]"])
def test_a_text_that_is_no_message_is_an_error(message_type: Any, content: bytes) -> None:
    with pytest.raises(NkwError, match="cannot be read"):
        message_type.decode(content, 0)


def test_control_characters_of_another_rank_are_escaped_and_long_texts_are_shortened() -> None:
    state = StateMessage.decode(StateMessage(1, "failed", "\x1b[2J" + "a" * 10_000).encode().encode(), 1)
    assert state.text.startswith("\\x1b[2J") and len(state.text) < 2100


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.int8, np.uint64, np.bool_, np.complex64, "U5", "S3", ml_dtypes.bfloat16]
    + [ml_dtypes.float8_e4m3fn, ml_dtypes.int4],
)
def test_dtypes_of_numbers_and_texts_are_sent(dtype: Any) -> None:
    message = ArrivalMessage({}, Location("", 0, ""), [((2,), np.dtype(dtype))])
    assert ArrivalMessage.decode(message.encode().encode(), 0).shapes == [((2,), np.dtype(dtype))]


@pytest.mark.parametrize("dtype", [object, "f4,f4", "V3"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"NKW-PROCESSES.*cannot be sent to another process"):
        ArrivalMessage({}, Location("", 0, ""), [((2,), np.dtype(dtype))]).encode()


class Command:
    """An object whose pickle creates a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("key", ["process/1", "state/1", "1/1/'place'/1"])
def test_a_pickle_in_the_store_runs_no_code(tmp_path: Path, key: str) -> None:
    torch = pytest.importorskip("torch")
    store = torch.distributed.HashStore()
    ranks = [Processes(rank, 2, store) for rank in range(2)]
    rendezvous = Rendezvous("place", True, (0, 1), {}, lambda operands: operands)
    with ranks[0].launch():
        arrival = ranks[0].post(rendezvous, [], Location("", 0, ""), dry=True)
    marker = tmp_path / "executed"
    store.set(key, pickle.dumps(Command(marker)))
    with pytest.raises(NkwError, match="the message of rank 1 cannot be read"):
        ranks[0].wait([arrival])
    assert not marker.exists()


def test_arrays_are_split_at_their_ends_and_other_lengths_are_refused() -> None:
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 4), np.int32),
        np.ones(5, ml_dtypes.bfloat16),
    ]
    message = ArraysMessage([(array.shape, array.dtype) for array in arrays])
    content = b"".join(array.tobytes() for array in arrays)
    received = ArraysMessage.decode(message.encode().encode(), 1).split(content, 1)
    assert [(array.dtype, array.shape) for array in received] == [
        (array.dtype, array.shape) for array in arrays
    ]
    assert all(np.array_equal(one, two) for one, two in zip(received, arrays))
    for wrong in (content[:-1], content + b"\0"):
        with pytest.raises(NkwError, match="the message of rank 1 cannot be read"):
            message.split(wrong, 1)


def test_no_source_of_the_product_reads_pickles_of_others() -> None:
    """The one pickle travels over a socket pair between a server and its own child."""
    calls = (
        "pickle",
        "all_gather_object",
        "broadcast_object",
        "scatter_object",
        "gather_object",
        "torch.load(",
    )
    root = Path(__file__).resolve().parents[2]
    users = {
        path.relative_to(root).as_posix()
        for folder in ("simulate", "model", "nkw", "nki_kernels")
        for path in (root / folder).rglob("*.py")
        if any(call in path.read_text().replace("allow_pickle=False", "") for call in calls)
    }
    explained = {"simulate/run/messages.py", "simulate/bundle/reading.py", "simulate/hardware/record.py"}
    assert users - explained == {"model/serve/child.py", "model/device/neuron/host_group.py"}
