"""`JobSetJob`: a manifest for Kubernetes, of kind JobSet (jobset.x-k8s.io/v1alpha2).

A JobSet gives its pods stable DNS names, so that processes know the first pod's address before it
runs, and restarts all pods when one fails. The manifest is text for `kubectl apply -f -`.

    JobSet  name
      replicatedJobs[0]  "workers", one Job
        Job  indexed, num_processes pods
          Pod  one process, numbered by JOB_COMPLETION_INDEX

A Secret accompanies it, with the rendezvous token of the processes.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from weft.config import REQUIRED, Required
from weft.errors import JobConfigError
from weft.launch import job as job_lib

_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_REPLICATED_JOB = "workers"
_COORDINATOR_PORT = 8476
_IS_USAGE_ERROR = {
    "containerName": "main",
    "operator": "In",
    "values": [job_lib.USAGE_EXIT_CODE],
}
_LONGEST_NAME = 63
# Kubernetes appends a hyphen and five letters to the name of a pod.
_POD_SUFFIX = 6


class JobSetJob(job_lib.Job):
    """Processes as Kubernetes pods.

    >>> cfg = JobSetJob.default_config().set(name="lm", command=["weft", "train", "lm"])
    >>> cfg.set(image="registry/weft:1").instantiate().manifest()["kind"]
    'JobSet'
    """

    class Config(job_lib.Job.Config):
        """Configures a JobSetJob."""

        image: Required[str] = REQUIRED
        """Container image that has the command."""
        namespace: str | None = None
        resources: dict[str, str] = {}
        """Resources of each pod by Kubernetes name, such as {"cpu": "8", "memory": "64Gi",
        "google.com/tpu": "4"}."""
        node_selector: dict[str, str] = {}
        """Labels of the nodes that may run a pod."""
        labels: dict[str, str] = {}
        """For example {"kueue.x-k8s.io/queue-name": "research"}."""
        volume_claim: str | None = None
        """PersistentVolumeClaim that all pods mount, for the run's directory; its access mode must
        be ReadWriteMany."""
        mount_path: str = "/runs"
        working_dir: str | None = None
        """Of the command; by default `mount_path` with a claim, or the image's own."""

    def __init__(self, config: Config):
        super().__init__(config)
        cfg, where = self.config, f"JobSetJob {self.config.name!r}"
        expected = "lowercase letters, digits and hyphens, not starting or ending with a hyphen"
        for field in ("name", "namespace", "volume_claim"):
            job_lib.check_text(
                where, field, getattr(cfg, field), _LABEL, expected
            )
        job_lib.check_text(
            where,
            "image",
            cfg.image,
            r"\S+",
            "the name of an image, without spaces",
        )
        for field in ("mount_path", "working_dir"):
            job_lib.check_text(
                where,
                field,
                getattr(cfg, field),
                r"/[^\s:]+",
                "an absolute path",
            )
        too_long = (
            len(self._pod_name(cfg.num_processes - 1))
            + _POD_SUFFIX
            - _LONGEST_NAME
        )
        if too_long > 0:
            raise JobConfigError(
                f"{self._where('name')} is too long: with Kubernetes' suffix, names of pods "
                f"would exceed {_LONGEST_NAME} letters. Remove {too_long}."
            )
        if cfg.gpus_per_process and "nvidia.com/gpu" in cfg.resources:
            raise JobConfigError(
                f"{self._where('resources')} has nvidia.com/gpu, but "
                f"gpus_per_process={cfg.gpus_per_process} requests it, too. Set one of them."
            )

    def _pod_name(self, index: int) -> str:
        return f"{self.config.name}-{_REPLICATED_JOB}-0-{index}"

    @property
    def coordinator_address(self) -> str:
        """Address of the first pod."""
        return f"{self._pod_name(0)}.{self.config.name}:{_COORDINATOR_PORT}"

    def manifest(self) -> dict[str, Any]:
        """Returns the manifest as plain values."""
        cfg = self.config
        metadata = self._metadata(cfg.name)
        if cfg.labels:
            metadata["labels"] = dict(cfg.labels)
        job = {
            "parallelism": cfg.num_processes,
            "completions": cfg.num_processes,
            "completionMode": "Indexed",
            # Failed pods are not replaced individually: the others wait for the lost process.
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [{"action": "FailJob", "onExitCodes": _IS_USAGE_ERROR}]
            },
            "template": {"spec": self._pod()},
        }
        # A wrong command would fail again.
        stop_on_usage_error = {
            "name": "wrongCommand",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": {
                "network": {
                    "enableDNSHostnames": True,
                    "publishNotReadyAddresses": True,
                },
                "failurePolicy": {
                    "maxRestarts": cfg.max_tries - 1,
                    "rules": [stop_on_usage_error],
                },
                "replicatedJobs": [
                    {
                        "name": _REPLICATED_JOB,
                        "replicas": 1,
                        "template": {"spec": job},
                    }
                ],
            },
        }

    def _metadata(self, name: str) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": name}
        if self.config.namespace is not None:
            metadata["namespace"] = self.config.namespace
        return metadata

    @property
    def _secret_name(self) -> str:
        return f"{self.config.name}-rendezvous"

    def secret(self) -> dict[str, Any]:
        """Returns the Secret of the manifest, with a new token."""
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._metadata(self._secret_name),
            "stringData": {"token": secrets.token_hex(16)},
        }

    def _pod(self) -> dict[str, Any]:
        cfg = self.config
        resources = dict(cfg.resources)
        if cfg.gpus_per_process:
            resources["nvidia.com/gpu"] = str(cfg.gpus_per_process)
        variables = {
            **self.environment,
            job_lib.COORDINATOR_ADDRESS: self.coordinator_address,
            # A preempted pod that saved has not finished, which exit code 0 would claim.
            **job_lib.TRY_AGAIN,
        }
        env: list[dict[str, Any]] = []
        for name, value in variables.items():
            env.append({"name": name, "value": value})
        token = {"secretKeyRef": {"name": self._secret_name, "key": "token"}}
        env.append({"name": job_lib.RENDEZVOUS_TOKEN, "valueFrom": token})
        container: dict[str, Any] = {
            "name": "main",
            "image": cfg.image,
            "command": list(cfg.command),
            "env": env,
            "ports": [{"containerPort": _COORDINATOR_PORT}],
        }
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": round(cfg.grace_seconds),
            "containers": [container],
        }
        if cfg.node_selector:
            pod["nodeSelector"] = dict(cfg.node_selector)
        if resources:
            container["resources"] = {
                "limits": resources
            }  # requests default to the limits
        if cfg.working_dir is not None:
            container["workingDir"] = cfg.working_dir
        if cfg.volume_claim is not None:
            container.setdefault("workingDir", cfg.mount_path)
            container["volumeMounts"] = [
                {"name": "runs", "mountPath": cfg.mount_path}
            ]
            claim = {"claimName": cfg.volume_claim}
            pod["volumes"] = [{"name": "runs", "persistentVolumeClaim": claim}]
        return pod

    def yaml(self) -> str:
        """Returns the Secret and the manifest, for `kubectl apply -f -`."""
        return f"{to_yaml(self.secret())}\n---\n{to_yaml(self.manifest())}\n"


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
# JSON leaves these unescaped, but YAML requires escapes.
_NOT_PRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
# Includes those of YAML 1.1, which many tools read.
_RESERVED = frozenset(
    ["true", "false", "yes", "no", "on", "off", "y", "n", "null"]
)


def to_yaml(value: Mapping[str, Any] | Sequence[Any], indent: int = 0) -> str:
    """Formats mappings, lists, strings, numbers, booleans and None as YAML.

    Ambiguous strings are quoted as in JSON, which is valid YAML.

    >>> print(to_yaml({"kind": "Job", "spec": {"args": ["train", "seed=1"], "on": 3, "env": {}}}))
    kind: Job
    spec:
      args:
      - train
      - "seed=1"
      "on": 3
      env: {}
    """
    pad = " " * indent
    lines: list[str] = []
    if isinstance(value, Mapping):
        for name, item in value.items():
            key = f"{pad}{_scalar(name)}:"
            if isinstance(item, Mapping) and item:
                lines += [key, to_yaml(item, indent + 2)]
            elif (
                isinstance(item, Sequence)
                and not isinstance(item, str)
                and item
            ):
                lines += [key, to_yaml(item, indent)]
            else:
                lines.append(f"{key} {_scalar(item)}")
    else:
        for item in value:
            text = _scalar(item)
            if isinstance(item, Mapping) and item:
                text = to_yaml(item, indent + 2).lstrip()
            lines.append(f"{pad}- {text}")
    return "\n".join(lines)


def _scalar(value: object) -> str:
    if (
        isinstance(value, str)
        and _PLAIN.fullmatch(value)
        and value.lower() not in _RESERVED
    ):
        return value
    # JSON is YAML: numbers, quoted strings, empty lists and mappings.
    text = json.dumps(value, ensure_ascii=False)
    return _NOT_PRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
