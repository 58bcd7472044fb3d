"""What does importing cost, and how much does an extra install?

Each import runs in a new process; its CPU time is divided by that of `import jax`. The size of an
extra is that of all distributions which it brings beyond those that Weft itself needs.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

import weft
from benchmarks.harness import Row, counted, row

# With what a program uses first, since packages load their modules on first use.
MODULES = {
    "weft.linen": "Dense, Module, scan",
    "weft.nnx": "Linear, Module, Optimizer, jit",
    "weft.hierarchy.layers": "LayerNorm, Linear",
    "weft.trainer.trainer": "SpmdTrainer",
}
PAIRS = 15
_PROGRAM = "import time; t = time.process_time(); {}; print(time.process_time() - t)"


_OF_JAX = (
    "import sys; from {} import *; "
    "print(sum(name.partition('.')[0] == 'jax' for name in sys.modules))"
)


def _printed(program: str) -> float:
    # Compiled files are kept, as they are wherever a package is installed.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, encoding="utf-8", check=True
    )
    return float(done.stdout)


def _seconds(statement: str) -> float:
    return _printed(_PROGRAM.format(statement))


def _times() -> Iterator[Row]:
    for name, used in {"weft.config": "config_class", **MODULES}.items():
        _seconds(f"from {name} import {used}")  # the first one compiles missing bytecode
    config = [_seconds("from weft.config import config_class") for _ in range(PAIRS)]
    fixed = ([t / 0.1 for t in config], config, [0.1] * PAIRS)
    yield row("import weft.config / 0.1 s", fixed, at_most=1.0)
    of_jax = _printed(_OF_JAX.format("weft.config"))
    yield counted("modules of JAX that import weft.config brings", of_jax, at_most=0)
    for name, used in MODULES.items():
        statement = f"from {name} import {used}"
        times = [(_seconds(statement), _seconds("import jax")) for _ in range(PAIRS)]
        against_jax = ([a / b for a, b in times], *map(list, zip(*times, strict=True)))
        # The trainer imports packages for saving, reading and reporting.
        at_most = None if name.startswith("weft.trainer") else 1.2
        yield row(f"import {name} / import jax", against_jax, at_most=at_most)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _required(of: Distribution, extras: Iterable[str]) -> Iterator[Requirement]:
    """Yields the requirements of a distribution here, with the given extras."""
    for text in of.requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def closure(of: Distribution, extras: Iterable[str] = ()) -> dict[str, Distribution]:
    """Returns all distributions that one needs with these of its extras, by name, it itself among
    them.

    Raises:
        PackageNotFoundError: if one of them is not installed; it holds the name.
    """
    found = {_normal(of.name): of}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(_required(of, extras))
    while waiting:
        requirement = waiting.pop()
        name = _normal(requirement.name)
        key = name, frozenset(requirement.extras)
        if key not in seen:
            seen.add(key)
            found[name] = distribution(requirement.name)
            waiting += _required(found[name], requirement.extras)
    return found


def size(of: Distribution) -> int:
    """Returns the bytes of its files, without the bytecode that Python makes of them."""
    if of.name == "weft":  # here it is a link to the source
        return sum(path.stat().st_size for path in Path(weft.__file__).parent.rglob("*.py"))
    return sum(file.size or 0 for file in of.files or [])


def _shown(found: Iterable[Distribution]) -> tuple[int, str]:
    """Returns the size of several distributions, and in words."""
    sizes = {of.name: size(of) for of in found}
    total, largest = sum(sizes.values()), max(sizes, key=sizes.__getitem__)
    words = f"{_megabytes(total)} in {len(sizes)} distributions"
    return total, f"{words}; {largest} alone {_megabytes(sizes[largest])}"


def _megabytes(n: int) -> str:
    return f"{n / 1e6:.0f} MB" if n >= 1e7 else f"{n / 1e6:.1f} MB"


def sizes(of: Distribution) -> Iterator[Row]:
    """Dependencies of a distribution besides JAX, and those that each extra adds."""
    base = closure(of)
    total, words = _shown(base.values())
    more, missing = {}, []
    for extra in sorted(of.metadata.get_all("Provides-Extra") or []):
        try:
            found = closure(of, [extra])
        except PackageNotFoundError as error:
            missing.append(f"{extra} ({error.name})")
        else:
            more[extra] = [found[name] for name in found if name not in base]
    if missing:
        words += f"; not installed, so not counted: {', '.join(missing)}"
    of_jax = _shown(closure(distribution("jax")).values())[0]
    yield counted(
        f"size of {of.name} and its needs / of jax's", total / of_jax, at_most=None, note=words
    )
    for extra, found in more.items():
        if found:
            added, words = _shown(found)
            question = f"size of the extra {extra} / of {of.name} and its needs"
            yield counted(question, added / total, at_most=None, note=words)


def run() -> list[Row]:
    """Imports, then sizes."""
    return [*_times(), *sizes(distribution("weft-jax"))]
