"""`LocalJob`: several processes on this machine, connected through its loopback interface.

Simulates several machines: processes share only files and messages. On the CPU they use gloo.
"""

import contextlib
import os
import secrets
import socket
import sys

from weft import errors
from weft.launch.job import (
    COORDINATOR_ADDRESS,
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
        """Directory of one log file per process; None to print lines here with their id."""
        failure_grace_seconds: float = 5
        """Time for the other processes to exit after one failed."""

    def run(self) -> int:
        """Runs the processes to their end; returns 0, or the exit code of the first failure.

        After a signal it is that of the processes: 143 after SIGTERM, where they save and stop.

        Raises JobConfigError if they cannot be started.
        """
        cfg = self.config
        for tries_left in reversed(range(cfg.max_tries)):
            outcome = self._run_once()
            if outcome.failed is not None:
                _report(failure_text(outcome, cfg.num_processes))
            elif outcome.stopped_by is not None:
                codes = [
                    f"process {end.index}: {end.code}"
                    for end in sorted(outcome.ended)
                ]
                _report(
                    f"stopped by {outcome.stopped_by}; exit codes: {', '.join(codes)}"
                )
            # A wrong command would fail again.
            if (
                outcome.failed is None
                or not tries_left
                or outcome.code == USAGE_EXIT_CODE
            ):
                break
            _report(
                f"restarting all processes; tries left after this one: {tries_left - 1}"
            )
        return outcome.code

    def _run_once(self) -> Outcome:
        cfg = self.config
        # Another program may take the port before process 0 does; the run then fails and says so.
        with socket.socket() as free_socket:
            free_socket.bind(("127.0.0.1", 0))
            _, port = free_socket.getsockname()
        token = secrets.token_hex(16)
        environments: list[dict[str, str]] = []
        for index in range(cfg.num_processes):
            environment = self.process_environment(index, f"127.0.0.1:{port}")
            environment[RENDEZVOUS_TOKEN] = token
            environments.append(environment)
        log_paths: list[str] | None = None
        if cfg.log_dir is not None:
            width = len(str(cfg.num_processes - 1))
            names = [
                f"process-{index:0{width}}.log"
                for index in range(cfg.num_processes)
            ]
            log_paths = [os.path.join(cfg.log_dir, name) for name in names]
            _report(
                f"{cfg.num_processes} process(es), with logs in {log_paths[0]} and its siblings"
            )
        group = ProcessGroup(
            cfg.command,
            environments,
            say=PrefixedLines(cfg.num_processes),
            log_paths=log_paths,
            grace_seconds=cfg.grace_seconds,
            failure_grace_seconds=cfg.failure_grace_seconds,
        )
        return group.run()

    def process_environment(self, index: int, address: str) -> dict[str, str]:
        """Returns all environment variables of a process.

        Raises JobConfigError if there are too few GPUs.
        """
        devices = {"JAX_PLATFORMS": "cpu"}
        if self.config.gpus_per_process:
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus(index))}
        return {
            **os.environ,
            **devices,
            **self.environment,
            COORDINATOR_ADDRESS: address,
            PROCESS_ID: str(index),
        }

    def _gpus(self, index: int) -> list[str]:
        cfg = self.config
        num_gpus = cfg.num_processes * cfg.gpus_per_process
        visible_text = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible = [name for name in visible_text.split(",") if name]
        if not visible:
            visible = [str(number) for number in range(num_gpus)]
        if len(visible) < num_gpus:
            raise errors.JobConfigError(
                f"{self._where('gpus_per_process')}={cfg.gpus_per_process} for "
                f"num_processes={cfg.num_processes} needs {num_gpus} GPUs, but "
                f"CUDA_VISIBLE_DEVICES={','.join(visible)} has {len(visible)}. Request fewer."
            )
        first = index * cfg.gpus_per_process
        return visible[first : first + cfg.gpus_per_process]


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
