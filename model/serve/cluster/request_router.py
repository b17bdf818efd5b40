"""Request router for Ray Serve that sends a call to the replica whose id is the call's first argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from model.serve.cluster.handle import watch_router
from model.serve.replicas.backend import ReplicaLost


class NamedReplicaRouter(RequestRouter):  # type: ignore[misc]
    """Request router that sends every call to the replica that `model/serve/replicas/routing.py` has chosen.

    Ray creates a router in the server's process, for the handle of the deployment.
    """

    queue_len_response_deadline_s = 2.0
    """Time for the answer to Ray's question for the length of a replica's queue, which a step may delay."""

    def initialize_state(self, **settings: Any) -> None:
        """Make this the router that `list_running_replicas` reads; called by Ray after construction.

        The class keeps no state of its own, because Ray may import it again.
        """
        watch_router(self)

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidate whose id is the first argument of the pending call, as the only choice.

        If no candidate has the id, the replica has ended: the call fails with ReplicaLost, because Ray would wait for
        it.
        """
        assert pending_request is not None
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == pending_request.args[0]:
                return [[replica]]
        if not pending_request.future.done():
            pending_request.future.set_exception(ReplicaLost())
        return [list(candidate_replicas)]  # Ray notices at the next candidate that the call has ended
