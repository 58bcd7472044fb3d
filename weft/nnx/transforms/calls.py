"""Which transformations are open in this thread, so that errors can name what the user wrote."""

import contextlib
import functools
import inspect
import linecache
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from weft.config.origins import Origin
from weft.errors import (
    ArgumentMismatchError,
    CapturedObjectError,
    InconsistentAliasError,
    LoopStructureError,
    SharedObjectError,
    TransformArgumentError,
)
from weft.lifting.crossing import Static
from weft.nnx.filters import Path
from weft.nnx.pytree import Pytree
from weft.nnx.variables import Variable

MISSING: Any = object()


class Call:
    """A call of a transformed function.

    Attributes:
        transformation: its name, such as "vmap".
        fn: the user's function.
        args: what it was called with.
        specs: the parameters that say what happens to arguments and to results.
        inside: where the objects are in what `fn` was given, if not as in `args`.
        returned: where the objects are in what `fn` has returned.
    """

    def __init__(
        self, transformation: str, fn: Callable[..., Any], args: Any, specs: tuple[str, str]
    ):
        self.transformation, self.fn, self.args, self.specs = transformation, fn, args, specs
        # In words: the objects themselves belong to a trace that ends before the call does.
        self.inside: list[str] | None = None
        self.returned: list[str] = []

    @property
    def title(self) -> str:
        """The call in words."""
        return f"nnx.{self.transformation}({getattr(self.fn, '__name__', repr(self.fn))})"

    @property
    def line(self) -> str:
        """Where the function is transformed, and what stands there."""
        code = getattr(self.fn, "__code__", None)
        if code is None:
            return self.title
        line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
        place = str(Origin(code.co_filename, code.co_firstlineno))
        return place + (f": {line}" if line else "")


class _Open(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_OPEN = _Open()


def current_call() -> Call | None:
    """The innermost call that is open in this thread."""
    return _OPEN.calls[-1] if _OPEN.calls else None


@contextlib.contextmanager
def opened(call: Call) -> Iterator[Call]:
    """Makes a call the innermost one for as long as the context lasts."""
    _OPEN.calls.append(call)
    try:
        yield call
    finally:
        _OPEN.calls.pop()


def object_paths(tree: Any, names: list[str] | None) -> list[str]:
    """Where the objects in a tree are, in words."""
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


def _place(path: Path) -> str:
    """A path from the pair of arguments and results, as the user would write it."""
    part, i, *below = path
    call, roots = current_call(), []
    if call is not None and part == 1:
        roots = call.returned
    elif call is not None:
        roots = call.inside or object_paths(call.args, parameter_names(call.fn))
    which: Any = i
    unnamed = f"args[{which}]" if part == 0 else "the result"
    root = roots[which] if which < len(roots) else unnamed
    return root + "".join(f".{p}" if isinstance(p, str) else f"[{p!r}]" for p in below)


def parameter_names(fn: Any) -> list[str]:
    """The names of the parameters that can be given by position."""
    code = getattr(fn, "__code__", None)
    return list(code.co_varnames[: code.co_argcount]) if code is not None else []


def _shown(x: Any) -> str:
    value = x._value if isinstance(x, Variable) else None
    shape = f" of shape {value.shape}" if hasattr(value, "shape") else ""
    return f"{type(x).__name__}{shape}"


def inconsistent_aliases(x: Any, first: tuple[Path, Any], second: tuple[Path, Any]) -> Exception:
    """Two places of one value for which different things were said.

    Args:
        x: the value.
        first: a path from the pair of arguments and results, and what was said there.
        second: the other one.
    """
    call = current_call()
    specs = call.specs if call is not None else ("in_axes", "out_axes")
    said = [
        f"{specs[path[0]]} gives {role!r} to {_place(path)}"  # pyright: ignore[reportArgumentType, reportCallIssue]
        for path, role in (first, second)
    ]
    return InconsistentAliasError(
        f"{call.title if call is not None else 'a transformation'}: one {_shown(x)} is at two "
        f"places, for which different things are said: {said[0]}, and {said[1]}. All aliases of a "
        "reference cross in the same way; say the same for both, or give nnx.clone(...) at one "
        "place." + (f" The line to change is {call.line}" if call is not None else "")
    )


def shared_in_tree_mode(x: Any, first: Path, second: Path) -> Exception:
    """An object that is met twice where objects are plain pytrees."""
    call = current_call()
    return SharedObjectError(
        f"{call.title if call is not None else 'a transformation'} with graph=False or "
        f"graph_updates=False: one {_shown(x)} is at {_place(first)} and at {_place(second)}; "
        "there an object is a plain pytree, which has no shared references. Give nnx.clone(...) "
        "at one place, or say graph=True, graph_updates=True."
    )


def captured_output(x: Any, path: Path) -> Exception:
    """An object from outside that is among the results, or was made a part of an argument."""
    call = current_call()
    return CapturedObjectError(
        f"{call.title if call is not None else 'a transformation'}: {_place(path)} is a "
        f"{_shown(x)} that was made outside and was not given as an argument, so it would come "
        "out as another object (an implicit clone). Give it as an argument, or return "
        "nnx.clone(...) of it." + (f" The line to change is {call.line}" if call else "")
    )


def changed_in_loop(path: Path, what: str) -> Exception:
    """An object of a loop of which more than values has changed."""
    call = current_call()
    return LoopStructureError(
        f"{call.title if call is not None else 'a loop'}: the body {what} at {_place(path)}; what "
        "all iterations share or carry keeps its attributes, references and static values, and "
        "only values of variables change. Make the attribute before the loop, with its value in a "
        "variable if it changes from one iteration to the next."
    )


def transformed(
    transformation: str,
    fn: Callable[..., Any],
    call: Callable[..., Any],
    specs: tuple[str, str] = ("in_axes", "out_axes"),
) -> Callable[..., Any]:
    """A transformed function as users call it.

    Args:
        transformation: its name.
        fn: the user's function, whose name and parameters the result has.
        call: takes the arguments by position, and before them in a dict those that can only be
            given by name.
        specs: the parameters that say what happens to arguments and to results.

    Raises:
        TransformArgumentError: if `fn` is a bound method.
    """
    check_unbound(transformation, fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args, kwargs = by_position(fn, args, kwargs)
        with opened(Call(transformation, fn, args, specs)):
            return call(kwargs, *args)

    return wrapper


def by_position(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by position, and those that can only be given by name."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs  # the call itself says what is wrong
    return bound.args, bound.kwargs


def only_by_position(transformation: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of what knows arguments by their position, and so has nothing to say of others.

    Args:
        transformation: its name.
        call: takes the arguments by position.
    """

    def checked(kwargs: dict[str, Any], *args: Any) -> Any:
        if kwargs:
            raise ArgumentMismatchError(
                f"nnx.{transformation}: {', '.join(kwargs)} can only be given by name, and what is "
                "said of arguments goes by position; make it a parameter that has one."
            )
        return call(*args)

    return checked


def taking_named(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes the arguments given by name first, in a dict."""
    return lambda kwargs, *args: fn(*args, **kwargs)


def check_unbound(transformation: str, fn: Any) -> None:
    """Raises TransformArgumentError for a method of an object, which would capture the object."""
    if inspect.ismethod(fn) and isinstance(fn.__self__, Pytree):
        owner, name = type(fn.__self__).__name__, fn.__name__
        raise TransformArgumentError(
            f"nnx.{transformation}: {name} is a method of one {owner}, which would not go through "
            f"the transformation; transform {owner}.{name} and give it the object as its first "
            f"argument, or write @nnx.{transformation} above the method in the class."
        )


def recorded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose result is noted in the call that is open, for errors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if (call := current_call()) is not None:
            call.returned = object_paths(result, None)
        return result

    return run


class StaticArguments:
    """A function of which some arguments are hashable values that no transformation sees.

    Attributes:
        fn: takes them in a box that is a pytree without leaves.

    Args:
        fn: takes them as they are.
        argnums: their positions.
    """

    def __init__(self, fn: Callable[..., Any], argnums: int | Sequence[int]):
        self._argnums = frozenset((argnums,) if isinstance(argnums, int) else argnums)
        self.fn = _unboxing(fn) if self._argnums else fn

    def wrapped(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with boxes around those that are static."""
        at = {i % len(args) for i in self._argnums} if args else set()
        return tuple(Static(x) if i in at else x for i, x in enumerate(args))


def _unboxing(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: fn(*(x.value if isinstance(x, Static) else x for x in args))
