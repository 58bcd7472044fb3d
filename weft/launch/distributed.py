"""Process ids from the environment, and the rendezvous of processes.

The variables are, by precedence:

    set by                    coordinator                number                id
    a `Job`, or by hand       JAX_COORDINATOR_ADDRESS    JAX_NUM_PROCESSES     JAX_PROCESS_ID
    Slurm, inside of `srun`   first of the step's nodes  SLURM_STEP_NUM_TASKS  SLURM_PROCID
    Kubernetes, indexed jobs  -                          -                     JOB_COMPLETION_INDEX

Without any of them, a process runs alone. Launchers also set WEFT_RENDEZVOUS_TOKEN, a secret that
process 0 requires of the others.
"""

import contextlib
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax

from weft.errors import CoordinatorNotFoundError, ProcessEnvironmentError, WeftError
from weft.launch.job import (
    COORDINATOR_ADDRESS,
    HEARTBEAT_TIMEOUT,
    NUM_PROCESSES,
    PROCESS_ID,
    RENDEZVOUS_TOKEN,
)
from weft.trainer.companions import HEARTBEAT_TIMEOUT_SECONDS, in_company
from weft.trainer.meeting import meet

_CONNECT_SECONDS = 300.0
_JAX_NOTICES_LATER_SECONDS = 30
_LAST_WORDS_SECONDS = 1.0
_LONGEST_TOKEN = 256


class Place(NamedTuple):
    """Id of a process among the processes of a run."""

    coordinator: str
    num_processes: int
    process_id: int


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Returns the place of the process with these environment variables; None if it is alone.

    Raises:
        ProcessEnvironmentError: if the variables contradict each other.

    >>> place_of({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_ID": "17",
    ...           "SLURM_STEP_NODELIST": "gpu[07-08],big1"})
    Place(coordinator='gpu07:61457', num_processes=4, process_id=3)
    """
    slurm = _of_slurm(environ)
    said = {
        name: environ[name]
        for name in (COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID)
        if environ.get(name)
    }
    if not said and (slurm is None or slurm[NUM_PROCESSES] == "1"):
        return None
    if said.get(NUM_PROCESSES) == "1" and said.get(PROCESS_ID, "0") == "0":
        return None
    values = dict(slurm or {})
    if "JOB_COMPLETION_INDEX" in environ:
        values[PROCESS_ID] = environ["JOB_COMPLETION_INDEX"]
    values |= said
    missing = [n for n in (COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID) if n not in values]
    if missing:
        raise ProcessEnvironmentError(
            f"the environment has {_shown(values)} but not {' and '.join(missing)}. Set all "
            "three, as `weft launch` does, or none for a process that runs alone."
        )
    return _checked(values)


def _checked(values: Mapping[str, str]) -> Place:
    address = values[COORDINATOR_ADDRESS]
    if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+):[0-9]{1,5}", address):
        raise ProcessEnvironmentError(
            f"{COORDINATOR_ADDRESS}={address!r} is not of the form host:port, such as "
            "10.0.0.1:1234."
        )
    numbers = []
    for name in (NUM_PROCESSES, PROCESS_ID):
        if not re.fullmatch("[0-9]+", values[name]):
            raise ProcessEnvironmentError(f"{name}={values[name]!r} is not an integer.")
        numbers.append(int(values[name]))
    num, index = numbers
    if index >= num:
        raise ProcessEnvironmentError(
            f"{PROCESS_ID}={index} is out of range for {NUM_PROCESSES}={num}; ids count from 0 "
            f"to {num - 1}."
        )
    return Place(address, num, index)


def _of_slurm(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the variables of a process that `srun` started, or None."""
    found = {
        NUM_PROCESSES: environ.get("SLURM_STEP_NUM_TASKS"),
        PROCESS_ID: environ.get("SLURM_PROCID"),
        COORDINATOR_ADDRESS: environ.get("SLURM_STEP_NODELIST"),
    }
    job = environ.get("SLURM_JOB_ID", "")
    if None in found.values() or not job.isdigit():
        return None
    values = {name: value or "" for name, value in found.items()}
    host = first_host(values[COORDINATOR_ADDRESS])
    values[COORDINATOR_ADDRESS] = f"{host}:{slurm_port(int(job))}"
    return values


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
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    assert first is not None
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0])


def _shown(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


@contextlib.contextmanager
def joined_processes(environ: Mapping[str, str] | None = None) -> Iterator[Place | None]:
    """Initializes `jax.distributed` and yields the place, or None for a process that is alone.

    Must be entered before JAX is used. An error inside is printed and ends the process at once, as
    a regular exit would wait for the other processes, which wait for this one.

    Raises:
        ProcessEnvironmentError: if the variables contradict each other.
        CoordinatorNotFoundError: if process 0 does not answer.
        ProcessesNotReadyError: if others do not join; the message names them.
    """
    environ = os.environ if environ is None else environ
    place = place_of(environ)
    if place is None or jax.distributed.is_initialized():
        yield place
        return
    heartbeat_timeout, token = _heartbeat_timeout(environ), _token(environ)
    if place.process_id != 0:
        wait_for_coordinator(place)
    companions = meet(
        place.coordinator,
        process_id=place.process_id,
        num_processes=place.num_processes,
        timeout_seconds=_CONNECT_SECONDS,
        token=token,
        heartbeat_timeout_seconds=heartbeat_timeout,
    )
    try:
        with in_company(companions):
            jax.distributed.initialize(
                *place,
                cluster_detection_method="deactivate",
                # Longer than the timeout of the companions, which name the silent process.
                heartbeat_timeout_seconds=heartbeat_timeout + _JAX_NOTICES_LATER_SECONDS,
            )
            yield place
    except BaseException as error:
        _leave(error, place.process_id)
    jax.distributed.shutdown()


def _heartbeat_timeout(environ: Mapping[str, str]) -> int:
    text = environ.get(HEARTBEAT_TIMEOUT, str(HEARTBEAT_TIMEOUT_SECONDS))
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise ProcessEnvironmentError(f"{HEARTBEAT_TIMEOUT}={text!r} is not a number of seconds.")
    return int(text)


def _token(environ: Mapping[str, str]) -> str:
    token = environ.get(RENDEZVOUS_TOKEN, "")
    if len(token) > _LONGEST_TOKEN:
        raise ProcessEnvironmentError(
            f"{RENDEZVOUS_TOKEN} has {len(token)} characters; expected at most {_LONGEST_TOKEN}, "
            "such as the output of `openssl rand -hex 16`."
        )
    return token


def _leave(error: BaseException, process_id: int) -> None:
    code = 1
    with contextlib.suppress(OSError):  # stderr may be closed
        if isinstance(error, WeftError):
            code = 2
            print(f"weft: {error}", file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            code = 130
        elif isinstance(error, SystemExit) and isinstance(error.code, int | None):
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


def wait_for_coordinator(place: Place, timeout_seconds: float = _CONNECT_SECONDS) -> None:
    """Waits until process 0 listens, or raises CoordinatorNotFoundError instead of JAX's abort."""
    host, _, port = place.coordinator.rpartition(":")
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise CoordinatorNotFoundError(
                    f"process {place.process_id} of {place.num_processes} could not connect to "
                    f"{place.coordinator} within {timeout_seconds:g} s ({error}). Process 0 "
                    "listens there: check in its log whether it started, and whether "
                    f"{COORDINATOR_ADDRESS} names its host."
                ) from error
        time.sleep(min(0.1, timeout_seconds))
