"""Lets `import flax` find Weft, in this process and its children, once this module is imported.

Packages that are built on Flax then run on Weft without a change: `flax.X` is the module `weft.X`
itself, so classes and functions are the same objects under both names. Two ways lead here:
`import weft.as_flax` before the first import of `flax`, and `weft run-as-flax`.

Both put the folder `startup` in PYTHONPATH, which child processes inherit: Python imports its
`sitecustomize` when it starts, and that imports this module. Imports nothing slow, as each of them
does it.
"""

import argparse
import importlib.util
import logging
import multiprocessing
import os
import site
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any, NoReturn

import weft
from weft.errors import AsFlaxError

FLAX_VERSION = "0.12.8"
"""The version of Flax whose names Weft has, which programs find in `flax.__version__`."""

logger = logging.getLogger(__name__)


# `flax` itself and `flax.version`, which Weft does not have.
_OWN_MODULES = ("", "version")


class _Flax(types.ModuleType):
    """The module `flax`, or `flax.version`; what it lacks is that of `weft`."""

    __version__ = FLAX_VERSION

    def __getattr__(self, name: str) -> Any:
        if name == "version":
            return importlib.import_module("flax.version")
        return getattr(weft, name)

    def __dir__(self) -> list[str]:
        return dir(weft)


class _Finder:
    """Finder and loader of `flax` and its modules, and finder of the distribution `flax`."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: object = None,
    ) -> ModuleSpec | None:
        package, _, submodule = name.partition(".")
        if package != "flax":
            return None
        if submodule not in _OWN_MODULES and not importlib.util.find_spec(
            f"weft.{submodule}"
        ):
            return None
        return importlib.util.spec_from_loader(
            name,
            self,  # pyright: ignore[reportArgumentType]
            is_package=not submodule,
        )

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        submodule = spec.name.partition(".")[2]
        if not submodule and multiprocessing.parent_process() is None:
            logger.warning(
                "flax is Weft %s in this process and its children",
                weft.__version__,
            )
        if submodule in _OWN_MODULES:
            return _Flax(spec.name)
        module = importlib.import_module(spec.name.replace("flax", "weft", 1))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        # Python has replaced the spec of a module of Weft.
        if not isinstance(module, _Flax) and module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state

    def find_distributions(
        self, context: DistributionFinder.Context
    ) -> Iterator[Distribution]:
        if context.name is None or context.name.lower() == "flax":
            yield _Distribution()


class _Distribution(Distribution):
    def read_text(self, filename: str) -> str | None:
        return (
            f"Name: flax\nVersion: {FLAX_VERSION}\n"
            if filename == "METADATA"
            else None
        )

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(weft.__file__).parent / path


def run(arguments: argparse.Namespace) -> NoReturn:
    """Replaces this process by Python with a program for which `flax` is Weft.

    Raises AsFlaxError if no program is named.
    """
    program = (
        ["-m", *arguments.module] if arguments.module else arguments.program
    )
    if not arguments.module and not program:
        raise AsFlaxError(
            "no program is named; write `weft run-as-flax script.py` or `-m module`"
        )
    os.execv(sys.executable, [sys.executable, *program])


def _let_children_follow() -> None:
    """Puts the folder `startup` in PYTHONPATH, and the folder of Weft if it is not installed."""
    inherited = os.environ.get("PYTHONPATH", "")
    folders = [str(Path(__file__).with_name("startup"))]
    folder_of_weft = str(Path(weft.__file__).parents[1])
    # Python looks in PYTHONPATH before its own library, so what is installed stays where it is.
    if folder_of_weft not in (
        *site.getsitepackages(),
        site.getusersitepackages(),
    ):
        folders.append(folder_of_weft)
    inherited_folders = inherited.split(os.pathsep) if inherited else []
    new_folders = [
        folder for folder in folders if folder not in inherited_folders
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*new_folders, *inherited_folders]
    )


if "flax" in sys.modules:
    raise AsFlaxError(
        f"flax is already imported, from {getattr(sys.modules['flax'], '__file__', None)}, and its "
        "objects are in use; import weft.as_flax before the first import of flax and of packages "
        "that import it"
    )
sys.meta_path.insert(0, _Finder())  # pyright: ignore[reportArgumentType]
_let_children_follow()
