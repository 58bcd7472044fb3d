"""`weft config show` and `weft config diff`: configs as text."""

import argparse

from weft.cli.configs import load_config
from weft.config import diff, to_text


def run(arguments: argparse.Namespace) -> int:
    """Prints a config, or the differences between two."""
    if arguments.action == "show":
        config = load_config(arguments.recipe, arguments.overrides, allow=arguments.allow)
        print(to_text(config, omit_defaults=not arguments.defaults, origins=arguments.origin))
        return 0
    changes = diff(
        *(load_config(name, allow=arguments.allow) for name in (arguments.a, arguments.b))
    )
    print(changes)
    return 1 if changes else 0
