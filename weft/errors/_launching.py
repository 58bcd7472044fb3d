from weft.errors._base import WeftError


class JobConfigError(WeftError, ValueError):
    """The config of a job cannot be started."""


class ProcessEnvironmentError(WeftError, ValueError):
    """Environment variables that identify this process are missing or contradict each other."""


class CoordinatorNotFoundError(WeftError, TimeoutError):
    """The coordinator, process 0, did not answer in time."""


class ProcessesNotReadyError(WeftError, TimeoutError):
    """Some processes of a run did not join in time; the message names them."""


class ProcessLostError(WeftError, RuntimeError):
    """Another process of the run failed or ended, and this one cannot continue without it."""
