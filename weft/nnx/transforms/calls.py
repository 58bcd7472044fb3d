"""Open calls of transformations in the current thread, so that errors can use the user's names."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from weft.core.tracebacks import hide_frames
from weft.errors import (
    CallMismatchError,
    CapturedObjectError,
    InconsistentAliasError,
    LoopStructureError,
    SharedObjectError,
    StateFilterError,
    TransformArgumentError,
)
from weft.lifting import CARRY, DIFF
from weft.lifting.argnums import check_argnums
from weft.lifting.crossing import Static
from weft.lifting.names import takes_name
from weft.nnx.filters import Path, shown_filters
from weft.nnx.naming import Origin, known_of, origin, text_of
from weft.nnx.pytree import Pytree
from weft.nnx.variables import Variable

MISSING: Any = object()


class Call:
    """A call of a transformed function.

    Attributes:
        specs: the parameters that hold the roles of arguments and of results.
        inside: places of objects in the arguments of `fn`, if they differ from `args`.
        values: the numbers of the values after the call, and their paths.
        returned: places of objects in the result of `fn`.
    """

    def __init__(
        self,
        transformation: str,
        fn: Callable[..., Any],
        args: Any,
        specs: tuple[str, str],
        *,
        names: list[str] | None = None,
        named: Mapping[str, Any] = MappingProxyType({}),
        place: Origin | None = None,
    ):
        self.transformation, self.fn, self.args, self.specs = transformation, fn, args, specs
        self.names = parameter_names(fn) if names is None else names
        self.named, self.place = named, place
        # In words: the objects themselves belong to a trace that ends before the call does.
        self.inside: list[str] | None = None
        self.returned: list[str] = []
        self.values: tuple[Sequence[int], Sequence[Path]] = ([], ())

    @property
    def title(self) -> str:
        """The transformation and the function, as in `nnx.vmap(f)`."""
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"nnx.{self.transformation}({name})"

    @property
    def line(self) -> str:
        """The source line that transforms the function."""
        if self.place is not None:
            return text_of(self.place)
        code = getattr(self.fn, "__code__", None)
        return text_of((code, 0)) if code is not None else self.title

    @property
    def given(self) -> list[str]:
        """Places of the objects in the arguments of `fn`, in words."""
        if self.inside is not None:
            return self.inside
        named = list(self.named)
        return object_paths(tuple(self.named.values()), named) + object_paths(self.args, self.names)


class _Open(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_OPEN = _Open()


def current_call() -> Call | None:
    """Returns the innermost open call of this thread."""
    return _OPEN.calls[-1] if _OPEN.calls else None


@contextlib.contextmanager
def opened(call: Call) -> Iterator[Call]:
    """Makes a call the innermost one within the context."""
    _OPEN.calls.append(call)
    try:
        yield call
    finally:
        _OPEN.calls.pop()


def object_paths(tree: Any, names: list[str] | None) -> list[str]:
    """Returns the places of the objects in a tree, in words."""
    is_object = lambda x: isinstance(x, Pytree | Variable)  # noqa: E731
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_object):
        if is_object(x):
            first, rest = path[:1], path[1:] if names is not None else path
            root = "the result"
            if names is not None:
                i = first[0].idx
                root = names[i] if i < len(names) else f"args[{i}]"
            found.append(root + jax.tree_util.keystr(rest))
    return found


def place_of(path: Path) -> str:
    """Returns a path from the pair of arguments and results in the user's notation."""
    part, i, *below = path
    call, roots = current_call(), []
    if call is not None and part == 1:
        roots = call.returned
    elif call is not None:
        roots = call.given
    which: Any = i
    unnamed = f"args[{which}]" if part == 0 else "the result"
    root = roots[which] if which < len(roots) else unnamed
    return root + "".join(f".{p}" if isinstance(p, str) else f"[{p!r}]" for p in below)


def note_values(keys: Sequence[int], paths: Sequence[Path]) -> None:
    """Records the paths of values by number in the open call, for errors."""
    if (call := current_call()) is not None:
        call.values = keys, paths


def place_of_value(path_of: Callable[[int], Path | None], path: Any) -> str:
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


def argument_at(path: Any) -> str:
    """Returns the user's notation of a JAX path among the arguments."""
    call, i = current_call(), path[0].idx
    name = call.names[i] if call is not None and i < len(call.names) else f"args[{i}]"
    return name + jax.tree_util.keystr(path[1:])


def parameter_names(fn: Any) -> list[str]:
    """Returns the names of the positional parameters."""
    code = getattr(fn, "__code__", None)
    return list(code.co_varnames[: code.co_argcount]) if code is not None else []


def _shown(x: Any) -> str:
    value = x._value if isinstance(x, Variable) else None
    shape = f" of shape {value.shape}" if hasattr(value, "shape") else ""
    return f"{type(x).__name__}{shape}"


def _said(role: Any, is_derivative: bool) -> str:
    if is_derivative:
        return "a gradient" if role is DIFF else "no gradient"
    return "nnx.Carry" if role is CARRY else repr(role)


def _in_call(fallback: str = "a transformation") -> str:
    call = current_call()
    return call.title if call is not None else fallback


def unmatched(x: Any, path: Path, filters: Sequence[Any]) -> Exception:
    """Returns the error for a part of an object that matches no filter."""
    call = current_call()
    spec = call.specs[path[0]] if call is not None else "a filter"  # pyright: ignore[reportArgumentType, reportCallIssue]
    return StateFilterError(
        f"{_in_call()}: {spec} has no filter for {place_of(path)}, a {type(x).__name__}; its "
        f"filters are {shown_filters(filters)}; add `...` as the last one."
        + (f" The line to change is {call.line}" if call is not None else "")
    )


def inconsistent_aliases(x: Any, first: tuple[Path, Any], second: tuple[Path, Any]) -> Exception:
    """Returns the error for a value with two roles, each a pair of its path and the role."""
    call = current_call()
    specs = call.specs if call is not None else ("in_axes", "out_axes")
    is_derivative = any(role is DIFF for _, role in (first, second))
    said = [
        f"{specs[path[0]]} gives {_said(role, is_derivative)} to {place_of(path)}"  # pyright: ignore[reportArgumentType, reportCallIssue]
        for path, role in (first, second)
    ]
    return InconsistentAliasError(
        f"{_in_call()}: the same {_shown(x)} is in two "
        f"places with different settings: {said[0]}, and {said[1]}. All aliases of a "
        "reference need the same setting; use one for both, or pass nnx.clone(...) in one "
        "place." + (f" The line to change is {call.line}" if call is not None else "")
    )


def shared_in_tree_mode(x: Any, first: Path, second: Path) -> Exception:
    """Returns the error for an object in two places where objects are plain pytrees."""
    return SharedObjectError(
        f"{_in_call()} with graph=False or "
        f"graph_updates=False: the same {_shown(x)} is at {place_of(first)} and at "
        f"{place_of(second)}; in this mode an object is a plain pytree without shared references. "
        "Pass nnx.clone(...) in one place, or set graph=True, graph_updates=True."
    )


def captured_output(x: Any, path: Path) -> Exception:
    """Returns the error for an outside object in the results or in an argument."""
    call = current_call()
    return CapturedObjectError(
        f"{_in_call()}: {place_of(path)} is a {_shown(x)} that was created outside and not "
        "passed as an argument, so it would come out as another object (an implicit clone)."
        + (f" It {known}." if (known := known_of(x)) else "")
        + " Pass it as an argument, or return "
        "nnx.clone(...) of it." + (f" The line to change is {call.line}" if call else "")
    )


def changed_in_loop(path: Path, what: str) -> Exception:
    """Returns the error for an object that changed in a loop by more than its values."""
    return LoopStructureError(
        f"{_in_call('a loop')}: the body {what} at {place_of(path)}; objects "
        "that all iterations share or carry keep their attributes, references and static values, "
        "and only values of variables change. Create the attribute before the loop, with its value "
        "in a variable if it changes from one iteration to the next."
    )


def made_again(path: Path) -> Exception:
    """Returns the error for an object that a loop's body makes in each iteration."""
    return LoopStructureError(
        f"{_in_call('a loop')}: the body makes an attribute at {place_of(path)}, which exists "
        "already; a loop carries the objects that its body makes, so make it only if it is missing "
        "(if not hasattr(...)), or before the loop."
    )


def made_of_own_keys(path: Path | None) -> Exception:
    """Returns the error for a variable made before a loop from keys of one iteration."""
    at = "a PRNG stream" if path is None else place_of(path)
    return LoopStructureError(
        f"{_in_call('a loop')}: the body makes an attribute whose initial value depends on {at}, "
        "which differs between iterations; draw from a carried stream, or make the attribute "
        "before the loop."
    )


def transformed(
    transformation: str,
    fn: Callable[..., Any],
    call: Callable[..., Any],
    specs: tuple[str, str] = ("in_axes", "out_axes"),
    in_axes: Any = None,
) -> Callable[..., Any]:
    """Returns the transformed function that users call.

    Args:
        transformation: its name.
        fn: the user's function, which lends the result its name and parameters.
        call: takes a dict of the keyword-only arguments, then the positional arguments.
        specs: the parameters that hold the roles of arguments and of results.
        in_axes: roles of the arguments; a tuple may include omitted arguments with defaults.

    Raises:
        TransformArgumentError: if `fn` is a bound method.
    """
    check_unbound(transformation, fn)
    place = origin()

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            if kwargs:
                args, kwargs = by_position(fn, args, kwargs)
            if isinstance(in_axes, tuple | list) and len(args) < len(in_axes):
                args = _with_defaults(fn, args, len(in_axes))
            with opened(Call(transformation, fn, args, specs, named=kwargs, place=place)):
                return call(kwargs, *args)
        except Exception as error:
            hide_frames(error)
            raise

    return wrapper


def by_position(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def only_by_position(transformation: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `call`, which has roles for positional arguments only, to refuse others."""

    def checked(kwargs: dict[str, Any], *args: Any) -> Any:
        if kwargs:
            raise CallMismatchError(
                f"nnx.{transformation}: {', '.join(kwargs)} can only be passed by name, but roles "
                "of arguments go by position; make it a positional parameter."
            )
        return call(*args)

    return checked


def taking_named(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` with the keyword arguments as a dict in first position."""
    return takes_name(fn, lambda kwargs, *args: fn(*args, **kwargs))


def check_unbound(transformation: str, fn: Any) -> None:
    """Raises TransformArgumentError for a bound method, which would capture its object."""
    if inspect.ismethod(fn) and isinstance(fn.__self__, Pytree):
        owner, name = type(fn.__self__).__name__, fn.__name__
        raise TransformArgumentError(
            f"nnx.{transformation}: {name} is a bound method of a {owner}, which would not pass "
            f"through the transformation; transform {owner}.{name} and pass the object as its "
            f"first argument, or write @nnx.{transformation} above the method in the class."
        )


def recorded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fn` to record its result in the open call, for errors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if (call := current_call()) is not None:
            call.returned = object_paths(result, None)
        return result

    return takes_name(fn, run)


class StaticArguments:
    """A function with static arguments, which are hashable and skip the transformation.

    Its `fn` takes them in boxes, which are pytrees without leaves.
    """

    def __init__(self, title: str, what: str, fn: Callable[..., Any], argnums: int | Sequence[int]):
        self._argnums = frozenset((argnums,) if isinstance(argnums, int) else argnums)
        check_argnums(f"nnx.{title}", what, fn, self._argnums)
        self.fn = _unboxing(fn) if self._argnums else fn

    def wrapped(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments, with boxes around the static ones."""
        at = {i + len(args) if i < 0 else i for i in self._argnums}
        boxed = tuple(Static(x) if i in at else x for i, x in enumerate(args))
        if (call := current_call()) is not None:
            call.args = boxed
        return boxed


def _unboxing(fn: Callable[..., Any]) -> Callable[..., Any]:
    def unboxing(*args: Any, **kwargs: Any) -> Any:
        return fn(*(x.value if isinstance(x, Static) else x for x in args), **kwargs)

    return takes_name(fn, unboxing)
