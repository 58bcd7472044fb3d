"""The command line: `weft train`, `launch`, `config`, `sample`, `export`, `inspect` and others.

Reads the arguments and reports errors. Each command is a module of its own, imported on demand so
that `weft --help` does not wait for JAX.
"""

import contextlib
import importlib
import sys
from collections.abc import Sequence

from weft.cli.arguments import parse_arguments
from weft.cli.output import Output
from weft.errors import MissingExtraError, WeftError
from weft.serialization.foreign import printable

__all__ = ["main"]

# Import names of the packages of the extra `train`.
_TRAIN_PACKAGES = ("grain", "orbax", "safetensors", "tensorboardX", "tensorstore")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit code: 0, 1 if the output cannot be written, 2 for bad input, 130 after Ctrl-C.
    """
    with contextlib.redirect_stdout(Output(sys.stdout)) as output:
        code = _run(argv, output)
        with contextlib.suppress(OSError):
            output.flush()
    # The reader, such as `head`, closed the pipe.
    if output.error is None or output.lasts or isinstance(output.error, BrokenPipeError):
        return code
    _print_error(f"the output cannot be written: {output.error.strerror}")
    return code or 1


def _run(argv: Sequence[str] | None, output: Output) -> int:
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        command = importlib.import_module(arguments.command)
        return command.run(arguments)
    except SystemExit as end:  # argparse has printed help, a version or an error
        return int(end.code or 0)
    except WeftError as error:
        return _refuse(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _TRAIN_PACKAGES:
            raise
        return _refuse(
            MissingExtraError(
                f"this command needs the package {error.name!r}, which the extra `train` installs: "
                "pip install 'weft[train]'"
            )
        )
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error is not output.error:
            raise
        return 0


def _refuse(error: WeftError) -> int:
    _print_error(str(error))
    return 2


def _print_error(text: str) -> None:
    # Errors about foreign files may quote control characters.
    with contextlib.suppress(OSError):
        print(f"weft: {printable(text)}", file=sys.stderr)
