import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from weft.errors import JobConfigError
from weft.launch.jobset import JobSetJob

SCHEMA = json.loads(
    Path(__file__).with_name("jobset.v1alpha2.schema.json").read_text(encoding="utf-8")
)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def job(**fields):
    cfg = JobSetJob.default_config().set(name="lm", command=["weft", "train", "lm"])
    return cfg.set(**({"image": "registry/weft:1", "num_processes": 4} | fields)).instantiate()


ALL = {
    "gpus_per_process": 8,
    "env": {"GREETING": 'say "hi": yes'},
    "max_tries": 5,
    "grace_seconds": 300,
    "namespace": "research",
    "resources": {"cpu": "32", "memory": "400Gi"},
    "node_selector": {"cloud.google.com/gke-accelerator": "nvidia-h100"},
    "labels": {"kueue.x-k8s.io/queue-name": "research"},
    "volume_claim": "runs",
    "mount_path": "/data/runs",
}


def parts(manifest):
    """Returns the specs of the JobSet, of its Job, of the Job's pods, and their container."""
    spec = manifest["spec"]
    (replicated,) = spec["replicatedJobs"]
    job_spec = replicated["template"]["spec"]
    pod = job_spec["template"]["spec"]
    (container,) = pod["containers"]
    return spec, job_spec, pod, container


@pytest.mark.parametrize("fields", [{}, {"num_processes": 1}, ALL], ids=["few", "one", "all"])
def test_manifest_matches_api_schema(fields):
    VALIDATOR.check_schema(SCHEMA)
    made = job(**fields)
    secret, manifest = yaml.safe_load_all(made.yaml())
    assert secret["kind"] == "Secret" and manifest == made.manifest()
    VALIDATOR.validate(manifest)


def test_one_pod_per_process_and_joint_restart():
    spec, job_spec, pod, container = parts(job(max_tries=3).manifest())
    assert job_spec["parallelism"] == job_spec["completions"] == 4
    assert job_spec["completionMode"] == "Indexed"
    assert (job_spec["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert spec["failurePolicy"]["maxRestarts"] == 2
    assert container["command"] == ["weft", "train", "lm"]


def test_pod_spec_follows_config():
    manifest = job(**ALL).manifest()
    _, _, pod, container = parts(manifest)
    assert manifest["metadata"] == {
        "name": "lm",
        "namespace": "research",
        "labels": {"kueue.x-k8s.io/queue-name": "research"},
    }
    limits = {"cpu": "32", "memory": "400Gi", "nvidia.com/gpu": "8"}
    assert container["resources"] == {"limits": limits}
    assert pod["terminationGracePeriodSeconds"] == 300
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100"}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert container["volumeMounts"] == [{"name": "runs", "mountPath": "/data/runs"}]
    # So that runs/lm is one directory for all of them.
    assert container["workingDir"] == "/data/runs"
    elsewhere = parts(job(**ALL, working_dir="/app").manifest())[3]
    assert elsewhere["workingDir"] == "/app"
    assert "workingDir" not in parts(job().manifest())[3]


@pytest.mark.parametrize("fields", [{}, {"namespace": "research"}], ids=["here", "namespace"])
def test_pods_share_a_secret(fields):
    made = job(**fields)
    _, _, _, container = parts(made.manifest())
    reference = {"secretKeyRef": {"name": "lm-rendezvous", "key": "token"}}
    assert container["env"][-1] == {"name": "WEFT_RENDEZVOUS_TOKEN", "valueFrom": reference}
    first, second = made.secret(), made.secret()
    assert first["metadata"] == {"name": "lm-rendezvous"} | fields
    tokens = {secret["stringData"]["token"] for secret in (first, second)}
    assert len(tokens) == 2 and all(len(token) == 32 for token in tokens)
    assert not any(token in str(made.manifest()) for token in tokens)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "LM_1"}, r"name='LM_1'; expected lowercase letters, digits and hyphens"),
        ({"name": "a" * 50}, r"too long: .* exceed 63 letters\. Remove 5\."),
        ({"namespace": "-x"}, r"namespace='-x'; expected lowercase letters"),
        ({"volume_claim": "A"}, r"volume_claim='A'; expected"),
        ({"image": "a b"}, r"image='a b'; expected the name of an image"),
        ({"mount_path": "runs"}, r"mount_path='runs'; expected an absolute path"),
        ({"working_dir": "app"}, r"working_dir='app'; expected an absolute path"),
        (
            {"gpus_per_process": 1, "resources": {"nvidia.com/gpu": "1"}},
            r"resources has nvidia\.com/gpu, but gpus_per_process=1 .* Set one of them",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_invalid_kubernetes_fields_are_rejected(fields, message):
    with pytest.raises(JobConfigError, match=message):
        job(**fields)
