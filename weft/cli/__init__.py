"""The command line: `weft train`, `launch`, `config`, `sample`, `export`, `inspect` and others.

This file reads the arguments and says what went wrong. Each command is a file of its own, imported
when it is asked for, so that `weft --help` does not wait for JAX.
"""

import importlib
import os
import sys
from collections.abc import Sequence

from weft.cli.arguments import parse_arguments
from weft.errors import MissingExtraError, WeftError

__all__ = ["main"]

# The packages of the extra `train`, by the names under which they are imported.
_TRAIN_PACKAGES = ("grain", "orbax", "safetensors", "tensorboardX", "tensorstore")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The arguments, those of the process by default.

    Returns:
        The exit code: 0, 2 for bad input, 130 after Ctrl-C.
    """
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        command = importlib.import_module(arguments.command)
        code = command.run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse has printed help, a version or what is wrong
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
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _refuse(error: WeftError) -> int:
    print(f"weft: {error}", file=sys.stderr)
    return 2
