"""`Job`: a command that runs as several processes, as a config.

The processes are alike. What tells them apart is their environment, see `weft.launch.distributed`:

    JAX_COORDINATOR_ADDRESS    where process 0 listens, as host:port
    JAX_NUM_PROCESSES          how many there are
    JAX_PROCESS_ID             which of them this one is, from 0
    WEFT_RENDEZVOUS_TOKEN      a secret of this start of the job, without which nobody joins it

A subclass knows one place to run in, adds what that place asks for to the config, and does the
starting, or writes down what a scheduler reads.
"""

import re
from collections.abc import Sequence
from typing import Any

from weft.config import REQUIRED, Configurable, Required, config_class
from weft.errors import JobConfigError

COORDINATOR_ADDRESS = "JAX_COORDINATOR_ADDRESS"
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS_ID = "JAX_PROCESS_ID"
RENDEZVOUS_TOKEN = "WEFT_RENDEZVOUS_TOKEN"
"""A secret of all processes of a run; process 0 refuses those that have another one."""

STOPPED_EXIT_CODE = "WEFT_STOPPED_EXIT_CODE"
"""The exit code with which `weft train` ends when it was asked to stop before its last step; 0 if
this is not set. A scheduler that starts a job again only when it failed needs another one."""

TRY_AGAIN = {STOPPED_EXIT_CODE: "75"}
"""Variables of processes that are to be started again after a stop: 75 is the usual exit code for
"failed for now, try again"."""

HEARTBEAT_TIMEOUT = "WEFT_HEARTBEAT_TIMEOUT_SECONDS"
"""After how many seconds a silent process counts as gone."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Job(Configurable):
    """A command that runs as several processes.

    Raises:
        JobConfigError: if the config asks for what cannot be started.

    >>> Job.default_config().set(name="lm", command=["weft", "train"]).instantiate().environment
    {'JAX_NUM_PROCESSES': '1'}
    """

    _needs_allow = True  # it is made of commands

    @config_class
    class Config(Configurable.Config):
        """Configures a Job.

        Attributes:
            name: names the job, in logs and for the scheduler.
            command: the program and its arguments, the same for each process.
            num_processes: how many processes.
            gpus_per_process: how many GPUs each has for itself; 0 for the CPU, or for other devices
                that the scheduler is asked for.
            env: variables for each process, beside those that it inherits.
            max_tries: how often all processes are started, at most. The next try follows when one
                of them failed; a training goes on from its last checkpoint.
            grace_seconds: how long processes that were asked to stop may take to save.
            heartbeat_timeout_seconds: after how long a process of which the others hear nothing
                counts as gone. One that ends is noticed at once.
        """

        name: Required[str] = REQUIRED
        command: Required[Sequence[str]] = REQUIRED
        num_processes: int = 1
        gpus_per_process: int = 0
        env: dict[str, str] = {}
        max_tries: int = 1
        grace_seconds: float = 120
        heartbeat_timeout_seconds: int = 100

    def __init__(self, config: Config):
        super().__init__(config)
        cfg = self.config
        if not cfg.command:
            raise JobConfigError(
                f"{self._where('command')} is empty. Write a program and its arguments one by "
                'one, as command=["weft", "train", "lm"].'
            )
        least_values = {
            "num_processes": 1,
            "gpus_per_process": 0,
            "max_tries": 1,
            "heartbeat_timeout_seconds": 2,
        }
        for field, least in least_values.items():
            if getattr(cfg, field) < least:
                raise JobConfigError(
                    f"{self._where(field)}={getattr(cfg, field)}; expected {least} or more."
                )
        if not cfg.grace_seconds > 0:
            raise JobConfigError(
                f"{self._where('grace_seconds')}={cfg.grace_seconds:g}; expected a time above 0, "
                "in which a process that is to stop can save."
            )
        for name in cfg.env:
            self._check_variable(name)

    def _check_variable(self, name: str) -> None:
        if not _VARIABLE.fullmatch(name):
            raise JobConfigError(
                f"{self._where('env')} names {name!r}, which cannot be an environment variable. "
                "Use letters, digits and underscores, a digit not first."
            )
        if name in (COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID, RENDEZVOUS_TOKEN):
            raise JobConfigError(
                f"{self._where('env')} sets {name}, which the job sets itself so that the "
                "processes find each other. Leave it out."
            )

    def _where(self, field: str) -> str:
        return f"{type(self).__name__} {self.config.name!r}: {field}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that are the same for each process."""
        cfg = self.config
        variables = {NUM_PROCESSES: str(cfg.num_processes)}
        if cfg.heartbeat_timeout_seconds != type(self).default_config().heartbeat_timeout_seconds:
            variables[HEARTBEAT_TIMEOUT] = str(cfg.heartbeat_timeout_seconds)
        return {**cfg.env, **variables}


def check_text(job: str, field: str, value: Any, pattern: str, expected: str) -> None:
    """Checks a text that a scheduler reads.

    Args:
        job: says which job, in the error.
        field: of its config.
        value: what it holds.
        pattern: a regular expression for all of it.
        expected: what the pattern means, in words.

    Raises:
        JobConfigError: if the text is another one.

    >>> check_text("job", "name", "lm", "[a-z]+", "small letters")
    """
    if not re.fullmatch(pattern, value):
        raise JobConfigError(f"{job}: {field}={value!r}; expected {expected}.")
