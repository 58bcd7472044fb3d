"""`Job`: config of a command that runs as several processes.

The processes differ only in their environment, see `weft.launch.distributed`:

    JAX_COORDINATOR_ADDRESS    host:port of process 0
    JAX_NUM_PROCESSES          number of processes
    JAX_PROCESS_ID             id of the process, from 0
    WEFT_RENDEZVOUS_TOKEN      secret of this start of the job, required to join it

Each subclass supports one platform: it starts the processes or writes the input of a scheduler.
"""

import re
from collections.abc import Sequence

from weft.config import REQUIRED, Configurable, Required
from weft.errors import JobConfigError

COORDINATOR_ADDRESS = "JAX_COORDINATOR_ADDRESS"
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS_ID = "JAX_PROCESS_ID"
RENDEZVOUS_TOKEN = "WEFT_RENDEZVOUS_TOKEN"
"""Secret of all processes of a run; process 0 rejects others."""

STOPPED_EXIT_CODE = "WEFT_STOPPED_EXIT_CODE"
"""Exit code of `weft train` that a signal has stopped before its last step; if unset, 128 plus the
number of the signal.
"""

TRY_AGAIN = {STOPPED_EXIT_CODE: "75"}
"""Variables of processes that restart after a stop; 75 is the usual code of temporary failures."""

USAGE_EXIT_CODE = 2
"""Exit code for a wrong command, recipe or field, which another try would not mend."""

HEARTBEAT_TIMEOUT = "WEFT_HEARTBEAT_TIMEOUT_SECONDS"
"""Seconds without a heartbeat after which a process is lost."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Job(Configurable):
    """Command that runs as several processes.

    Raises JobConfigError for an invalid config.

    >>> Job.default_config().set(name="lm", command=["weft", "train"]).instantiate().environment
    {'JAX_NUM_PROCESSES': '1'}
    """

    _needs_allow = True  # it runs commands

    class Config(Configurable.Config):
        """Configures a Job."""

        name: Required[str] = REQUIRED
        """Name of the job, in logs and for the scheduler."""
        command: Required[Sequence[str]] = REQUIRED
        """The program and its arguments, the same for each process."""
        num_processes: int = 1
        gpus_per_process: int = 0
        """GPUs of each process; 0 for the CPU, or devices requested otherwise."""
        env: dict[str, str] = {}
        """Variables for each process, in addition to the inherited ones."""
        max_tries: int = 1
        """Maximum number of starts of all processes. They restart when one fails, and continue from
        the last checkpoint, except after exit code 2, for a wrong command."""
        grace_seconds: float = 120
        """Time to save after a request to stop."""
        heartbeat_timeout_seconds: int = 100
        """Time without a heartbeat after which a process is lost. The end of a process is noticed
        at once."""

    def __init__(self, config: Config):
        super().__init__(config)
        cfg = self.config
        if not cfg.command:
            raise JobConfigError(
                f"{self._where('command')} is empty. Write a program and its arguments as "
                'separate strings, such as command=["weft", "train", "lm"].'
            )
        least_values = {
            "num_processes": 1,
            "gpus_per_process": 0,
            "max_tries": 1,
        }
        for field, least in (
            *least_values.items(),
            ("heartbeat_timeout_seconds", 2),
        ):
            if getattr(cfg, field) < least:
                raise JobConfigError(
                    f"{self._where(field)}={getattr(cfg, field)}; expected {least} or more."
                )
        if not cfg.grace_seconds > 0:
            raise JobConfigError(
                f"{self._where('grace_seconds')}={cfg.grace_seconds:g}; expected a time above "
                "0, in which a process can save before it stops."
            )
        for name in cfg.env:
            if not _VARIABLE.fullmatch(name):
                raise JobConfigError(
                    f"{self._where('env')} has {name!r}, which is not a valid name of an "
                    "environment variable. Use letters, digits and underscores, and do not begin "
                    "with a digit."
                )
            if name in (
                COORDINATOR_ADDRESS,
                NUM_PROCESSES,
                PROCESS_ID,
                RENDEZVOUS_TOKEN,
            ):
                raise JobConfigError(
                    f"{self._where('env')} sets {name}, which the job sets itself to connect its "
                    "processes. Remove it."
                )

    def _where(self, field: str) -> str:
        return f"{type(self).__name__} {self.config.name!r}: {field}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that all processes share."""
        cfg = self.config
        variables = {NUM_PROCESSES: str(cfg.num_processes)}
        if (
            cfg.heartbeat_timeout_seconds
            != type(self).default_config().heartbeat_timeout_seconds
        ):
            variables[HEARTBEAT_TIMEOUT] = str(cfg.heartbeat_timeout_seconds)
        return {**cfg.env, **variables}


def check_text(
    job: str, field: str, value: str | None, pattern: str, expected: str
) -> None:
    """Raises a JobConfigError if a text that a scheduler reads does not match a pattern."""
    if value is not None and not re.fullmatch(pattern, value):
        raise JobConfigError(f"{job}: {field}={value!r}; expected {expected}.")
