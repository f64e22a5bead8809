"""The job templates of the work pools: valid for Prefect's workers and for Kubernetes, and nothing secret in them."""

import json
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prefect.utilities.templating import apply_values
from prefect_docker.worker import DockerWorkerJobConfiguration

from config.load import load
from config.records import STAGES
from config.sections.where import Where
from tasks.deployment.compose_setup import POOL, container_template, placed
from tests.conftest import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

POOLS = ROOT / "docker" / "pools"
KUBERNETES = "1.33"
ENVIRONMENT = {
    "RLHF_TRAIN_IMAGE": "train:1",
    "RLHF_NETWORK": "net",
    "RLHF_CACHE_VOLUME": "data",
    "RLHF_CREDENTIALS_VOLUME": "keys",
    "AWS_ENDPOINT_URL": "http://s3:9000",
    "AWS_DEFAULT_REGION": "us-east-1",
    "RLHF_STAGE_MEMORY": "3g",
    "AWS_SECRET_ACCESS_KEY": "hidden-key",
}


def configured(template: dict[str, Any]) -> DockerWorkerJobConfiguration:
    return DockerWorkerJobConfiguration(**apply_values(template["job_configuration"], defaults(template)))


def defaults(template: dict[str, Any]) -> dict[str, Any]:
    return {name: field["default"] for name, field in template["variables"]["properties"].items()}


def rendered_job(**values: Any) -> dict[str, Any]:
    """The manifest of the Kubernetes template as the worker makes it, with the environment in Kubernetes' own form."""
    template = json.loads((POOLS / "kubernetes.json").read_text())
    variables = defaults(template) | {"name": "sft"} | values
    job = apply_values(template["job_configuration"], variables)["job_manifest"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": name, "value": value} for name, value in container["env"].items()]
    return dict(job)


def test_a_gpu_pool_asks_for_all_gpus_and_the_plain_one_for_none() -> None:
    plain, gpu = (configured(container_template(ENVIRONMENT, gpus=gpus)) for gpus in (False, True))
    assert (plain.image, plain.networks, plain.mem_limit) == ("train:1", ["net"], "3g")
    assert plain.volumes == ["data:/cache", "keys:/run/rlhf:ro"]
    assert "device_requests" not in (plain.container_create_kwargs or {})
    assert (gpu.container_create_kwargs or {})["device_requests"] == [
        {"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}
    ]
    assert all((pool.container_create_kwargs or {})["shm_size"] == "2g" for pool in (plain, gpu))


def test_a_pool_knows_no_secret() -> None:
    assert "hidden-key" not in json.dumps([container_template(ENVIRONMENT, gpus=gpus) for gpus in (False, True)])


def test_the_job_of_a_stage_is_valid_for_kubernetes() -> None:
    for gpus in (0, 8):
        job = rendered_job(gpus=gpus, node_selector={"gpu": "a100"})
        kubernetes_validate.validate(job, KUBERNETES, strict=True)
        pod = job["spec"]["template"]["spec"]
        assert (pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"], pod["nodeSelector"]) == (
            gpus,
            {"gpu": "a100"},
        )
        assert pod["terminationGracePeriodSeconds"] == 600
        assert job["spec"]["backoffLimit"] == 0, "the pipeline starts it again, from the checkpoint in the store"


def test_a_wrong_job_is_not_valid() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(rendered_job(grace_seconds="long"), KUBERNETES, strict=True)


def test_the_manifests_are_valid_for_kubernetes() -> None:
    manifests = list(yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text()))
    assert [manifest["kind"] for manifest in manifests] == [
        "Namespace", "PersistentVolumeClaim", "PersistentVolumeClaim", "ServiceAccount", "Role",
        "RoleBinding", "Deployment", "Deployment",
    ]  # fmt: skip
    for manifest in manifests:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


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


def test_workers_and_stage_keep_pod_security_restricted() -> None:
    manifests = list(yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text()))
    assert manifests[0]["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    pods = {
        item["metadata"]["name"]: item["spec"]["template"]["spec"]
        for item in [*manifests, {**rendered_job(), "metadata": {"name": "stage"}}]
        if item["kind"] in ("Deployment", "Job")
    }
    assert {name: breaks_restricted(pod) for name, pod in pods.items()} == {
        "rlhf-worker": set(), "rlhf-retrain": set(), "stage": set(),
    }  # fmt: skip
    for name in ("rlhf-retrain", "stage"):
        assert pods[name]["automountServiceAccountToken"] is False, name


def test_the_cluster_serves_retraining_in_a_workspace_that_stays() -> None:
    manifests = list(yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text()))
    [retrain] = [m for m in manifests if m["metadata"]["name"] == "rlhf-retrain"]
    pod = retrain["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["args"][container["args"].index("--pool") + 1] == POOL
    mounted = {item["mountPath"]: item["name"] for item in container["volumeMounts"]}
    claims = {
        item["name"]: item["persistentVolumeClaim"]["claimName"]
        for item in pod["volumes"]
        if "persistentVolumeClaim" in item
    }
    declared = {m["metadata"]["name"] for m in manifests if m["kind"] == "PersistentVolumeClaim"}
    assert {claims[mounted["/workspaces"]], claims[mounted["/cache"]]} == declared
    assert (retrain["spec"]["replicas"], retrain["spec"]["strategy"]["type"]) == (1, "Recreate")


def test_a_pod_that_says_nothing_is_not_restricted() -> None:
    assert breaks_restricted({"containers": [{}], "volumes": [{"hostPath": {"path": "/"}}]}) == {
        "hostPath", "runAsNonRoot", "seccompProfile", "allowPrivilegeEscalation", "capabilities",
    }  # fmt: skip


def test_no_run_can_change_the_command_of_a_job() -> None:
    template = json.loads((POOLS / "kubernetes.json").read_text())
    assert "command" not in template["variables"]["properties"]
    container = rendered_job(command="sh -c evil")["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == ["python", "-m", "prefect.engine"]


def test_the_form_is_prefilled_with_every_stage_on_the_pool() -> None:
    content = placed(
        load(ROOT / "recipes" / "demo.yaml", ["where.sft={pool: mine, processes: 2}"]), "docker", "http://mlflow:5000"
    )
    where = Where.model_validate(content["where"])
    assert {where.of(stage).pool for stage in STAGES} == {"docker"}
    assert where.of("sft").processes == 2
    assert content["tracking"]["uri"] == "http://mlflow:5000"
