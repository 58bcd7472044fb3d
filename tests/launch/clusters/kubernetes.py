"""A cluster of Kubernetes on this machine: `kubectl`, and the controller of JobSets.

`apply` returns when the JobSet has ended. The folder of a claim is $FAKE_CLUSTER/NAME, and must be
there.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import yaml

STATE = Path(os.environ["FAKE_CLUSTER"])
SECRETS, PODS = STATE / "secrets.json", STATE / "pods.json"
SCHEMA = Path(__file__).parents[1] / "jobset.v1alpha2.schema.json"


def kubectl(words):
    match words:
        case ["create", "secret", "generic", name, literal]:
            key, value = re.fullmatch(r"--from-literal=(\w+)=(\S+)", literal).groups()
            SECRETS.write_text(json.dumps({name: {key: value}}), encoding="utf-8")
        case ["apply", "-f", path]:
            manifest = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
            jsonschema.Draft202012Validator(schema).validate(manifest)
            return control(manifest)
        case ["delete", "pod", "-l", selector]:
            index = selector.removeprefix("batch.kubernetes.io/job-completion-index=")
            os.kill(json.loads(PODS.read_text(encoding="utf-8"))[int(index)], signal.SIGTERM)
        case _:
            raise ValueError(f"unknown command: {words}")
    return 0


def control(manifest):
    """Starts the pods of a JobSet, all again when one fails; returns 0 if it completes."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    policy = spec["failurePolicy"]
    for restarts in range(policy["maxRestarts"] + 1):
        codes = run_job(job, f"{name}-{replicated['name']}-0", name)
        print(f"restarts {restarts}, exit codes {codes}", flush=True)
        if not any(codes):
            return 0
        reason = "BackoffLimitExceeded"
        for rule in job["podFailurePolicy"]["rules"]:
            if set(codes) & set(rule["onExitCodes"]["values"]):
                reason = "PodFailurePolicy"
        if any(reason in rule["onJobFailureReasons"] for rule in policy["rules"]):
            break
    return 1


def run_job(job, job_name, subdomain):
    """Runs the pods of an indexed Job, and ends them all when one fails; returns their codes."""
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0
    assert job["parallelism"] == job["completions"]
    spec = job["template"]["spec"]
    pods = [start_pod(spec, f"{job_name}-{i}", subdomain, i) for i in range(job["completions"])]
    PODS.write_text(json.dumps([pod.pid for pod in pods]), encoding="utf-8")
    while None in [pod.poll() for pod in pods]:
        if any(pod.returncode for pod in pods):
            for pod in pods:
                pod.terminate()
            deadline = time.monotonic() + spec["terminationGracePeriodSeconds"]
            for pod in pods:
                pod.wait(deadline - time.monotonic())
        time.sleep(0.02)
    return [pod.returncode for pod in pods]


def start_pod(spec, name, subdomain, index):
    (container,) = spec["containers"]
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"]
    }
    mounts = {
        mount["mountPath"]: str(STATE / claims[mount["name"]])
        for mount in container["volumeMounts"]
    }
    assert all(os.path.isdir(folder) for folder in mounts.values())
    env = os.environ | {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": name}
    for variable in container["env"]:
        env[variable["name"]] = value_of(variable, f"{name[:-1]}0.{subdomain}")
    command = []
    for word in container["command"]:
        for path, folder in mounts.items():
            word = re.sub(rf"(^|=){path}(?=/|$)", rf"\g<1>{folder}", word)
        command.append(word)
    with open(STATE / f"{name}.log", "ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def value_of(variable, first_pod):
    """Returns the value in the pod; the first pod's name, which DNS knows, is this machine."""
    if "value" in variable:
        return re.sub(rf"^{re.escape(first_pod)}(?=:)", "127.0.0.1", variable["value"])
    reference = variable["valueFrom"]["secretKeyRef"]
    return json.loads(SECRETS.read_text(encoding="utf-8"))[reference["name"]][reference["key"]]


if __name__ == "__main__":
    sys.exit(kubectl(sys.argv[2:]))
