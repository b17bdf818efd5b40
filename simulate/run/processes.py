"""Ranks in processes of their own, as torchrun starts them: how one process meets the ranks of the others.

The transport is torch.distributed's: its store carries the terms, shapes and lines of the members of a rendezvous,
gloo carries their operands. A rendezvous is named by launch, place and how often the place was met, so a rank that has
left out a collective is never paired with another one. Values are those of ranks in one process, because every member
carries out the same exchange on the operands of all.

A process that waits for long publishes what it waits for. Ranks that wait for each other, or for one that has ended
or failed, are therefore seen by all of them within a second, as inside one process, and so is one of the same machine
that was killed; a rank that only computes is waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import platform
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np

from simulate.errors import Deadlock, InvalidArgument, Location, NkwError, Unsupported
from simulate.isa.plan import Rendezvous

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets in the environment of every process."""

_QUIET_SECONDS = 0.05
"""A wait shorter than this is not published; rendezvous of ranks in step take far less."""
_LOOK_SECONDS = 0.2
"""How often a waiting process looks at what the others wait for."""

Arrived = list[tuple[Rendezvous, list[np.ndarray], Location]]


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun started."""
    return all(name in os.environ for name in TORCHRUN_VARIABLES) and os.environ["WORLD_SIZE"] != "1"


@dataclass(frozen=True)
class Posted:
    """One rank's arrival at a rendezvous, which the other members can see."""

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
        self._met: dict[str, int] = {}
        self._published = 0
        self._sends: list[tuple[Any, Any]] = []
        self._said = ""
        self._last_key: dict[str, str] = {}
        self._store.set(f"process/{rank}", pickle.dumps((platform.node(), os.getpid())))
        self._say("runs", "", ())
        atexit.register(self._ended)

    @classmethod
    def join(cls) -> Processes:
        """Join the processes that torchrun started with this one, over gloo.

        Raises InvalidArgument without torchrun's environment, Unsupported without torch.
        """
        absent = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
        if absent:
            raise InvalidArgument(
                "NKW-PROCESSES",
                f"{', '.join(absent)} not set: start the processes with torchrun --nproc-per-node N SCRIPT",
            )
        try:
            import torch.distributed as dist
        except ImportError:
            raise Unsupported(
                "NKW-TORCH",
                "ranks in processes of their own meet through torch; pip install 'nki-workbench[speed]'",
            ) from None
        global _joined
        if _joined is None:
            store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=timedelta(minutes=5))))
            if not dist.is_initialized():
                dist.init_process_group(
                    "gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=ranks
                )
            _joined = cls(rank, ranks, dist.PrefixStore("nki", store))
        return _joined

    @contextlib.contextmanager
    def launch(self) -> Iterator[None]:
        """One launch; rendezvous of different launches are apart. An error inside is told to those that wait."""
        self._launches += 1
        self._met.clear()
        if self._said != "runs":  # the launch before failed
            with _connected(Location("", 0, "a launch")):
                self._say("runs", "", ())
        try:
            yield
        except NkwError as error:
            self._failed(str(error))
            raise
        except BaseException as error:
            self._failed(f"{type(error).__name__}: {error}")
            raise

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """The arrays that all ranks give, of any shapes and dtypes, in the order of the ranks."""
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
    ) -> Posted:
        """Arrive at a rendezvous without waiting for other members. Raises NkwError where they cannot be reached."""
        place = repr(rendezvous.place)
        count = self._met[place] = self._met.get(place, 0) + 1
        key = f"{self._launches}/{count}/{place}"
        operands = [np.ascontiguousarray(each) for each in operands]
        shapes = [(each.shape, each.dtype) for each in operands]
        posted = Posted(key, self.rank, rendezvous, operands, where, dry)
        with _connected(where):
            self._store.set(f"{key}/{self.rank}", pickle.dumps((rendezvous.terms, where, shapes)))
            if not dry:
                self._send(posted)
        return posted

    def _send(self, posted: Posted) -> None:
        """Begin to send the own operands to every other member, without waiting for them to be received.

        Members with several rendezvous at once may complete them in different orders; a member that waited for its
        sends would wait for one that waits for it.
        """
        import torch
        import torch.distributed as dist

        self._sends = [work for work in self._sends if not work[0].is_completed()]
        for member in posted.rendezvous.members:
            for mine in posted.operands:
                if member != posted.member and member < self.ranks and mine.size:
                    held = torch.from_numpy(_bytes(mine).copy())
                    self._sends.append((dist.isend(held, member, tag=_tag(posted)), held))

    def wait(self, posted: Sequence[Posted]) -> tuple[int, Arrived]:
        """Wait until one of several rendezvous is complete; its index, and what every member brought, in their order.

        Raises Deadlock where none can ever be complete, NkwError where a member has failed or cannot be reached.
        """
        with _connected(posted[0].where):
            return self._wait(posted)

    def _wait(self, posted: Sequence[Posted]) -> tuple[int, Arrived]:
        began = looked = time.monotonic()
        while True:
            for index, each in enumerate(posted):
                if self._store.check([*each.missing()]):
                    if self._said == "waits":
                        self._say("runs", "", ())
                    return index, self._collect(each)
            with contextlib.suppress(RuntimeError):  # it took too long; a lost store shows at the next look
                self._store.wait(posted[0].missing(), timedelta(seconds=0.002 if len(posted) > 1 else 0.05))
            now = time.monotonic()
            if now - began > _QUIET_SECONDS and self._said != "waits":
                text = "; ".join(
                    f"{each.rendezvous.terms.get('operation', 'a rendezvous')} at {each.where}"
                    for each in posted
                )
                self._say("waits", text, [each.missing() for each in posted])
            if now - looked > _LOOK_SECONDS:
                looked = now
                self._look(posted)

    def _collect(self, posted: Posted) -> Arrived:
        """What every member of a complete rendezvous brought."""
        arrived: Arrived = []
        shapes: dict[int, list[tuple[tuple[int, ...], np.dtype]]] = {}
        for member in posted.rendezvous.members:
            if member == posted.member:
                arrived.append((posted.rendezvous, posted.operands, posted.where))
                continue
            terms, where, shapes[member] = pickle.loads(self._store.get(f"{posted.key}/{member}"))
            arrived.append((replace(posted.rendezvous, terms=terms), [], where))
        agreed = all(rendezvous.terms == posted.rendezvous.terms for rendezvous, _, _ in arrived)
        if agreed and not posted.dry:
            operands = self._exchange(posted, shapes)
            arrived = [
                (rendezvous, operands[member], where)
                for member, (rendezvous, _, where) in zip(posted.rendezvous.members, arrived)
            ]
        # Whoever is at this place for the next time has read what was said the time before.
        place = repr(posted.rendezvous.place)
        before, self._last_key[place] = self._last_key.get(place), f"{posted.key}/{self.rank}"
        if before is not None:
            self._store.delete_key(before)
        return arrived

    def _exchange(
        self, posted: Posted, shapes: dict[int, list[tuple[tuple[int, ...], np.dtype]]]
    ) -> dict[int, list[np.ndarray]]:
        """Receive the operands of every other member; what they get was sent when this rank arrived."""
        import torch
        import torch.distributed as dist

        tag = _tag(posted)
        operands: dict[int, list[np.ndarray]] = {posted.member: posted.operands}
        work: list[Any] = []
        for member, described in shapes.items():
            operands[member] = [np.empty(shape, dtype) for shape, dtype in described]
            for theirs in operands[member]:
                if theirs.size:
                    work.append(dist.irecv(torch.from_numpy(_bytes(theirs)), member, tag=tag))
        for each in work:
            each.wait()
        return operands

    def _look(self, posted: Sequence[Posted]) -> None:
        """Raise if no rank that this one waits for, directly or through others, can ever come."""
        states = self._stuck(posted)
        if states is None:
            return
        time.sleep(_QUIET_SECONDS)
        again = self._stuck(posted)
        if again is None or {rank: state[0] for rank, state in again.items()} != {
            rank: state[0] for rank, state in states.items()
        }:
            return
        failed = [(rank, text) for rank, (_, kind, text, _) in sorted(states.items()) if kind == "failed"]
        if failed:
            rank, text = failed[0]
            raise NkwError(
                "NKW-PROCESS-LOST", f"rank {rank} failed, which this one waits for: {text}", posted[0].where
            )
        lines = [
            f"rank {rank} waits in {text}" if kind == "waits" else f"rank {rank} has ended"
            for rank, (_, kind, text, _) in sorted(states.items())
        ]
        raise Deadlock(
            "NKW-DEADLOCK", "every rank that has not ended waits for another one\n  " + "\n  ".join(lines)
        )

    def _stuck(self, posted: Sequence[Posted]) -> dict[int, tuple[int, str, str, Any]] | None:
        """The states of all ranks this one depends on, if none of them can go on; None if one can."""
        states: dict[int, tuple[int, str, str, Any]] = {}
        ahead = {self.rank}
        while ahead:
            rank = ahead.pop()
            state = states[rank] = self._state_of(rank)
            kind, rendezvous = state[1], state[3]
            if kind == "runs":
                if not self._is_gone(rank):
                    return None
                states[rank] = state[0], "failed", "its process is gone", ()
            for missing in rendezvous:
                absent = [key for key in missing if not self._store.check([key])]
                if not absent:
                    return None  # that rank has not noticed yet that it can go on
                ahead |= {int(key.rpartition("/")[2]) for key in absent} - set(states)
        return states

    def _state_of(self, rank: int) -> tuple[int, str, str, Any]:
        """(how many states it has published, "runs", "waits", "ended" or "failed", text, keys it waits for)."""
        if rank >= self.ranks:
            return 0, "ended", "", ()
        state: tuple[int, str, str, Any] = pickle.loads(self._store.get(f"state/{rank}"))
        return state

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank's process was on this machine and is there no more: a killed one has not said that it ends."""
        host, number = pickle.loads(self._store.get(f"process/{rank}"))
        return os.name == "posix" and host == platform.node() and not _is_there(number)

    def _say(self, kind: str, text: str, rendezvous: Any) -> None:
        self._said = kind
        self._published += 1
        self._store.set(f"state/{self.rank}", pickle.dumps((self._published, kind, text, list(rendezvous))))

    def _failed(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # it may be the loss of the store that failed
            self._say("failed", text, ())

    def _ended(self) -> None:
        with contextlib.suppress(RuntimeError):  # at exit the store may be gone before
            self._say("ended", "", ())


_joined: Processes | None = None


@contextlib.contextmanager
def _connected(where: Location) -> Iterator[None]:
    """Let what torch says of a lost connection or store, always a RuntimeError, be an error of ours."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise NkwError("NKW-PROCESS-LOST", f"the connection to another rank broke: {first}", where) from None


def _is_there(process: int) -> bool:
    """Whether a process exists on this machine, and is more than an entry that nobody has collected yet."""
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as stat:
            state = stat.read().rpartition(") ")[2][:1]
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a system without /proc
        return True
    return state not in ("Z", "X")


def _tag(posted: Posted) -> int:
    """The number under which the operands of a rendezvous travel."""
    return zlib.crc32(posted.key.encode()) & 0x7FFFFFFF


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
