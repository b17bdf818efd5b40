"""`nkw serve --cluster`: the deployment of the engines, and this process as one of its servers.

A deployment on a lasting cluster belongs to all servers that use it. Every server keeps an actor on the cluster, which
Ray ends together with the server. A server that stops ends the deployment unless another server's actor remains. The
deployment of a server that was killed remains, and the next server takes it over if its options are equal.
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
from model.loading.shipped import find_model_name
from model.serve.cluster.folder import hash_folder
from model.serve.cluster.handle import ServeHandle, list_running_replicas
from model.serve.http.keys import others_may_read
from model.serve.log import LOG
from model.serve.replicas.backend import ReplicaLost
from model.serve.replicas.routing import Routing
from model.serve.serving import count_max_continuations, make_server
from nkw.cluster import LOCAL, find_token_file, join_cluster

if TYPE_CHECKING:
    from model.serve.cluster.engine import EngineDescription

_SERVER_OPTIONS = frozenset(
    "host port api_key_file allowed_origins max_body max_connections header_timeout body_timeout write_timeout "
    "log_level cluster".split()
)
"""Options that may differ between the servers of one deployment."""
_ONGOING_REQUESTS = 1_000_000
"""More than the engines' queues take, so that the limits of the engines apply and not Ray Serve's."""
_HEALTH_SECONDS, _DRAIN_SECONDS = 2, 60
_MODEL_ERROR = re.compile(r"ModelError: (.*)")


def serve_cluster(options: argparse.Namespace, keys: list[str], on_listening: Callable[[int], None]) -> None:
    """Serve with engines on the machines of a Ray cluster until a signal stops the server.

    Args:
        options: The parsed options of `nkw serve`.
        keys: API keys of clients; with none, every client is admitted.
        on_listening: Called with the port once the server takes connections.

    Raises:
        ModelError: Ray is not installed, no cluster answers, a node has another model, an engine cannot start, or the
        cluster serves the model with different options. The port is not opened then.
    """
    from model.serve.replicas.router import Router

    # Without a folder the digest is None, and the engines refuse the folder with the message of a single server.
    digest = hash_folder(options.model)
    name = name_application(options)
    if options.cluster != LOCAL:
        _warn_about_token()
    try:
        with join_cluster(
            options.cluster, max(options.replicas, os.cpu_count() or 1), f"nkw-serve-{name}"
        ) as ray:
            check_nodes(ray, options.model, digest)
            with _join_deployment(ray, options, name, digest) as (backend, positions):
                router = Router(
                    backend, Routing(options.max_num_seqs, count_max_continuations(options), positions)
                )
                asyncio.run(make_server(router, options, keys, on_listening, router.drain).serve())
    except ImportError as absent:
        if absent.name is None or absent.name.partition(".")[0] != "ray":
            raise
        raise ModelError(
            "--cluster needs Ray Serve; pip install 'nki-workbench[cluster]'", "NKW-SERVE-EXTRA"
        ) from None
    except ConnectionError as refused:
        raise ModelError(str(refused)) from None


def name_application(options: argparse.Namespace) -> str:
    """Return the name of the deployment in Ray Serve: the served model's name, with refused characters as hyphens.

    Ray takes ASCII letters, digits, underscores, dots and hyphens.
    """
    return re.sub(r"[^\w.-]", "-", options.served_model_name or find_model_name(options.model), flags=re.A)


def fingerprint(options: argparse.Namespace, digest: str | None) -> str:
    """Return a digest of the model and of the options of the engines; options of the server alone do not count."""
    engine_options = {
        name: str(option) for name, option in vars(options).items() if name not in _SERVER_OPTIONS
    }
    return blake2b(json.dumps([digest, sorted(engine_options.items())]).encode(), digest_size=16).hexdigest()


def check_nodes(ray: Any, folder: Path, digest: str | None) -> None:
    """Compare the model's folder on all nodes that have processors with the folder on this machine.

    Args:
        ray: The module `ray`, connected to a cluster.
        folder: Path of the model's folder, the same on every node.
        digest: Digest of the folder here, or None if it does not exist.

    Raises:
        ModelError: The folder of a node differs or is missing; the message names the first such node.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    task = ray.remote(num_cpus=0)(hash_folder)
    strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    digests = ray.get([task.options(scheduling_strategy=strategy).remote(folder) for strategy in strategies])
    for node, node_digest in zip(nodes, digests):
        if node_digest != digest:
            raise ModelError(
                f"node {node['NodeManagerAddress']} has {'no folder' if node_digest is None else 'another model at'} "
                f"{folder}: copy the folder of this machine to the same path on every node"
            )


def _warn_about_token() -> None:
    """Log a warning if this machine has no token for Ray, or a token file that every user can read."""
    path = find_token_file()
    if path.is_file() and others_may_read(path):
        LOG.warning("every user of this machine may read Ray's token: chmod o-r %s", path)
    elif not path.is_file() and "RAY_AUTH_TOKEN" not in os.environ:
        LOG.warning("Ray has no token here: whoever reaches a cluster without one can run code in it")


@contextmanager
def _join_deployment(
    ray: Any, options: argparse.Namespace, name: str, digest: str | None
) -> Iterator[tuple[ServeHandle, int]]:
    """Start the engines, unless the cluster has them already; yield a backend for them and the positions of each cache.

    The positions are 0 without a prefix cache. The last server that leaves the block ends the engines.

    Raises:
        ModelError: An engine cannot start, or the cluster serves the name with another model or other options.
    """
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException
    from ray.util import list_named_actors

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # which Ray Serve sets when it is imported
    actor_name = f"server-{uuid4().hex}"
    actor = ray.remote(num_cpus=0)(_ServerActor).options(name=actor_name, max_restarts=-1).remote()
    ray.get(actor.wait.remote())
    serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "WARNING"})
    options_fingerprint = fingerprint(options, digest)
    try:
        applications = serve.status().applications
        if name not in applications or applications[name].status != "RUNNING":
            _deploy(serve, options, name, digest, options_fingerprint)
        handle = serve.get_app_handle(name)
        engines: list[EngineDescription] = handle.broadcast("describe").results()
        if any(engine.fingerprint != options_fingerprint for engine in engines):
            raise ModelError(
                f"the cluster serves {name} with another model or other options: give --served-model-name another "
                "name, or end the servers that use it"
            )
        backend = ServeHandle(handle, list_running_replicas, (RayError, RayServeException, ReplicaLost))
        yield backend, engines[0].positions if options.prefix_caching else 0
    finally:
        ray.kill(actor)
        if not set(list_named_actors()) - {actor_name}:
            serve.delete(name)


def _deploy(
    serve: Any, options: argparse.Namespace, name: str, digest: str | None, options_fingerprint: str
) -> None:
    """Start the engines on the cluster and wait until they answer.

    Raises:
        ModelError: An engine fails; the message is that of the engine.
    """
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
        serve.run(deployment.bind(options, digest, options_fingerprint), name=name, route_prefix=None)
    except RuntimeError as failed:
        status = serve.status().applications[name]
        deployments = status.deployments.values()
        messages = [status.message, *(deployment.message for deployment in deployments), str(failed)]
        matches = map(_MODEL_ERROR.search, messages)
        reason = next((match[1] for match in matches if match), str(failed))
        raise ModelError(f"an engine cannot start: {reason}") from None


class _ServerActor:
    """Ray actor that lives as long as its server, by which servers count each other."""

    def wait(self) -> None:
        """Return at once; a result shows that the actor runs."""
