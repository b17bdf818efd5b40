"""Replicas that Ray Serve has placed, reached through the handle of their deployment."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from model.serve.replicas.backend import Answer, Call, Head, ReplicaLost

_ASK_SECONDS = 10.0
_watched: list[Any] = []
"""Ray Serve's router of this process, once there is one."""


def watch_router(router: Any) -> None:
    """Let `running_replicas` ask a router of Ray Serve."""
    _watched[:] = [router]


def running_replicas() -> list[str]:
    """Return the unique ids of the replicas that Ray Serve sends calls of this process to."""
    return [key.unique_id for router in _watched for key in list(router.curr_replicas)]


class ServeHandle:
    """The backend of `nkw serve --cluster`; a replica's key is its unique id in Ray Serve."""

    def __init__(
        self, handle: Any, running: Callable[[], Sequence[str]], errors: tuple[type[Exception], ...]
    ) -> None:
        """Keep a handle of `ClusterEngine`.

        Args:
            handle: Ray Serve's DeploymentHandle.
            running: Returns the unique ids of the replicas that take calls.
            errors: What the handle raises if a replica is lost.
        """
        self._handle = handle
        self._answers = handle.options(method_name="answer", stream=True)
        self._running = running
        self._errors: tuple[type[Exception], ...] = (*errors, TimeoutError)

    @property
    def up(self) -> Sequence[str]:
        """Unique ids of the replicas that take calls."""
        return self._running()

    async def exchange(self, key: Any, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """Yield the head of a replica's answer and its data; closing the generator cancels the request.

        Raises: ReplicaLost if the replica ends before its answer does.
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
        """Return every replica's answer to GET of a path; a replica that ends meanwhile has none."""
        try:
            response = self._handle.broadcast("ask", path)
            answers = await response.results_async(timeout_s=_ASK_SECONDS, return_exceptions=True)
        except self._errors:
            return []
        return [answer for answer in answers if isinstance(answer, tuple)]

    def drain(self) -> None:
        """Do nothing: other servers may use the same replicas. Ray Serve drains them when the deployment ends."""

    def collect(self) -> Iterator[Metric]:
        """Return which replicas take calls."""
        up = GaugeMetricFamily("nkw_replica_up", "1 where the replica answers.", labels=["replica"])
        for key in self.up:
            up.add_metric([key], 1)
        yield up
