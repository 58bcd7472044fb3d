"""Modules: objects with layers, and operations on all of their submodules.

During tracing, a module's call opens a `jax.named_scope` with the name that its calling module
holds it under, so that profiles and compiled text show the layer of each operation.

During `nnx.capture`, an attribute of each module collects sown values. It is part of the module's
state, so it passes through transformations inside the call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from weft.core.tracing import ThreadStack
from weft.errors import GraphStructureError, ModuleAttributeNotFoundError, warn_deprecated
from weft.lifting.traces import current_trace, is_tracing
from weft.nnx import split_merge
from weft.nnx.filters import Filter, Path, to_predicate
from weft.nnx.pytree import Pytree, iter_children, iter_graph
from weft.nnx.variables import Perturbation, Variable, variable_type_from_name

T = TypeVar("T")
_MISSING: Any = object()


def append_sown(xs: tuple[Any, ...], x: object) -> tuple[Any, ...]:
    """Returns a tuple of sown values with another one, the default of `Module.sow`."""
    return (*xs, x)


# Running module calls, each with the names of the modules that it holds, by id.
_RUNNING = ThreadStack[tuple[Pytree | None, dict[int, str]]]()


def _call_in_named_scope(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def in_scope(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not is_tracing():
            return fn(self, *args, **kwargs)
        calls = _RUNNING.items
        above, names = calls[-1] if calls else (None, {})
        if above is self:  # a base class's method
            return fn(self, *args, **kwargs)
        calls.append((self, _names_of(self)))
        try:
            with jax.named_scope(names.get(id(self)) or type(self).__name__):
                return fn(self, *args, **kwargs)
        finally:
            calls.pop()

    return in_scope


def _names_of(module: Pytree) -> dict[int, str]:
    """Returns the attribute and keys by which a module holds each other one, by id."""
    names: dict[int, str] = {}

    def note(name: str, value: object) -> None:
        if isinstance(value, list | dict):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                note(f"{name}_{key}", item)
        elif isinstance(value, Pytree):
            names.setdefault(id(value), name)

    for name, value in vars(module).items():
        if isinstance(value, Pytree):
            note(name, value)
    return names


class Module(Pytree):
    """Base class of modules: objects whose attributes are variables, modules and plain values.

    >>> class Linear(nnx.Module):
    ...     def __init__(self, features_in, features_out, *, rngs):
    ...         self.kernel = nnx.Param(rngs.params.normal((features_in, features_out)))
    ...     def __call__(self, x):
    ...         return x @ self.kernel
    >>> Linear(3, 2, rngs=nnx.Rngs(0))(jnp.ones((4, 3))).shape
    (4, 2)
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isfunction(call := vars(cls).get("__call__")):
            cls.__call__ = _call_in_named_scope(call)

    def sow(
        self,
        variable_type: type[Variable[Any]] | str,
        name: str,
        value: object,
        reduce_fn: Callable[[Any, Any], Any] = append_sown,
        init_fn: Callable[[], Any] = tuple,
    ) -> bool:
        """Stores a value in a variable; returns False if `nnx.capture` omits its kind.

        A trainer reports what is sown as "summaries". Over the batches of an evaluation, a plain
        number is averaged as it is, each batch with equal weight; a `WeightedScalar` of
        `weft.hierarchy` by its weight; and a metric of `weft.metrics`, such as F1, adds up.

        Args:
            variable_type: class of the variable, or its name (see `variable_type_from_name`).
            reduce_fn: combines the stored value and the new one; by default appends to a tuple.

        Raises GraphStructureError if the attribute exists and is not such a variable.
        """
        there, kind = vars(self).get(name, _MISSING), _kind(variable_type)
        captured = vars(self).get(CAPTURED)
        if captured is not None:
            return captured.sow(kind, name, value, reduce_fn, init_fn)
        if there is _MISSING:
            setattr(self, name, kind(reduce_fn(init_fn(), value)))
            return True
        _check_type(self, name, there, kind)
        there.set_value(reduce_fn(there.get_value(), value))
        return True

    def perturb(
        self, name: str, value: object, variable_type: type[Variable[Any]] | str = Perturbation
    ) -> Any:
        """Adds a variable of zeros to a value, so that the variable's gradient is the value's.

        Args:
            name: name of the variable; the first call creates it.
            value: an array; use the returned one in its place.

        Raises GraphStructureError if the attribute exists and is not such a variable.
        """
        there, kind = vars(self).get(name, _MISSING), _kind(variable_type)
        captured = vars(self).get(CAPTURED)
        if captured is not None:
            added = captured.perturbation(kind, name, value)
            return value if added is None else jax.tree.map(jnp.add, value, added)
        if there is _MISSING:
            there = kind(jax.tree.map(jnp.zeros_like, value))
            setattr(self, name, there)
        _check_type(self, name, there, kind)
        return jax.tree.map(jnp.add, value, there.get_value())

    def iter_modules(self) -> Iterator[tuple[Path, "Module"]]:
        """Yields the modules in this one, and itself last, with their paths; deprecated."""
        warn_deprecated("module.iter_modules()", "call nnx.iter_modules(module)")
        return iter_modules(self)

    def iter_children(self) -> Iterator[tuple[Hashable, Any]]:
        """Yields the modules and variables that are attributes, by name; deprecated."""
        warn_deprecated("module.iter_children()", "call nnx.iter_children(module)")
        return iter_children(self)

    def set_attributes(
        self,
        *filters: Filter,
        raise_if_not_found: bool = True,
        graph: bool | None = None,
        **attributes: object,
    ) -> None:
        """Sets attributes of this module and its submodules that have them and match the filters.

        Raises ModuleAttributeNotFoundError if no module has one of them, if `raise_if_not_found`.
        """
        _set_attributes(self, filters, raise_if_not_found, attributes)

    def train(self, **attributes: object) -> None:
        """Sets `deterministic` and `use_running_average` to False, and `attributes` as given."""
        modes = {"deterministic": False, "use_running_average": False}
        self.set_attributes(**{**modes, **attributes}, raise_if_not_found=False)

    def eval(self, **attributes: object) -> None:
        """Sets `deterministic` and `use_running_average` to True, and `attributes` as given."""
        modes = {"deterministic": True, "use_running_average": True}
        self.set_attributes(**{**modes, **attributes}, raise_if_not_found=False)


def _kind(variable_type: type[Variable[Any]] | str) -> type[Variable[Any]]:
    if isinstance(variable_type, str):
        return variable_type_from_name(variable_type, allow_register=True)
    return variable_type


def _check_type(module: Module, name: str, there: object, wanted: type[Variable[Any]]) -> None:
    if not isinstance(there, wanted):
        raise GraphStructureError(
            f"{type(module).__name__}.{name} is a {type(there).__name__}, and should be a "
            f"{wanted.__name__}; use another name."
        )


def _set_attributes(
    node: object, filters: tuple[Filter, ...], raise_if_not_found: bool, attributes: dict[str, Any]
) -> None:
    matches = to_predicate(filters or True)
    places = [
        (module, name)
        for path, module in iter_graph(node)
        if isinstance(module, Pytree) and matches(path, module)
        for name in attributes
        if name in vars(module)
    ]
    missing = set(attributes) - {name for _, name in places}
    if missing and raise_if_not_found:
        raise ModuleAttributeNotFoundError(
            f"no selected module in {type(node).__name__} has the attributes "
            f"{', '.join(sorted(missing))}; give raise_if_not_found=False if this is intended."
        )
    for module, name in places:
        setattr(module, name, attributes[name])


def iter_modules(module: object, /, *, graph: bool | None = None) -> Iterator[tuple[Path, Module]]:
    """Yields the modules in an object with their paths, inner ones first; `graph` is ignored.

    >>> [path for path, _ in nnx.iter_modules(nnx.List([nnx.List([]), nnx.Param(1)]))]
    [(0,), ()]
    """
    return ((path, x) for path, x in iter_graph(module) if isinstance(x, Module))


def with_attributes(
    node: T,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
    **attributes: object,
) -> T:
    """Returns a copy of an object with other attributes in modules that `only` matches.

    The copy shares the variables.

    Raises ModuleAttributeNotFoundError if no module has one of them, if `raise_if_not_found`.

    >>> nnx.with_attributes(nnx.Dropout(0.5), deterministic=True).deterministic
    True
    """
    made = split_merge.clone(node, variables=False)
    _set_attributes(made, (only,), raise_if_not_found, attributes)
    return made


def view(
    node: T,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
    **kwargs: object,
) -> T:
    """Returns a copy of an object in another mode, which shares its variables.

    The `set_view` of each module that `only` matches receives those arguments that it accepts.

    Raises ModuleAttributeNotFoundError if no module accepts one of them, if `raise_if_not_found`.

    >>> dropout = nnx.Dropout(0.5)
    >>> nnx.view(dropout, deterministic=True).deterministic, dropout.deterministic
    (True, False)
    """
    made = split_merge.clone(node, variables=False)
    taken = [(m, _taken(m, kwargs)) for _, m in _with_views(made, only)]
    missing = set(kwargs).difference(*(names for _, names in taken))
    if missing and raise_if_not_found:
        raise ModuleAttributeNotFoundError(
            f"no selected module in {type(node).__name__} has a `set_view` that takes "
            f"{', '.join(sorted(missing))}; nnx.view_info shows what they take, and "
            "raise_if_not_found=False ignores it."
        )
    for module, names in taken:
        module.set_view(**{name: kwargs[name] for name in names})
    return made


def view_info(node: object, /, *, only: Filter = ..., graph: bool | None = None) -> str:
    """Returns the signatures of `set_view` of an object's modules that `only` matches, by class."""
    methods = {type(m): m.set_view for _, m in _with_views(node, only)}
    return "\n".join(
        f"{cls.__qualname__}:\n  set_view{_shown_signature(method)}"
        for cls, method in methods.items()
    )


def _shown_signature(method: Any) -> inspect.Signature:
    try:
        return inspect.signature(method, eval_str=True)
    except NameError:  # an annotation imported only for type checking
        return inspect.signature(method)


def _with_views(node: object, only: Filter) -> list[tuple[Path, Any]]:
    matches = to_predicate(only)
    found = ((path, m) for path, m in iter_graph(node) if isinstance(m, Pytree))
    return [(path, m) for path, m in found if hasattr(type(m), "set_view") and matches(path, m)]


def _taken(module: Any, kwargs: dict[str, Any]) -> list[str]:
    parameters = inspect.signature(module.set_view).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return [name for name in kwargs if takes_any or name in parameters]


CAPTURED = "_captured"
"""Name of the attribute."""


class UnreturnedValue(NamedTuple):
    """Placeholder for a value sown in an inner trace and not yet returned, with a previous one."""

    before: tuple[Any, ...]


class SownValues(Pytree):
    """Values sown by one module.

    Each kind has one variable from the start, with a dict by name, so that transformations that
    return only variables' values return sown values too.

    Args:
        kinds: kinds of variables to collect, excluding derived kinds.
        outputs: kind for the results of methods, or None.
    """

    def __init__(
        self,
        kinds: tuple[type[Variable[Any]], ...],
        outputs: type[Variable[Any]] | None,
        variables: dict[str, Variable[Any]],
    ):
        self.kinds, self.outputs = kinds, outputs
        values: dict[type[Variable[Any]], dict[str, Any]] = {kind: {} for kind in kinds}
        for name, variable in variables.items():
            values.setdefault(type(variable), {})[name] = variable.get_raw_value()
        self.variables = [kind.from_metadata(value, {}) for kind, value in values.items()]

    def sow(
        self,
        kind: type[Variable[Any]],
        name: str,
        value: object,
        reduce_fn: Callable[[Any, Any], Any],
        init_fn: Callable[[], Any],
    ) -> bool:
        """Stores a value as `Module.sow` does; returns False for kinds not collected."""
        if kind not in self.kinds:
            return False
        there = self._existing(kind, name)
        before = init_fn() if there is None else _values(there)[name]
        variable = self._variable_of_kind(kind) if there is None else there
        self._store(variable, name, reduce_fn(before, value))
        return True

    def perturbation(self, kind: type[Variable[Any]], name: str, value: object) -> Any:
        """Returns the term that `Module.perturb` adds, or None."""
        there = self._existing(kind, name)
        if there is not None:
            return _values(there)[name]
        if kind not in self.kinds:
            return None
        zeros = jax.tree.map(jnp.zeros_like, value)
        self._store(self._variable_of_kind(kind), name, zeros)
        return zeros

    def unreturned(self) -> Iterator[str]:
        """Yields names of values that copies sowed and their trace did not return."""
        for variable in self.variables:
            for name, value in variable.get_raw_value().items():
                if isinstance(value, UnreturnedValue):
                    yield name

    def values(self) -> Iterator[tuple[str, Variable[Any]]]:
        """Yields each value as a variable, sorted by name."""
        holder = {name: v for v in self.variables for name in v.get_raw_value()}
        for name in sorted(holder):
            yield name, type(holder[name])(holder[name].get_raw_value()[name])

    def _variable_of_kind(self, kind: type[Variable[Any]]) -> Variable[Any]:
        return next(variable for variable in self.variables if type(variable) is kind)

    def _store(self, variable: Variable[Any], name: str, value: object) -> None:
        here = current_trace()
        if variable._trace != here and self._info.trace == here:
            variable = self._replace_outer(variable, name)
        variable.set_raw_value({**variable.get_raw_value(), name: value})

    def _replace_outer(self, outer: Variable[Any], name: str) -> Variable[Any]:
        """Replaces an outer trace's variable, leaving a placeholder in it."""
        values = _values(outer)
        inner = type(outer).from_metadata(values, outer._metadata)
        self.variables[next(i for i, x in enumerate(self.variables) if x is outer)] = inner
        before = (values[name],) if name in values else ()
        noted = {**outer.get_raw_value(), name: UnreturnedValue(before)}
        outer.set_raw_value(noted, _unsafe_bypass_check=True)
        return inner

    def _existing(self, kind: type[Variable[Any]], name: str) -> Variable[Any] | None:
        there = next((v for v in self.variables if name in _values(v)), None)
        if there is not None and not isinstance(there, kind):
            raise GraphStructureError(
                f"{name!r} was sown as a {type(there).__name__}, and now as a {kind.__name__}, in "
                "one call; use another name."
            )
        return there


def _values(variable: Variable[Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in variable.get_raw_value().items():
        if not isinstance(value, UnreturnedValue):
            values[name] = value
        elif value.before:
            values[name] = value.before[0]
    return values
