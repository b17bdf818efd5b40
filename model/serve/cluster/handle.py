"""Backend of the server's router for replicas that Ray Serve has placed on a cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from model.serve.replicas.backend import Answer, Call, Head, ReplicaLost

_MAX_ANSWER_SECONDS = 10.0
_routers: list[Any] = []
"""Ray Serve's router of this process, once it was created."""


def watch_router(router: Any) -> None:
    """Set the router of Ray Serve whose replicas `list_running_replicas` returns, in place of an earlier one."""
    _routers[:] = [router]


def list_running_replicas() -> list[str]:
    """Return the unique ids of the replicas to which Ray Serve can send calls of this process.

    The list is empty before `watch_router` is called.
    """
    return [key.unique_id for router in _routers for key in list(router.curr_replicas)]


class ServeHandle:
    """Backend of `nkw serve --cluster`; the key of a replica is its unique id in Ray Serve.

    Args:
        handle: Ray Serve's DeploymentHandle of `ClusterEngine`.
        running: Returns the unique ids of the replicas that take calls.
        errors: The exceptions that the handle raises if a replica is lost.
    """

    def __init__(
        self, handle: Any, running: Callable[[], Sequence[str]], errors: tuple[type[Exception], ...]
    ) -> None:
        self._handle = handle
        self._answers = handle.options(method_name="answer", stream=True)
        self._running = running
        self._errors: tuple[type[Exception], ...] = (*errors, TimeoutError)

    @property
    def up(self) -> Sequence[str]:
        """Unique ids of the replicas that take calls now."""
        return self._running()

    async def exchange(self, key: Any, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """Send a request to the replica `key`; yield the head of its answer and then pieces of the body.

        Closing the generator cancels the request.

        Raises:
            ReplicaLost: The replica ended before its answer did.
        """
        response = self._answers.remote(key, call)
        try:
            async for piece in response:
                yield piece
        except self._errors as lost:
            raise ReplicaLost from lost
        finally:
            response.cancel()

    async def ask(self, path: str) -> list[tuple[str, Answer]]:
        """Return (key, answer to GET `path`) for every replica, without replicas that end before their answer.

        The list is empty if the replicas cannot be asked at all, or if their answers take more than 10 s.
        """
        try:
            response = self._handle.broadcast("ask", path)
            answers = await response.results_async(timeout_s=_MAX_ANSWER_SECONDS, return_exceptions=True)
        except self._errors:
            return []
        return [answer for answer in answers if isinstance(answer, tuple)]

    def drain(self) -> None:
        """Do nothing: other servers may use the same replicas, and Ray Serve drains them when the deployment ends."""

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge `nkw_replica_up`, which is 1 for each replica that takes calls."""
        up = GaugeMetricFamily("nkw_replica_up", "1 where the replica answers.", labels=["replica"])
        for key in self.up:
            up.add_metric([key], 1)
        yield up
