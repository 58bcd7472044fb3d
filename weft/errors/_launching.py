"""The errors of starting a program as several processes."""

from weft.errors._base import WeftError


class JobConfigError(WeftError, ValueError):
    """The config of a job asks for something that cannot be started."""


class ProcessEnvironmentError(WeftError, ValueError):
    """The environment does not say where this process stands among the others, or not rightly."""


class CoordinatorNotFoundError(WeftError, TimeoutError):
    """The process that the others meet at did not answer in time."""


class ProcessesNotReadyError(WeftError, TimeoutError):
    """Some of the processes of a run did not come in time; the message names them."""


class ProcessLostError(WeftError, RuntimeError):
    """Another process of the run has failed or ended, and this one cannot go on without it."""
