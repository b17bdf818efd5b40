"""Rendezvous between ranks in processes of their own, as torchrun starts them.

The transport is torch.distributed's: its store carries the terms, shapes and lines of the members of a rendezvous,
gloo carries their operands. The key of a rendezvous is launch, place and number of visits to the place, so a rank that
skips a collective is never paired with a later one. Every member computes the same exchange on the operands of all, so
values equal those of ranks in one process.

A process that waits longer than _PUBLISH_AFTER_SECONDS publishes its rendezvous. Every process thus detects within a
second a deadlock, a rank that has ended or failed, and a killed process of the same machine, as the core scheduler
does inside one process. A rank that only computes is waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np

from nkw.errors import Deadlock, Location, NkwError, Unsupported
from simulate.isa.plan import Rendezvous
from simulate.run.environment import check_environment
from simulate.run.messages import ArrivalMessage, ProcessMessage, Shape, StateMessage

_PUBLISH_AFTER_SECONDS = 0.05
"""A wait shorter than this is not published; rendezvous of ranks in step take far less."""
_CHECK_SECONDS = 0.2
"""The interval at which a waiting process reads the states of the others."""
_JOIN_TIMEOUT = timedelta(minutes=5)
"""The time that the processes have to join; torchrun starts them within seconds of each other."""

_LOG_VARIABLE = "TORCH_CPP_LOG_LEVEL"
"""What torch's libraries print. Their warnings name every wait beyond its timeout and end a lost rank with C++ frames,
beside the error that this module raises."""

Arrivals = list[tuple[Rendezvous, list[np.ndarray], Location]]


@dataclass(frozen=True)
class Arrival:
    """One rank's arrival at a rendezvous, visible to the other members."""

    key: str
    member: int
    rendezvous: Rendezvous
    operands: list[np.ndarray]
    where: Location
    dry: bool

    def missing(self) -> list[str]:
        """The keys of the arrivals that complete the rendezvous."""
        return [f"{self.key}/{member}" for member in self.rendezvous.members if member != self.member]


class Processes:
    """This process among those of a world; each holds one rank."""

    def __init__(self, rank: int, ranks: int, store: Any) -> None:
        self.rank = rank
        self.ranks = ranks
        self._store = store
        self._launches = 0
        self._visits: dict[str, int] = {}
        self._published = 0
        self._sends: list[tuple[Any, Any]] = []
        self._published_kind = ""
        self._last_key: dict[str, str] = {}
        self._store.set(f"process/{rank}", ProcessMessage(platform.node(), os.getpid()).encode())
        self._publish("runs", "", ())
        atexit.register(self._ended)

    @classmethod
    def join(cls) -> Processes:
        """Join the processes that torchrun started with this one, over gloo.

        Raises InvalidArgument without torchrun's environment, Unsupported without torch, NkwError where nobody answers.
        """
        check_environment()
        os.environ.setdefault(_LOG_VARIABLE, "ERROR")
        try:
            import torch.distributed as dist
        except ImportError:
            raise Unsupported(
                "NKW-TORCH",
                "ranks in processes of their own meet through torch; pip install 'nki-workbench[speed]'",
            ) from None
        global _joined
        if _joined is None:
            with _connected(Location("", 0, "the start")):
                store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=_JOIN_TIMEOUT)))
                if not dist.is_initialized():
                    dist.init_process_group(
                        "gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=ranks
                    )
                _joined = cls(rank, ranks, dist.PrefixStore("nki", store))
        return _joined

    @contextlib.contextmanager
    def launch(self) -> Iterator[None]:
        """One launch, with rendezvous of its own; an error inside is published to the processes that wait."""
        self._launches += 1
        self._visits.clear()
        if self._published_kind != "runs":  # the launch before failed
            with _connected(Location("", 0, "a launch")):
                self._publish("runs", "", ())
        try:
            yield
        except NkwError as error:
            self._failed(str(error))
            raise
        except BaseException as error:
            self._failed(f"{type(error).__name__}: {error}")
            raise

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """The arrays of all ranks, of any shapes and dtypes, in the order of the ranks."""
        rendezvous = Rendezvous(
            place=("gather",),
            by_rank=True,
            members=tuple(range(self.ranks)),
            terms={"operation": "gather"},
            exchange=lambda operands: operands,
        )
        _, arrived = self.wait([self.post(rendezvous, [array], Location("", 0, "gather"))])
        return [operands[0] for _, operands, _ in arrived]

    def post(
        self, rendezvous: Rendezvous, operands: list[np.ndarray], where: Location, dry: bool = False
    ) -> Arrival:
        """Arrive at a rendezvous without waiting for other members. Raises NkwError if the connection is lost."""
        place = repr(rendezvous.place)
        count = self._visits[place] = self._visits.get(place, 0) + 1
        key = f"{self._launches}/{count}/{place}"
        operands = [np.ascontiguousarray(each) for each in operands]
        shapes = [(each.shape, each.dtype) for each in operands]
        # Texts of the terms, which are what members can exchange and compare.
        terms = {name: str(value) for name, value in rendezvous.terms.items()}
        arrival = Arrival(key, self.rank, replace(rendezvous, terms=terms), operands, where, dry)
        message = ArrivalMessage(terms, where, shapes).encode()
        with _connected(where):
            self._store.set(f"{key}/{self.rank}", message)
            if not dry:
                self._send(arrival)
        return arrival

    def _send(self, arrival: Arrival) -> None:
        """Begin to send this rank's operands to every other member, without waiting for the receives.

        Members with several rendezvous at once may complete them in different orders; waiting for sends could deadlock.
        """
        import torch
        import torch.distributed as dist

        self._sends = [work for work in self._sends if not work[0].is_completed()]
        for member in arrival.rendezvous.members:
            for mine in arrival.operands:
                if member != arrival.member and member < self.ranks and mine.size:
                    held = torch.from_numpy(_bytes(mine).copy())
                    self._sends.append((dist.isend(held, member, tag=_tag(arrival)), held))

    def wait(self, arrival: Sequence[Arrival]) -> tuple[int, Arrivals]:
        """Wait until one of several rendezvous is complete; returns its index and its members' arrivals, in order.

        Raises Deadlock if none can ever be complete, NkwError if a member has failed or the connection is lost.
        """
        with _connected(arrival[0].where):
            return self._wait(arrival)

    def _wait(self, arrival: Sequence[Arrival]) -> tuple[int, Arrivals]:
        began = checked = time.monotonic()
        while True:
            for index, each in enumerate(arrival):
                if self._store.check([*each.missing()]):
                    if self._published_kind == "waits":
                        self._publish("runs", "", ())
                    return index, self._collect(each)
            with contextlib.suppress(RuntimeError):  # a timeout; a lost store raises at the next check
                self._store.wait(arrival[0].missing(), timedelta(seconds=0.002 if len(arrival) > 1 else 0.05))
            now = time.monotonic()
            if now - began > _PUBLISH_AFTER_SECONDS and self._published_kind != "waits":
                text = "; ".join(
                    f"{each.rendezvous.terms.get('operation', 'a rendezvous')} at {each.where}"
                    for each in arrival
                )
                self._publish("waits", text, [each.missing() for each in arrival])
            if now - checked > _CHECK_SECONDS:
                checked = now
                self._check_progress(arrival)

    def _collect(self, arrival: Arrival) -> Arrivals:
        """The arrivals of all members of a complete rendezvous."""
        arrived: Arrivals = []
        shapes: dict[int, Sequence[Shape]] = {}
        for member in arrival.rendezvous.members:
            if member == arrival.member:
                arrived.append((arrival.rendezvous, arrival.operands, arrival.where))
                continue
            message = ArrivalMessage.decode(self._store.get(f"{arrival.key}/{member}"), member)
            shapes[member] = message.shapes
            arrived.append((replace(arrival.rendezvous, terms=dict(message.terms)), [], message.where))
        agreed = all(rendezvous.terms == arrival.rendezvous.terms for rendezvous, _, _ in arrived)
        if agreed and not arrival.dry:
            operands = self._exchange(arrival, shapes)
            arrived = [
                (rendezvous, operands[member], where)
                for member, (rendezvous, _, where) in zip(arrival.rendezvous.members, arrived)
            ]
        # A member that arrives at this place again has read the arrivals of the visit before.
        place = repr(arrival.rendezvous.place)
        before, self._last_key[place] = self._last_key.get(place), f"{arrival.key}/{self.rank}"
        if before is not None:
            self._store.delete_key(before)
        return arrived

    def _exchange(self, arrival: Arrival, shapes: dict[int, Sequence[Shape]]) -> dict[int, list[np.ndarray]]:
        """Receive the operands of every other member; this rank's were sent when it arrived."""
        import torch
        import torch.distributed as dist

        tag = _tag(arrival)
        operands: dict[int, list[np.ndarray]] = {arrival.member: arrival.operands}
        work: list[Any] = []
        for member, described in shapes.items():
            operands[member] = [_empty(shape, dtype, member) for shape, dtype in described]
            for theirs in operands[member]:
                if theirs.size:
                    work.append(dist.irecv(torch.from_numpy(_bytes(theirs)), member, tag=tag))
        for each in work:
            each.wait()
        return operands

    def _check_progress(self, arrival: Sequence[Arrival]) -> None:
        """Raise Deadlock or NkwError if no rank that this one waits for, directly or through others, can go on."""
        states = self._blocked_states(arrival)
        if states is None:
            return
        time.sleep(_PUBLISH_AFTER_SECONDS)
        again = self._blocked_states(arrival)
        if again is None or {rank: state.count for rank, state in again.items()} != {
            rank: state.count for rank, state in states.items()
        }:
            return
        failed = [(rank, state.text) for rank, state in sorted(states.items()) if state.kind == "failed"]
        if failed:
            rank, text = failed[0]
            raise NkwError(
                "NKW-PROCESS-LOST", f"this rank waits for rank {rank}, which failed: {text}", arrival[0].where
            )
        lines = [
            f"rank {rank} waits in {state.text}" if state.kind == "waits" else f"rank {rank} has ended"
            for rank, state in sorted(states.items())
        ]
        raise Deadlock(
            "NKW-DEADLOCK", "every rank that has not ended waits for another one\n  " + "\n  ".join(lines)
        )

    def _blocked_states(self, arrival: Sequence[Arrival]) -> dict[int, StateMessage] | None:
        """The states of all ranks that this one waits for, directly or not; None if one of them can go on."""
        states: dict[int, StateMessage] = {}
        ahead = {self.rank}
        while ahead:
            rank = ahead.pop()
            state = states[rank] = self._state_of(rank)
            if state.kind == "runs":
                if not self._has_died(rank):
                    return None
                states[rank] = StateMessage(state.count, "failed", "its process is gone")
            for missing in state.missing:
                absent = [key for key in missing if not self._store.check([key])]
                if not absent:
                    return None  # that rank has not noticed yet that it can go on
                ahead |= {int(key.rpartition("/")[2]) for key in absent} - set(states)
        return states

    def _state_of(self, rank: int) -> StateMessage:
        """Return the state that a rank published last; a rank outside of the world has ended."""
        if rank >= self.ranks:
            return StateMessage()
        return StateMessage.decode(self._store.get(f"state/{rank}"), rank)

    def _has_died(self, rank: int) -> bool:
        """Whether a rank's process ran on this machine and is gone: a killed process does not publish its end."""
        process = ProcessMessage.decode(self._store.get(f"process/{rank}"), rank)
        is_local = os.name == "posix" and process.host == platform.node()
        return is_local and not _is_alive(process.process_id)

    def _publish(self, kind: str, text: str, rendezvous: Any) -> None:
        self._published_kind = kind
        self._published += 1
        self._store.set(f"state/{self.rank}", StateMessage(self._published, kind, text, rendezvous).encode())

    def _failed(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # it may be the loss of the store that failed
            self._publish("failed", text, ())

    def _ended(self) -> None:
        with contextlib.suppress(RuntimeError):  # at exit the store may be gone before
            self._publish("ended", "", ())


_joined: Processes | None = None


@contextlib.contextmanager
def _connected(where: Location) -> Iterator[None]:
    """Turn torch's error for a lost connection or store, always a RuntimeError, into NkwError."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        if first.startswith("["):  # gloo begins with its source line and ends with advice
            first = first.partition("] ")[2].partition(". ")[0]
        raise NkwError("NKW-PROCESS-LOST", f"the connection to another rank broke: {first}", where) from None


def _is_alive(process: int) -> bool:
    """Whether a process exists on this machine and is no zombie."""
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as stat:
            state = stat.read().rpartition(") ")[2][:1]
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a system without /proc
        return True
    return state not in ("Z", "X")


def _tag(arrival: Arrival) -> int:
    """The message tag of a rendezvous' operands."""
    return zlib.crc32(arrival.key.encode()) & 0x7FFFFFFF


def _empty(shape: tuple[int, ...], dtype: np.dtype, member: int) -> np.ndarray:
    """Return an array for the operand of another member. Raises NkwError if the memory is lacking."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError):  # numpy's error for a size beyond its integers
        raise NkwError(
            "NKW-PROCESS-LOST",
            f"rank {member} sends an array of {shape} {dtype}, which does not fit into memory",
        ) from None


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
