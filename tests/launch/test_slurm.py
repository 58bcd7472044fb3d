import builtins
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.sbatch import directives
from tests.pages import ROOT
from weft.errors import JobConfigError, MissingExtraError
from weft.launch.slurm import SlurmJob


def job(**fields):
    cfg = SlurmJob.default_config().set(name="lm", command=["weft", "train", "lm", "a=[1, 2]"])
    return cfg.set(**({"num_processes": 4} | fields)).instantiate()


ALL = {
    "nodes": 2,
    "gpus_per_process": 4,
    "cpus_per_process": 16,
    "memory_per_node": "400G",
    "time": "2-12:00:00",
    "partition": "gpu",
    "account": "lab",
    "output": "logs/%x-%j.log",
    "sbatch": {"qos": "high", "exclusive": ""},
    "setup": ["module load cuda"],
    "env": {"GREETING": "it's"},
    "max_tries": 3,
    "grace_seconds": 300,
}


def program(directory, name, text):
    path = directory / name
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Returns the programs of a cluster of two nodes, both on this machine."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    program(
        bin_dir,
        "scontrol",
        # Many hosts, one line at a time: who reads only the first must not end the others' writer.
        'echo "scontrol $*" >> "$CALLS"\n'
        '[ "$1" = show ] && { echo localhost; for i in $(seq 9999); do echo n$i; done; }; exit 0',
    )
    program(
        bin_dir,
        "srun",
        'echo "srun $*" >> "$CALLS"\n'
        'while [[ "$1" == --* ]]; do shift; done\n'
        "export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST\n"
        'pids=(); for i in 0 1; do SLURM_PROCID=$i "$@" & pids+=($!); done\n'
        'code=0; for pid in "${pids[@]}"; do wait $pid || code=$?; done; exit $code',
    )
    program(bin_dir, "sbatch", 'cp "${!#}" "$CALLS"\necho "Submitted batch job 4242"')
    monkeypatch.setenv("PATH", f"{bin_dir}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path


def run_script(script, **env):
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost,other"}
    return subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, **slurm, **env},
        capture_output=True,
        encoding="utf-8",
    )


def test_directives_match_fields():
    assert directives(job().script()) == {
        "job-name": "lm",
        "nodes": "4",
        "ntasks-per-node": "1",
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": "TERM@120",
    }
    assert directives(job(**ALL).script()) == {
        "job-name": "lm",
        "nodes": "2",
        "ntasks-per-node": "2",
        "cpus-per-task": "16",
        "gpus-per-task": "4",
        "mem": "400G",
        "time": "2-12:00:00",
        "partition": "gpu",
        "account": "lab",
        "output": "logs/%x-%j.log",
        "open-mode": "append",
        "signal": "TERM@300",
        "requeue": "",
        "qos": "high",
        "exclusive": "",
    }


def test_script_runs_the_processes_and_ends_with_their_code(cluster):
    show = 'echo "$SLURM_PROCID/$JAX_NUM_PROCESSES $JAX_COORDINATOR_ADDRESS $GREETING"'
    fields = {"num_processes": 2, "env": {"GREETING": "it's"}, "setup": ["echo set up"]}
    script = job(**fields, command=["bash", "-c", show]).script()
    done = run_script(script, SLURM_JOB_ID="17")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "set up"
    assert sorted(lines[1:]) == [f"{i}/2 localhost:61457 it's" for i in range(2)]
    assert run_script(job(command=["bash", "-c", "exit 3"]).script()).returncode == 3


def test_each_start_of_a_script_has_a_new_token(cluster):
    made = job(num_processes=2, command=["bash", "-c", 'echo "$WEFT_RENDEZVOUS_TOKEN"'])
    starts = [run_script(made.script()).stdout.split() for _ in range(2)]
    (first, same), (second, _) = starts
    assert first == same != second and len(first) == 32 and first not in made.script()


def test_failed_job_is_requeued_up_to_max_tries(cluster):
    script = job(max_tries=2, command=["bash", "-c", "exit 143"]).script()
    assert run_script(script).returncode == 143
    calls = Path(os.environ["CALLS"])
    assert "scontrol requeue" in calls.read_text(encoding="utf-8")
    calls.unlink()
    assert run_script(script, SLURM_RESTART_COUNT="1").returncode == 143
    assert "requeue" not in calls.read_text(encoding="utf-8")


@pytest.mark.parametrize("code", [2, 130])
def test_job_with_a_wrong_command_or_stopped_by_sigint_is_not_requeued(cluster, code):
    # As a process that reads this variable would.
    command = ["bash", "-c", f"exit ${{WEFT_STOPPED_EXIT_CODE:-{code}}}"]
    assert run_script(job(max_tries=2, command=command).script()).returncode == code
    assert "requeue" not in Path(os.environ["CALLS"]).read_text(encoding="utf-8")


def test_code_of_a_wrong_command_is_not_hidden_by_processes_that_lost_it(cluster):
    fake_srun = Path(__file__).parent / "clusters" / "slurm.py"
    program(cluster / "bin", "srun", f'exec {sys.executable} -P {fake_srun} srun "$@"')
    text = "[ $SLURM_PROCID = 0 ] && exit 2; sleep 0.5; exit 1"
    fields = {"num_processes": 2, "cpus_per_process": 1, "grace_seconds": 30}
    script = job(**fields, command=["bash", "-c", text]).script()
    slurm = {"SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2"}
    done = run_script(script, **slurm, FAKE_CLUSTER=str(cluster), PYTHONPATH=str(ROOT))
    assert done.returncode == 2, done.stderr


@pytest.mark.long
def test_slurm_processes_join(cluster):
    text = (
        "from weft.launch.distributed import joined_processes\n"
        "with joined_processes() as place:\n"
        "    import jax, sys\n"
        "    n, devices = jax.process_count(), jax.device_count()\n"
        # In one piece, as both processes write to the same pipe.
        "    sys.stdout.write(f'{place.process_id} of {n} devices {devices}\\n')"
    )
    script = job(num_processes=2, command=[sys.executable, "-c", text]).script()
    env = {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = run_script(script, **env)
    assert done.returncode == 0, done.stderr
    told = sorted(line for line in done.stdout.splitlines() if "devices" in line)
    assert told == ["0 of 2 devices 2", "1 of 2 devices 2"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 3}, r"nodes=3 does not divide num_processes=4"),
        ({"nodes": 0}, r"nodes=0 does not divide"),
        ({"name": "my job"}, r"SlurmJob 'my job': name='my job'; expected one word"),
        ({"partition": "a\n#SBATCH --uid=0"}, r"partition=.*expected one word"),
        ({"time": "8h"}, r"time='8h'; expected Slurm's time format: 90 \(minutes\), 8:00:00"),
        ({"sbatch": {"--qos": "x"}}, r"sbatch='--qos'; expected names, as in --name=value"),
        ({"sbatch": {"qos": "a b"}}, r"sbatch\['qos'\]='a b'; expected one word"),
        ({"sbatch": {"time": "1"}, "time": "2"}, r"sbatch sets time, which the job sets itself"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_invalid_slurm_fields_are_rejected(fields, message):
    with pytest.raises(JobConfigError, match=message):
        job(**fields)


def test_submit_errors(cluster, monkeypatch):
    pytest.importorskip("submitit")
    with pytest.raises(JobConfigError, match=r"max_tries=2, but submitit does not .* \| sbatch"):
        job(max_tries=2).submit(str(cluster / "slurm"))
    program(cluster / "bin", "sbatch", "echo 'no such account' >&2; exit 1")
    with pytest.raises(JobConfigError, match=r"(?s)was not submitted: .*no such account.* job\.sh"):
        job().submit(str(cluster / "slurm"))
    monkeypatch.setenv("PATH", os.defpath)
    with pytest.raises(JobConfigError, match=r"was not submitted: .*from a machine of the cluster"):
        job().submit(str(cluster / "slurm"))


def test_missing_submitit_names_the_extra(monkeypatch):
    import_module = builtins.__import__

    def without_submitit(name, *args, **kwargs):
        if name == "submitit":
            raise ModuleNotFoundError("No module named 'submitit'", name="submitit")
        return import_module(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_submitit)
    with pytest.raises(MissingExtraError, match=r"pip install 'weft-jax\[launch\]'.*\| sbatch"):
        job().submit()
