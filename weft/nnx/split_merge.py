"""Conversion of objects to descriptions and states, and back: split, merge and related functions.

A state holds the object's own variables, and merging puts a state's variables into the new object,
so no value is copied; `clone` copies. Inside a transformation both are new, as JAX recreates them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import jax

from weft.errors import GraphStructureError, ObjectArgumentError, warn_deprecated
from weft.nnx import settings
from weft.nnx.filters import All, Filter, OfType, Path, grouped, to_predicate
from weft.nnx.graph import (
    FlatGraph,
    GraphDef,
    VariableDef,
    build_graph,
    copies,
    find_duplicates,
    flatten_graph,
    leaf_defs,
    leaves_of,
    with_plain_values,
)
from weft.nnx.pytree import TreePlaces, is_array
from weft.nnx.refs import initial_ref
from weft.nnx.state import (
    FlatState,
    State,
    _flatten_state,
    _flatten_state_with_keys,
    from_flat_state,
    merge_state,
    path_text,
    split_state,
    to_flat_state,
)
from weft.nnx.variables import Variable, is_variable, map_value, value_of

T = TypeVar("T")


def _flattened(
    node: object, graph: bool | None, known: Mapping[Any, int] | None = None
) -> FlatGraph:
    """Splits an object as a graph, or without graphs as a tree."""
    references, _ = settings.resolve_graph_options(graph)
    places = None if references else TreePlaces()
    return flatten_graph(node, known={} if known is None else known, places=places)


PureState = tuple[GraphDef[T], State]
"""An object split in two, as `split` returns it."""


def split(node: object, *filters: Filter, graph: bool | None = None) -> tuple[Any, ...]:
    """Splits an object into a description and states.

    Args:
        node: object, or pytree of objects.
        *filters: one state each; without filters, one state with everything.
        graph: whether objects may be shared; by default by `nnx.set_graph_mode`.

    Raises:
        StateFilterError: if no filter matches a value.
        SharedObjectError: without graphs, if a variable is at several places.
        GraphStructureError: without graphs, for an object of a class with `pytree=False`.

    >>> graphdef, state = nnx.split(nnx.Dict(factor=nnx.Param(2.0)))
    >>> nnx.merge(graphdef, state).factor.get_value()
    2.0
    """
    flat = _flattened(node, graph)
    whole = from_flat_state(flat.items())
    if not filters:
        return flat.graphdef, whole
    states = split_state(whole, *filters)
    return flat.graphdef, *(states if len(filters) > 1 else (states,))


def merge(
    graphdef_or_graphstate: object,
    /,
    *states: object,
    copy: bool = False,
    recreate_variables: bool = True,
) -> Any:
    """Returns the object of a description and states; the inverse of `split` and `unpack`.

    Args:
        graphdef_or_graphstate: description, or a state from `unpack`, which includes it.
        *states: states; or one list of values, as `jax.tree.leaves` returns those of a state.
        recreate_variables: ignored; values become new variables.

    Raises:
        GraphStructureError: if a value is missing or unexpected, or in two states.
        ObjectArgumentError: if the first argument is not a description.
    """
    graphdef, states = _graphdef_and_states(graphdef_or_graphstate, states)
    if len(states) == 1:
        state = states[0]
    else:
        _check_disjoint(states)
        state = merge_state(*states) if states else State()
    leaves = leaves_of(graphdef, state)
    return build_graph(graphdef, copies(leaves) if copy else leaves, share=True)[0]


def _check_disjoint(states: Sequence[object]) -> None:
    paths = Counter(path for state in states for path, _ in to_flat_state(state))
    for path, count in paths.items():
        if count > 1:
            raise GraphStructureError(
                f"merge was given {count} values at {path_text(path)!r}, in several states; remove "
                "all but one, or join the states with nnx.merge_state, where the last one counts."
            )


def _graphdef_and_states(
    first: object, states: tuple[Any, ...]
) -> tuple[GraphDef, tuple[Any, ...]]:
    if isinstance(first, GraphState):
        return first._graphdef, (first, *states)
    if isinstance(first, GraphDef):
        return first, states
    raise ObjectArgumentError(
        f"merge was given a {type(first).__name__} first; give the description that nnx.split "
        "returned, and then the states, or the result of nnx.unpack."
    )


def unpack(node: object, *filters: Filter, graph: bool | None = None) -> Any:
    """Splits an object like `split`, into `GraphState`s, which include its description.

    >>> params, rest = unpack(nnx.Dict(w=nnx.Param(1.0), n=nnx.Cache(2)), nnx.Param, ...)
    >>> nnx.merge(params, rest).w.get_value(), list(rest)
    (1.0, ['n'])
    """
    graphdef, *states = split(node, *filters, graph=graph)
    made = [GraphState(graphdef, state) for state in states]
    return made[0] if len(made) == 1 else tuple(made)


def state(node: object, *filters: Filter, graph: bool | None = None) -> Any:
    """Returns the variables and arrays of an object, or one state per filter with those it matches.

    >>> nnx.to_pure_dict(nnx.state(nnx.Dict(w=nnx.Param(1.0), n=nnx.Cache(2)), nnx.Param))
    {'w': 1.0}
    """
    groups, _ = grouped(_flattened(node, graph).items(), filters or (...,))
    states = [from_flat_state(group) for group in groups]
    return states[0] if len(states) == 1 else tuple(states)


variables = state
"""The same as `state`."""


def graphdef(node: T, /, *, graph: bool | None = None) -> GraphDef[T]:
    """Returns an object's description; equal for objects that differ only in values."""
    return _flattened(node, graph).graphdef


def clone(node: T, variables: bool = True, *, arrays: bool = False, graph: bool | None = None) -> T:
    """Returns a copy of an object, with its sharing preserved.

    Args:
        variables: whether to copy variables; otherwise they are shared.
        arrays: whether to copy arrays as well.
    """

    def copied(x: object) -> Any:
        return x.copy() if arrays and isinstance(x, jax.Array) else x

    flat = _flattened(node, graph)
    leaves = [map_value(copied, x) if variables else copied(x) for x in flat.leaves]
    return build_graph(flat.graphdef, leaves, share=True)[0]


def map(
    f: Callable[[Path, Any], Any],
    node: object,
    /,
    *,
    graph: bool | None = None,
    recreate_variables: bool = True,
) -> Any:
    """Returns a copy of an object with `f(path, value)` in place of each variable and array.

    Args:
        f: returns a variable, which the copy holds itself, or the value of one.
        recreate_variables: whether a value becomes a variable; otherwise an attribute is the value.
    """
    flat = _flattened(node, graph)
    leaves = [f(path, x) for path, x in flat.items()]
    if recreate_variables:
        return build_graph(flat.graphdef, leaves, share=True)[0]
    graphdef, leaves = with_plain_values(flat.graphdef, leaves)
    return build_graph(graphdef, leaves, share=True)[0]


def as_pure(tree: object) -> Any:
    """Returns a pytree with variables replaced by their values.

    >>> as_pure([nnx.Param(1), 2])
    [1, 2]
    """
    return jax.tree.map(value_of, tree, is_leaf=is_variable)


def pure(tree: object) -> Any:
    """Returns `as_pure(tree)`; deprecated."""
    warn_deprecated("nnx.pure", "call nnx.as_pure")
    return as_pure(tree)


def flatten(
    node: object,
    /,
    *,
    with_paths: bool = True,
    ref_index: RefMap | None = None,
    ref_outer_index: Mapping[Any, int] | None = None,
    graph: bool | None = None,
) -> tuple[GraphDef, Any]:
    """Returns an object as a description and a flat state.

    Args:
        with_paths: whether to return a flat state; otherwise a list of variables' values.
        ref_index: indices of objects in other descriptions; updated with new objects.
        ref_outer_index: indices in another description to record for objects of this one.

    >>> graphdef, leaves = nnx.flatten(nnx.List([nnx.Param(1.0)]), with_paths=False)
    >>> nnx.unflatten(graphdef, leaves)[0][...]
    1.0
    """
    known = RefMap() if ref_index is None else ref_index
    first = 1 + max(known.values(), default=-1)
    flat = _flattened(node, graph, known)
    graphdef, new = flat.graphdef, list(enumerate(flat.objects, first))
    if ref_index is not None:
        ref_index.update((x, i) for i, x in new)
    if ref_outer_index is not None:
        there = {i: ref_outer_index[x] for i, x in new if x in ref_outer_index}
        graphdef = graphdef.with_outer_index(there)
    if with_paths:
        return graphdef, FlatState(flat.items(), sort=False)
    leaves = [x.get_raw_value() if isinstance(x, Variable) else x for x in flat.leaves]
    return graphdef, leaves


def unflatten(
    graphdef: GraphDef,
    state: Any,
    /,
    *,
    index_ref: dict[int, Any] | None = None,
    outer_index_outer_ref: Mapping[int, Any] | None = None,
    copy_variables: bool = False,
    recreate_variables: bool = True,
) -> Any:
    """Returns the object of a description and values; the inverse of `flatten`.

    Args:
        state: state, or list of values in the order of the description.
        index_ref: objects of other descriptions by index; updated with new objects.
        outer_index_outer_ref: objects to update, by recorded index (see `GraphDef.outer`).
        recreate_variables: ignored, see `merge`.

    Raises GraphStructureError if a value is missing or unexpected, or an object is unknown.
    """
    leaves = leaves_of(graphdef, state)
    there = outer_index_outer_ref or {}
    existing = {i: there[outer] for i, outer in graphdef.outer if outer in there}
    values = copies(leaves) if copy_variables else leaves
    root, objects = build_graph(graphdef, values, True, existing, known=index_ref or {})
    for (part, _), leaf in zip(leaf_defs(graphdef), leaves, strict=True):
        variable = existing.get(part.index) if isinstance(part, VariableDef) else None
        if isinstance(variable, Variable) and variable is not leaf:
            is_variable = isinstance(leaf, Variable)
            variable.update_from_state(leaf) if is_variable else variable.set_raw_value(leaf)
    if index_ref is not None:
        indices = sorted({*index_ref, *(n.index for n in graphdef.nodes if n.index is not None)})
        index_ref.update(zip(indices, objects, strict=True))
    return root


def as_abstract(tree: Any, graph: bool | None = None) -> Any:
    """Returns a copy of objects with shapes and dtypes in place of arrays.

    >>> as_abstract(nnx.Dict(w=nnx.Param(jnp.ones(2)))).w[...]
    ShapeDtypeStruct(shape=(2,), dtype=float32)
    """

    def abstract(x: Any) -> Any:
        is_kept = is_array(x) or isinstance(x, jax.Ref)
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_kept else x

    return map(lambda _, x: map_value(abstract, x), tree, graph=graph)


def set_metadata(node: object, /, *, only: Filter = Variable, **metadata: object) -> None:
    """Sets metadata of an object's variables that `only` matches."""
    matches = to_predicate(only)
    flat = flatten_graph(node)
    for path, x in flat.items():
        if isinstance(x, Variable) and matches(path, x):
            x.set_metadata(**metadata)


class GraphState(State):
    """State, complete or partial, with the description of its object.

    Raises ObjectArgumentError if an argument has another type.

    >>> whole = GraphState(*nnx.split(nnx.Dict(w=nnx.Param(1.0))))
    >>> nnx.merge(jax.tree.map(lambda x: x + 1, whole)).w.get_value()
    2.0
    """

    _graphdef: GraphDef

    def __init__(self, _graphdef: GraphDef, _state: State):
        if not isinstance(_graphdef, GraphDef) or not isinstance(_state, State):
            raise ObjectArgumentError(
                f"GraphState was given a {type(_graphdef).__name__} and a {type(_state).__name__}; "
                "give a description and a state, as nnx.split returns them."
            )
        super().__init__(_state, _copy=False)
        object.__setattr__(self, "_graphdef", _graphdef)

    @property
    def _state(self) -> State:
        return State(self._mapping, _copy=False)

    def __reduce__(self) -> Any:
        return GraphState, (self._graphdef, self._state)


def _flatten(state: GraphState) -> tuple[tuple[Any, ...], Any]:
    values, keys = _flatten_state(state)
    return values, (state._graphdef, keys)


def _flatten_with_keys(state: GraphState) -> tuple[Any, Any]:
    values, keys = _flatten_state_with_keys(state)
    return values, (state._graphdef, keys)


def _unflatten(fixed: Any, values: Any) -> GraphState:
    graphdef, keys = fixed
    return GraphState(graphdef, State(dict(zip(keys, values, strict=True)), _copy=False))


jax.tree_util.register_pytree_with_keys(GraphState, _flatten_with_keys, _unflatten, _flatten)


class RefMap(MutableMapping[Any, Any]):
    """Mapping by identity, which accepts unhashable keys such as variables and arrays.

    >>> a, b = nnx.Param(1), nnx.Param(1)
    >>> seen = RefMap([(a, 0)])
    >>> a in seen, b in seen
    (True, False)
    """

    def __init__(self, items: Iterable[tuple[Any, Any]] = ()):
        self._items: dict[int, tuple[Any, Any]] = {}
        for key, value in items:
            self[key] = value

    def __getitem__(self, key: object) -> Any:
        return self._items[id(key)][1]

    def __setitem__(self, key: object, value: object) -> None:
        self._items[id(key)] = (key, value)

    def __delitem__(self, key: object) -> None:
        del self._items[id(key)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._items

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        items = ", ".join(f"{type(k).__name__}: {v!r}" for k, v in self._items.values())
        return f"RefMap({{{items}}})"


A = TypeVar("A")


def with_vars(
    node: A,
    /,
    *,
    hijax: bool | None = None,
    ref: bool | None = None,
    mutable: bool | None = None,
    only: Filter = ...,
    allow_duplicates: bool = False,
) -> A:
    """Returns a copy of an object that holds its variables differently, and shares unaffected ones.

    Args:
        ref: whether to hold values in a `jax.Ref` (`weft.nnx.refs`); `hijax` is an alias.
        allow_duplicates: whether a variable may occur twice, which JAX rejects for a `jax.Ref`.

    Raises:
        GraphStructureError: if a variable occurs twice.
        VariableArgumentError: if a value for a `jax.Ref` has other leaves than arrays.

    >>> model = with_vars(nnx.Dict(n=nnx.Variable(jnp.array(0))), ref=True)
    >>> @jax.jit
    ... def step(model):
    ...     model.n[...] += 1
    >>> step(model)
    >>> int(model.n)
    1
    """
    asked = {"hijax": hijax, "ref": ref, "mutable": mutable}
    wanted = {name: value for name, value in asked.items() if value is not None}
    matches = to_predicate(All(OfType(Variable), only))
    flat = flatten_graph(node)
    leaves = [_with_storage(x, wanted) if matches(path, x) else x for path, x in flat.items()]
    may_repeat = allow_duplicates or not wanted
    for first, *others in [] if may_repeat else find_duplicates(node, only=matches):
        raise GraphStructureError(
            f"the variable at {path_text(first)!r} is also at "
            f"{', '.join(repr(path_text(path)) for path in others)}, but JAX accepts a reference "
            "only once; give allow_duplicates=True, or a copy at one place."
        )
    return build_graph(flat.graphdef, leaves, share=True)[0]


@functools.wraps(with_vars, assigned=("__annotations__",))
def vars_as(node: Any, /, **options: Any) -> Any:
    """Returns `with_vars(node, **options)`; deprecated."""
    warn_deprecated("nnx.vars_as", "call nnx.with_vars")
    return with_vars(node, **options)


def _with_storage(variable: Variable[Any], wanted: dict[str, bool]) -> Variable[Any]:
    there = {"mutable": True, **variable.get_metadata()}
    updates = {name: value for name, value in wanted.items() if there[name] != value}
    if not updates:
        return variable
    value = variable.get_raw_value()
    if updates.get("ref") or updates.get("hijax"):
        metadata = {**variable._metadata, **updates}
        value = initial_ref(value, metadata, updates, type(variable).__name__)
    new = variable.copy(value, **updates)
    if updates.get("mutable"):
        new.del_metadata("mutable")
    return new
