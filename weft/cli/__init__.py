"""The command line: `weft train`, `launch`, `config`, `sample`, `export`, `inspect` and others.

Reads the arguments and reports errors. A command's module is imported on demand, so that
`weft --help` does not wait for JAX. After a failed write to the standard output, a command that
only prints ends: with its own code if the reader, such as `head`, closed the pipe, else with code 1
and the reason. A training continues and saves. On CPUs, `malloc` keeps freed memory.
"""

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, TextIO

from weft.cli.arguments import parse_arguments
from weft.distributed.watchdog import interrupts
from weft.errors import WeftError
from weft.serialization.untrusted import printable

logger = logging.getLogger(__name__)


class Output:
    """Standard output of a command.

    Args:
        stream: The original stream; None if the process was started without (`>&-`).

    Attributes:
        error: The reason why output is dropped, or None.
        is_optional: Whether the command continues without output.
    """

    def __init__(self, stream: TextIO | None):
        if stream is None:
            # Takes the lowest free number: else a file of the run would be number 1 and receive the
            # output of libraries.
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the end
        self._stream = stream
        self.error: OSError | None = None
        self.is_optional = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        r"""Writes a text, or drops it; what the stream's encoding lacks as `\xd7`, as on stderr."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        writable = text.encode(encoding, "backslashreplace").decode(encoding)
        self._try("write", writable)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, or drops its buffer."""
        self._try("flush")

    def _try(self, method: str, *args: object) -> None:
        if self.error is not None:
            return
        try:
            getattr(self._stream, method)(*args)
        except OSError as error:
            self.error = error
            # Discards buffered text, which would fail again at exit.
            with contextlib.suppress(
                OSError, ValueError
            ):  # the stream may have no descriptor
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, self._stream.fileno())
                os.close(devnull)
            if not self.is_optional:
                raise
            logger.warning(
                "no further output, as the stream cannot be written: %s", error
            )


def continue_without_output() -> None:
    """Lets the running command continue when its output cannot be written."""
    if isinstance(sys.stdout, Output):
        sys.stdout.is_optional = True


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns the exit code: 0; 1 if a run fails or the output cannot be written; 2 for bad input; 128
    plus the number of the signal that stopped the command, such as 130 for Ctrl-C.
    """
    if "jax" not in sys.modules:
        keep_freed_memory()
    _open_missing_streams()
    with (
        contextlib.redirect_stdout(Output(sys.stdout)) as output,
        _fewer_garbage_collections(),
        _printable_log(),
    ):
        code = _run(argv, output)
        with contextlib.suppress(OSError):
            output.flush()
    # The reader, such as `head`, closed the pipe.
    if (
        output.error is None
        or output.is_optional
        or isinstance(output.error, BrokenPipeError)
    ):
        return code
    _print_error(f"the output cannot be written: {output.error.strerror}")
    return code or 1


class _PrintableFormatter(logging.Formatter):
    """Formatter of log lines, which quote names and messages that others wrote."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line without control characters."""
        return printable(super().format(record))


@contextlib.contextmanager
def _printable_log() -> Iterator[None]:
    """Lets the handler of log lines that has not been configured print no control characters."""
    handler = logging.lastResort
    if handler is None:
        yield
        return
    formatter = handler.formatter
    handler.setFormatter(_PrintableFormatter())
    try:
        yield
    finally:
        handler.setFormatter(formatter)


def _open_missing_streams() -> None:
    """Opens the null device for streams that the process was started without (`2>&-`).

    In the order of their numbers, so that each gets its own: else a file of the run would have it,
    and receive what libraries read or write there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


# Parameters of mallopt(3) in <malloc.h>, and values.
_KEEP_FREED_MEMORY = {
    -4: 0,  # M_MMAP_MAX: no block is mapped by itself, to be unmapped when it is freed
    -1: -1,  # M_TRIM_THRESHOLD: the heap never shrinks
    -8: 1,  # M_ARENA_MAX: threads share the heap, as those of their own have a limit of 64 MB
}
_ACCELERATORS = ("jax_plugins", "libtpu")


def keep_freed_memory() -> None:
    """Lets glibc's `malloc` keep the memory that computations on CPUs free, for the next ones.

    XLA allocates the temporary memory of a step on a CPU in each step. By default, `malloc` returns
    blocks of this size to the kernel, which then clears each page again when it is first written:
    a third of the CPU time of a step of `lm`.

    Has no effect once JAX has used a device, as its threads have heaps of their own then. Does
    nothing if an accelerator may be used, or if the environment configures `malloc`
    (`MALLOC_...`, `GLIBC_TUNABLES`).
    """
    is_configured = any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    )
    if is_configured or sys.platform != "linux":
        return
    if os.environ.get("JAX_PLATFORMS") != "cpu" and any(
        map(find_spec, _ACCELERATORS)
    ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        for parameter, value in _KEEP_FREED_MEMORY.items():
            mallopt(parameter, value)


@contextlib.contextmanager
def _fewer_garbage_collections() -> Iterator[None]:
    # Imports and traces make many objects, few of them garbage in cycles.
    thresholds = gc.get_threshold()
    gc.set_threshold(max(thresholds[0], 50_000), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


# Commands that run a program of the user, which may import from where it is started.
_RUN_OTHER_PROGRAMS = ("weft.as_flax:run", "weft.cli.train:launch")


@contextlib.contextmanager
def _children_ignore_current_directory() -> Iterator[None]:
    """Lets Python processes that start within import nothing from the current directory.

    `multiprocessing` starts the workers of an input as `python -c`, which would look there first
    for its own modules. It has no argument for that, only this variable.
    """
    variable = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = variable or "1"
    try:
        yield
    finally:
        if variable is None:
            del os.environ[_SAFE_PATH]


_SAFE_PATH = "PYTHONSAFEPATH"


def _run(argv: Sequence[str] | None, output: Output) -> int:
    with interrupts:
        try:
            code = _run_command(argv, output)
        except Exception:
            if not interrupts.came:
                raise
            code = 1  # Ctrl-C has left a module half imported
        return 130 if code and interrupts.came else code


def _run_command(argv: Sequence[str] | None, output: Output) -> int:
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        module, _, function = arguments.command.partition(":")
        run = getattr(importlib.import_module(module), function)
        if arguments.command in _RUN_OTHER_PROGRAMS:
            return run(arguments)
        with _children_ignore_current_directory():
            return run(arguments)
    except (
        SystemExit
    ) as end:  # argparse has printed help, a version or an error
        return int(end.code or 0)
    except WeftError as error:
        _print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error is not output.error:
            raise
        return 0


def _print_error(text: str) -> None:
    # Errors about foreign files may quote control characters.
    with contextlib.suppress(OSError):
        print(f"weft: {printable(text)}", file=sys.stderr)
