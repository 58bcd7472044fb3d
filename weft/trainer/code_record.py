"""Record of the code that a config runs: what its text does not show.

The text of a config names a function or class, and a run with another body of the same name, or
another number in a closure, has the same text. So a run records, for each function and class of the
user in its config and for those that their code names:

    my_model.Net                        a digest of its source, without comments and docstrings
    my_model.DROPOUT                    the value of a plain constant that the code reads
    learner.optimizer…step_size         the value in a closure, such as one of optax

Functions and classes of installed packages are taken to be the same; closures of theirs are not.
"""

import ast
import dataclasses
import enum
import functools
import hashlib
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from weft import nnx
from weft.config import ConfigBase, InMemory
from weft.trainer.model_record import is_installed

if TYPE_CHECKING:
    from weft.input import Batches

_MAX_ENTRIES = 2000
_MAX_DEPTH = 24
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def code_record(
    cfg: ConfigBase, ignored_fields: frozenset[str]
) -> dict[str, str]:
    """Returns texts of what a config runs, by name or by path in the config.

    Args:
        ignored_fields: Names of fields of the config that are left out.
    """
    recorder = _Recorder()
    for name, value in cfg.items():
        if name not in ignored_fields:
            recorder.add(name, value)
    return dict(list(recorder.entries.items())[:_MAX_ENTRIES])


def changes_of_code(
    before: Mapping[str, str], after: Mapping[str, str]
) -> list[str]:
    """Returns a line for each difference between two records."""
    lines: list[str] = []
    changed_name = ""  # what is within a value that has changed follows from it
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        is_within = changed_name and name.startswith(
            (f"{changed_name}.", f"{changed_name}[")
        )
        if old == new or is_within:
            continue
        if old is None or new is None:
            # What is newly named in code has changed that code, which has a line of its own.
            if name.partition(".")[0] in _FIELDS_OF_VALUES:
                lines.append(f"{name}: {old or 'nothing'} → {new or 'nothing'}")
                changed_name = name
        elif old.startswith(_SOURCE) and new.startswith(_SOURCE):
            lines.append(f"the code of {name} has changed")
        else:
            lines.append(f"{name}: {old} → {new}")
            changed_name = name
    return lines


_SOURCE = "source "
_FIELDS_OF_VALUES = ("learner",)
"""Fields whose values, such as those of an optimizer, are compared also if one side has none."""


class _Recorder:
    """Collects entries; each object is visited once."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self._visited: dict[int, object] = {}

    def add(self, path: str, value: object, depth: int = 0) -> None:
        """Adds what a value of the config, or of a closure, runs."""
        if isinstance(value, InMemory):
            # Grain, which it imports, takes half a second.
            from weft.input import Arrays, Batches

            if isinstance(value, Batches):
                self._add_batches(path, value)
            elif not isinstance(value, Arrays):  # whose digest is in the text
                self._add_object(path, value.value, depth)
            return
        if depth > _MAX_DEPTH or not self._is_new(value):
            return
        if isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, ConfigBase):
            for name, child in value.items():
                self.add(f"{path}.{name}", child, depth + 1)
        elif isinstance(value, functools.partial):
            parts = {
                "func": value.func,
                "args": value.args,
                "keywords": value.keywords,
            }
            self.add(path, parts, depth + 1)
        elif isinstance(value, Mapping):
            for name, child in value.items():
                self.add(f"{path}[{name!r}]", child, depth + 1)
        elif isinstance(value, list | tuple):
            names = getattr(value, "_fields", range(len(value)))
            for name, child in zip(names, value, strict=True):
                part = f".{name}" if isinstance(name, str) else f"[{name}]"
                self.add(path + part, child, depth + 1)
        elif callable(value) and _function_of(value) is not None:
            self._add_function(path, value, depth)
        else:
            self._add_object(path, value, depth)

    def _is_new(self, value: object) -> bool:
        if isinstance(value, _PLAIN) or id(value) in self._visited:
            return False
        self._visited[id(value)] = value  # so that its id stays its own
        return len(self.entries) < _MAX_ENTRIES

    def _add_batches(self, path: str, batches: "Batches") -> None:
        """Adds a digest of batches that are the same each time that they are read."""
        if batches.is_iterator:
            return
        values = batches.value
        is_in_memory = getattr(
            values, "in_memory", isinstance(values, list | tuple)
        )
        try:
            digest = _digest_of_batches([batches.first])
            if is_in_memory:
                digest = _digest_of_batches(values)
            elif digest != _digest_of_batches([next(iter(values))]):
                return
        except Exception:  # which the run will meet, and report
            return
        self.entries[path] = f"batches {digest}"

    def _add_object(self, path: str, value: object, depth: int) -> None:
        """Adds the class of an object, and what its attributes run."""
        self.add(path, type(value), depth)
        if isinstance(value, nnx.Pytree):
            for _, node in nnx.iter_graph(value):
                if isinstance(node, nnx.Pytree):
                    self._add_attributes(path, node, depth)
        elif dataclasses.is_dataclass(value) or _is_own(type(value)):
            self._add_attributes(path, value, depth)

    def _add_attributes(self, path: str, value: object, depth: int) -> None:
        self.add(path, type(value), depth)
        for name, attribute in getattr(value, "__dict__", {}).items():
            if not isinstance(attribute, nnx.Pytree | jax.Array | np.ndarray):
                self.add(f"{path}.{name}", attribute, depth + 1)

    def _add_function(self, path: str, function: Any, depth: int) -> None:
        inner = _function_of(function)
        assert inner is not None
        if _is_own(inner):
            self._add_source(inner, path)
            self._add_names(inner, depth)
        elif inner.__closure__:
            self.entries[path] = f"{inner.__module__}.{inner.__qualname__}"
        for default in [
            *(inner.__defaults__ or ()),
            *(inner.__kwdefaults__ or {}).values(),
        ]:
            self.add(f"{path}.{inner.__name__}", default, depth + 1)
        cells = zip(
            inner.__code__.co_freevars, inner.__closure__ or (), strict=True
        )
        assigned_names = _assigned_names(inner)
        for name, cell in cells:
            if name in assigned_names:
                continue
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            self._add_value(f"{path}.{name}", value, depth)

    def _add_value(self, path: str, value: object, depth: int) -> None:
        """Adds a value that code reads: its text if it is plain, or else what it runs.

        What is in a list or dict may change during a run.
        """
        text = _text_of(value)
        if text is not None:
            self.entries[path] = text
        elif isinstance(value, tuple) and depth < _MAX_DEPTH:
            self.entries[path] = f"{len(value)} of a {type(value).__name__}"
            for index, item in enumerate(value):
                self._add_value(f"{path}[{index}]", item, depth + 1)
        else:
            self.add(path, value, depth + 1)

    def _add_class(self, cls: type) -> None:
        if not _is_own(cls):
            return
        self._add_source(cls)
        for base in cls.__mro__[1:]:
            self.add("", base)
        for name, attribute in vars(cls).items():
            text = _text_of(attribute)
            if text is not None and not name.startswith("_"):
                self.entries[f"{_name_of(cls)}.{name}"] = text
            for function in _functions_in(attribute):
                if _is_own(function):
                    self._add_names(function, 1)

    def _add_source(self, definition: Any, path: str = "") -> None:
        digest = _source_digest(definition)
        if digest is None:
            return
        name = _name_of(definition)
        if path and "<" in name:  # several may have this name
            name = f"{path}, {name}"
        self.entries[name] = _SOURCE + digest

    def _add_names(self, function: types.FunctionType, depth: int) -> None:
        """Adds functions, classes and constants of the user that a function names."""
        names = _names_in(function.__code__)
        scope = function.__globals__
        assigned_names = _assigned_names(function)
        for name in names:
            is_assigned = name.startswith("__") or name in assigned_names
            if name not in scope or is_assigned:
                continue
            value = scope[name]
            if isinstance(value, types.ModuleType):
                if _is_own(value):
                    members = {
                        member: vars(value)[member]
                        for member in names
                        if member in vars(value)
                    }
                    for member, child in members.items():
                        self._add_named(
                            f"{value.__name__}.{member}", child, depth
                        )
                continue
            self._add_named(f"{scope.get('__name__')}.{name}", value, depth)

    def _add_named(self, name: str, value: object, depth: int) -> None:
        if isinstance(value, type) or _function_of(value) is not None:
            if isinstance(value, type) or _is_own(_function_of(value)):
                self.add(name, value, depth + 1)
        elif not isinstance(value, types.ModuleType):
            self._add_value(name, value, depth)


def _name_of(definition: Any) -> str:
    return f"{definition.__module__}.{definition.__qualname__}"


def _is_own(definition: Any) -> bool:
    """Returns whether a function, class or module is the user's."""
    module = definition
    if not isinstance(definition, types.ModuleType):
        module = inspect.getmodule(definition)
    name = getattr(module, "__name__", None)
    if name is None or name == "builtins" or name.partition(".")[0] == "weft":
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        # Of a notebook; other modules without a file are Python's.
        return name == "__main__"
    return not is_installed(file)


def _function_of(value: object) -> types.FunctionType | None:
    """Returns the function of the user that a function, method or wrapper calls."""
    function = inspect.unwrap(value) if callable(value) else value  # pyright: ignore[reportArgumentType]
    if isinstance(function, types.MethodType):
        function = function.__func__
    return function if isinstance(function, types.FunctionType) else None


def _functions_in(attribute: object) -> Iterator[types.FunctionType]:
    """Yields the functions of an attribute of a class: a method, a property or the like."""
    candidates: list[object] = [attribute]
    if isinstance(attribute, staticmethod | classmethod):
        candidates = [attribute.__func__]
    elif isinstance(attribute, property):
        candidates = [attribute.fget, attribute.fset]
    for candidate in candidates:
        function = _function_of(candidate)
        if function is not None:
            yield function


def _names_in(code: types.CodeType) -> list[str]:
    """Returns the names in code, and in the functions that it defines, in order."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(_names_in(constant))
    return list(names)


def _assigned_names(definition: Any) -> set[str]:
    """Returns the variables outside of it that a definition assigns to, such as a counter."""
    tree = _definition_tree_if_known(definition)
    names: set[str] = set()
    if tree is not None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Global | ast.Nonlocal):
                names.update(node.names)
    return names


def _text_of(value: object) -> str | None:
    """Returns the text of a plain value or an array; None for others."""
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, _PLAIN):
        return repr(value)[:200]
    if isinstance(value, tuple | frozenset) and not hasattr(value, "_fields"):
        texts = [_text_of(item) for item in value]
        known_texts = [text for text in texts if text is not None]
        if len(known_texts) < len(texts):
            return None
        if isinstance(value, frozenset):
            known_texts.sort()
        return f"({', '.join(known_texts)})"[:200]
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return _text_of_array(value)
    return None


def _text_of_array(value: Any) -> str | None:
    if not getattr(value, "is_fully_addressable", True):
        return None
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    if array.dtype.hasobject:
        return None
    if array.ndim == 0:
        return str(array)
    digest = hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data)
    return f"{array.dtype}{list(array.shape)} {digest.hexdigest()[:12]}"


def _digest_of_batches(batches: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for path, x in jax.tree.leaves_with_path(batch):
            array = np.ascontiguousarray(x)
            digest.update(f"{path} {array.dtype} {array.shape}\n".encode())
            digest.update(array.view(np.uint8).data)
    return digest.hexdigest()[:12]


# Sources.


def _source_digest(definition: Any) -> str | None:
    """Returns a digest of a definition's source; None if it is not known."""
    tree = _definition_tree_if_known(definition)
    if tree is None:
        return None
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        is_definition = isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        )
        if is_definition and body and ast.get_docstring(node, clean=False):  # pyright: ignore[reportArgumentType]
            del body[0]
            if not body:
                body.append(ast.Pass())
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


def _definition_tree_if_known(definition: Any) -> ast.AST | None:
    """Returns the parsed source of a function or class; None if it is not known."""
    try:
        return _definition_tree(definition)
    except (OSError, TypeError, SyntaxError, ValueError, RecursionError):
        return None


def _definition_tree(definition: Any) -> ast.AST | None:
    if definition.__name__ != "<lambda>":
        source = textwrap.dedent(inspect.getsource(definition))
        return ast.parse(source).body[0]
    # The source of a lambda is whole lines, which hold more than it.
    lines, _ = inspect.findsource(definition)
    positions = [
        position
        for position in definition.__code__.co_positions()
        if None not in position and position[2:] != (0, 0)
    ]
    first_line = definition.__code__.co_firstlineno
    for node in ast.walk(_parsed("".join(lines))):
        if isinstance(node, ast.Lambda) and node.lineno == first_line:
            begin = (node.lineno, node.col_offset)
            end = (node.end_lineno, node.end_col_offset)
            is_inside = all(
                begin <= (line, column) and (end_line, end_column) <= end
                for line, end_line, column, end_column in positions
            )
            if is_inside and _argument_names(node) == _names_of_code(
                definition.__code__
            ):
                return node
    return None


@functools.lru_cache(maxsize=16)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _argument_names(node: ast.Lambda) -> list[str]:
    arguments = node.args
    names = [
        argument.arg
        for argument in [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
        ]
    ]
    return names


def _names_of_code(code: types.CodeType) -> list[str]:
    count = code.co_argcount + code.co_kwonlyargcount
    return list(code.co_varnames[:count])
