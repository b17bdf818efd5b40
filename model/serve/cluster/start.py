"""`nkw serve --cluster`: the deployment of the engines, and this process as one of the servers before it.

A deployment on a lasting cluster belongs to all servers that use it. Each of them keeps an actor there, which Ray ends
with its server, however that one ended. A server that leaves ends the deployment if no actor of another server is left.
A server that is killed leaves the deployment to the next one, which takes it over if the options are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from model.errors import ModelError
from model.serve.cluster.folder import folder_digest
from model.serve.cluster.handle import ServeHandle, running_replicas
from model.serve.http.keys import others_may_read
from model.serve.log import LOG
from model.serve.replicas.backend import ReplicaLost
from model.serve.replicas.routing import Routing
from model.serve.serving import places, server_for
from nkw.cluster import LOCAL, joined_cluster, token_file

if TYPE_CHECKING:
    from model.serve.cluster.engine import Deployed

_FRONT_OPTIONS = frozenset(
    "host port api_key_file allowed_origins max_body max_connections header_timeout body_timeout write_timeout "
    "log_level cluster".split()
)
"""Options of the server, in which several servers before one deployment may differ."""
_ONGOING_REQUESTS = 1_000_000
"""More than the engines' queues hold, so that their limits decide and not Ray Serve's."""
_HEALTH_SECONDS, _DRAIN_SECONDS = 2, 60
_ALONE = re.compile(r"ModelError: (.*)")


def serve_cluster(options: argparse.Namespace, keys: list[str], bound: Callable[[int], None]) -> None:
    """Serve with engines on the machines of a Ray cluster until the server is told to end.

    Raises: ModelError, before the port is opened, if Ray is not installed, if no cluster answers, if a node has another
        model, if an engine cannot start, or if the cluster serves the model with other options.
    """
    # No folder: the engines refuse it with the sentence of one server.
    digest = folder_digest(options.model)
    name = application_name(options)
    processors = max(options.replicas, os.cpu_count() or 1)
    if options.cluster != LOCAL:
        _warn_about_token()
    try:
        with joined_cluster(options.cluster, processors, f"nkw-serve-{name}") as ray:
            check_nodes(ray, options.model, digest)
            with _deployed(ray, options, name, digest) as (backend, positions):
                asyncio.run(_serve(options, keys, bound, backend, positions))
    except ImportError as absent:
        if absent.name is None or absent.name.partition(".")[0] != "ray":
            raise
        raise ModelError(
            "--cluster needs Ray Serve; pip install 'nki-workbench[cluster]'", "NKW-SERVE-EXTRA"
        ) from None
    except ConnectionError as refused:
        raise ModelError(str(refused)) from None


def application_name(options: argparse.Namespace) -> str:
    """Return the name of the deployment in Ray Serve: that of the model, in letters that Ray takes."""
    return re.sub(
        r"[^\w.-]", "-", options.served_model_name or Path(options.model).resolve().name, flags=re.A
    )


def fingerprint(options: argparse.Namespace, digest: str | None) -> str:
    """Return a digest of the model and of all options that the engines have."""
    engine = {name: str(setting) for name, setting in vars(options).items() if name not in _FRONT_OPTIONS}
    return blake2b(json.dumps([digest, sorted(engine.items())]).encode(), digest_size=16).hexdigest()


def check_nodes(ray: Any, folder: Path, digest: str | None) -> None:
    """Raise ModelError for the first node with processors whose folder differs from this machine's."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    task = ray.remote(num_cpus=0)(folder_digest)
    on = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    digests = ray.get([task.options(scheduling_strategy=strategy).remote(folder) for strategy in on])
    for node, found in zip(nodes, digests):
        if found != digest:
            raise ModelError(
                f"node {node['NodeManagerAddress']} has {'no folder' if found is None else 'another model at'} "
                f"{folder}: copy the folder of this machine to the same path on every node"
            )


def _warn_about_token() -> None:
    """Log a warning if this machine has no token for Ray, or one that every user can read."""
    path = token_file()
    if path.is_file() and others_may_read(path):
        LOG.warning("every user of this machine may read Ray's token: chmod o-r %s", path)
    elif not path.is_file() and "RAY_AUTH_TOKEN" not in os.environ:
        LOG.warning("Ray has no token here: whoever reaches a cluster without one can run code in it")


async def _serve(
    options: argparse.Namespace,
    keys: list[str],
    bound: Callable[[int], None],
    backend: ServeHandle,
    positions: int,
) -> None:
    from model.serve.replicas.router import Router

    router = Router(backend, Routing(options.max_num_seqs, places(options), positions))
    await server_for(router, options, keys, bound, router.drain).serve()


@contextmanager
def _deployed(
    ray: Any, options: argparse.Namespace, name: str, digest: str | None
) -> Iterator[tuple[ServeHandle, int]]:
    """Yield the engines and the positions of a cache; the last server that leaves ends them."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException
    from ray.util import list_named_actors

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # which Ray Serve sets when it is imported
    own = f"server-{uuid4().hex}"
    present = ray.remote(num_cpus=0)(_Present).options(name=own, max_restarts=-1).remote()
    ray.get(present.wait.remote())
    serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "WARNING"})
    mark = fingerprint(options, digest)
    try:
        applications = serve.status().applications
        if name not in applications or applications[name].status != "RUNNING":
            _deploy(serve, options, name, digest, mark)
        handle = serve.get_app_handle(name)
        deployed: list[Deployed] = handle.broadcast("describe").results()
        if any(each.fingerprint != mark for each in deployed):
            raise ModelError(
                f"the cluster serves {name} with another model or other options: give --served-model-name another "
                "name, or end the servers that use it"
            )
        positions = deployed[0].positions if options.prefix_caching else 0
        errors = (RayError, RayServeException, ReplicaLost)
        yield ServeHandle(handle, running_replicas, errors), positions
    finally:
        ray.kill(present)
        if not set(list_named_actors()) - {own}:
            serve.delete(name)


def _deploy(serve: Any, options: argparse.Namespace, name: str, digest: str | None, mark: str) -> None:
    """Start the engines and wait until they answer. Raises ModelError with the sentence of the one that does not."""
    from model.serve.cluster.engine import ClusterEngine

    resources: dict[str, Any] = {"num_cpus": 1}
    if options.backend == "neuron":
        resources["resources"] = {"neuron_cores": 1}  # Ray then sets NEURON_RT_VISIBLE_CORES
    deployment = serve.deployment(
        ClusterEngine,
        num_replicas=options.replicas,
        max_ongoing_requests=_ONGOING_REQUESTS,
        ray_actor_options=resources,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=_DRAIN_SECONDS,
        max_constructor_retry_count=1,
        request_router_config={
            "request_router_class": "model.serve.cluster.request_router:NamedReplicaRouter"
        },
    )
    LOG.info("waiting for %d engines on the cluster", options.replicas)
    try:
        serve.run(deployment.bind(options, digest, mark), name=name, route_prefix=None)
    except RuntimeError as failed:
        status = serve.status().applications[name]
        messages = [status.message, *(each.message for each in status.deployments.values()), str(failed)]
        said = next((found[1] for found in map(_ALONE.search, messages) if found), str(failed))
        raise ModelError(f"an engine cannot start: {said}") from None


class _Present:
    """An actor that lives as long as its server."""

    def wait(self) -> None:
        """Return once the actor runs."""
