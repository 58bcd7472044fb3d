import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from weft.errors import CoordinatorNotFoundError, ProcessEnvironmentError
from weft.launch import distributed
from weft.launch.distributed import (
    ProcessInfo,
    joined_processes,
    process_info,
    wait_for_coordinator,
)
from weft.launch.local import LocalJob

GIVEN = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
SLURM = {
    "SLURM_JOB_ID": "4099",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}
TPU = {"TPU_WORKER_HOSTNAMES": "a.lm,b.lm", "TPU_WORKER_ID": "1"}
SLICES = TPU | {
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "lm-0-0.lm:8081",
    # Of this slice alone.
    "JOB_COMPLETION_INDEX": "1",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        (GIVEN, ProcessInfo("10.0.0.1:1234", 4, 3)),
        (GIVEN | {"JAX_COORDINATOR_ADDRESS": "[::1]:80"}, ProcessInfo("[::1]:80", 4, 3)),
        ({"JAX_NUM_PROCESSES": "1"}, None),
        (GIVEN | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        (SLURM, ProcessInfo("gpu08:61443", 2, 1)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        (TPU, ProcessInfo("a.lm:8482", 2, 1)),
        (SLICES, ProcessInfo("lm-0-0.lm:8482", 6, 5)),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        (GIVEN | SLICES, ProcessInfo("10.0.0.1:1234", 4, 3)),
        # As the script of a SlurmJob sets them.
        (
            SLURM | {"JAX_COORDINATOR_ADDRESS": "gpu08:7", "JAX_NUM_PROCESSES": "2"},
            ProcessInfo("gpu08:7", 2, 1),
        ),
        # In the script itself, outside of srun, and in an interactive session.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),
        # As the manifest of a JobSetJob sets them, and Kubernetes.
        (
            {
                "JAX_COORDINATOR_ADDRESS": "lm-workers-0-0.lm:8476",
                "JAX_NUM_PROCESSES": "2",
                "JOB_COMPLETION_INDEX": "1",
            },
            ProcessInfo("lm-workers-0-0.lm:8476", 2, 1),
        ),
        ({"JOB_COMPLETION_INDEX": "1"}, None),
    ],
    ids=str,
)
def test_process_info(environ, place):
    assert process_info(environ) == place


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"JAX_PROCESS_ID": "0"},
            r"has JAX_PROCESS_ID=0 but not JAX_COORDINATOR_ADDRESS and JAX_N",
        ),
        (GIVEN | {"JAX_PROCESS_ID": ""}, r"but not JAX_PROCESS_ID\. Set all three, as"),
        (GIVEN | {"JAX_NUM_PROCESSES": "two"}, r"JAX_NUM_PROCESSES='two' is not an integer"),
        (GIVEN | {"JAX_PROCESS_ID": "-1"}, r"JAX_PROCESS_ID='-1' is not an integer"),
        (GIVEN | {"JAX_PROCESS_ID": "4"}, r"JAX_PROCESS_ID=4 is out of range for .*=4; .* 0 to 3"),
        (GIVEN | {"JAX_COORDINATOR_ADDRESS": "here"}, r"'here' is not of the form host:port"),
    ],
    ids=str,
)
def test_inconsistent_environment_is_rejected(environ, message):
    with pytest.raises(ProcessEnvironmentError, match=message):
        process_info(environ)


def test_missing_coordinator_is_reported():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # and no server listens
        place = ProcessInfo(f"127.0.0.1:{s.getsockname()[1]}", 2, 1)
        with pytest.raises(
            CoordinatorNotFoundError,
            match=r"process 1 of 2 could not connect to 127.* within 0\.2 s",
        ):
            wait_for_coordinator(place, timeout_seconds=0.2)


def test_sigterm_does_not_cut_the_last_words_short(monkeypatch, capsys):
    codes = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: codes.append("SIGTERM"))
    monkeypatch.setattr(time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(os, "_exit", codes.append)
    try:
        distributed._leave(ProcessEnvironmentError("it differs"), 0)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert codes == [2]
    assert capsys.readouterr().err == "weft: it differs\n"


PROGRAM = """
import re
import sys
from weft.launch.distributed import joined_processes
with joined_processes() as place:
    import jax
    from jax.experimental import multihost_utils
    total = multihost_utils.process_allgather(jax.numpy.asarray(place.process_id)).sum()
    print("sum", total, "of", jax.process_count(), flush=True)
    with open("/proc/self/status") as status:
        caught = int(re.search("SigCgt:\\s*(\\w+)", status.read())[1], 16)
    assert not caught >> 14 & 1, "SIGTERM would not end this process"
    multihost_utils.sync_global_devices("printed")
    if place.process_id == 1:
        raise ArithmeticError("of one")
    multihost_utils.sync_global_devices("end")
"""


@pytest.mark.long
def test_two_processes_meet_and_failed_one_exits_with_traceback(capfd):
    cfg = LocalJob.default_config().set(
        name="t",
        command=[sys.executable, "-c", PROGRAM],
        num_processes=2,
        env={"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert cfg.instantiate().run() == 1
    out, told = capfd.readouterr()
    assert sorted(line for line in out.splitlines() if "sum" in line) == [
        f"[{i}] sum 1 of 2" for i in range(2)
    ]
    assert "process 1 of 2" in told and "  [1] ArithmeticError: of one\n" in told


def test_weft_errors_are_printed_like_the_cli(python_server):
    program = (
        "import os, warnings\n"
        "from weft.errors import MeshError\n"
        "from weft.launch.distributed import _leave\n"
        "warnings.simplefilter('ignore')\n"
        "for error in (MeshError('too few'), KeyboardInterrupt(), SystemExit(7)):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        _leave(error, process_id=1)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n"
    )
    with python_server.start("-c", program, stderr=subprocess.PIPE) as process:
        codes, told = process.communicate()
    assert (codes.split(), told) == (["2", "130", "7"], "weft: too few\n")


def test_overlong_token_is_rejected():
    environ = GIVEN | {"WEFT_RENDEZVOUS_TOKEN": "x" * 257}
    with (
        pytest.raises(ProcessEnvironmentError, match="_TOKEN has 257 characters; expected at most"),
        joined_processes(environ),
    ):
        pass
