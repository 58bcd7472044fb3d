"""`capture`: calls that return sown values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from weft.errors import GraphStructureError, ObjectArgumentError
from weft.nnx import intercept, pytree, versions
from weft.nnx.filters import Path
from weft.nnx.module import CAPTURED, SownValues, append_sown
from weft.nnx.state import State, from_flat_state, path_text, to_flat_state
from weft.nnx.variables import Variable

_Kinds = tuple[type[Variable[Any]], ...]


def capture(
    fn: object,
    /,
    *var_types: type[Variable[Any]],
    init: State | None = None,
    method_outputs: type[Variable[Any]] | None = None,
) -> Callable[..., Any]:
    """Wraps a function to also return what modules sow and perturb in the call.

    The modules are those among the arguments, and that of `fn` if it is a module or a method. They
    are unchanged afterwards, and sow only the requested kinds.

    Args:
        fn: function, module or method. If omitted, the result is a decorator.
        *var_types: kinds of variables, one state each; the first that a variable is an instance of.
        init: initial values of variables by path, such as perturbations.
        method_outputs: kind under which to sow each method's result, by method name.

    Raises:
        ObjectArgumentError: if a kind is not a class of variables, or `fn` is not callable.
        GraphStructureError: if `init` does not fit the modules, two arguments sow at the same path,
            or a module merged inside a JAX transformation sows and its state is not returned.

    >>> class Double(nnx.Module):
    ...     def __call__(self, x):
    ...         self.sow(nnx.Intermediate, "doubled", 2 * x)
    ...         return 2 * x + 1
    >>> y, seen = capture(Double(), nnx.Intermediate)(3)
    >>> y, nnx.to_pure_dict(seen)
    (7, {'doubled': (6,)})
    """
    if isinstance(fn, type) and issubclass(fn, Variable):
        kinds = (fn, *var_types)
        return lambda fn: capture(fn, *kinds, init=init, method_outputs=method_outputs)
    for kind in (*var_types, *([] if method_outputs is None else [method_outputs])):
        if not (isinstance(kind, type) and issubclass(kind, Variable)):
            raise ObjectArgumentError(
                f"capture was given {kind!r}; give kinds of variables, such as nnx.Intermediate."
            )
    if not callable(fn):
        raise ObjectArgumentError(
            f"capture was given a {type(fn).__name__}, which is not callable; give a function, a "
            "module with a __call__, or a method."
        )
    owner: Any = fn if isinstance(fn, pytree.Pytree) else getattr(fn, "__self__", None)
    function: Any = fn

    def captured(*args: object, **kwargs: object) -> Any:
        roots = [owner, *args, *kwargs.values()]
        open_modules = _CapturedModules(
            [r for r in roots if r is not None], var_types, init, method_outputs
        )
        try:
            result = function(*args, **kwargs)
            states = list(open_modules.states())
        finally:
            open_modules.close()
        _remove_captured(result)
        return (result, *states) if var_types else result

    return captured if owner is fn else functools.wraps(function)(captured)


class _CapturedModules:
    """Modules of one call that collect sown values."""

    def __init__(self, roots: list[Any], kinds: _Kinds, init: Any, outputs: Any):
        self._kinds = kinds
        self._modules: list[tuple[int, Path, pytree.Pytree]] = []
        self._before: list[Any] = []
        seen: set[int] = set()
        for i, root in enumerate(roots):
            for path, x in intercept.iter_objects(root):
                if id(x) not in seen:
                    seen.add(id(x))
                    self._modules.append((i, path, x))
        first = _by_module(init, {path for _, path, _ in self._modules})
        for _, path, x in self._modules:
            self._before.append(vars(x).get(CAPTURED))
            _set_captured(x, SownValues(kinds, outputs, first.get(path, {})))
            if outputs is not None:
                intercept.intercept_calls(x, _sow_output)

    def states(self) -> Iterator[State]:
        """Yields the collected values, by kind."""
        found: dict[Path, tuple[int, Variable[Any]]] = {}
        for i, path, x in self._modules:
            captured = vars(x)[CAPTURED]
            for name in captured.unreturned():
                raise GraphStructureError(
                    f"the value sown or perturbed at {path_text((*path, name))!r} is lost: a copy "
                    "of the module, merged inside a JAX transformation, sowed it, and its state "
                    "was not returned; return nnx.state(module, kind) from the transformed "
                    "function, and pass it to nnx.update outside."
                )
            for name, variable in captured.values():
                where = (*path, name)
                if where in found and found[where][0] != i:
                    raise GraphStructureError(
                        f"two modules among the arguments sow at {path_text(where)!r}, so one of "
                        "the values would be lost; capture their calls one at a time, or pass "
                        "them together as one list or dict."
                    )
                found[where] = i, variable
        for n, kind in enumerate(self._kinds):
            others = self._kinds[:n]
            yield from_flat_state(
                (path, variable)
                for path, (_, variable) in found.items()
                if type(variable) in self._kinds
                and isinstance(variable, kind)
                and not isinstance(variable, others)
            )

    def close(self) -> None:
        """Restores the modules."""
        for (_, _, x), before in zip(self._modules, self._before, strict=True):
            intercept.stop_intercepting(x)
            _set_captured(x, before)


def _set_captured(x: pytree.Pytree, captured: SownValues | None) -> None:
    # Not by setattr, so that modules of another trace, in a function's closure, can sow.
    if captured is None:
        vars(x).pop(CAPTURED, None)
    else:
        vars(x)[CAPTURED] = captured
    if x._info.watched:
        versions.STRUCTURE_VERSION.end()


def _remove_captured(result: object) -> None:
    is_object = lambda x: isinstance(x, pytree.Pytree)  # noqa: E731
    for root in jax.tree.leaves(result, is_leaf=is_object):
        for _, x in intercept.iter_objects(root) if is_object(root) else ():
            intercept.stop_intercepting(x)
            _set_captured(x, None)


def _by_module(init: object, paths: set[Path]) -> Mapping[Path, dict[str, Variable[Any]]]:
    found: dict[Path, dict[str, Variable[Any]]] = {}
    for path, value in to_flat_state(init) if init is not None else ():
        if path[:-1] not in paths or not isinstance(value, Variable):
            what = "no module is there" if isinstance(value, Variable) else "it is not a variable"
            raise GraphStructureError(
                f"init has a {type(value).__name__} at {path_text(path)!r}, but {what}; give a "
                "state that capture returned for these arguments."
            )
        found.setdefault(path[:-1], {})[path[-1]] = value  # pyright: ignore[reportArgumentType]
    return found


def _sow_output(
    x: object, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    result = method(*args, **kwargs)
    captured = vars(x).get(CAPTURED)
    if captured is not None and captured.outputs is not None:
        captured.sow(captured.outputs, name, result, append_sown, tuple)
    return result
