"""Requests on several groups of ranks, each with a cache of its own, that compute their steps together.

Groups divide the routed experts of a model, so all take part in every launch: in one step each computes a batch of its
own, perhaps an empty one. Each has a scheduler; a request stays on the group to which it was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from model.engine.kv_cache import KVCache
from model.engine.request import Request
from model.engine.scheduler import Batch, Scheduler, SchedulerOptions
from model.state import PagePool, SlotPool


class GroupCaches:
    """The caches of equal groups."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self._caches = caches

    @property
    def count(self) -> int:
        """Pages of all kinds and slots, of all groups."""
        return sum(each.count for each in self._caches)

    @property
    def free(self) -> int:
        """Pages of all kinds and slots that nobody holds, of all groups."""
        return sum(each.free for each in self._caches)

    @property
    def positions(self) -> int:
        """Positions that the caches of all groups remember at most."""
        return sum(each.positions for each in self._caches)

    @property
    def block_size(self) -> int:
        """Positions of a page."""
        return self._caches[0].block_size

    @property
    def pages(self) -> int:
        """Pages of layers that see all positions, of each group."""
        return self._caches[0].pages

    @property
    def window_pages(self) -> tuple[tuple[int, int], ...]:
        """The windows whose layers have pages of their own, and how many, of each group."""
        return self._caches[0].window_pages

    @property
    def pools(self) -> Sequence[PagePool]:
        """The pools of pages of the first group, which those of the others equal."""
        return self._caches[0].pools

    @property
    def slots(self) -> SlotPool | None:
        """The slots of states of the first group, where layers are recurrent; the others have as many."""
        return self._caches[0].slots


class GroupScheduler:
    """The schedulers of some groups as one; the limits of a step hold for each group."""

    def __init__(self, groups: Sequence[Scheduler]) -> None:
        assert len({each.options for each in groups}) == 1, "groups have the same limits"
        self._groups = tuple(groups)
        self.options: SchedulerOptions = groups[0].options
        self.cache = GroupCaches([each.cache for each in groups])

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests without pages, group after group."""
        return [request for each in self._groups for request in each.waiting]

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold pages, group after group."""
        return [request for each in self._groups for request in each.running]

    def submit(self, request: Request) -> None:
        """Let a request wait on the group with the fewest requests; of equal ones that which knows most of its prompt.

        Raises ModelError as a scheduler does.
        """
        request.group = self._by_preference(request)[0]
        self._groups[request.group].submit(request)

    def adopt(self, request: Request) -> bool:
        """Run a request whose tokens were computed elsewhere, on the first group in that order that has room."""
        for number in self._by_preference(request):
            if self._groups[number].adopt(request):
                request.group = number
                return True
        return False

    def arrived(self, request: Request, token: int) -> None:
        """The keys and values of an adopted request are in its pages."""
        self._groups[request.group].arrived(request, token)

    def end(self, request: Request) -> None:
        """A request is done or cancelled."""
        self._groups[request.group].end(request)

    def resume(self, request: Request) -> None:
        """Let a request that `end` has taken out wait again on its group."""
        self._groups[request.group].resume(request)

    def fork(self, request: Request, id: str) -> Request:
        """A second request of the same group that has computed the same tokens in the same pages."""
        child = self._groups[request.group].fork(request, id)
        child.group = request.group
        return child

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget what the pages of all groups hold; not done where a group has requests, unless they are preempted."""
        if self.running and not reset_running_requests:
            return False
        done = [each.reset_prefix_cache(reset_running_requests) for each in self._groups]
        return all(done)

    def schedule(self) -> Batch:
        """The next step of all groups."""
        batches = [each.schedule() for each in self._groups]
        return Batch(
            {request: chunk for each in batches for request, chunk in each.chunks.items()},
            preempted=[request for each in batches for request in each.preempted],
            group_batches=batches,
        )

    def drafted(self, batch: Batch) -> None:
        """The chunks of a batch have their drafts."""
        for own, scheduler in zip(self._batches(batch), self._groups):
            scheduler.drafted(own)

    def finish(self, batch: Batch, chosen: Mapping[Request, Sequence[int]]) -> None:
        """A step is done on all groups."""
        for own, scheduler in zip(self._batches(batch), self._groups):
            scheduler.finish(own, chosen)

    def steady_steps(self, batch: Batch) -> int:
        """How many steps in a row decide alike on every group."""
        return min(
            scheduler.steady_steps(own)
            for own, scheduler in zip(self._batches(batch), self._groups)
            if own.chunks or scheduler.waiting
        )

    def repeat(self, batch: Batch, steps: int, tokens: Sequence[int]) -> None:
        """Finish a batch that decodes so many times in a row."""
        for own, scheduler in zip(self._batches(batch), self._groups):
            scheduler.repeat(own, steps, tokens)

    def _by_preference(self, request: Request) -> list[int]:
        """The numbers of the groups, for a new request the best first."""

        def preference(number: int) -> tuple[int, int]:
            own = self._groups[number]
            return len(own.waiting) + len(own.running), -own.cache.known_blocks(request)

        return sorted(range(len(self._groups)), key=preference)

    def _batches(self, batch: Batch) -> list[Batch]:
        return batch.split_groups(len(self._groups))


Schedulers = Scheduler | GroupScheduler
"""What schedules the steps of an engine."""
