"""Scheduling of several data-parallel groups of ranks, each with a KV cache, that compute their steps together.

Groups divide the routed experts of a model, so all groups take part in every launch. In one step each group computes a
batch of its own, perhaps an empty one. Each group has a `Scheduler`, and a request stays on its group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from model.engine.kv_cache import KVCache
from model.engine.request import Request
from model.engine.scheduler import Batch, Scheduler, SchedulerOptions


class GroupCaches:
    """Sizes of the KV caches of groups that all have equal caches, with the attributes of `KVCache`.

    `count` and `positions` are sums over all groups. The other attributes are those of one group.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self._caches = caches
        self.count = sum(cache.count for cache in caches)
        self.positions = sum(cache.positions for cache in caches)
        self.block_size = caches[0].block_size
        self.pages = caches[0].pages
        self.window_pages = caches[0].window_pages
        self.pools = caches[0].pools
        self.slots = caches[0].slots

    @property
    def free(self) -> int:
        """Number of free pages of all pools plus free slots, summed over all groups."""
        return sum(cache.free for cache in self._caches)


class GroupScheduler:
    """Scheduler with the methods of `Scheduler` for several data-parallel groups.

    The limits of a step in `options` apply to each group.
    """

    def __init__(self, groups: Sequence[Scheduler]) -> None:
        assert len({group.options for group in groups}) == 1, "groups have the same limits"
        self._groups = tuple(groups)
        self.options: SchedulerOptions = groups[0].options
        self.cache = GroupCaches([group.cache for group in groups])

    @property
    def waiting(self) -> Sequence[Request]:
        """Waiting requests, which have no pages, of the first group, then of the second, and so on."""
        return [request for group in self._groups for request in group.waiting]

    @property
    def running(self) -> Sequence[Request]:
        """Running requests, which have pages, of the first group, then of the second, and so on."""
        return [request for group in self._groups for request in group.running]

    def submit(self, request: Request) -> None:
        """Let a request wait on the group with the fewest requests; ties go to the longest cached prefix.

        Sets `request.group`.

        Raises:
            ModelError: The request has no token, or never fits into the pages or a step of a group.
        """
        request.group = self._rank_groups(request)[0]
        self._groups[request.group].submit(request)

    def adopt(self, request: Request) -> bool:
        """Run a request whose keys and values are transferred from elsewhere, on the first group with room for it.

        Returns whether a group has room; see `Scheduler.adopt`.
        """
        for number in self._rank_groups(request):
            if self._groups[number].adopt(request):
                request.group = number
                return True
        return False

    def complete_transfer(self, request: Request, token: int) -> None:
        """Record that the keys and values of an adopted request are in its pages, and append its next token."""
        self._groups[request.group].complete_transfer(request, token)

    def end(self, request: Request) -> None:
        """Remove a finished or cancelled request from its group and release its pages."""
        self._groups[request.group].end(request)

    def resume(self, request: Request) -> None:
        """Let a request that `end` has removed wait again on its group."""
        self._groups[request.group].resume(request)

    def fork(self, request: Request, id: str) -> Request:
        """Return a new request on the same group that shares the computed tokens and pages of a request."""
        child = self._groups[request.group].fork(request, id)
        child.group = request.group
        return child

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Remove all contents from the prefix caches of all groups, and return whether that was possible.

        Returns False while requests run, unless `reset_running_requests` preempts them.
        """
        if self.running and not reset_running_requests:
            return False
        resets = [group.reset_prefix_cache(reset_running_requests) for group in self._groups]
        return all(resets)

    def schedule(self) -> Batch:
        """Schedule the next step of all groups, and return one batch with the chunks of all groups."""
        batches = [group.schedule() for group in self._groups]
        return Batch(
            {request: chunk for batch in batches for request, chunk in batch.chunks.items()},
            preempted=[request for batch in batches for request in batch.preempted],
            group_batches=batches,
        )

    def discard_unused_slots(self, batch: Batch) -> None:
        """Cancel copies of recurrent states that were made for draft tokens, for requests that got no draft tokens."""
        for group_batch, group in self._split(batch):
            group.discard_unused_slots(group_batch)

    def complete_step(self, batch: Batch, sampled_tokens: Mapping[Request, Sequence[int]]) -> None:
        """Append sampled tokens and mark chunks as computed on all groups; see `Scheduler.complete_step`."""
        for group_batch, group in self._split(batch):
            group.complete_step(group_batch, sampled_tokens)

    def count_steady_steps(self, batch: Batch) -> int:
        """Return how many steps in a row, this one included, have the same decisions on every group.

        See `Scheduler.count_steady_steps`.
        """
        return min(
            group.count_steady_steps(group_batch)
            for group_batch, group in self._split(batch)
            if group_batch.chunks or group.waiting
        )

    def repeat(self, batch: Batch, steps: int, tokens: Sequence[int]) -> None:
        """Complete `steps` equal steps of a batch that only decodes; see `Scheduler.repeat`."""
        for group_batch, group in self._split(batch):
            group.repeat(group_batch, steps, tokens)

    def _rank_groups(self, request: Request) -> list[int]:
        """Return the indices of all groups, the best for a new request first.

        The best has the fewest requests; ties go to the longest cached prefix, then to the lower index.
        """
        preferences = [
            (len(group.waiting) + len(group.running), -group.cache.count_cached_blocks(request))
            for group in self._groups
        ]
        return sorted(range(len(self._groups)), key=preferences.__getitem__)

    def _split(self, batch: Batch) -> Iterable[tuple[Batch, Scheduler]]:
        """Return pairs of each group's batch and scheduler."""
        return zip(batch.split_groups(len(self._groups)), self._groups)


Schedulers = Scheduler | GroupScheduler
"""The scheduler of one or of several groups."""
