"""Recipe: function that makes a trainer's config, with arguments from a command line."""

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import weft
from weft.config import ConfigBase, Configurable
from weft.config.fields import type_name
from weft.config.overrides import NoConversion, convert
from weft.config.text_parser import read_value
from weft.errors import (
    CommandLineError,
    RecipeError,
    WeftError,
    did_you_mean,
    similar_names,
)

if TYPE_CHECKING:
    from weft.trainer.trainer import SpmdTrainer


class Recipe(NamedTuple):
    """Function that makes a trainer's config. Its module is imported on demand.

    Attributes:
        name: Name on the command line.
        summary: Description in one line; "" for the first line of the function's docstring.
        function: The function, or a trainer's config, as `module:name`.
        preparation: Function in the same form that prepares a run's initial state; "" for none.
        file: Absolute path of the module if it is not installed; "" otherwise.
    """

    name: str
    summary: str
    function: str
    preparation: str = ""
    file: str = ""

    def __call__(
        self, data_dir: str | None = None, **kwargs: Any
    ) -> "SpmdTrainer.Config":
        """Makes a fresh config; see `weft.config.TrainerConfigFn`.

        Raises RecipeError if an argument is missing, or the function does not return such a config.
        """
        if data_dir is not None:
            kwargs["data_dir"] = data_dir
        function = self._function()
        missing: list[str] = []
        for name, parameter in self.arguments().items():
            if parameter.default is parameter.empty and name not in kwargs:
                missing.append(name)
        if missing:
            words = " ".join(f"{name}=VALUE" for name in missing)
            raise RecipeError(
                f"{self.name}: {' and '.join(missing)} of the function must be given: add "
                f"{words} to the command, or a default to the function."
            )
        if not self.is_own():
            return function(**kwargs)
        with _report_failures(f"{self.name} failed", self._root()):
            result = function(**kwargs)
        return _checked_config(result, f"{self.name} returned")

    def config(
        self, words: Iterable[str]
    ) -> "tuple[SpmdTrainer.Config, list[str]]":
        """Makes a config with the arguments among `key=value` words; returns the other words too.

        Raises:
            CommandLineError: if a value does not have the argument's type, or a word is misspelled.
            RecipeError: as `__call__`.
        """
        parameters = self.arguments()
        kwargs: dict[str, Any] = {}
        other_words: list[str] = []
        for word in words:
            key, _, text = word.partition("=")
            name = key.strip()
            if name in parameters:
                kwargs[name] = self._convert(word, parameters[name], text)
            else:
                other_words.append(word)
        cfg = self(**kwargs)
        fields = cfg._fields()
        # The other words are overrides of the config's fields; those are checked where they apply.
        for word in other_words:
            name = word.partition("=")[0].strip()
            if (
                name.isidentifier()
                and name not in fields
                and similar_names(name, parameters)
            ):
                raise CommandLineError(
                    f"{word}: {name!r} is neither an argument of {self.name} nor a field of its "
                    f"config. {did_you_mean(name, [*parameters, *fields])}"
                )
        return cfg, other_words

    def arguments(self) -> dict[str, inspect.Parameter]:
        """Returns the arguments that can be set by name; their annotations are types."""
        function = self._function()
        try:
            parameters = inspect.signature(function, eval_str=True).parameters
        except Exception:  # a type that is imported for type checkers only
            parameters = inspect.signature(function).parameters
        arguments: dict[str, inspect.Parameter] = {}
        for name, parameter in parameters.items():
            if parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                arguments[name] = parameter.replace(
                    annotation=_type_of(parameter)
                )
        return arguments

    def written_arguments(self) -> list[str]:
        """Returns the names of the arguments in the source of a function, without importing it."""
        module, _, function_name = self.function.partition(":")
        with contextlib.suppress(
            ImportError, OSError, SyntaxError, AttributeError, TypeError
        ):
            source_path = importlib.util.find_spec(module).origin  # pyright: ignore[reportOptionalMemberAccess]
            source = Path(source_path).read_text(encoding="utf-8")  # pyright: ignore[reportArgumentType]
            for node in ast.parse(source).body:
                if (
                    isinstance(node, ast.FunctionDef)
                    and node.name == function_name
                ):
                    arguments = [*node.args.args, *node.args.kwonlyargs]
                    return [argument.arg for argument in arguments]
        return []

    def _convert(
        self, word: str, parameter: inspect.Parameter, text: str
    ) -> Any:
        """Returns the value of `text`, the part of a word after `=`, in the parameter's type."""

        def read(value_text: str) -> object:
            return read_value(value_text, allow=self.packages(), source="")

        try:
            return convert(text, parameter.annotation, read)
        except NoConversion as error:
            message = str(error.cause or "")
            if not message:
                message = f"expected {type_name(parameter.annotation)}, but got {text!r}."
            if parameter.default is not parameter.empty:
                message += f" It is {parameter.default!r} by default."
            raise CommandLineError(f"{word}: {message}") from None

    def description(self) -> str:
        """Describes the recipe and its arguments, one per line."""
        docstring = inspect.getdoc(self._function()) or ""
        summary = self.summary or docstring.partition("\n")[0]
        # For each argument: name and default, type, description.
        rows: list[tuple[str, str, str]] = []
        for name, parameter in self.arguments().items():
            word = name
            if parameter.default is not parameter.empty:
                word = f"{name}={parameter.default}"
            description = _description_of(name, docstring)
            rows.append((word, type_name(parameter.annotation), description))
        word_width = max((len(word) for word, _, _ in rows), default=0)
        type_width = max(
            (len(type_text) for _, type_text, _ in rows), default=0
        )
        lines = [f"{self.name}: {summary}" if summary else self.name]
        for word, type_text, description in rows:
            line = f"  {word:{word_width}}  {type_text:{type_width}}  {description}"
            lines.append(line.rstrip())
        return "\n".join(lines)

    def record(self, words: Iterable[str] | None) -> dict[str, Any]:
        """Returns what `recorded_recipe` reads: the recipe, and the words that made a config.

        Args:
            words: Arguments and overrides; None if the config was not made from the recipe.
        """
        source = self._import().__file__ or os.devnull
        return {
            "name": self.name,
            "function": self.function,
            "file": self.file,
            "sha256": _file_digest(source),
            "neighbors": {
                path: _file_digest(self._path(path))
                for path in self._neighbors()
            },
            "words": None if words is None else list(words),
        }

    def changed_files(self, record: Mapping[str, Any]) -> list[str]:
        """Returns the paths of the files of a record that have changed since."""
        digests = {self._import().__file__ or os.devnull: record["sha256"]}
        for neighbor, digest in record.get("neighbors", {}).items():
            digests[self._path(neighbor)] = digest
        return [
            path
            for path, digest in digests.items()
            if _file_digest(path) != digest
        ]

    def _neighbors(self) -> list[str]:
        """Returns the files of the modules that were imported from the recipe's directory.

        They are relative to that directory, and without the recipe's own.
        """
        root = self._root()
        if not root:
            return []
        top_level_names = _loaded_from(root)
        paths: set[str] = set()
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            is_neighbor = name.partition(".")[0] in top_level_names
            if is_neighbor and file is not None and file.endswith(".py"):
                paths.add(os.path.relpath(file, root))
        paths.discard(os.path.relpath(self.file, root))
        return sorted(paths)

    def _path(self, neighbor: str) -> str:
        return os.path.join(self._root(), neighbor)

    def packages(self) -> tuple[str, ...]:
        """Returns the modules of the user that the text of a run's config may name.

        These are the recipe's package, and modules from the same directory that it has imported.
        """
        if not self.is_own():
            return ()
        self._import()
        names = {self._module_name().partition(".")[0]}
        root = self._root()
        if root:
            names |= _loaded_from(root)
        return tuple(sorted(names - {"__main__", "weft"}))

    def prepare(
        self,
        cfg: "SpmdTrainer.Config",
        train: "Callable[[str, SpmdTrainer.Config], SpmdTrainer | None]",
    ) -> bool:
        """Prepares the initial state of a run, such as a checkpoint that is trained first.

        Args:
            train: Trains a recipe by name and config, and returns the trainer, None if stopped.

        Returns whether the run can begin.
        """
        if not self.preparation:
            return True
        module, _, function_name = self.preparation.partition(":")
        function = getattr(importlib.import_module(module), function_name)
        return function(cfg, train)

    def is_own(self) -> bool:
        """Returns whether the recipe is the user's, not Weft's."""
        return not self.function.startswith("weft.")

    def load_function(self) -> Callable[..., Any]:
        """Returns the function, which may also be of another kind, such as a reward.

        Raises RecipeError if it cannot be imported.
        """
        return self._function()

    def _module_name(self) -> str:
        return self.function.partition(":")[0]

    def _root(self) -> str:
        """Returns the directory from which the module's file is imported; "" without a file."""
        if not self.file:
            return ""
        depth = self._module_name().count(".")
        if self.file.endswith("__init__.py"):
            depth += 1
        return str(Path(self.file).parents[depth])

    def _import(self) -> ModuleType:
        """Imports the module, from its file unless it is installed.

        A module that is loaded from a file has the name that `import` statements of its neighbors
        use, such that its classes exist once and a config's text can name them.

        Raises RecipeError if there is no such module, it raises an error, or its name is taken.
        """
        name, file, root = self._module_name(), self.file, self._root()
        if file and not os.path.isfile(file):
            names = [path.name for path in Path(file).parent.glob("*.py")]
            raise RecipeError(
                f"{self.name}: there is no file {file}. {did_you_mean(Path(file).name, names)}"
            )
        if root and root not in sys.path:
            sys.path.insert(0, root)
            importlib.invalidate_caches()
        with _report_failures(f"{self.name} cannot be imported", root):
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as error:
                # Another module may be missing, which this one imports.
                if error.name is None or not f"{name}.".startswith(
                    f"{error.name}."
                ):
                    raise
                raise RecipeError(
                    f"{self.name}: there is no module {name!r}. Name a file, path/to/file.py, or "
                    "a module in this directory or of an installed package."
                ) from None
        if file and not os.path.samefile(module.__file__ or os.devnull, file):
            raise RecipeError(
                f"{self.name}: {file} cannot be imported as {name!r}, because this is already the "
                f"name of {module.__file__ or 'a module of Python'}. Rename the file."
            )
        return module

    def _function(self) -> Callable[..., Any]:
        module, name = self._import(), self.function.partition(":")[2]
        if not hasattr(module, name):
            raise RecipeError(
                f"{self.name}: {module.__file__} defines no {name!r}. "
                f"{did_you_mean(name, _names_of_recipes(module))}"
            )
        target: Any = getattr(module, name)
        if isinstance(target, type) and issubclass(target, Configurable):
            return target.default_config
        if callable(target) and not isinstance(target, type):
            return target
        return _checked_config(target, f"{self.name} is").clone


def _file_digest(path: str) -> str:
    """Returns the digest of a file, "" if it is not there any longer."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return ""


def _checked_config(value: object, subject: str) -> "SpmdTrainer.Config":
    """Returns a config; otherwise raises RecipeError, whose text begins with `subject`, a verb."""
    from weft.trainer.trainer import SpmdTrainer

    if isinstance(value, SpmdTrainer.Config):
        return value
    description = f"an object of type {type_name(type(value))}"
    fix = "Return SpmdTrainer.default_config().set(model=…, …)."
    if value is None:
        description = "None"
        fix = "Does the function lack `return cfg`?"
    elif isinstance(value, SpmdTrainer):
        fix = "Return its config: leave out `.instantiate(parent=None)`."
    elif isinstance(value, type):
        description = f"the class {value.__name__}"
    raise RecipeError(
        f"{subject} {description}; expected a trainer's config, SpmdTrainer.Config. {fix}"
    )


def _names_of_recipes(module: ModuleType) -> list[str]:
    """Returns names of what may be a recipe in a module: its functions, and configs."""
    names: list[str] = []
    for name, value in vars(module).items():
        is_own_function = (
            inspect.isfunction(value) and value.__module__ == module.__name__
        )
        if not name.startswith("_") and (
            isinstance(value, ConfigBase) or is_own_function
        ):
            names.append(name)
    return names


def _type_of(parameter: inspect.Parameter) -> Any:
    """Returns the type of a parameter, from its default if it has no annotation."""
    hint, default = parameter.annotation, parameter.default
    if hint is parameter.empty or isinstance(hint, str):
        return (
            type(default)
            if isinstance(default, bool | int | float | str)
            else Any
        )
    return hint | None if default is None and hint is not Any else hint


def _description_of(name: str, docstring: str) -> str:
    """Returns what the section `Args` of a docstring says about an argument."""
    # Lines that continue the text are indented more than the name.
    entry = re.search(
        rf"^( +){name}(?: \(.*?\))?: (.*(?:\n\1 +.*)*)", docstring, re.MULTILINE
    )
    return " ".join(entry[2].split()) if entry else ""


_NO_USER_CODE = (
    str(Path(weft.__file__).parent),
    "<frozen ",
    str(Path(contextlib.__file__).parent),
)


def _loaded_from(root: str) -> set[str]:
    """Returns the names of imported modules and packages that are directly in a directory."""
    names: set[str] = set()
    for name, module in list(sys.modules.items()):
        if "." in name:
            continue
        # A package has directories, a module has a file; builtin modules have none.
        paths = getattr(module, "__path__", None) or [
            getattr(module, "__file__", None)
        ]
        if any(path and os.path.dirname(path) == root for path in paths):
            names.add(name)
    return names


@contextlib.contextmanager
def _report_failures(subject: str, root: str) -> Iterator[None]:
    """Raises errors of the user's code with the line that caused them, and without Weft's lines.

    A message starts with `subject`; `root` is the directory of the code, "" if unknown.
    """
    try:
        yield
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        user_frames: list[traceback.FrameSummary] = []
        for frame in traceback.extract_tb(error.__traceback__):
            if not frame.filename.startswith(_NO_USER_CODE):
                user_frames.append(frame)
        # A library may have raised it; the line in the user's own directory says more.
        frames_below_root = [
            frame for frame in user_frames if frame.filename.startswith(root)
        ]
        last_frame = (frames_below_root or user_frames)[-1:]
        location = f"{subject}:\n{''.join(traceback.format_list(last_frame))}"
        if isinstance(error, WeftError):
            error.args = (f"{location}{error}",)
            raise
        text = "".join(traceback.format_exception_only(error)).rstrip()
        if isinstance(error, SystemExit):
            text += (
                "\nPut what a program runs under `if __name__ == '__main__':`."
            )
        raise RecipeError(f"{location}{text}") from error
