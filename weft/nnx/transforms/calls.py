"""Transformed functions: their calls, arguments and results, and errors about these."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import UnionType
from typing import Any, ParamSpec, TypeVar

import jax
from jax.tree_util import KeyPath, keystr

from weft import errors, lifting
from weft.core.tracing import hide_frames
from weft.lifting.kind import Static
from weft.lifting.roles import Role
from weft.lifting.signature import as_tuple, check_argnums, copy_name
from weft.nnx import pytree, settings, versions
from weft.nnx.filters import Filter, Path, filters_text
from weft.nnx.variables import Variable
from weft.nnx.versions import (
    TransformCall,
    current_call,
    describe_object,
    origin,
)
from weft.typing import PyTree

MISSING: Any = object()
P = ParamSpec("P")
R = TypeVar("R")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def object_paths(
    tree: PyTree,
    names: list[str] | None,
    types: type | UnionType = pytree.Pytree | Variable,
) -> list[str]:
    """Returns the places of the objects in a tree, in words; `names` are those of its items."""

    def is_object(x: PyTree) -> bool:
        return isinstance(x, types)

    places: list[str] = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_object):
        if is_object(x):
            places.append(_path_text(path, names))
    return places


def _path_text(path: KeyPath, names: list[str] | None) -> str:
    """Returns the user's notation of a JAX path in the result, or among arguments with names."""
    if names is None:
        return "the result" + keystr(path)
    i = path[0].idx
    name = f"args[{i}]"
    if i < len(names):
        name = names[i]
    return name + keystr(path[1:])


def place_of(path: Path) -> str:
    """Returns a path from the pair of arguments and results in the user's notation."""
    part, i, *path_in_object = path
    call = current_call()
    object_names: list[str] = []
    if part == 1:
        object_name = "the result"
        if call is not None:
            object_names = call.returned
    else:
        object_name = f"args[{i}]"
        if call is not None:
            object_names = call.given or _argument_paths(call)
    assert isinstance(i, int)
    if i < len(object_names):
        object_name = object_names[i]
    return object_name + path_suffix(path_in_object)


def _argument_paths(call: TransformCall) -> list[str]:
    """Returns the places of the objects in the arguments; those by name come first."""
    named_values = tuple(call.named.values())
    return [
        *object_paths(named_values, list(call.named)),
        *object_paths(call.args, argument_names(call)),
    ]


def path_suffix(path: Iterable[Hashable]) -> str:
    """Returns a path below an object in the user's notation."""
    return "".join(map(key_suffix, path))


@functools.lru_cache(maxsize=4096, typed=True)
def key_suffix(key: Hashable) -> str:
    """Returns one key of a path in the user's notation."""
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    return f"[{key!r}]"


def record_value_paths(numbers: Sequence[int], paths: Sequence[Path]) -> None:
    """Records the paths of values by number in the open call, for errors."""
    call = current_call()
    if call is not None:
        call.values = numbers, paths


def place_of_value(path_of: Callable[[int], Path | None], path: KeyPath) -> str:
    """Returns the place of a value, or of a part of it, in the user's notation.

    `path` is a JAX path that starts with the number of the value; `path_of` maps input numbers.
    """
    number = path[0].key
    path_in_value: list[Any] = []
    for key in path[1:]:
        # The value of a variable, or of a `PassedValue`, is named like these.
        if getattr(key, "name", None) != "value":
            path_in_value.append(key)
    value_path = path_of(number)
    call = current_call()
    if value_path is None and call is not None:
        value_path = dict(zip(*call.values, strict=True)).get(number)
    place = "a new value"
    if value_path is not None:
        place = place_of(value_path)
    return place + keystr(tuple(path_in_value))


def argument_at(path: KeyPath) -> str:
    """Returns the user's notation of a JAX path among the arguments."""
    call = current_call()
    names: list[str] = []
    if call is not None:
        names = argument_names(call)
    return _path_text(path, names)


def argument_names(call: TransformCall) -> list[str]:
    """Returns the names of the positional arguments of a call."""
    if call.names is not None:
        return call.names
    return parameter_names(call.fn)


def parameter_names(fn: Callable[..., Any]) -> list[str]:
    """Returns the names of the positional parameters."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return []
    return list(code.co_varnames[: code.co_argcount])


# Errors in the user's names. Each says what is wrong, where, and what to write instead.


def call_title(fallback: str = "a transformation") -> str:
    """Returns the title of the open call, for errors."""
    call = current_call()
    return fallback if call is None else call.title


def _line_to_change() -> str:
    call = current_call()
    return "" if call is None else f" The line to change is {call.line}"


def unmatched_error(
    x: PyTree, path: Path, filters: Sequence[Filter]
) -> errors.StateFilterError:
    """Returns the error for a part of an object that matches no filter."""
    call = current_call()
    spec = "a filter"
    if call is not None:
        spec = _spec_of(path, call.specs)
    return errors.StateFilterError(
        f"{call_title()}: {spec} has no filter for {place_of(path)}, a {type(x).__name__}; its "
        f"filters are {filters_text(filters)}; add `...` as the last one."
        + _line_to_change()
    )


def _spec_of(path: Path, specs: tuple[str, str]) -> str:
    """Returns the parameter that holds the role of an argument, or of a result."""
    arguments_spec, results_spec = specs
    return results_spec if path[0] == 1 else arguments_spec


def inconsistent_alias_error(
    x: PyTree, first: tuple[Path, Role], second: tuple[Path, Role]
) -> errors.InconsistentAliasError:
    """Returns the error for a value with two roles, each a pair of its path and the role."""
    call = current_call()
    specs = ("in_axes", "out_axes")
    if call is not None:
        specs = call.specs
    is_derivative = lifting.DIFF in (first[1], second[1])
    settings_text: list[str] = []
    for path, role in (first, second):
        role_text = _describe_role(role, is_derivative)
        settings_text.append(
            f"{_spec_of(path, specs)} gives {role_text} to {place_of(path)}"
        )
    return errors.InconsistentAliasError(
        f"{call_title()}: the same {versions.class_and_shape(x)} is in two "
        f"places with different settings: {', and '.join(settings_text)}. All aliases of a "
        "reference need the same setting; use one for both, or pass nnx.clone(...) in one "
        "place." + _line_to_change()
    )


def _describe_role(role: Role, is_derivative: bool) -> str:
    if is_derivative:
        return "a gradient" if role is lifting.DIFF else "no gradient"
    return "nnx.Carry" if role is lifting.CARRY else repr(role)


def shared_object_error(
    x: PyTree, first: Path, second: Path
) -> errors.SharedObjectError:
    """Returns the error for an object in two places where objects are plain pytrees."""
    return errors.SharedObjectError(
        f"{call_title()} with graph=False or graph_updates=False: the same "
        f"{versions.class_and_shape(x)} is at {place_of(first)} and at {place_of(second)}; in "
        "this mode an object is a plain pytree without shared references. Pass nnx.clone(...) in "
        "one place, or set graph=True, graph_updates=True."
    )


def captured_object_error(x: PyTree, path: Path) -> errors.CapturedObjectError:
    """Returns the error for an outside object in the results or in an argument."""
    description = describe_object(x)
    if description:
        description = f" It {description}."
    return errors.CapturedObjectError(
        f"{call_title()}: {place_of(path)} is a {versions.class_and_shape(x)} that was created "
        "outside and not passed as an argument, so it would come out as another object (an "
        f"implicit clone).{description} Pass it as an argument, or return nnx.clone(...) of it."
        + _line_to_change()
    )


def loop_change_error(path: Path, change: str) -> errors.LoopStructureError:
    """Returns the error for an object that changed in a loop by more than its values."""
    return errors.LoopStructureError(
        f"{call_title('a loop')}: the body {change} at {place_of(path)}; objects "
        "that all iterations share or carry keep their attributes, references and static values, "
        "and only values of variables change. Create the attribute before the loop, with its value "
        "in a variable if it changes from one iteration to the next, and write to that variable, "
        "as in variable[...] = value."
    )


def warn_of_dropped_change(path: Path, x: PyTree) -> None:
    """Warns that a loop's body changes a value that all iterations share."""
    where = f"nnx.PathContains({path[-1]!r})"
    if isinstance(x, Variable):
        where = type(x).__name__
    errors.warn_user(
        f"{call_title('a loop')}: the body changes {place_of(path)}, which all iterations share "
        "(None); each of them begins with the value before the loop, and the change is dropped. "
        f"To keep it, carry the value, as nnx.StateAxes({{{where}: nnx.Carry, ...: None}}) does; "
        "otherwise change a copy, nnx.clone(...).",
        errors.SharedStateWarning,
    )


def warn_of_dropped_structure(path: Path, change: str) -> None:
    """Warns that a loop without graph updates drops a change of more than variables' values."""
    errors.warn_user(
        f"{call_title('a loop')}: the body {change} at {place_of(path)}, and the change is "
        "dropped; without graph updates, a loop keeps new values of variables, and arrays in "
        "attributes of a carry (nnx.Carry). Write the variable's value (variable[...] = value), "
        "keep what changes in a variable, or set graph=True, graph_updates=True.",
        errors.SharedStateWarning,
    )


def with_graph_options(
    fn: Callable[P, R], function: str | None = None
) -> Callable[P, R]:
    """Decorates an entry point with keyword arguments `**options: Unpack[GraphOptions]`.

    Its signature names them, and its errors are raised without Weft's frames. Without an argument
    for the parameter `function`, it returns a decorator.
    """
    signature = inspect.signature(fn)
    *parameters, _ = signature.parameters.values()
    for name, annotation in settings.GraphOptions.__annotations__.items():
        option = inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=annotation,
        )
        parameters.append(option)
    full_signature = signature.replace(parameters=parameters)
    names = frozenset(full_signature.parameters)

    @functools.wraps(fn)
    def entered(*args: P.args, **kwargs: P.kwargs) -> Any:
        for unknown_name in kwargs.keys() - names:
            raise TypeError(
                f"{fn.__name__}() got an unexpected keyword argument {unknown_name!r}"
            )
        if function is not None and not args and function not in kwargs:
            return functools.partial(entered, **kwargs)
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    entered.__signature__ = full_signature  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    return entered


def optional_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorates a transformation with graph options to return a decorator without a function."""
    return with_graph_options(fn, next(iter(inspect.signature(fn).parameters)))


def wrap_transformed(
    transformation: str,
    fn: Callable[P, Any],
    call: Callable[..., Any],
    specs: tuple[str, str] = ("in_axes", "out_axes"),
    in_axes: PyTree = None,
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
            with TransformCall(
                transformation, fn, args, specs, named=kwargs, place=place
            ):
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


def bind_positional(
    fn: Callable[..., Any], args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Returns the positional arguments and the keyword-only ones."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs  # the call itself says what is wrong
    return bound.args, bound.kwargs


def _with_defaults(fn: Callable[..., Any], args: Args, n: int) -> Args:
    """Returns `n` positional arguments, or those given if one of the others has no default."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return args
    all_args = list(args)
    for parameter in parameters[len(args) : n]:
        is_by_name = parameter.kind is parameter.KEYWORD_ONLY
        if is_by_name or parameter.default is parameter.empty:
            return args
        all_args.append(parameter.default)
    return tuple(all_args)


def with_kwargs_first(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` with the keyword arguments as a dict in first position."""
    return copy_name(fn, lambda kwargs, *args: fn(*args, **kwargs))


def check_unbound(transformation: str, fn: Callable[..., Any]) -> None:
    """Raises TransformArgumentError for a bound method, which would capture its object."""
    if inspect.ismethod(fn) and isinstance(fn.__self__, pytree.Pytree):
        owner = type(fn.__self__).__name__
        name = fn.__name__
        raise errors.TransformArgumentError(
            f"nnx.{transformation}: {name} is a bound method of a {owner}, which would not pass "
            f"through the transformation; transform {owner}.{name} and pass the object as its "
            f"first argument, or write @nnx.{transformation} above the method in the class."
        )


class StaticArguments:
    """A function with static arguments, which are hashable and skip the transformation.

    Its `fn` takes them in boxes, which are pytrees without leaves.
    """

    def __init__(
        self,
        transformation: str,
        option: str,
        fn: Callable[..., Any],
        argnums: int | Sequence[int],
    ):
        check_argnums(f"nnx.{transformation}", option, fn, argnums)
        self._argnums = frozenset(as_tuple(argnums))

        def unboxing(*args: PyTree, **kwargs: PyTree) -> PyTree:
            unboxed = list(args)
            for i, arg in enumerate(args):
                if isinstance(arg, Static):
                    unboxed[i] = arg.value
            return fn(*unboxed, **kwargs)

        self.fn = copy_name(fn, unboxing) if self._argnums else fn

    def wrapped(self, args: Args) -> Args:
        """Returns the arguments, with boxes around the static ones."""
        boxed = list(args)
        for i in self._argnums:
            if -len(args) <= i < len(args):
                boxed[i] = Static(args[i])
        boxed_args = tuple(boxed)
        call = current_call()
        if call is not None:
            call.args = boxed_args
        return boxed_args
