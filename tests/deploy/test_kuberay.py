"""deploy/kuberay.yaml: its objects have documented keys only, fit together, and start `nkw serve` as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nkw.commands import build_parser

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with check-jsonschema (dev)")

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "kuberay.yaml"


def closed(required: str, optional: str = "", **schemas: Any) -> dict[str, Any]:
    """Return the schema of an object that has these keys and no others."""
    names = [*required.split(), *optional.split()]
    return {
        "type": "object",
        "required": required.split(),
        "properties": {name: schemas.get(name, {}) for name in names},
        "additionalProperties": False,
    }


def listed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": schema}


TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITIES = closed("cpu memory", cpu={"type": "string"}, memory={"type": "string", "pattern": "^[0-9]+Gi$"})
METADATA = closed("labels", "name", labels=TEXTS, name={"type": "string", "pattern": "^[a-z0-9-]{1,63}$"})
CONTAINER = closed(
    "name image resources",
    "command args env ports readinessProbe volumeMounts",
    command=listed({"type": "string"}),
    args=listed({"type": "string"}),
    resources=closed("limits requests", limits=QUANTITIES, requests=QUANTITIES),
    env=listed(closed("name", "value valueFrom", value={"type": "string"})),
    ports=listed(closed("name containerPort", containerPort={"type": "integer"})),
    volumeMounts=listed(closed("name mountPath readOnly", readOnly={"const": True})),
)
TEMPLATE = closed(
    "metadata spec",
    metadata=METADATA,
    spec=closed(
        "containers",
        "terminationGracePeriodSeconds volumes",
        containers=listed(CONTAINER),
        volumes=listed(closed("name", "persistentVolumeClaim secret")),
    ),
)
# Keys as the API reference of KubeRay 1.5 lists them.
HEAD = "headService enableIngress resources labels serviceType"
WORKERS = "suspend minReplicas maxReplicas idleTimeoutSeconds resources labels scaleStrategy numOfHosts"
CLUSTER = closed(
    "rayVersion authOptions headGroupSpec workerGroupSpecs",
    "suspend managedBy autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions upgradeStrategy",
    authOptions=closed("mode", mode={"enum": ["disabled", "token"]}),
    headGroupSpec=closed("template rayStartParams", HEAD, template=TEMPLATE, rayStartParams=TEXTS),
    workerGroupSpecs=listed(
        closed("groupName replicas template rayStartParams", WORKERS, template=TEMPLATE, rayStartParams=TEXTS)
    ),
)
SPECS = {
    ("ray.io/v1", "RayCluster"): CLUSTER,
    ("apps/v1", "Deployment"): closed("replicas selector template", template=TEMPLATE),
    ("v1", "Service"): closed("selector ports", selector=TEXTS),
    ("networking.k8s.io/v1", "NetworkPolicy"): closed("podSelector policyTypes ingress"),
}


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))


def find_object(objects: list[dict[str, Any]], object_kind: str) -> dict[str, Any]:
    return next(manifest for manifest in objects if manifest["kind"] == object_kind)


def templates(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    cluster = find_object(objects, "RayCluster")["spec"]
    yield cluster["headGroupSpec"]["template"]
    yield from (group["template"] for group in cluster["workerGroupSpecs"])
    yield find_object(objects, "Deployment")["spec"]["template"]


def check(manifest: dict[str, Any]) -> None:
    schema = closed("apiVersion kind metadata spec", metadata=METADATA)
    schema["properties"]["spec"] = SPECS[manifest["apiVersion"], manifest["kind"]]
    jsonschema.validate(manifest, schema)


def test_objects_have_documented_keys_only(objects: list[dict[str, Any]]) -> None:
    for manifest in objects:
        check(manifest)
    cluster = find_object(objects, "RayCluster")
    with pytest.raises(jsonschema.ValidationError, match="workerGroupSpec'"):
        check(cluster | {"spec": cluster["spec"] | {"workerGroupSpec": []}})


def test_selectors_find_their_pods(objects: list[dict[str, Any]]) -> None:
    labels = [template["metadata"]["labels"] for template in templates(objects)]
    selectors = [find_object(objects, "Deployment")["spec"]["selector"]["matchLabels"]]
    selectors.append(find_object(objects, "Service")["spec"]["selector"])
    policies = [manifest["spec"] for manifest in objects if manifest["kind"] == "NetworkPolicy"]
    selectors += [policy["podSelector"]["matchLabels"] for policy in policies]
    counts = [sum(selector.items() <= pod_labels.items() for pod_labels in labels) for selector in selectors]
    assert counts == [1, 1, 3, 1], "the server, the server, all pods, the server"


def test_pods_have_the_same_image_and_those_with_a_model_have_it_at_the_same_path(
    objects: list[dict[str, Any]],
) -> None:
    containers = [
        container for template in templates(objects) for container in template["spec"]["containers"]
    ]
    assert len({container["image"] for container in containers}) == 1
    mounts = [
        mount
        for container in containers
        for mount in container.get("volumeMounts", ())
        if mount["name"] == "model"
    ]
    assert [mount["mountPath"] for mount in mounts] == ["/models"] * 2
    for template in templates(objects):
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
        assert {
            mount["name"] for c in template["spec"]["containers"] for mount in c.get("volumeMounts", ())
        } == volumes


def test_server_starts_as_it_is_told_and_every_engine_has_a_node(objects: list[dict[str, Any]]) -> None:
    (server,) = find_object(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    nkw, *words = server["args"]
    options = build_parser(["serve"]).parse_args(
        [word if word != "/models/model" else "stories" for word in words]
    )
    cluster = find_object(objects, "RayCluster")
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert (nkw, options.command, options.cluster) == ("nkw", "serve", "auto")
    assert options.replicas == workers["replicas"] * int(workers["rayStartParams"]["num-cpus"])
    assert options.port == server["ports"][0]["containerPort"]
    assert f"--address={cluster['metadata']['name']}-head-svc:6379" in server["command"][2]


def test_every_node_demands_the_token(objects: list[dict[str, Any]]) -> None:
    cluster = find_object(objects, "RayCluster")
    (server,) = find_object(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable for variable in server["env"]}
    assert cluster["spec"]["authOptions"]["mode"] == variables["RAY_AUTH_MODE"]["value"] == "token"
    secret = {"name": cluster["metadata"]["name"], "key": "auth_token"}
    assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == secret


def test_version_of_ray_is_the_one_of_the_tests(objects: list[dict[str, Any]]) -> None:
    pinned = (ROOT / "constraints.txt").read_text(encoding="ascii").splitlines()
    assert f"ray=={find_object(objects, 'RayCluster')['spec']['rayVersion']}" in pinned
