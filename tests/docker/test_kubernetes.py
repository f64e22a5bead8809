"""The manifests for Kubernetes: valid, without rights, and nodes that pools of stages find."""

from typing import Any

import kubernetes_validate
import pytest
import yaml

from tasks.deployment.compose_setup import NODES, POOL
from tests.conftest import ROOT

KUBERNETES = "1.33"


@pytest.fixture
def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text()))


@pytest.fixture
def pods(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of the Ray cluster: head, and the groups of nodes."""
    cluster = manifests[-1]["spec"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {name: group["template"]["spec"] for name, group in {"head": cluster["headGroupSpec"], **groups}.items()}


def test_the_manifests_are_valid_for_kubernetes(
    manifests: list[dict[str, Any]], pods: dict[str, dict[str, Any]]
) -> None:
    assert [manifest["kind"] for manifest in manifests] == [
        "Namespace", "PersistentVolumeClaim", "PersistentVolumeClaim", "RayCluster",
    ]  # fmt: skip
    for manifest in manifests[:-1]:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for name, spec in pods.items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        assert spec["terminationGracePeriodSeconds"] == 600
        assert {item["claimName"] for volume in spec["volumes"] if (item := volume.get("persistentVolumeClaim"))} <= {
            manifest["metadata"]["name"] for manifest in manifests
        }


def test_a_wrong_pod_is_not_valid(pods: dict[str, dict[str, Any]]) -> None:
    pods["cpu"]["terminationGracePeriodSeconds"] = "long"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "cpu"}, "spec": pods["cpu"]},
            KUBERNETES,
            strict=True,
        )


def test_nobody_gets_into_the_cluster_without_its_token_and_the_head_runs_no_placed_stage(
    manifests: list[dict[str, Any]], pods: dict[str, dict[str, Any]]
) -> None:
    cluster = manifests[-1]["spec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    [container] = pods["head"]["containers"]
    assert container["args"][container["args"].index("--pool") + 1] == POOL
    mounted = {item["mountPath"] for item in container["volumeMounts"]}
    assert {"/workspaces", "/cache", "/run/rlhf"} == mounted


def test_each_group_of_nodes_is_a_pool_that_starts_with_none(
    manifests: list[dict[str, Any]], pods: dict[str, dict[str, Any]]
) -> None:
    groups = manifests[-1]["spec"]["workerGroupSpecs"]
    assert {group["labels"]["pool"]: (group["replicas"], group["minReplicas"]) for group in groups} == {
        NODES: (0, 0), "gpus": (0, 0),
    }  # fmt: skip
    assert pods["gpus"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1


def breaks_restricted(pod: dict[str, Any]) -> set[str]:
    """What of Pod Security's level `restricted` a pod does not keep.

    Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/, Restricted.
    """
    broken = {name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)}
    volumes = {kind for volume in pod.get("volumes", []) for kind in volume if kind != "name"}
    broken |= volumes - {
        "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
        "projected", "secret",
    }  # fmt: skip
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        security = container.get("securityContext", {})
        both = pod.get("securityContext", {}) | security
        capabilities = security.get("capabilities", {})
        kept = {
            "runAsNonRoot": both.get("runAsNonRoot") is True,
            "runAsUser": both.get("runAsUser") != 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "allowPrivilegeEscalation": security.get("allowPrivilegeEscalation") is False,
            "privileged": not security.get("privileged"),
            "capabilities": capabilities.get("drop") == ["ALL"]
            and set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", [])),
        }
        broken |= {name for name, fine in kept.items() if not fine}
    return broken


def test_the_cluster_keeps_pod_security_restricted(
    manifests: list[dict[str, Any]], pods: dict[str, dict[str, Any]]
) -> None:
    assert manifests[0]["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    assert {name: breaks_restricted(pod) for name, pod in pods.items()} == {name: set() for name in pods}
    for name in (NODES, "gpus"):
        assert pods[name]["automountServiceAccountToken"] is False, name


def test_a_pod_that_says_nothing_is_not_restricted() -> None:
    assert breaks_restricted({"containers": [{}], "volumes": [{"hostPath": {"path": "/"}}]}) == {
        "hostPath", "runAsNonRoot", "seccompProfile", "allowPrivilegeEscalation", "capabilities",
    }  # fmt: skip
