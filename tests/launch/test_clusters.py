"""The files of examples/clusters train with two processes on fakes of the clusters."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.clusters.server import weft_server
from tests.pages import ROOT
from tests.sockets import free_port
from tests.weft_process import PATIENCE_SECONDS, newest_step, wait_for_save

pytestmark = pytest.mark.long

FILES = ROOT / "examples" / "clusters"
FAKES = Path(__file__).with_name("clusters")
COMMANDS = {
    "slurm.py": ["sbatch", "srun", "scontrol", "scancel"],
    "kubernetes.py": ["kubectl"],
    "tpu.py": ["gcloud", "curl"],
    "hosts.py": ["ssh"],
}

# A model of one parameter; its steps take their time after the first save until it has to hurry.
RECIPE = """
import os
import time

import jax.numpy as jnp
import numpy as np
from weft.config import config_for_class
from weft.hierarchy import BaseModel, ParameterSpec
from weft.input.in_memory import ArrayInput, Arrays
from weft.recipes.lm import trainer_config
from weft.trainer import Hook


class Line(BaseModel):
    def _create_layer_parameter_specs(self):
        return {"weight": ParameterSpec(shape=(1, 1), mesh_axes=(None, None))}

    def forward(self, input_batch):
        return jnp.mean((input_batch["x"] @ self.state["weight"] - 1) ** 2), {}


class Slow(Hook):
    def before_step(self, step):
        if step > 20 and not os.path.exists(f"{os.environ['FAKE_CLUSTER']}/hurry"):
            time.sleep(0.1)


def recipe(max_step=200):
    data = ArrayInput.default_config().set(
        arrays=Arrays({"x": np.ones((8, 1), np.float32)}), global_batch_size=8
    )
    cfg = trainer_config(
        "runs/mine",
        model=Line.default_config(),
        train_input=data,
        held_out_input=data,
        max_step=max_step,
        peak_lr=0.1,
        eval_every=1_000,
        save_every=20,
    )
    cfg.learner.optimizer = cfg.learner.optimizer.inner
    cfg.evalers = {}
    cfg.hooks["slow"] = config_for_class(Slow)
    return cfg
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch, python_server):
    """Returns the folder of the user, with the fakes and `weft` on the PATH."""
    bin_dir, state = tmp_path / "bin", tmp_path / "state"
    bin_dir.mkdir()
    state.mkdir()

    def add(name, command):
        program = bin_dir / name
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        program.chmod(0o755)

    add("weft", f"{sys.executable} -S -E {FAKES / 'client.py'} weft")
    for file, names in COMMANDS.items():
        for name in names:
            add(name, f"{sys.executable} -P {FAKES / file} {name}")
    monkeypatch.setenv("PATH", f"{bin_dir}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FAKE_CLUSTER", str(state))
    monkeypatch.setenv("WEFT_SERVER", f"{state}/socket")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(RECIPE, encoding="utf-8")
    with weft_server(f"{state}/socket", python_server):
        yield tmp_path


def start(*words, **env):
    return subprocess.Popen(
        list(map(str, words)),
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )


def finish(process, code):
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    logs = "\n".join(path.read_text(encoding="utf-8") for path in Path().rglob("*.log"))
    assert process.returncode == code, out + logs
    return out + logs


def starts(run_dir):
    """Returns the number of processes at each start of a run."""
    told = json.loads(Path(run_dir, "run.json").read_text(encoding="utf-8"))["starts"]
    return [start["processes"] for start in told]


def wait_for_starts(run_dir, number, process):
    while len(starts(run_dir)) < number:
        assert process.poll() is None, finish(process, 0)
        time.sleep(0.02)


def test_slurm_job_saves_before_its_time_limit_and_continues(cluster):
    options = ["--wait", "--nodes=2", "--cpus-per-task=1"]
    words = ["sbatch", *options, FILES / "slurm.sbatch", "own.py:recipe", "dir=run"]
    job = start(*words)
    wait_for_save("run", job)
    (cluster / "state" / "time-is-up").touch()
    wait_for_starts("run", 2, job)
    # Before a process trains, Ctrl-C ends it, as any program.
    wait_for_save("run", job, after=newest_step("run"))
    number = json.loads((cluster / "state" / "job.json").read_text(encoding="utf-8"))["id"]
    subprocess.run(["scancel", "--signal=INT", str(number)], check=True)
    text = finish(job, 130)
    assert "stopped by SIGUSR1" in text and "stopped by SIGINT" in text
    (cluster / "state" / "hurry").touch()
    finish(start(*words), 0)
    assert starts("run") == [2, 2, 2] and newest_step("run") == 200


def test_jobset_restarts_after_an_eviction_and_completes(cluster):
    for claim in ("runs", "corpus"):
        (cluster / "state" / claim).mkdir()
    manifest = (FILES / "jobset.yaml").read_text(encoding="utf-8")
    create = re.search(r"kubectl create secret .*\n.*", manifest)[0].replace("#", "")
    subprocess.run(["bash", "-c", create], check=True)
    words = f"{cluster}/own.py:recipe, dir=/runs/lm"
    changed = manifest.replace("lm, dir=/runs/lm, data_dir=/corpus", words)
    changed = changed.replace("8476", str(free_port()))
    assert words in changed
    Path("jobset.yaml").write_text(changed, encoding="utf-8")
    applied = start("kubectl", "apply", "-f", "jobset.yaml")
    run = cluster / "state" / "runs" / "lm"
    wait_for_save(run, applied)
    label = "batch.kubernetes.io/job-completion-index=1"
    subprocess.run(["kubectl", "delete", "pod", "-l", label], check=True)
    wait_for_starts(run, 2, applied)
    (cluster / "state" / "hurry").touch()
    text = finish(applied, 0)
    assert "restarts 0, exit codes [143, 143]" in text and "restarts 1, exit codes [0, 0]" in text
    assert starts(run) == [2, 2] and newest_step(run) == 200


def test_tpu_slice_is_requested_stopped_and_released(cluster):
    paths = {"WEFT": f"{cluster}/bin/weft", "LOGS": f"{cluster}/logs", "PORT": str(free_port())}
    script = FILES / "tpu-slice.sh"
    words = [script, "start", "own.py:recipe", "dir=run"]
    training = start(*words, **paths)
    wait_for_save("run", training)
    finish(start(script, "stop", **paths), 0)
    finish(training, 130)
    (cluster / "state" / "hurry").touch()
    finish(start(*words, **paths), 0)
    assert starts("run") == [2, 2] and newest_step("run") == 200
    finish(start(script, "release", **paths), 0)
    assert not (cluster / "state" / "slice.json").exists()


def test_hosts_stop_and_continue(cluster):
    Path("hosts.txt").write_text("# two names\n127.0.0.1\nlocalhost\n\n", encoding="utf-8")
    script, port = FILES / "hosts.sh", str(free_port())
    words = [script, "start", "own.py:recipe", "dir=run"]
    training = start(*words, PORT=port)
    wait_for_save("run", training)
    finish(start(script, "stop"), 0)
    finish(training, 130)
    (cluster / "state" / "hurry").touch()
    finish(start(*words, PORT=port), 0)
    assert starts("run") == [2, 2] and newest_step("run") == 200
