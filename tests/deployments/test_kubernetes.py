"""What protects the pods of deployments/kuberay.yaml; every part has the form of Kubernetes' schema."""

from typing import Any

import kubernetes_validate
import pytest
import yaml

from flows.server.deploy import FOLDER

DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text()))
CLUSTER, WORKER, *POLICIES = DOCUMENTS
GROUPS = [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]]
PODS: dict[str, dict[str, Any]] = {
    "head": GROUPS[0]["template"],
    "ray": GROUPS[1]["template"],
    "worker": WORKER["spec"]["template"],
}
VERSION = "1.34"

each_pod = pytest.mark.parametrize("name", sorted(PODS))


def container(name: str) -> dict[str, Any]:
    """The only container of a pod."""
    (only,) = PODS[name]["spec"]["containers"]
    return dict(only)


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a selector of labels takes these, as Kubernetes does for the forms that the file uses."""
    exact = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return exact and all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", [])
    )


def test_documents_have_the_form_of_the_schema() -> None:
    for document in [WORKER, *POLICIES]:
        kubernetes_validate.validate(document, VERSION, strict=True)
    for name, template in PODS.items():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_the_schema_finds_a_misspelled_key() -> None:
    wrong = yaml.safe_load(yaml.safe_dump(WORKER).replace("readOnlyRootFilesystem", "readOnlyRootFilesytem"))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


@each_pod
def test_a_pod_has_no_rights_that_it_does_not_need(name: str) -> None:
    spec, only = PODS[name]["spec"], container(name)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] == 10001
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert not any("hostPath" in volume for volume in spec["volumes"])


@each_pod
def test_a_pod_has_limits_and_probes(name: str) -> None:
    only = container(name)
    assert {"cpu", "memory", "ephemeral-storage"} <= set(only["resources"]["limits"])
    assert "readinessProbe" in only and "livenessProbe" in only
    sizes = [volume["emptyDir"] for volume in PODS[name]["spec"]["volumes"] if "emptyDir" in volume]
    assert sizes and all("sizeLimit" in size for size in sizes)


@each_pod
def test_secrets_are_files_and_images_have_a_tag(name: str) -> None:
    only = container(name)
    assert not any("valueFrom" in entry for entry in only["env"])
    assert not any("secretRef" in entry for entry in only["envFrom"])
    assert {mount["mountPath"] for mount in only["volumeMounts"] if mount.get("readOnly")} == {
        "/run/secrets", "/run/aws",
    }  # fmt: skip
    assert only["image"].endswith(":0.1.0-gpu")
    assert "command" not in only  # it would replace the entrypoint, which reads the secrets


@each_pod
def test_a_pod_talks_to_its_like_only(name: str) -> None:
    labels = PODS[name]["metadata"]["labels"]
    own = [policy["spec"] for policy in POLICIES if matches(policy["spec"]["podSelector"], labels)]
    assert {kind for spec in own for kind in spec["policyTypes"]} == {"Ingress", "Egress"}
    peers = [peer for spec in own for rule in spec.get("ingress", []) for peer in rule["from"]]
    assert peers and all(set(peer) == {"podSelector"} for peer in peers)
    reached = {
        peer["podSelector"]["matchLabels"]["app"]
        for spec in own
        for rule in spec["egress"]
        for peer in rule["to"]
        if "matchLabels" in peer.get("podSelector", {})
    }
    assert reached == ({"storage", "prefect", "mlflow"} if name == "worker" else {"storage"})
