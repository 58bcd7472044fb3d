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
from weft.errors import CommandLineError, RecipeError, WeftError, did_you_mean, similar_names

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

    def __call__(self, data_dir: str | None = None, **kwargs: Any) -> "SpmdTrainer.Config":
        """Makes a fresh config; see `weft.config.TrainerConfigFn`.

        Raises RecipeError if an argument is missing, or the function does not return such a config.
        """
        if data_dir is not None:
            kwargs["data_dir"] = data_dir
        function = self._function()
        missing = [
            name
            for name, argument in self.arguments().items()
            if argument.default is argument.empty and name not in kwargs
        ]
        if missing:
            raise RecipeError(
                f"{self.name}: {' and '.join(missing)} of the function must be given: add "
                f"{' '.join(f'{name}=VALUE' for name in missing)} to the command, or a default to "
                "the function."
            )
        if not self.is_own():
            return function(**kwargs)
        with _report_failures(f"{self.name} failed", self._root()):
            made = function(**kwargs)
        return _checked(made, f"{self.name} returned")

    def config(self, words: Iterable[str]) -> "tuple[SpmdTrainer.Config, list[str]]":
        """Makes a config with the arguments among `key=value` words; returns the other words too.

        Raises:
            CommandLineError: if a value does not have the argument's type, or a word is misspelt.
            RecipeError: as `__call__`.
        """
        known, given, others = self.arguments(), {}, []
        for word in words:
            name, _, text = word.partition("=")
            if name.strip() in known:
                given[name.strip()] = self._convert(word, known[name.strip()], text)
            else:
                others.append(word)
        made = self(**given)
        for word in others:
            name = word.partition("=")[0].strip()
            if name.isidentifier() and name not in made._fields() and similar_names(name, known):
                raise CommandLineError(
                    f"{word}: {name!r} is neither an argument of {self.name} nor a field of its "
                    f"config. {did_you_mean(name, [*known, *made._fields()])}"
                )
        return made, others

    def arguments(self) -> dict[str, inspect.Parameter]:
        """Returns the arguments that can be set by name; their annotations are types."""
        function = self._function()
        try:
            parameters = inspect.signature(function, eval_str=True).parameters
        except Exception:  # a type that is imported for type checkers only
            parameters = inspect.signature(function).parameters
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {
            name: p.replace(annotation=_type_of(p))
            for name, p in parameters.items()
            if p.kind in by_name
        }

    def written_arguments(self) -> list[str]:
        """Returns the names of the arguments in the source of a function, without importing it."""
        module, _, name = self.function.partition(":")
        with contextlib.suppress(ImportError, OSError, SyntaxError, AttributeError, TypeError):
            source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")  # pyright: ignore[reportArgumentType, reportOptionalMemberAccess]
            for node in ast.parse(source).body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
        return []

    def _convert(self, word: str, argument: inspect.Parameter, text: str) -> Any:
        hint, default = argument.annotation, argument.default
        try:
            return convert(text, hint, lambda t: read_value(t, allow=self.packages(), source=""))
        except NoConversion as error:
            expected = error.cause or f"expected {type_name(hint)}, but got {text!r}."
            shown = "" if default is argument.empty else f" It is {default!r} by default."
            raise CommandLineError(f"{word}: {expected}{shown}") from None

    def description(self) -> str:
        """Describes the recipe and its arguments, one per line."""
        docs = inspect.getdoc(self._function()) or ""
        summary = self.summary or docs.partition("\n")[0]
        rows = [
            (
                name if p.default is p.empty else f"{name}={p.default}",
                type_name(p.annotation),
                _description_of(name, docs),
            )
            for name, p in self.arguments().items()
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [
            f"  {shown:{widths[0]}}  {kind:{widths[1]}}  {text}".rstrip()
            for shown, kind, text in rows
        ]
        return "\n".join([f"{self.name}: {summary}" if summary else self.name, *lines])

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
            "neighbors": {path: _file_digest(self._path(path)) for path in self._neighbors()},
            "words": None if words is None else list(words),
        }

    def changed_files(self, record: Mapping[str, Any]) -> list[str]:
        """Returns the paths of the files of a record that have changed since."""
        paths = {self._import().__file__ or os.devnull: record["sha256"]}
        for path, digest in record.get("neighbors", {}).items():
            paths[self._path(path)] = digest
        return [path for path, digest in paths.items() if _file_digest(path) != digest]

    def _neighbors(self) -> list[str]:
        """Returns the files of the modules that were imported from the recipe's directory.

        They are relative to that directory, and without the recipe's own.
        """
        root = self._root()
        if not root:
            return []
        names, paths = _loaded_from(root), set[str]()
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file is not None and file.endswith(".py") and name.partition(".")[0] in names:
                paths.add(os.path.relpath(file, root))
        return sorted(paths - {os.path.relpath(self.file, root)})

    def _path(self, neighbor: str) -> str:
        return os.path.join(self._root(), neighbor)

    def packages(self) -> tuple[str, ...]:
        """Returns the modules of the user that the text of a run's config may name.

        These are the recipe's package, and modules from the same directory that it has imported.
        """
        if not self.is_own():
            return ()
        self._import()
        top, root = self.function.partition(":")[0].partition(".")[0], self._root()
        neighbors = _loaded_from(root) if root else set[str]()
        return tuple(sorted({top, *neighbors} - {"__main__", "weft"}))

    def prepare(self, cfg: Any, train: Callable[[str, Any], Any]) -> bool:
        """Prepares the initial state of a run, such as a checkpoint that is trained first.

        Args:
            train: Trains a recipe by name and config, and returns the trainer, None if stopped.

        Returns whether the run can begin.
        """
        if not self.preparation:
            return True
        module, _, function = self.preparation.partition(":")
        return getattr(importlib.import_module(module), function)(cfg, train)

    def is_own(self) -> bool:
        """Returns whether the recipe is the user's, not Weft's."""
        return not self.function.startswith("weft.")

    def _root(self) -> str:
        """Returns the directory from which the module's file is imported; "" without a file."""
        depth = self.function.partition(":")[0].count(".") + self.file.endswith("__init__.py")
        return str(Path(self.file).parents[depth]) if self.file else ""

    def _import(self) -> ModuleType:
        """Imports the module, from its file unless it is installed.

        A module that is loaded from a file has the name that `import` statements of its neighbors
        use, such that its classes exist once and a config's text can name them.

        Raises RecipeError if there is no such module, it raises an error, or its name is taken.
        """
        name, file, root = self.function.partition(":")[0], self.file, self._root()
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
                if error.name is None or not f"{name}.".startswith(f"{error.name}."):
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
        found: Any = getattr(module, name)
        if isinstance(found, type) and issubclass(found, Configurable):
            return found.default_config
        is_function = callable(found) and not isinstance(found, type)
        return found if is_function else _checked(found, f"{self.name} is").clone


def _file_digest(path: str) -> str:
    """Returns the digest of a file, "" if it is not there any longer."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return ""


def _checked(made: object, what: str) -> "SpmdTrainer.Config":
    from weft.trainer.trainer import SpmdTrainer

    if isinstance(made, SpmdTrainer.Config):
        return made
    fix = "Return SpmdTrainer.default_config().set(model=…, …)."
    if made is None:
        fix = "Does the function lack `return cfg`?"
    elif isinstance(made, SpmdTrainer):
        fix = "Return its config: leave out `.instantiate(parent=None)`."
    kind = f"an object of type {type_name(type(made))}"
    if made is None or isinstance(made, type):
        kind = f"the class {made.__name__}" if made else "None"
    raise RecipeError(f"{what} {kind}; expected a trainer's config, SpmdTrainer.Config. {fix}")


def _names_of_recipes(module: ModuleType) -> list[str]:
    """Returns names of what may be a recipe in a module: its functions, and configs."""
    return [
        name
        for name, found in vars(module).items()
        if not name.startswith("_")
        and (
            isinstance(found, ConfigBase)
            or (inspect.isfunction(found) and found.__module__ == module.__name__)
        )
    ]


def _type_of(argument: inspect.Parameter) -> Any:
    hint, default = argument.annotation, argument.default
    if hint is argument.empty or isinstance(hint, str):
        return type(default) if isinstance(default, bool | int | float | str) else Any
    return hint | None if default is None and hint is not Any else hint


def _description_of(name: str, docs: str) -> str:
    """Returns what the section `Args` of a docstring says about an argument."""
    found = re.search(rf"^( +){name}(?: \(.*?\))?: (.*(?:\n\1 +.*)*)", docs, re.MULTILINE)
    return " ".join(found[2].split()) if found else ""


_NO_USER_CODE = (str(Path(weft.__file__).parent), "<frozen ", str(Path(contextlib.__file__).parent))


def _loaded_from(root: str) -> set[str]:
    """Returns the names of imported modules and packages that are directly in a directory."""
    names = set()
    for name, module in list(sys.modules.items()):
        places = getattr(module, "__path__", None) or [getattr(module, "__file__", None)]
        if "." not in name and any(place and os.path.dirname(place) == root for place in places):
            names.add(name)
    return names


@contextlib.contextmanager
def _report_failures(what: str, root: str) -> Iterator[None]:
    """Raises errors of the user's code with the line that caused them, and without Weft's lines.

    A message starts with `what`; `root` is the directory of the code, "" if unknown.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, RecipeError):
            raise
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(_NO_USER_CODE)
        ]
        own = [frame for frame in frames if frame.filename.startswith(root)] or frames
        where = f"{what}:\n{''.join(traceback.format_list(own[-1:]))}"
        if isinstance(error, WeftError):
            error.args = (f"{where}{error}",)
            raise
        text = "".join(traceback.format_exception_only(error)).rstrip()
        if isinstance(error, SystemExit):
            text += "\nPut what a program runs under `if __name__ == '__main__':`."
        raise RecipeError(f"{where}{text}") from error
