"""`LocalJob`: several processes on this machine, connected through its loopback interface.

Simulates several machines: processes share only files and messages. On the CPU they use gloo.
"""

import contextlib
import math
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from datetime import datetime

from weft.errors import JobConfigError
from weft.launch.job import (
    COORDINATOR_ADDRESS,
    NUM_PROCESSES,
    PROCESS_ID,
    RENDEZVOUS_TOKEN,
    USAGE_EXIT_CODE,
    Job,
)
from weft.launch.processes import Ended, Outcome, PrefixedLines, ProcessGroup


class LocalJob(Job):
    """Processes on this machine.

    >>> cfg = LocalJob.default_config().set(name="hello", command=["echo", "hello"])
    >>> cfg.instantiate().run()
    [0] hello
    0
    """

    class Config(Job.Config):
        """Configures a LocalJob."""

        log_dir: str | None = None
        """Directory of one log file per process, to which each try appends; None to print lines
        here with their id."""
        failure_grace_seconds: float = 5
        """Time for the other processes to exit after one failed."""
        min_processes: int | None = None
        """Number of processes with which the next try may start after others failed, with
        `max_tries`; None for `num_processes`."""
        rejoin_seconds: float = 600
        """Time after which fewer processes save and stop, for a start of all of them."""

    def __init__(self, config: Config):
        super().__init__(config)
        cfg = self.config
        if not 1 <= self._min_processes <= cfg.num_processes:
            raise JobConfigError(
                f"{self._where('min_processes')}={cfg.min_processes}; expected 1 to "
                f"num_processes={cfg.num_processes}."
            )
        if self._min_processes < cfg.num_processes and cfg.max_tries == 1:
            raise JobConfigError(
                f"{self._where('min_processes')}={cfg.min_processes} is for another try, and "
                "max_tries=1 allows one. Set max_tries to 2 or more."
            )
        if not cfg.rejoin_seconds > 0:
            raise JobConfigError(
                f"{self._where('rejoin_seconds')}={cfg.rejoin_seconds:g}; expected a time above 0."
            )

    @property
    def _min_processes(self) -> int:
        if self.config.min_processes is None:
            return self.config.num_processes
        return self.config.min_processes

    def run(self) -> int:
        """Runs the processes to their end; returns 0, or the exit code of the first failure.

        After a signal it is that of the processes: 143 after SIGTERM, where they save and stop.

        Raises JobConfigError if they cannot be started.
        """
        cfg = self.config
        tries_left = cfg.max_tries - 1
        places = self._places(lost=())
        lost: list[int] = []
        while True:
            outcome = self._run_once(places, cfg.max_tries - tries_left)
            if outcome.failed is not None:
                _report(failure_text(outcome, len(places)))
                # A wrong command would fail again; a mesh may not fit fewer processes.
                is_refused = outcome.code == USAGE_EXIT_CODE
                has_all = len(places) == cfg.num_processes
                if not tries_left or (is_refused and has_all):
                    return outcome.code
                tries_left -= 1
                lost.append(places[outcome.failed.index])
                if is_refused or len(self._places(lost)) < self._min_processes:
                    lost = []
            elif outcome.is_timed_out and outcome.code:
                lost = []
            else:
                if outcome.stopped_by is not None:
                    _report(_stop_text(outcome))
                return outcome.code
            places = self._places(lost)
            _report(self._restart_text(len(places), tries_left))

    def _restart_text(self, num_processes: int, tries_left: int) -> str:
        cfg = self.config
        text = "restarting all processes"
        if num_processes < cfg.num_processes:
            text = (
                f"restarting with {num_processes} of {cfg.num_processes} processes; all are "
                f"started again after {cfg.rejoin_seconds:g} s"
            )
        return f"{text}; tries left after this one: {tries_left}"

    def _places(self, lost: Sequence[int]) -> list[int]:
        """Returns places for processes on this machine, each with GPUs of its own if they have any.

        If processes can be fewer, a place where one has failed is not used for the next ones: a
        place of unused GPUs is, or they are fewer.
        """
        cfg = self.config
        num_places = cfg.num_processes
        if cfg.gpus_per_process:
            num_spare = len(_visible_gpus()) // cfg.gpus_per_process
            num_places = max(num_places, num_spare)
        if self._min_processes == cfg.num_processes == num_places:
            lost = ()
        free = [place for place in range(num_places) if place not in lost]
        return free[: cfg.num_processes]

    def _run_once(self, places: Sequence[int], number: int) -> Outcome:
        """Runs the processes to their end, in the try of this number, which counts from 1."""
        cfg = self.config
        num_processes = len(places)
        # Another program may take the port before process 0 does; the run then fails and says so.
        with socket.socket() as free_socket:
            free_socket.bind(("127.0.0.1", 0))
            _, port = free_socket.getsockname()
        token = secrets.token_hex(16)
        environments: list[dict[str, str]] = []
        for index, place in enumerate(places):
            environment = self.process_environment(
                index, f"127.0.0.1:{port}", place
            )
            environment[NUM_PROCESSES] = str(num_processes)
            environment[RENDEZVOUS_TOKEN] = token
            environments.append(environment)
        log_paths: list[str] | None = None
        if cfg.log_dir is not None:
            width = len(str(num_processes - 1))
            names = [
                f"process-{index:0{width}}.log"
                for index in range(num_processes)
            ]
            log_paths = [os.path.join(cfg.log_dir, name) for name in names]
            _report(
                f"{num_processes} process(es), with logs in {log_paths[0]} and its siblings"
            )
        group = ProcessGroup(
            cfg.command,
            environments,
            say=PrefixedLines(num_processes),
            log_paths=log_paths,
            log_heading=(
                f"weft launch: try {number} of {cfg.max_tries}, "
                f"{num_processes} process(es), {datetime.now():%Y-%m-%d %H:%M:%S}"
            ),
            grace_seconds=cfg.grace_seconds,
            failure_grace_seconds=cfg.failure_grace_seconds,
            stop_after_seconds=(
                cfg.rejoin_seconds
                if num_processes < cfg.num_processes
                else math.inf
            ),
        )
        return group.run()

    def process_environment(
        self, index: int, address: str, place: int | None = None
    ) -> dict[str, str]:
        """Returns all environment variables of a process, at the place of its number by default.

        Raises JobConfigError if there are too few GPUs.
        """
        if place is None:
            place = index
        devices = {"JAX_PLATFORMS": "cpu"}
        if self.config.gpus_per_process:
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus(place))}
        return {
            **os.environ,
            **devices,
            **self.environment,
            COORDINATOR_ADDRESS: address,
            PROCESS_ID: str(index),
        }

    def _gpus(self, place: int) -> list[str]:
        cfg = self.config
        num_gpus = cfg.num_processes * cfg.gpus_per_process
        visible = _visible_gpus()
        if not visible:
            visible = [str(number) for number in range(num_gpus)]
        if len(visible) < num_gpus:
            raise JobConfigError(
                f"{self._where('gpus_per_process')}={cfg.gpus_per_process} for "
                f"num_processes={cfg.num_processes} needs {num_gpus} GPUs, but "
                f"CUDA_VISIBLE_DEVICES={','.join(visible)} has {len(visible)}. Request fewer."
            )
        first = place * cfg.gpus_per_process
        return visible[first : first + cfg.gpus_per_process]


def _visible_gpus() -> list[str]:
    text = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name for name in text.split(",") if name]


def _stop_text(outcome: Outcome) -> str:
    codes = [
        f"process {end.index}: {end.code}" for end in sorted(outcome.ended)
    ]
    return f"stopped by {outcome.stopped_by}; exit codes: {', '.join(codes)}"


def failure_text(outcome: Outcome, num_processes: int) -> str:
    """Describes a process that failed, and the ends of the others."""
    failed = outcome.failed
    assert failed is not None
    lines = [
        f"process {failed.index} of {num_processes} (pid {failed.pid}) {_end(failed)} "
        f"after {failed.seconds:.1f} s; its exit code is {failed.code}"
    ]
    if failed.last_lines:
        lines.append("its last lines:")
        lines += [f"  [{failed.index}] {line}" for line in failed.last_lines]
    for other in outcome.ended:
        if other is not failed:
            lines.append(
                f"process {other.index} {_end(other)} at {other.seconds:.1f} s"
            )
    return "\n".join(lines)


def _end(ended: Ended) -> str:
    if ended.signal_name is not None:
        return f"was ended by {ended.signal_name}"
    return (
        f"ended with exit code {ended.code}"
        if ended.code
        else "exited normally"
    )


def _report(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        print(f"weft launch: {text}", file=sys.stderr, flush=True)
