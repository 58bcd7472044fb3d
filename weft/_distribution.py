"""The distribution that installs Weft, and the other one that has its name."""

import os
import sys
import warnings

DISTRIBUTION = "weft-jax"
"""Name by which Weft is installed; on the package index, `weft` is another program."""


def warn_of_namesake() -> None:
    """Warns if the distribution `weft` is installed too: it may have replaced files or the command.

    Looks at names in `sys.path` alone, since `importlib.metadata` takes longer than `import weft`.
    """
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # an archive, or a folder that is not there
            continue
        for name in names:
            if name.startswith("weft-") and name.endswith(".dist-info"):
                warnings.warn(
                    f"the distribution {name.removesuffix('.dist-info')} is installed in {folder}. "
                    f"It is another program, or Weft before it was called {DISTRIBUTION}, and may "
                    "have replaced files of Weft or the command `weft`. Run `pip uninstall weft`, "
                    f"then install {DISTRIBUTION} again.",
                    stacklevel=3,
                )
                return
