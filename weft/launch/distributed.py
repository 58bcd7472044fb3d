"""Process ids from the environment, and the rendezvous of processes.

The variables are, by precedence:

    set by                    coordinator                number                id
    a `Job`, or by hand       JAX_COORDINATOR_ADDRESS    JAX_NUM_PROCESSES     JAX_PROCESS_ID
    Slurm, inside of `srun`   first of the step's nodes  SLURM_STEP_NUM_TASKS  SLURM_PROCID
    Kubernetes, indexed jobs  -                          -                     JOB_COMPLETION_INDEX
    TPUs of Google's          first of                   number of
    Kubernetes                TPU_WORKER_HOSTNAMES       TPU_WORKER_HOSTNAMES  TPU_WORKER_ID

With several slices of TPUs, MEGASCALE_NUM_SLICES, MEGASCALE_SLICE_ID and
MEGASCALE_COORDINATOR_ADDRESS are read, too. Without any of them, a process runs alone. Launchers
also set WEFT_RENDEZVOUS_TOKEN, a secret that process 0 requires of the others.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax

from weft.distributed.peers import HEARTBEAT_TIMEOUT_SECONDS, use_peers
from weft.distributed.rendezvous import rendezvous
from weft.errors import (
    CoordinatorNotFoundError,
    ProcessEnvironmentError,
    WeftError,
)
from weft.launch import job

_CONNECT_SECONDS = 300.0
_JAX_NOTICES_LATER_SECONDS = 30
_LAST_WORDS_SECONDS = 1.0
_LONGEST_TOKEN = 256
_TPU_PORT = 8482  # as JAX's, which the TPU runtime does not use


class ProcessInfo(NamedTuple):
    """Id of a process among the processes of a run."""

    coordinator: str
    num_processes: int
    process_id: int


def process_info(environ: Mapping[str, str]) -> ProcessInfo | None:
    """Returns the place of the process with these environment variables; None if it is alone.

    Raises ProcessEnvironmentError if the variables contradict each other.

    >>> process_info({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_ID": "17",
    ...           "SLURM_STEP_NODELIST": "gpu[07-08],big1"})
    ProcessInfo(coordinator='gpu07:61457', num_processes=4, process_id=3)
    """
    detected_values = _slurm_values(environ) or _tpu_values(environ)
    names = job.COORDINATOR_ADDRESS, job.NUM_PROCESSES, job.PROCESS_ID
    explicit_values = {
        name: environ[name] for name in names if environ.get(name)
    }
    if not explicit_values:
        is_alone = detected_values.get(job.NUM_PROCESSES, "1") == "1"
        return None if is_alone else _parse(detected_values)
    is_first = explicit_values.get(job.PROCESS_ID, "0") == "0"
    if explicit_values.get(job.NUM_PROCESSES) == "1" and is_first:
        return None
    # By precedence, the least first.
    values = dict(detected_values)
    if "JOB_COMPLETION_INDEX" in environ:
        values[job.PROCESS_ID] = environ["JOB_COMPLETION_INDEX"]
    values |= explicit_values
    missing = [name for name in names if name not in values]
    if missing:
        present = ", ".join(f"{name}={value}" for name, value in values.items())
        raise ProcessEnvironmentError(
            f"the environment has {present} but not {' and '.join(missing)}. Set all "
            "three, as `weft launch` does, or none for a process that runs alone."
        )
    return _parse(values)


def _parse(values: Mapping[str, str]) -> ProcessInfo:
    address = values[job.COORDINATOR_ADDRESS]
    if not re.fullmatch(
        r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+):[0-9]{1,5}", address
    ):
        raise ProcessEnvironmentError(
            f"{job.COORDINATOR_ADDRESS}={address!r} is not of the form host:port, such as "
            "10.0.0.1:1234."
        )
    for name in (job.NUM_PROCESSES, job.PROCESS_ID):
        if not re.fullmatch("[0-9]+", values[name]):
            raise ProcessEnvironmentError(
                f"{name}={values[name]!r} is not an integer."
            )
    num, index = int(values[job.NUM_PROCESSES]), int(values[job.PROCESS_ID])
    if index >= num:
        raise ProcessEnvironmentError(
            f"{job.PROCESS_ID}={index} is out of range for {job.NUM_PROCESSES}={num}; ids count "
            f"from 0 to {num - 1}."
        )
    return ProcessInfo(address, num, index)


def _slurm_values(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the values of the three variables in a step of Slurm; {} outside of one."""
    job_id = environ.get("SLURM_JOB_ID", "")
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    index = environ.get("SLURM_PROCID", "")
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    if not (job_id.isdigit() and num_tasks and index and nodes):
        return {}
    address = f"{first_host(nodes)}:{slurm_port(int(job_id))}"
    return {
        job.NUM_PROCESSES: num_tasks,
        job.PROCESS_ID: index,
        job.COORDINATOR_ADDRESS: address,
    }


def _tpu_values(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the values of the three variables on TPUs of GKE; {} elsewhere."""
    hosts = [
        host
        for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
        if host
    ]
    index = environ.get("TPU_WORKER_ID", "")
    num_slices = environ.get("MEGASCALE_NUM_SLICES") or "1"
    slice_index = environ.get("MEGASCALE_SLICE_ID") or "0"
    numbers = index, num_slices, slice_index
    if not hosts or not all(number.isdigit() for number in numbers):
        return {}
    # The processes of all slices meet at one host.
    address = environ.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]
    host, _, _ = address.partition(":")
    return {
        job.NUM_PROCESSES: str(len(hosts) * int(num_slices)),
        job.PROCESS_ID: str(int(slice_index) * len(hosts) + int(index)),
        job.COORDINATOR_ADDRESS: f"{host}:{_TPU_PORT}",
    }


def slurm_port(job_id: int) -> int:
    """Returns the rendezvous port of a Slurm job; jobs that share nodes get different ports.

    >>> slurm_port(17)
    61457
    """
    return 61440 + job_id % 4096


def first_host(node_list: str) -> str:
    """Returns the first host of Slurm's abbreviated list.

    >>> first_host("node[003-005,9],big1"), first_host("big1,big2"), first_host("r[1-2]n[5,7]")
    ('node003', 'big1', 'r1n5')
    """
    # A comma within brackets does not end a part of the list.
    first_part = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    assert first_part is not None
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first_part[0])


@contextlib.contextmanager
def joined_processes(
    environ: Mapping[str, str] | None = None,
) -> Iterator[ProcessInfo | None]:
    """Initializes `jax.distributed` and yields the place, or None for a process that is alone.

    Must be entered before JAX is used. JAX's preemption service is not started, since it takes the
    place of the handler of SIGTERM. An error inside is printed and ends the process at once, as
    a regular exit would wait for the other processes, which wait for this one.

    Raises:
        ProcessEnvironmentError: if the variables contradict each other.
        CoordinatorNotFoundError: if process 0 does not answer.
        ProcessesNotReadyError: if others do not join; the message names them.
    """
    environ = os.environ if environ is None else environ
    place = process_info(environ)
    if place is None or jax.distributed.is_initialized():
        yield place
        return
    text = environ.get(job.HEARTBEAT_TIMEOUT, str(HEARTBEAT_TIMEOUT_SECONDS))
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise ProcessEnvironmentError(
            f"{job.HEARTBEAT_TIMEOUT}={text!r} is not a number of seconds."
        )
    heartbeat_timeout, token = int(text), environ.get(job.RENDEZVOUS_TOKEN, "")
    if len(token) > _LONGEST_TOKEN:
        raise ProcessEnvironmentError(
            f"{job.RENDEZVOUS_TOKEN} has {len(token)} characters; expected at most "
            f"{_LONGEST_TOKEN}, such as the output of `openssl rand -hex 16`."
        )
    # It would swallow each SIGTERM that comes before a run handles signals.
    jax.config.update("jax_enable_preemption_service", False)
    if place.process_id != 0:
        wait_for_coordinator(place)
    peers = rendezvous(
        place.coordinator,
        process_id=place.process_id,
        num_processes=place.num_processes,
        timeout_seconds=_CONNECT_SECONDS,
        token=token,
        heartbeat_timeout_seconds=heartbeat_timeout,
    )
    try:
        with use_peers(peers):
            jax.distributed.initialize(
                *place,
                cluster_detection_method="deactivate",
                # Longer than the timeout of the peers, which name the silent process.
                heartbeat_timeout_seconds=heartbeat_timeout
                + _JAX_NOTICES_LATER_SECONDS,
            )
            yield place
    except BaseException as error:
        _leave(error, place.process_id)
    jax.distributed.shutdown()


def _leave(error: BaseException, process_id: int) -> None:
    code = 1
    # A launcher asks all to stop as soon as the first has failed.
    with contextlib.suppress(ValueError):  # in another thread than the main one
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # stderr may be closed
        if isinstance(error, WeftError):
            code = error.exit_code
            print(f"weft: {error}", file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            code = 130
        elif isinstance(error, SystemExit) and isinstance(
            error.code, int | None
        ):
            code = error.code or 0
        else:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    if process_id == 0:
        # JAX aborts the others as soon as process 0 exits; this leaves them time to report their
        # errors.
        time.sleep(_LAST_WORDS_SECONDS)
    os._exit(code)


def wait_for_coordinator(
    place: ProcessInfo, timeout_seconds: float = _CONNECT_SECONDS
) -> None:
    """Waits until process 0 listens, or raises CoordinatorNotFoundError instead of JAX's abort."""
    host, _, port = place.coordinator.rpartition(":")
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection(
                (host.strip("[]"), int(port)), timeout=5
            ).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise CoordinatorNotFoundError(
                    f"process {place.process_id} of {place.num_processes} could not connect to "
                    f"{place.coordinator} within {timeout_seconds:g} s ({error}). Process 0 "
                    "listens there: check in its log whether it started, and whether "
                    f"{job.COORDINATOR_ADDRESS} names its host."
                ) from error
        time.sleep(min(0.1, timeout_seconds))
