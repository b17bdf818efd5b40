"""Ray Serve's part of the routing: a call goes to the replica that its first argument names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from model.serve.cluster.handle import watch_router
from model.serve.replicas.backend import ReplicaLost


class NamedReplicaRouter(RequestRouter):  # type: ignore[misc]
    """Sends each call to the replica that the server has chosen by `model/serve/replicas/routing.py`.

    Ray creates one of these in the server's process, for the handle of the deployment.
    """

    queue_len_response_deadline_s = 2.0
    """An engine that computes may answer Ray's question for the length of its queue late."""

    def initialize_state(self, **settings: Any) -> None:
        """Become the router that `running_replicas` asks. Ray may import this class anew, so it keeps no state."""
        watch_router(self)

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the named replica. Where it is gone, the call fails with ReplicaLost; Ray would wait for it."""
        assert pending_request is not None
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == pending_request.args[0]:
                return [[replica]]
        if not pending_request.future.done():
            pending_request.future.set_exception(ReplicaLost())
        return [list(candidate_replicas)]  # Ray notices at the next candidate that the call has ended
