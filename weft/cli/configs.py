"""Trainer configs from a recipe's name, a file or a run's directory.

`--mesh data=4,model=2` and `--mesh-selector NAME` choose the mesh of a run. `weft config show`
and `weft config diff` print configs as text.
"""

import argparse
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from weft.config import (
    REQUIRED,
    ConfigBase,
    Required,
    UnreadValue,
    apply_overrides,
    diff,
    from_text,
    to_text,
)
from weft.errors import CommandLineError, ConfigError, InvalidConfigValueError
from weft.hierarchy.module import nowrap
from weft.input import Input
from weft.recipes import (
    Recipe,
    find_recipe,
    named_trainer_configs,
    recorded_recipe,
)
from weft.serialization.untrusted import printable, read_text_file
from weft.trainer import (
    SpmdTrainer,
    record_signature,
    run_dir,
    select_mesh_config,
)
from weft.trainer.parallelism import MESH_AXIS_NAMES, ParallelismModifier
from weft.trainer.trained_model import recorded_batch
from weft.trainer.trainer_config_modifier import (
    apply_config_modifiers,
    find_values,
)
from weft.typing import Nested


def load_config(
    name: str,
    overrides: Iterable[str] = (),
    *,
    allow: Sequence[str] = (),
    recipe: str | None = None,
    keep_unreadable: bool = False,
) -> SpmdTrainer.Config:
    """Loads a config, and applies its modifiers.

    Args:
        name: A recipe (`weft.recipes.find_recipe`), a config file's path, or a run's directory.
        overrides: Strings `path=value`. If they name an argument of the recipe, such as
            `data_dir=texts`, they are passed to it.
        allow: Names that the text of a config may use, see `weft.config.from_text`.
        recipe: The recipe whose modules a file or the config of a run may name. By default, a run
            that this user has started finds its recipe.
        keep_unreadable: Whether values that only a program has, and no override replaces, are an
            error only where they are used, see `weft.config.from_text`.

    Raises UnknownConfigError, RecipeError, ConfigError or CommandLineError for what does not exist,
    makes no config, is invalid, or cannot be read.
    """
    if _is_path(name):
        packages = _packages_of(recipe)
        if Path(name).is_dir():
            config = run_config(name, allow=allow, recipe=recipe)
        else:
            config = _parse(Path(name), _read(Path(name)), [*allow, *packages])
    else:
        named_recipe = find_recipe(name)
        config, overrides = named_recipe.config(overrides)
        packages = named_recipe.packages()
    allow = [*allow, *packages]
    config = apply_overrides(
        config, overrides, allow=allow, source="command line"
    )
    unread_values = _unread_values(config)
    if unread_values and not keep_unreadable:
        raise unread_values[0].error
    _check_fields(config)
    return apply_config_modifiers(config)


def _check_fields(config: SpmdTrainer.Config) -> None:
    """Checks fields that take any value, since types do not say what a dtype or layout is.

    Raises InvalidConfigValueError, with the path of a field.
    """

    def is_checked(path: str, value: object) -> bool:
        is_plain = isinstance(value, str | int | float | list | tuple | dict)
        return is_plain and path.endswith(("dtype", "partition_spec"))

    for path, value in find_values(config, is_checked).items():
        if path.endswith("dtype"):
            if not (isinstance(value, str) and _is_dtype(value)):
                raise InvalidConfigValueError(
                    f"{path}={value!r} is not a dtype; write the name of one, such as bfloat16."
                )
        elif isinstance(value, str | int | float):
            raise InvalidConfigValueError(
                f"{path}={value!r} is not a layout; write the mesh axes of each dimension, such as "
                "(None, 'model')."
            )


def _is_dtype(name: str) -> bool:
    try:
        jnp.dtype(name)
    except TypeError:
        return False
    return True


def load_run(
    name: str,
    overrides: Sequence[str] = (),
    *,
    allow: Sequence[str] = (),
    recipe: str | None = None,
) -> SpmdTrainer.Config:
    """Loads the config of a run that will write to `dir`. Takes the arguments of `load_config`.

    Raises CommandLineError if only a file sets `dir`. Files may come from elsewhere, so the user
    has to name the directory.
    """
    config = load_config(name, overrides, allow=allow, recipe=recipe)
    paths = [override.partition("=")[0].strip() for override in overrides]
    if _is_path(name) and Path(name).is_file() and "dir" not in paths:
        raise CommandLineError(
            f"{name!r} would write to dir={config.dir!r}, but a file must not choose the "
            "directory: add dir=PATH to the command line."
        )
    return config


def _is_path(name: str) -> bool:
    """Returns whether a name is that of a config file or directory, rather than of a recipe."""
    is_recipe = name in named_trainer_configs() or name.endswith(".py")
    return not is_recipe and Path(name).exists()


def run_directory(name: str) -> str:
    """Returns a run's directory: the given one, or that of a recipe's config."""
    is_recipe = name in named_trainer_configs() or ":" in name
    if is_recipe and not Path(name).exists():
        return load_config(name).dir
    return name


def run_config(
    name: str, *, allow: Sequence[str] = (), recipe: str | None = None
) -> SpmdTrainer.Config:
    """Reads the config of a run; values that only a program has are kept unread.

    Args:
        name: The directory of the run, or the recipe that it trains.
        recipe: As in `load_config`.

    Raises:
        CommandLineError: if it is not the directory of a run.
        ConfigError: if its config cannot be read.
        RecipeError: if the recipe that made the config is needed, but has moved.
    """
    directory = run_directory(name)
    if directory != name:
        recipe = name
    run_dir.check_places(directory)
    path = Path(directory, run_dir.CONFIG_FILE)
    if not run_dir.was_started(directory):
        if run_dir.has_steps(directory):
            raise _lost_config(directory)
        problem = (
            "has no run in it"
            if Path(directory).is_dir()
            else "is not a directory"
        )
        raise CommandLineError(
            f"{directory!r} {problem}: there is no {path}. Name the directory of a run, the value "
            "of `dir` that it was trained with."
        )
    text = _read_config(directory)
    config = _run_config(path, text, allow, recipe)
    _check_fields(config)
    return config.set(dir=directory)


def _run_config(
    path: Path, text: str, allow: Sequence[str], recipe: str | None
) -> SpmdTrainer.Config:
    """Returns the config of a run, with the help of the recipe that made it if that is needed."""
    record: Any = run_dir.surviving_record(str(path.parent)).get("recipe")
    has_record = isinstance(record, dict)
    config: SpmdTrainer.Config | None = None
    try:
        config = _parse(path, text, [*allow, *_packages_of(recipe)])
    except ConfigError:
        if not has_record:
            raise
    if config is not None and (not has_record or not _unread_values(config)):
        return config
    is_signed = record_signature.is_signed(record, text)
    if recipe is None and not is_signed:
        return _with_advice(
            lambda: _parse(path, text, allow),
            f"The run was made by {record.get('name')}, but not by you on this machine, or its "
            "files have been changed. If you trust the directory, name your copy of the recipe: "
            "--recipe path/to/file.py:function",
        )
    if recipe is None and record["function"].startswith("__main__:"):
        return _parse(path, text, allow)
    return _config_by_recipe(
        path, text, allow, _recipe_of_record(record, recipe), record, is_signed
    )


def check_is_read(config: SpmdTrainer.Config, field: str, advice: str) -> None:
    """Raises the error of a part of a run's config that only a program has, with advice."""
    part = getattr(config, field)
    if isinstance(part, UnreadValue):
        unread_values = [part]
    else:
        unread_values = _unread_values(part)
    if unread_values:
        error = unread_values[0].error
        raise type(error)(f"{error} {advice}")


def with_recorded_batch(config: SpmdTrainer.Config) -> SpmdTrainer.Config:
    """Returns the config of a run with an input that knows the shapes of a batch.

    Data that only a program has, as in a run of `weft.fit`, is not needed for what traces a model.
    """
    if not _unread_values(config.input):
        return config
    records = run_dir.surviving_record(config.dir).get("batch")
    if records is None:
        raise _unread_values(config.input)[0].error
    evalers: dict[str, Any] = {}
    for name, evaler in config.evalers.items():
        if not _unread_values(evaler):
            evalers[name] = evaler
    recorded_input = RecordedInput.default_config().set(
        batch=recorded_batch(records),
        partition_spec=config.input.partition_spec,
    )
    return config.clone(input=recorded_input, evalers=evalers)


class RecordedInput(Input):
    """Input that knows the shapes of a batch alone."""

    class Config(Input.Config):
        """Configures a RecordedInput."""

        batch: Required[Nested[jax.ShapeDtypeStruct]] = REQUIRED
        """Shapes and dtypes, in nested dicts."""

    @nowrap
    def element_spec(self) -> Nested[jax.ShapeDtypeStruct]:
        return self.config.batch


def _unread_values(config: ConfigBase) -> list[UnreadValue]:
    values = find_values(config, lambda _, x: isinstance(x, UnreadValue))
    return list(values.values())


def _with_advice(
    parse: Callable[[], SpmdTrainer.Config], advice: str
) -> SpmdTrainer.Config:
    """Returns a config whose errors, and that of values it keeps unread, have the advice."""
    try:
        config = parse()
    except ConfigError as error:
        raise type(error)(f"{error}\n{advice}") from None
    for value in _unread_values(config):
        value.error = type(value.error)(f"{value.error}\n{advice}")
    return config


def _config_by_recipe(
    path: Path,
    text: str,
    allow: Sequence[str],
    made_by: Recipe,
    record: dict[str, Any],
    is_signed: bool,
) -> SpmdTrainer.Config:
    """Returns the config of a run whose text may name what its recipe defines.

    The recipe makes the config again if the text has values without a name, such as lambdas.
    """
    words: list[str] | None = record["words"] if is_signed else None
    try:
        config = _parse(path, text, [*allow, *made_by.packages()])
        if words is None or not _unread_values(config):
            return config
        problem = _unread_values(config)[0].error
    except ConfigError as error:
        if words is None:
            raise
        problem = error
    config, overrides = made_by.config(words)
    config = apply_overrides(config, overrides, allow=made_by.packages())
    directory = str(path.parent)
    changes = run_dir.changes_of_run(directory, config.set(dir=directory))
    if changes:
        raise type(problem)(
            f"{problem}\n{made_by.name} cannot replace the text, because it makes "
            "another config now:\n"
            + "\n".join(f"  {change}" for change in changes)
        ) from None
    return config


def recipe_of_run(
    name: str, overrides: Sequence[str], *, recipe: str | None = None
) -> dict[str, Any] | None:
    """Returns what to record about the user's recipe of a run, None for a recipe of Weft.

    Takes the arguments of `load_run`.
    """
    if not _is_path(name):
        named_recipe = find_recipe(name)
        if not named_recipe.is_own():
            return None
        return named_recipe.record(overrides)
    earlier_record = None
    if Path(name).is_dir():
        earlier_record = run_dir.surviving_record(name).get("recipe")
    # What others have written must not be signed.
    if isinstance(earlier_record, dict) and record_signature.is_signed(
        earlier_record, _read_config(name)
    ):
        words = earlier_record["words"]
        if words is not None:
            words = [*words, *overrides]
        return _recipe_of_record(earlier_record, recipe).record(words)
    if not recipe:
        return None
    return find_recipe(recipe).record(None)


def _recipe_of_record(record: dict[str, Any], recipe: str | None) -> Recipe:
    """Returns the recipe that made a run, from where the user says that it is now, if anywhere."""
    if recipe:
        return find_recipe(recipe)
    return recorded_recipe(record)


def _packages_of(recipe: str | None) -> Sequence[str]:
    """Returns the packages that a text may name because the user names a recipe of theirs."""
    if not recipe:
        return ()
    return find_recipe(recipe).packages()


def _read(path: Path) -> str:
    try:
        return read_text_file(path, at_most=run_dir.MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise CommandLineError(f"cannot read {str(path)!r}: {error}") from None


def _read_config(directory: str) -> str:
    try:
        return run_dir.read_config(directory)
    except FileNotFoundError:
        raise _lost_config(directory) from None
    except OSError as error:
        raise CommandLineError(
            f"cannot read the config of a run: {error}"
        ) from None


def _lost_config(directory: str) -> CommandLineError:
    return CommandLineError(
        f"the config of the run in {directory!r} is lost: {run_dir.CONFIG_FILE} is empty or "
        f"missing, and {run_dir.RECORD_FILE} has no copy of it. Name the recipe that was trained "
        f"there, with its arguments; the run then continues: weft train RECIPE "
        f"dir={shlex.quote(directory)}"
    )


def _parse(path: Path, text: str, allow: Sequence[str]) -> Any:
    return from_text(text, source=str(path), allow=allow, keep_unreadable=True)


def parse_mesh(text: str) -> dict[str, int]:
    """Parses sizes of mesh axes by name; one may be -1.

    Raises CommandLineError for any other format.

    >>> parse_mesh("data=-1,model=2")
    {'data': -1, 'model': 2}
    """
    sizes: dict[str, int] = {}
    for axis in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(-?\d+)\s*", axis)
        fault: str | None = None
        if match is None:
            fault = "is not a list of axes with their sizes"
        elif match[1] in sizes:
            fault = f"has the axis {match[1]!r} twice"
        elif int(match[2]) < 1 and match[2] != "-1":
            fault = (
                f"has {match[0].strip()}, but a size is 1 or more, or -1 for "
                "the rest"
            )
        if match is None or fault is not None:
            raise CommandLineError(
                f"--mesh {text!r} {fault}; write it as --mesh data=4,model=2."
            )
        sizes[match[1]] = int(match[2])
    return sizes


def on_mesh(
    cfg: SpmdTrainer.Config,
    *,
    selector: str | None = None,
    mesh: str | None = None,
) -> SpmdTrainer.Config:
    """Applies the hardware and mesh of the command line to a trainer's config.

    Args:
        mesh: Sizes of mesh axes; other axes of the config get the size 1. If it names axes of
            `ParallelismModifier` that the config lacks, all of its axes shard the model.

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
    sizes: dict[str, Any] = parse_mesh(mesh)
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
        config = load_config(
            arguments.recipe,
            arguments.overrides,
            keep_unreadable=True,
            **arguments.trust,
        )
        text = to_text(
            config,
            omit_defaults=not arguments.defaults,
            origins=arguments.origin,
        )
        print(printable(text))
        for comment in run_dir.length_comments(config):
            print(comment)
        return 0
    changes = diff(
        load_config(arguments.a, keep_unreadable=True, **arguments.trust),
        load_config(arguments.b, keep_unreadable=True, **arguments.trust),
    )
    print(printable(str(changes)))
    return 1 if changes else 0
