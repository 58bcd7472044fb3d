"""Slurm on this machine: `sbatch --wait`, `srun`, `scontrol requeue` and `scancel --signal`.

A job has the folder $FAKE_CLUSTER. When the file time-is-up appears in it, its time limit is near.
"""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.launch import sbatch

STATE = Path(os.environ["FAKE_CLUSTER"])
JOB, TASKS, REQUEUED, TIME_IS_UP = (
    STATE / name for name in ("job.json", "tasks", "requeued", "time-is-up")
)
SRUN_OPTIONS = {
    "cpus-per-task": r"[1-9]\d*",
    "export": r"ALL",
    "kill-on-bad-exit": r"[01]",
    "label": None,
    "wait": r"[1-9]\d*",
}


def options_and_rest(words, parse):
    options = {}
    words = list(words)
    while words[0].startswith("--"):
        name, value = parse(words.pop(0))
        options[name] = value
    return options, words


def free_job_id():
    """Returns the number of a job whose port, by JAX's rule, no process listens to."""
    for number in itertools.count(os.getpid()):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", 61440 + number % 4096))
            except OSError:
                continue
            return number
    raise AssertionError


def run_sbatch(words):
    given, (path, *arguments) = options_and_rest(words, sbatch.parse_option)
    options = sbatch.directives(Path(path).read_text(encoding="utf-8")) | given
    assert "wait" in options, "this sbatch has no queue"
    job = {"id": free_job_id(), "options": options}
    JOB.write_text(json.dumps(job), encoding="utf-8")
    print(f"Submitted batch job {job['id']}", flush=True)
    output = options["output"].replace("%x", options["job-name"]).replace("%j", str(job["id"]))
    nodes = int(options["nodes"])
    env = os.environ | {
        "SLURM_JOB_ID": str(job["id"]),
        "SLURM_JOB_NAME": options["job-name"],
        # Names of this machine.
        "SLURM_JOB_NODELIST": f"127.0.0.[1-{nodes}]",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(nodes * int(options["ntasks-per-node"])),
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
        "SLURM_PROCID": "0",
    }
    for restarts in itertools.count():
        REQUEUED.unlink(missing_ok=True)
        if restarts:
            env["SLURM_RESTART_COUNT"] = str(restarts)
        with open(output, "a", encoding="utf-8") as log:
            script = subprocess.Popen(
                ["bash", path, *arguments], env=env, stdout=log, stderr=subprocess.STDOUT
            )
        while script.poll() is None:
            if TIME_IS_UP.exists():
                TIME_IS_UP.unlink()
                announce_end(options["signal"], script)
            time.sleep(0.02)
        if not REQUEUED.exists():
            return script.returncode
    raise AssertionError


def announce_end(directive, script):
    to_script, name = re.fullmatch(r"(?:R?(B?):)?([A-Z0-9]+)@\d+", directive).groups()
    number = signal.Signals[f"SIG{name}"]
    if to_script:
        script.send_signal(number)
    else:
        signal_tasks(number)


def signal_tasks(number):
    for pid in json.loads(TASKS.read_text(encoding="utf-8")):
        os.kill(pid, number)


def srun_option(word):
    name, _, value = word.removeprefix("--").partition("=")
    assert name in SRUN_OPTIONS, f"unknown option: {word}"
    assert re.fullmatch(SRUN_OPTIONS[name] or "", value), word
    return name, value


def run_srun(words):
    options, command = options_and_rest(words, srun_option)
    # As Slurm does since 22.05.
    assert options["cpus-per-task"] == os.environ["SLURM_CPUS_PER_TASK"], "one core per task"
    count, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_JOB_NUM_NODES"])
    tasks, codes = [], []

    def watch(number, task):
        for line in task.stdout:
            # In one piece, as several threads write.
            os.write(1, f"{number}: ".encode() + line if "label" in options else line)
        code = task.wait()
        codes.append(128 - code if code < 0 else code)
        if code and options.get("kill-on-bad-exit") == "1":
            kill_all()
        timer = threading.Timer(int(options["wait"]), kill_all)
        timer.daemon = True
        timer.start()

    def kill_all():
        for task in tasks:
            task.kill()

    for number in range(count):
        env = os.environ | {
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number * nodes % count),
            "SLURM_NODEID": str(number * nodes // count),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        }
        tasks.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    TASKS.write_text(json.dumps([task.pid for task in tasks]), encoding="utf-8")
    threads = [threading.Thread(target=watch, args=item) for item in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(codes)


def run_scontrol(words):
    job = json.loads(JOB.read_text(encoding="utf-8"))
    assert words == ["requeue", str(job["id"])]
    assert "requeue" in job["options"], "Requested operation is presently disabled"
    REQUEUED.touch()


def run_scancel(words):
    name, job = re.fullmatch(r"--signal=([A-Z0-9]+) (\d+)", " ".join(words)).groups()
    assert json.loads(JOB.read_text(encoding="utf-8"))["id"] == int(job)
    signal_tasks(signal.Signals[f"SIG{name}"])


if __name__ == "__main__":
    sys.exit(globals()[f"run_{sys.argv[1]}"](sys.argv[2:]))
