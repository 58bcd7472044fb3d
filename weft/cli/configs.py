"""Trainer configs from a recipe's name, a file or a run's directory."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from weft.config import apply_overrides, from_text
from weft.config.names import did_you_mean
from weft.errors import CommandLineError, UnknownConfigError
from weft.recipes import named_trainer_configs
from weft.trainer.run_record import CONFIG_FILE
from weft.trainer.trainer_config_modifier import apply_config_modifiers


def load_config(name: str, overrides: Iterable[str] = (), *, allow: Sequence[str] = ()) -> Any:
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


def load_run(name: str, overrides: Sequence[str] = (), *, allow: Sequence[str] = ()) -> Any:
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


def run_config(directory: str, *, allow: Sequence[str] = ()) -> Any:
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
