"""Trainer configs from a recipe's name, a file or a run's directory.

`--mesh data=4,model=2` and `--mesh-selector NAME` choose the mesh of a run. `weft config show`
and `weft config diff` print configs as text.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from weft.config import apply_overrides, diff, from_text, to_text
from weft.errors import CommandLineError, UnknownConfigError, did_you_mean
from weft.recipes import named_trainer_configs
from weft.trainer.mesh import select_mesh_config
from weft.trainer.parallelism import MESH_AXIS_NAMES, ParallelismModifier
from weft.trainer.run_dir import CONFIG_FILE
from weft.trainer.trainer import SpmdTrainer
from weft.trainer.trainer_config_modifier import apply_config_modifiers


def load_config(
    name: str, overrides: Iterable[str] = (), *, allow: Sequence[str] = ()
) -> SpmdTrainer.Config:
    """Loads a config, and applies its modifiers.

    Args:
        name: A recipe, the path of a config file, or a run's directory.
        overrides: Strings `path=value`. If they name an argument of the recipe, such as
            `data_dir=texts`, they are passed to it.

    Raises:
        UnknownConfigError: if there is no such recipe, file or directory.
        CommandLineError: if the directory is not a run's, or the file cannot be read.
        ConfigError: for an invalid config text or override.
    """
    recipes = named_trainer_configs()
    if name in recipes:
        known, given = recipes[name].arguments(), [o.partition("=") for o in overrides]
        config = recipes[name](**{k: value for k, _, value in given if k in known})
        overrides = ["".join(o) for o in given if o[0] not in known]
    elif Path(name).exists():
        is_run = Path(name).is_dir()
        config = run_config(name, allow=allow) if is_run else _read(Path(name), allow)
    elif "/" in name:
        raise UnknownConfigError(f"there is no file or directory {name!r}, and no such recipe.")
    else:
        raise UnknownConfigError(f"unknown recipe {name!r}. {did_you_mean(name, recipes)}")
    config = apply_overrides(config, overrides, allow=allow, source="command line")
    return apply_config_modifiers(config)


def load_run(
    name: str, overrides: Sequence[str] = (), *, allow: Sequence[str] = ()
) -> SpmdTrainer.Config:
    """Loads the config of a run that will write to `dir`. Takes the arguments of `load_config`.

    Raises:
        CommandLineError: if only a file sets `dir`. Files may come from elsewhere, so the user has
            to name the directory.
    """
    config = load_config(name, overrides, allow=allow)
    named = any(override.partition("=")[0].strip() == "dir" for override in overrides)
    if name not in named_trainer_configs() and not Path(name).is_dir() and not named:
        raise CommandLineError(
            f"{name!r} would write to dir={config.dir!r}, but a file must not choose the "
            "directory: add dir=PATH to the command line."
        )
    return config


def run_config(directory: str, *, allow: Sequence[str] = ()) -> SpmdTrainer.Config:
    """Reads the config of a run.

    Raises:
        CommandLineError: if it is not the directory of a run.
        ConfigError: if its config cannot be read.
    """
    path = Path(directory, CONFIG_FILE)
    if not path.is_file():
        what = "has no run in it" if Path(directory).is_dir() else "is not a directory"
        raise CommandLineError(
            f"{directory!r} {what}: there is no {path}. Name the directory of a run, the value "
            "of `dir` that it was trained with."
        )
    return _read(path, allow).set(dir=directory)


def _read(path: Path, allow: Sequence[str]) -> Any:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandLineError(f"cannot read {str(path)!r}: {error}") from None
    return from_text(text, source=str(path), allow=allow)


def parse_mesh(text: str) -> dict[str, int]:
    """Parses sizes of mesh axes by name; one may be -1.

    Raises:
        CommandLineError: for any other format.

    >>> parse_mesh("data=-1,model=2")
    {'data': -1, 'model': 2}
    """
    pairs = [re.fullmatch(r"\s*(\w+)\s*=\s*(-1|[1-9]\d*)\s*", part) for part in text.split(",")]
    names = [pair[1] for pair in pairs if pair]
    if len(set(names)) < len(pairs):
        raise CommandLineError(
            f"--mesh {text!r} is not a list of distinct axes with their sizes; write it as "
            "--mesh data=4,model=2."
        )
    return {pair[1]: int(pair[2]) for pair in pairs if pair}


def on_mesh(
    cfg: SpmdTrainer.Config, *, selector: str | None = None, mesh: str | None = None
) -> SpmdTrainer.Config:
    """Applies the hardware and mesh of the command line to a trainer's config.

    Args:
        mesh: Sizes of mesh axes; other axes of the config get the size 1. If it names axes of
            `ParallelismModifier` that the config lacks, the model is sharded over all of that
            modifier's axes.

    Raises:
        CommandLineError: for unknown axes, or hardware without a rule.
        ConfigModifierError: if the model cannot be sharded over the axes.
    """
    if selector is not None:
        patterns = [pattern for pattern, _ in cfg.mesh_rules or ()]
        if not any(re.fullmatch(pattern, selector) for pattern in patterns):
            raise CommandLineError(
                f"--mesh-selector {selector!r}: no mesh rule of the config matches. The rules "
                f"match {', '.join(map(repr, patterns)) or 'nothing'}."
            )
        select_mesh_config(cfg, mesh_selector=selector)
    if mesh is None:
        return cfg
    sizes = parse_mesh(mesh)
    names = tuple(cfg.mesh_axis_names)
    if sizes.keys() <= set(names):
        return cfg.set(mesh_shape=tuple(sizes.get(name, 1) for name in names))
    unknown = sorted(sizes.keys() - set(MESH_AXIS_NAMES))
    if unknown:
        raise CommandLineError(
            f"--mesh {mesh!r}: there is no axis {', '.join(map(repr, unknown))}. The config's "
            f"mesh has {', '.join(map(repr, names))}; a transformer can be sharded over "
            f"{', '.join(map(repr, MESH_AXIS_NAMES))}."
        )
    return ParallelismModifier.default_config().set(**sizes).instantiate()(cfg)


def show_or_diff(arguments: argparse.Namespace) -> int:
    """Prints a config, or the differences between two."""
    if arguments.action == "show":
        config = load_config(arguments.recipe, arguments.overrides, allow=arguments.allow)
        print(to_text(config, omit_defaults=not arguments.defaults, origins=arguments.origin))
        return 0
    a, b = (load_config(name, allow=arguments.allow) for name in (arguments.a, arguments.b))
    changes = diff(a, b)
    print(changes)
    return 1 if changes else 0
