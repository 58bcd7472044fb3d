"""Transformed functions: their calls, arguments and results, and errors about these."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import UnionType
from typing import Any, ParamSpec, TypeVar

import jax

from weft import errors, lifting
from weft.core.tracing import hide_frames
from weft.lifting import kind
from weft.lifting.signature import check_argnums, copy_name
from weft.nnx import pytree, settings, versions
from weft.nnx.filters import Path, filters_text
from weft.nnx.variables import Variable
from weft.nnx.versions import TransformCall, current_call, describe_object, origin

MISSING: Any = object()
P = ParamSpec("P")
R = TypeVar("R")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def object_paths(
    tree: object, names: list[str] | None, types: type | UnionType = pytree.Pytree | Variable
) -> list[str]:
    """Returns the places of the objects in a tree, in words; `names` are those of its items."""

    def is_object(x: object) -> bool:
        return isinstance(x, types)

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_object)
    return [_path_text(path, names) for path, x in leaves if is_object(x)]


def _path_text(path: jax.tree_util.KeyPath, names: list[str] | None) -> str:
    """Returns the user's notation of a JAX path in the result, or among arguments with names."""
    if names is None:
        return "the result" + jax.tree_util.keystr(path)
    i = path[0].idx
    name = names[i] if i < len(names) else f"args[{i}]"
    return name + jax.tree_util.keystr(path[1:])


def place_of(path: Path) -> str:
    """Returns a path from the pair of arguments and results in the user's notation."""
    part, i, *below = path
    call = current_call()
    roots: list[str] = []
    if call is not None and part == 1:
        roots = call.returned
    elif call is not None:
        roots = call.given or [
            *object_paths((*call.named.values(),), [*call.named]),
            *object_paths(call.args, argument_names(call)),
        ]
    which: Any = i
    unnamed = f"args[{which}]" if part == 0 else "the result"
    root = roots[which] if which < len(roots) else unnamed
    return root + path_suffix(below)


def path_suffix(path: Iterable[Hashable]) -> str:
    """Returns a path below an object in the user's notation."""
    return "".join(map(key_suffix, path))


@functools.lru_cache(maxsize=4096, typed=True)
def key_suffix(key: Hashable) -> str:
    """Returns one key of a path in the user's notation."""
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def record_value_paths(keys: Sequence[int], paths: Sequence[Path]) -> None:
    """Records the paths of values by number in the open call, for errors."""
    if (call := current_call()) is not None:
        call.values = keys, paths


def place_of_value(path_of: Callable[[int], Path | None], path: jax.tree_util.KeyPath) -> str:
    """Returns the place of a value, or of a part of it, in the user's notation.

    `path` is a JAX path that starts with the number of the value; `path_of` maps input numbers.
    """
    n, call = path[0].key, current_call()
    n = n if n >= 0 else ~n  # ~n holds extra data of value n
    rest = tuple(key for key in path[1:] if getattr(key, "name", None) != "value")
    if (at := path_of(n)) is not None:
        return place_of(at) + jax.tree_util.keystr(rest)
    after = dict(zip(*call.values, strict=True)) if call is not None else {}
    return (place_of(after[n]) if n in after else "a new value") + jax.tree_util.keystr(rest)


def argument_at(path: jax.tree_util.KeyPath) -> str:
    """Returns the user's notation of a JAX path among the arguments."""
    call = current_call()
    return _path_text(path, [] if call is None else argument_names(call))


def argument_names(call: TransformCall) -> list[str]:
    """Returns the names of the positional arguments of a call."""
    return parameter_names(call.fn) if call.names is None else call.names


def parameter_names(fn: object) -> list[str]:
    """Returns the names of the positional parameters."""
    code = getattr(fn, "__code__", None)
    return list(code.co_varnames[: code.co_argcount]) if code is not None else []


def _describe_role(role: object, is_derivative: bool) -> str:
    if is_derivative:
        return "a gradient" if role is lifting.DIFF else "no gradient"
    return "nnx.Carry" if role is lifting.CARRY else repr(role)


def call_title(fallback: str = "a transformation") -> str:
    """Returns the title of the open call, for errors."""
    call = current_call()
    return call.title if call is not None else fallback


def unmatched_error(x: object, path: Path, filters: Sequence[Any]) -> Exception:
    """Returns the error for a part of an object that matches no filter."""
    call = current_call()
    spec = call.specs[path[0]] if call is not None else "a filter"  # pyright: ignore[reportArgumentType, reportCallIssue]
    return errors.StateFilterError(
        f"{call_title()}: {spec} has no filter for {place_of(path)}, a {type(x).__name__}; its "
        f"filters are {filters_text(filters)}; add `...` as the last one."
        + (f" The line to change is {call.line}" if call is not None else "")
    )


def inconsistent_alias_error(
    x: object, first: tuple[Path, Any], second: tuple[Path, Any]
) -> Exception:
    """Returns the error for a value with two roles, each a pair of its path and the role."""
    call = current_call()
    specs = call.specs if call is not None else ("in_axes", "out_axes")
    is_derivative = any(role is lifting.DIFF for _, role in (first, second))
    roles = [
        f"{specs[path[0]]} gives {_describe_role(role, is_derivative)} to {place_of(path)}"  # pyright: ignore[reportArgumentType, reportCallIssue]
        for path, role in (first, second)
    ]
    return errors.InconsistentAliasError(
        f"{call_title()}: the same {versions.class_and_shape(x)} is in two "
        f"places with different settings: {roles[0]}, and {roles[1]}. All aliases of a "
        "reference need the same setting; use one for both, or pass nnx.clone(...) in one "
        "place." + (f" The line to change is {call.line}" if call is not None else "")
    )


def shared_object_error(x: object, first: Path, second: Path) -> Exception:
    """Returns the error for an object in two places where objects are plain pytrees."""
    return errors.SharedObjectError(
        f"{call_title()} with graph=False or graph_updates=False: the same "
        f"{versions.class_and_shape(x)} is at {place_of(first)} and at {place_of(second)}; in "
        "this mode an object is a plain pytree without shared references. Pass nnx.clone(...) in "
        "one place, or set graph=True, graph_updates=True."
    )


def captured_object_error(x: object, path: Path) -> Exception:
    """Returns the error for an outside object in the results or in an argument."""
    call = current_call()
    return errors.CapturedObjectError(
        f"{call_title()}: {place_of(path)} is a {versions.class_and_shape(x)} that was created "
        "outside and not passed as an argument, so it would come out as another object (an "
        "implicit clone)."
        + (f" It {known}." if (known := describe_object(x)) else "")
        + " Pass it as an argument, or return nnx.clone(...) of it."
        + (f" The line to change is {call.line}" if call else "")
    )


def loop_change_error(path: Path, what: str) -> Exception:
    """Returns the error for an object that changed in a loop by more than its values."""
    return errors.LoopStructureError(
        f"{call_title('a loop')}: the body {what} at {place_of(path)}; objects "
        "that all iterations share or carry keep their attributes, references and static values, "
        "and only values of variables change. Create the attribute before the loop, with its value "
        "in a variable if it changes from one iteration to the next, and write to that variable, "
        "as in variable[...] = value."
    )


def warn_of_dropped_change(path: Path, x: object) -> None:
    """Warns that a loop's body changes a value that all iterations share."""
    where = type(x).__name__ if isinstance(x, Variable) else f"nnx.PathContains({path[-1]!r})"
    errors.warn_user(
        f"{call_title('a loop')}: the body changes {place_of(path)}, which all iterations share "
        "(None); each of them begins with the value before the loop, and the change is dropped. "
        f"To keep it, carry the value, as nnx.StateAxes({{{where}: nnx.Carry, ...: None}}) does; "
        "otherwise change a copy, nnx.clone(...).",
        errors.SharedStateWarning,
    )


def warn_of_dropped_structure(path: Path, what: str) -> None:
    """Warns that a loop without graph updates drops a change of more than variables' values."""
    errors.warn_user(
        f"{call_title('a loop')}: the body {what} at {place_of(path)}, and the change is dropped; "
        "without graph updates, a loop keeps new values of variables, and arrays in attributes of "
        "a carry (nnx.Carry). Write the variable's value (variable[...] = value), keep what "
        "changes in a variable, or set graph=True, graph_updates=True.",
        errors.SharedStateWarning,
    )


def with_graph_options(fn: Callable[P, R], function: str | None = None) -> Callable[P, R]:
    """Decorates an entry point with keyword arguments `**options: Unpack[GraphOptions]`.

    Its signature names them, and its errors are raised without Weft's frames. Without an argument
    for the parameter `function`, it returns a decorator.
    """
    signature = inspect.signature(fn)
    parameters = list(signature.parameters.values())[:-1]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=note)
        for name, note in settings.GraphOptions.__annotations__.items()
    ]
    names = frozenset(p.name for p in (*parameters, *options))

    @functools.wraps(fn)
    def entered(*args: P.args, **kwargs: P.kwargs) -> Any:
        for unknown in kwargs.keys() - names:
            raise TypeError(f"{fn.__name__}() got an unexpected keyword argument {unknown!r}")
        if function is not None and not args and function not in kwargs:
            return functools.partial(entered, **kwargs)
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    entered.__signature__ = signature.replace(parameters=[*parameters, *options])  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    return entered


def optional_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorates a transformation with graph options to return a decorator without a function."""
    return with_graph_options(fn, next(iter(inspect.signature(fn).parameters)))


def wrap_transformed(
    transformation: str,
    fn: Callable[P, Any],
    call: Callable[..., Any],
    specs: tuple[str, str] = ("in_axes", "out_axes"),
    in_axes: object = None,
    *,
    by_position: bool = False,
) -> Callable[P, Any]:
    """Returns the transformed function that users call.

    Args:
        call: takes a dict of the keyword-only arguments, then the positional arguments.
        specs: the parameters that hold the roles of arguments and of results.
        in_axes: roles of the arguments; a tuple may include omitted arguments with defaults.
        by_position: whether `call` takes the positional arguments alone, which have roles.

    Raises TransformArgumentError if `fn` is a bound method.
    """
    check_unbound(transformation, fn)
    place = origin()

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            if kwargs:
                args, kwargs = bind_positional(fn, args, kwargs)
            if isinstance(in_axes, tuple | list) and len(args) < len(in_axes):
                args = _with_defaults(fn, args, len(in_axes))
            with TransformCall(transformation, fn, args, specs, named=kwargs, place=place):
                if not by_position:
                    return call(kwargs, *args)
                if kwargs:
                    raise errors.CallMismatchError(
                        f"nnx.{transformation}: {', '.join(kwargs)} can only be passed by name, "
                        "but roles of arguments go by position; make it a positional parameter."
                    )
                return call(*args)
        except Exception as error:
            hide_frames(error)
            raise

    return wrapper


def bind_positional(fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the positional arguments and the keyword-only ones."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs  # the call itself says what is wrong
    return bound.args, bound.kwargs


def _with_defaults(fn: Callable[..., Any], args: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())[len(args) : n]
    except (TypeError, ValueError):
        return args
    has_place = (p.kind is not p.KEYWORD_ONLY and p.default is not p.empty for p in parameters)
    return (*args, *(p.default for p in parameters)) if all(has_place) else args


def with_kwargs_first(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` with the keyword arguments as a dict in first position."""
    return copy_name(fn, lambda kwargs, *args: fn(*args, **kwargs))


def check_unbound(transformation: str, fn: object) -> None:
    """Raises TransformArgumentError for a bound method, which would capture its object."""
    if inspect.ismethod(fn) and isinstance(fn.__self__, pytree.Pytree):
        owner, name = type(fn.__self__).__name__, fn.__name__
        raise errors.TransformArgumentError(
            f"nnx.{transformation}: {name} is a bound method of a {owner}, which would not pass "
            f"through the transformation; transform {owner}.{name} and pass the object as its "
            f"first argument, or write @nnx.{transformation} above the method in the class."
        )


class StaticArguments:
    """A function with static arguments, which are hashable and skip the transformation.

    Its `fn` takes them in boxes, which are pytrees without leaves.
    """

    def __init__(self, title: str, what: str, fn: Callable[..., Any], argnums: int | Sequence[int]):
        self._argnums = frozenset((argnums,) if isinstance(argnums, int) else argnums)
        check_argnums(f"nnx.{title}", what, fn, self._argnums)

        def unboxing(*args: object, **kwargs: object) -> Any:
            return fn(*(x.value if isinstance(x, kind.Static) else x for x in args), **kwargs)

        self.fn = copy_name(fn, unboxing) if self._argnums else fn

    def wrapped(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments, with boxes around the static ones."""
        at = {i + len(args) if i < 0 else i for i in self._argnums}
        boxed = tuple(kind.Static(x) if i in at else x for i, x in enumerate(args))
        if (call := current_call()) is not None:
            call.args = boxed
        return boxed
