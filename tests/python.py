"""Programs in processes of their own, in which `flax` is Weft or Flax."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*args, as_flax=True, check=True, **kwargs):
    """Runs Python with this checkout of Weft; with `as_flax`, as a child of `weft run-as-flax`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if as_flax:
        paths.insert(0, str(ROOT / "weft/compat/flax/startup"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *map(str, args)], capture_output=True, encoding="utf-8", env=env, **kwargs
    )
    assert not check or done.returncode == 0, done.stderr
    return done
