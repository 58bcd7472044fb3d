"""Modules: objects with layers, and operations on all of their submodules.

During tracing, a module's call opens a `jax.named_scope` with the name that its calling module
holds it under, so that profiles and compiled text show the layer of each operation.

During `nnx.capture`, an attribute of each module collects sown values. It is part of the module's
state, so it passes through transformations inside the call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from weft.core.tracing import ThreadStack
from weft.errors import (
    GraphStructureError,
    ModuleAttributeNotFoundError,
    warn_deprecated,
)
from weft.lifting.traces import current_trace, is_tracing
from weft.nnx import split_merge
from weft.nnx.filters import Filter, Path, to_predicate
from weft.nnx.pytree import Pytree, iter_children, iter_graph
from weft.nnx.variables import Perturbation, Variable, variable_type_from_name
from weft.typing import PyTree

T = TypeVar("T")
R = TypeVar("R")
VariableType = type[Variable[Any]]


def append_sown(xs: tuple[T, ...], x: T) -> tuple[T, ...]:
    """Returns a tuple of sown values with another one, the default of `Module.sow`."""
    return (*xs, x)


class _ModuleCall(NamedTuple):
    """Running call of a module; `names` are those of the modules that it holds, by id."""

    module: Pytree
    names: dict[int, str]


_RUNNING_CALLS = ThreadStack[_ModuleCall]()


def _call_in_named_scope(fn: Callable[..., R]) -> Callable[..., R]:
    @functools.wraps(fn)
    def call(self: Pytree, /, *args: Any, **kwargs: Any) -> R:
        if not is_tracing():
            return fn(self, *args, **kwargs)
        scope_name = type(self).__name__
        caller = _RUNNING_CALLS.top
        if caller is not None:
            if caller.module is self:  # a base class's method
                return fn(self, *args, **kwargs)
            scope_name = caller.names.get(id(self), scope_name)
        running_calls = _RUNNING_CALLS.items
        running_calls.append(_ModuleCall(self, _names_of(self)))
        try:
            with jax.named_scope(scope_name):
                return fn(self, *args, **kwargs)
        finally:
            running_calls.pop()

    return call


def _names_of(module: Pytree) -> dict[int, str]:
    """Returns the attribute and keys by which a module holds each other one, by id."""
    names: dict[int, str] = {}

    def add_names(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                add_names(f"{name}_{key}", item)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                add_names(f"{name}_{index}", item)
        elif isinstance(value, Pytree):
            names.setdefault(id(value), name)  # the first of several names

    for name, value in vars(module).items():
        if isinstance(value, Pytree):  # also List and Dict
            add_names(name, value)
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
        call = vars(cls).get("__call__")
        if inspect.isfunction(call):
            cls.__call__ = _call_in_named_scope(call)

    def sow(
        self,
        variable_type: VariableType | str,
        name: str,
        value: PyTree,
        reduce_fn: Callable[[Any, Any], PyTree] = append_sown,
        init_fn: Callable[[], PyTree] = tuple,
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
        variable_type = _variable_type(variable_type)
        attributes = vars(self)
        captured = attributes.get(CAPTURED)
        if captured is not None:
            return captured.sow(variable_type, name, value, reduce_fn, init_fn)
        if name not in attributes:
            setattr(self, name, variable_type(reduce_fn(init_fn(), value)))
            return True
        variable = _checked_variable(self, name, variable_type)
        variable.set_value(reduce_fn(variable.get_value(), value))
        return True

    def perturb(
        self,
        name: str,
        value: PyTree,
        variable_type: VariableType | str = Perturbation,
    ) -> PyTree:
        """Adds a variable of zeros to a value, so that the variable's gradient is the value's.

        Args:
            name: name of the variable; the first call creates it.
            value: an array; use the returned one in its place.

        Raises GraphStructureError if the attribute exists and is not such a variable.
        """
        variable_type = _variable_type(variable_type)
        attributes = vars(self)
        captured = attributes.get(CAPTURED)
        if captured is not None:
            term = captured.perturbation(variable_type, name, value)
            if term is None:
                return value
            return jax.tree.map(jnp.add, value, term)
        if name not in attributes:
            term = jax.tree.map(jnp.zeros_like, value)
            setattr(self, name, variable_type(term))
        else:
            term = _checked_variable(self, name, variable_type).get_value()
        return jax.tree.map(jnp.add, value, term)

    def iter_modules(self) -> Iterator[tuple[Path, "Module"]]:
        """Yields the modules in this one, and itself last, with their paths; deprecated."""
        warn_deprecated(
            "module.iter_modules()", "call nnx.iter_modules(module)"
        )
        return iter_modules(self)

    def iter_children(
        self,
    ) -> Iterator[tuple[Hashable, Pytree | Variable[Any]]]:
        """Yields the modules and variables that are attributes, by name; deprecated."""
        warn_deprecated(
            "module.iter_children()", "call nnx.iter_children(module)"
        )
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


def _variable_type(variable_type: VariableType | str) -> VariableType:
    if isinstance(variable_type, str):
        return variable_type_from_name(variable_type, allow_register=True)
    return variable_type


def _checked_variable(
    module: Module, name: str, variable_type: VariableType
) -> Variable[Any]:
    """Returns the variable in an attribute, after a check of its type."""
    variable = vars(module)[name]
    if not isinstance(variable, variable_type):
        raise GraphStructureError(
            f"{type(module).__name__}.{name} is a {type(variable).__name__}, and should be a "
            f"{variable_type.__name__}; use another name."
        )
    return variable


def _set_attributes(
    node: PyTree,
    filters: tuple[Filter, ...],
    raise_if_not_found: bool,
    attributes: Mapping[str, object],
) -> None:
    matches = to_predicate(filters or True)
    places: list[tuple[Pytree, str]] = []
    for path, module in iter_graph(node):
        if not isinstance(module, Pytree) or not matches(path, module):
            continue
        for name in attributes:
            if name in vars(module):
                places.append((module, name))
    missing = attributes.keys() - {name for _, name in places}
    if missing and raise_if_not_found:
        raise ModuleAttributeNotFoundError(
            f"no selected module in {type(node).__name__} has the attributes "
            f"{', '.join(sorted(missing))}; give raise_if_not_found=False if this is intended."
        )
    for module, name in places:
        setattr(module, name, attributes[name])


def iter_modules(
    module: PyTree, /, *, graph: bool | None = None
) -> Iterator[tuple[Path, Module]]:
    """Yields the modules in an object with their paths, inner ones first; `graph` is ignored.

    >>> [path for path, _ in nnx.iter_modules(nnx.List([nnx.List([]), nnx.Param(1)]))]
    [(0,), ()]
    """
    for path, node in iter_graph(module):
        if isinstance(node, Module):
            yield path, node


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
    node_copy = split_merge.clone(node, variables=False)
    _set_attributes(node_copy, (only,), raise_if_not_found, attributes)
    return node_copy


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
    node_copy = split_merge.clone(node, variables=False)
    missing = set(kwargs)
    calls: list[tuple[_HasSetView, dict[str, object]]] = []
    for module in _modules_with_views(node_copy, only):
        accepted_kwargs = _accepted_kwargs(module.set_view, kwargs)
        missing -= accepted_kwargs.keys()
        calls.append((module, accepted_kwargs))
    if missing and raise_if_not_found:
        raise ModuleAttributeNotFoundError(
            f"no selected module in {type(node).__name__} has a `set_view` that takes "
            f"{', '.join(sorted(missing))}; nnx.view_info shows what they take, and "
            "raise_if_not_found=False ignores it."
        )
    for module, accepted_kwargs in calls:
        module.set_view(**accepted_kwargs)
    return node_copy


def view_info(
    node: PyTree, /, *, only: Filter = ..., graph: bool | None = None
) -> str:
    """Returns the signatures of `set_view` of an object's modules that `only` matches, by class."""
    text_by_class: dict[type, str] = {}
    for module in _modules_with_views(node, only):
        cls = type(module)
        signature = _signature_for_display(module.set_view)
        text_by_class[cls] = f"{cls.__qualname__}:\n  set_view{signature}"
    return "\n".join(text_by_class.values())


class _HasSetView(Protocol):
    @property
    def set_view(self) -> Callable[..., object]: ...


def _signature_for_display(method: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(method, eval_str=True)
    except NameError:  # an annotation imported only for type checking
        return inspect.signature(method)


def _modules_with_views(node: PyTree, only: Filter) -> list[_HasSetView]:
    matches = to_predicate(only)
    modules: list[Any] = []
    for path, module in iter_graph(node):
        is_viewable = isinstance(module, Pytree) and hasattr(
            type(module), "set_view"
        )
        if is_viewable and matches(path, module):
            modules.append(module)
    return modules


def _accepted_kwargs(
    method: Callable[..., object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Returns those of the keyword arguments that a method accepts."""
    parameters = inspect.signature(method).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(kwargs)
    return {name: x for name, x in kwargs.items() if name in parameters}


CAPTURED = "_captured"
"""Name of the attribute."""


class UnreturnedValue(NamedTuple):
    """Placeholder for a value sown in an inner trace and not yet returned.

    Attributes:
        previous: the value sown before that one, alone in a tuple; empty if there was none.
    """

    previous: tuple[PyTree, ...]


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
        kinds: tuple[VariableType, ...],
        outputs: VariableType | None,
        variables: Mapping[str, Variable[Any]],
    ):
        self.kinds = kinds
        self.outputs = outputs
        values_by_type: dict[VariableType, dict[str, PyTree]] = {}
        for kind in kinds:
            values_by_type[kind] = {}
        for name, variable in variables.items():
            values = values_by_type.setdefault(type(variable), {})
            values[name] = variable.get_raw_value()
        self.variables: list[Variable[dict[str, PyTree]]] = []
        for variable_type, values in values_by_type.items():
            self.variables.append(variable_type.from_metadata(values, {}))

    def sow(
        self,
        kind: VariableType,
        name: str,
        value: PyTree,
        reduce_fn: Callable[[Any, Any], PyTree],
        init_fn: Callable[[], PyTree],
    ) -> bool:
        """Stores a value as `Module.sow` does; returns False for kinds not collected."""
        if kind not in self.kinds:
            return False
        variable = self._variable_with(kind, name)
        if variable is None:
            variable = self._variable_of_kind(kind)
            stored_value = init_fn()
        else:
            stored_value = _values(variable)[name]
        self._store(variable, name, reduce_fn(stored_value, value))
        return True

    def perturbation(
        self, kind: VariableType, name: str, value: PyTree
    ) -> PyTree | None:
        """Returns the term that `Module.perturb` adds, or None."""
        variable = self._variable_with(kind, name)
        if variable is not None:
            return _values(variable)[name]
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
        variables: dict[str, Variable[Any]] = {}
        for variable in self.variables:
            for name, value in variable.get_raw_value().items():
                variables[name] = type(variable)(value)
        for name in sorted(variables):
            yield name, variables[name]

    def _variable_of_kind(
        self, kind: VariableType
    ) -> Variable[dict[str, PyTree]]:
        return next(x for x in self.variables if type(x) is kind)

    def _store(
        self, variable: Variable[dict[str, PyTree]], name: str, value: PyTree
    ) -> None:
        trace = current_trace()
        # This object is a copy that was merged in the running trace, which can't change an outer
        # trace's variable.
        if variable._trace != trace and self._info.trace == trace:
            variable = self._replace_outer(variable, name)
        variable.set_raw_value({**variable.get_raw_value(), name: value})

    def _replace_outer(
        self, outer_variable: Variable[dict[str, PyTree]], name: str
    ) -> Variable[dict[str, PyTree]]:
        """Replaces an outer trace's variable, leaving a placeholder in it."""
        values = _values(outer_variable)
        inner_variable = type(outer_variable).from_metadata(
            values, outer_variable._metadata
        )
        # By identity: variables of equal values are equal.
        for i, variable in enumerate(self.variables):
            if variable is outer_variable:
                self.variables[i] = inner_variable
                break
        placeholder = UnreturnedValue((values[name],) if name in values else ())
        outer_variable.set_raw_value(
            {**outer_variable.get_raw_value(), name: placeholder},
            _unsafe_bypass_check=True,
        )
        return inner_variable

    def _variable_with(
        self, kind: VariableType, name: str
    ) -> Variable[dict[str, PyTree]] | None:
        """Returns the variable that has a value of this name, if any; checks its kind."""
        for variable in self.variables:
            if name not in _values(variable):
                continue
            if not isinstance(variable, kind):
                raise GraphStructureError(
                    f"{name!r} was sown as a {type(variable).__name__}, and now as a "
                    f"{kind.__name__}, in one call; use another name."
                )
            return variable
        return None


def _values(variable: Variable[dict[str, PyTree]]) -> dict[str, PyTree]:
    """Returns the values in a variable of `SownValues`, previous ones for placeholders."""
    values: dict[str, PyTree] = {}
    for name, value in variable.get_raw_value().items():
        if not isinstance(value, UnreturnedValue):
            values[name] = value
        elif value.previous:
            values[name] = value.previous[0]
    return values
