"""Rendezvous between ranks in separate processes, as torchrun starts them.

A rendezvous is an instruction that several ranks carry out together, such as a collective; its terms are what the
members must agree on. The transport is torch.distributed: its store carries the terms, shapes and lines of the
members of a rendezvous, gloo carries their operands. The name of a rendezvous is launch, key and number of visits to
the key, so a rank that skips a collective is never paired with a later one. Every member computes the same exchange
on the operands of all, so values equal those of ranks in one process.

A process that waits longer than _PUBLISH_AFTER_SECONDS publishes that it waits, and for which arrivals. Within a
second every process thus detects a deadlock, a rank that has ended or failed, and a killed process on the same host,
as the core scheduler does inside one process. A rank that only computes is waited for.
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
"""Duration from which on a wait is published; rendezvous of synchronous ranks take far less."""
_CHECK_SECONDS = 0.2
"""Interval at which a waiting process reads the states of the other processes."""
_JOIN_TIMEOUT = timedelta(minutes=5)
"""Time limit for the processes to join; torchrun starts them within seconds of each other."""

_LOG_VARIABLE = "TORCH_CPP_LOG_LEVEL"
"""Variable that limits what torch's libraries print. Their warnings would repeat the errors of this module with C++
frames, and report every wait beyond its timeout."""

Arrivals = list[tuple[Rendezvous, list[np.ndarray], Location]]


@dataclass(frozen=True)
class Arrival:
    """Arrival of this process's rank at a rendezvous, which it has sent to the other members."""

    key: str
    member: int
    rendezvous: Rendezvous
    operands: list[np.ndarray]
    where: Location
    dry: bool

    def missing(self) -> list[str]:
        """Return the store keys under which the other members' arrivals appear; all of them complete the rendezvous."""
        return [f"{self.key}/{member}" for member in self.rendezvous.members if member != self.member]


class Processes:
    """Connection of this process, which has one rank of a world, to the processes of the other ranks."""

    def __init__(self, rank: int, ranks: int, store: Any) -> None:
        """Store that this rank runs, for the other ranks to read; at exit, store that it has ended.

        Args:
            rank: The rank of this process.
            ranks: The number of ranks.
            store: The store of torch.distributed that all ranks share.
        """
        self.rank = rank
        self.ranks = ranks
        self._store = store
        self._launches = 0
        self._visits: dict[str, int] = {}
        self._published = 0
        self._sends: list[tuple[Any, Any]] = []
        self._published_status = ""
        self._last_key: dict[str, str] = {}
        self._store.set(f"process/{rank}", ProcessMessage(platform.node(), os.getpid()).encode())
        self._publish("runs", "", ())
        atexit.register(self._publish_end)

    @classmethod
    def join(cls) -> Processes:
        """Join the processes that torchrun started with this one, over gloo; later calls return the same connection.

        Raises:
            InvalidArgument: The environment is not that of torchrun.
            Unsupported: torch is not installed.
            NkwError: The other processes do not answer within five minutes.
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
            with _convert_connection_errors(Location("", 0, "the start")):
                store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=_JOIN_TIMEOUT)))
                if not dist.is_initialized():
                    dist.init_process_group(
                        "gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=ranks
                    )
                _joined = cls(rank, ranks, dist.PrefixStore("nki", store))
        return _joined

    @contextlib.contextmanager
    def launch(self) -> Iterator[None]:
        """Count a launch, which lasts for the `with` block; an error in the block is sent to the other ranks.

        The error leaves the block unchanged. A rank that waits for this one then fails with its text.
        """
        self._launches += 1
        self._visits.clear()
        if self._published_status != "runs":  # the launch before failed
            with _convert_connection_errors(Location("", 0, "a launch")):
                self._publish("runs", "", ())
        try:
            yield
        except NkwError as error:
            self._publish_failure(str(error))
            raise
        except BaseException as error:
            self._publish_failure(f"{type(error).__name__}: {error}")
            raise

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of all ranks, of any shapes and dtypes, in the order of the ranks.

        Every rank must call it the same number of times in a launch.

        Raises:
            Deadlock: A rank can never arrive.
            NkwError: A rank has failed, the connection is lost, or a dtype cannot be sent.
        """
        rendezvous = Rendezvous(
            key=("gather",),
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
        """Send this rank's arrival at a rendezvous, and begin to send its operands; waits for no other member.

        Args:
            rendezvous: The rendezvous.
            operands: The operands of this rank.
            where: The kernel line, for messages.
            dry: Whether no operands are exchanged.

        Returns:
            The arrival, for `wait`.

        Raises:
            NkwError: The connection is lost.
            InvalidArgument: The dtype of an operand cannot be sent.
        """
        rendezvous_key = repr(rendezvous.key)
        count = self._visits[rendezvous_key] = self._visits.get(rendezvous_key, 0) + 1
        key = f"{self._launches}/{count}/{rendezvous_key}"
        operands = [np.ascontiguousarray(operand) for operand in operands]
        shapes = [(operand.shape, operand.dtype) for operand in operands]
        # Members can exchange and compare texts, so the terms are converted to texts.
        terms = {name: str(value) for name, value in rendezvous.terms.items()}
        arrival = Arrival(key, self.rank, replace(rendezvous, terms=terms), operands, where, dry)
        message = ArrivalMessage(terms, where, shapes).encode()
        with _convert_connection_errors(where):
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
            for operand in arrival.operands:
                if member != arrival.member and member < self.ranks and operand.size:
                    copied = torch.from_numpy(_view_bytes(operand).copy())
                    self._sends.append((dist.isend(copied, member, tag=_compute_tag(arrival)), copied))

    def wait(self, arrivals: Sequence[Arrival]) -> tuple[int, Arrivals]:
        """Wait until one of several rendezvous at which this rank has arrived is complete.

        Args:
            arrivals: What `post` returned for each.

        Returns:
            The index of the complete rendezvous, and for each member in order its rendezvous, operands and line.
            Operands of other members are missing if terms differ, and in a dry launch.

        Raises:
            Deadlock: No rendezvous can ever be complete.
            NkwError: A member has failed, or the connection is lost.
        """
        with _convert_connection_errors(arrivals[0].where):
            return self._wait(arrivals)

    def _wait(self, arrivals: Sequence[Arrival]) -> tuple[int, Arrivals]:
        """Wait until one of several rendezvous is complete; return its index and the arrivals of its members in order.

        Raises Deadlock if none can ever be complete, NkwError if a member has failed, and torch's RuntimeError for a
        lost store.
        """
        began = checked = time.monotonic()
        while True:
            for index, arrival in enumerate(arrivals):
                if self._store.check([*arrival.missing()]):
                    if self._published_status == "waits":
                        self._publish("runs", "", ())
                    return index, self._collect(arrival)
            with contextlib.suppress(RuntimeError):  # a timeout; a lost store raises at the next check
                self._store.wait(
                    arrivals[0].missing(), timedelta(seconds=0.002 if len(arrivals) > 1 else 0.05)
                )
            now = time.monotonic()
            if now - began > _PUBLISH_AFTER_SECONDS and self._published_status != "waits":
                text = "; ".join(
                    f"{arrival.rendezvous.terms.get('operation', 'a rendezvous')} at {arrival.where}"
                    for arrival in arrivals
                )
                self._publish("waits", text, [arrival.missing() for arrival in arrivals])
            if now - checked > _CHECK_SECONDS:
                checked = now
                self._check_progress(arrivals)

    def _collect(self, arrival: Arrival) -> Arrivals:
        """Return rendezvous, operands and line of every member of a complete rendezvous.

        The operands of other members are received only if all terms agree and the launch is not dry; otherwise they
        are empty.
        """
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
        # A member that arrives at this key again has read the arrivals of the visit before.
        key = repr(arrival.rendezvous.key)
        before, self._last_key[key] = self._last_key.get(key), f"{arrival.key}/{self.rank}"
        if before is not None:
            self._store.delete_key(before)
        return arrived

    def _exchange(self, arrival: Arrival, shapes: dict[int, Sequence[Shape]]) -> dict[int, list[np.ndarray]]:
        """Return the operands of every member, by member: those of other members are received, which waits for them.

        Args:
            arrival: The arrival of this rank, whose operands are on their way to the others.
            shapes: Shape and dtype of each operand of each other member.
        """
        import torch
        import torch.distributed as dist

        tag = _compute_tag(arrival)
        operands: dict[int, list[np.ndarray]] = {arrival.member: arrival.operands}
        receives: list[Any] = []
        for member, described in shapes.items():
            operands[member] = [_allocate_operand(shape, dtype, member) for shape, dtype in described]
            for operand in operands[member]:
                if operand.size:
                    receives.append(dist.irecv(torch.from_numpy(_view_bytes(operand)), member, tag=tag))
        for receive in receives:
            receive.wait()
        return operands

    def _check_progress(self, arrivals: Sequence[Arrival]) -> None:
        """Raise an error if no rank that this rank waits for, directly or through others, can continue; else return.

        Raises:
            Deadlock: All these ranks wait or have ended.
            NkwError: One of them has failed.
        """
        states = self._blocked_states(arrivals)
        if states is None:
            return
        time.sleep(_PUBLISH_AFTER_SECONDS)
        later_states = self._blocked_states(arrivals)
        if later_states is None or {rank: state.count for rank, state in later_states.items()} != {
            rank: state.count for rank, state in states.items()
        }:
            return
        failed = [(rank, state.text) for rank, state in sorted(states.items()) if state.status == "failed"]
        if failed:
            rank, text = failed[0]
            raise NkwError(
                "NKW-PROCESS-LOST",
                f"this rank waits for rank {rank}, which failed: {text}",
                arrivals[0].where,
            )
        lines = [
            f"rank {rank} waits in {state.text}" if state.status == "waits" else f"rank {rank} has ended"
            for rank, state in sorted(states.items())
        ]
        raise Deadlock(
            "NKW-DEADLOCK", "every rank that has not ended waits for another one\n  " + "\n  ".join(lines)
        )

    def _blocked_states(self, arrivals: Sequence[Arrival]) -> dict[int, StateMessage] | None:
        """Return the states of this rank and of the ranks that it waits for, directly or through others, by rank.

        Returns None if one of them can continue. A rank whose process on this host is gone counts as failed.
        """
        states: dict[int, StateMessage] = {}
        ahead = {self.rank}
        while ahead:
            rank = ahead.pop()
            state = states[rank] = self._read_state(rank)
            if state.status == "runs":
                if not self._has_died(rank):
                    return None
                states[rank] = StateMessage(state.count, "failed", "its process is gone")
            for missing in state.missing:
                absent = [key for key in missing if not self._store.check([key])]
                if not absent:
                    return None  # that rank has not noticed yet that it can continue
                ahead |= {int(key.rpartition("/")[2]) for key in absent} - set(states)
        return states

    def _read_state(self, rank: int) -> StateMessage:
        """Return the state that a rank published last; a rank beyond the world's counts as ended."""
        if rank >= self.ranks:
            return StateMessage()
        return StateMessage.decode(self._store.get(f"state/{rank}"), rank)

    def _has_died(self, rank: int) -> bool:
        """Return whether a rank's process ran on this host and no longer exists; False for a process on another host.

        A killed process does not publish its end.
        """
        process = ProcessMessage.decode(self._store.get(f"process/{rank}"), rank)
        is_local = os.name == "posix" and process.host == platform.node()
        return is_local and not _is_alive(process.process_id)

    def _publish(self, status: str, text: str, rendezvous: Any) -> None:
        """Write this rank's state to the store.

        Args:
            status: "runs", "waits", "ended" or "failed".
            text: What it waits in, or its error.
            rendezvous: For each rendezvous that it waits for, the missing arrivals' keys.
        """
        self._published_status = status
        self._published += 1
        self._store.set(
            f"state/{self.rank}", StateMessage(self._published, status, text, rendezvous).encode()
        )

    def _publish_failure(self, text: str) -> None:
        """Write to the store that this rank has failed, with the error's text; does nothing if the store is lost."""
        with contextlib.suppress(RuntimeError):  # the failure may be the loss of the store
            self._publish("failed", text, ())

    def _publish_end(self) -> None:
        """Write to the store that this rank has ended; does nothing if the store is lost."""
        with contextlib.suppress(RuntimeError):  # at exit the store may be gone before
            self._publish("ended", "", ())


_joined: Processes | None = None


@contextlib.contextmanager
def _convert_connection_errors(where: Location) -> Iterator[None]:
    """Convert a RuntimeError in the `with` block, torch's error for a lost connection, into NkwError."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        if first.startswith("["):  # gloo begins with its source line and ends with advice
            first = first.partition("] ")[2].partition(". ")[0]
        raise NkwError("NKW-PROCESS-LOST", f"the connection to another rank broke: {first}", where) from None


def _is_alive(process: int) -> bool:
    """Return whether a process runs on this host; True also where that cannot be found out, False for a zombie."""
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as stat:
            state = stat.read().rpartition(") ")[2][:1]
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user, or a system without /proc
        return True
    return state not in ("Z", "X")


def _compute_tag(arrival: Arrival) -> int:
    """Return the tag that marks gloo's messages of a rendezvous, equal in all members."""
    return zlib.crc32(arrival.key.encode()) & 0x7FFFFFFF


def _allocate_operand(shape: tuple[int, ...], dtype: np.dtype, member: int) -> np.ndarray:
    """Return an uninitialised array for an operand that is received; `member` is the sender, for the error.

    Raises:
        NkwError: The array does not fit into memory.
    """
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError):  # numpy's error for a size beyond its integers
        raise NkwError(
            "NKW-PROCESS-LOST",
            f"rank {member} sends an array of {shape} {dtype}, which does not fit into this host's memory; send a "
            "smaller one",
        ) from None


def _view_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of a contiguous array as a flat uint8 view."""
    return array.reshape(-1).view(np.uint8)
