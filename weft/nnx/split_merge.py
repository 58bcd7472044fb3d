"""Conversion of objects to descriptions and states, and back: split, merge and related functions.

A state holds the object's own variables, and merging puts a state's variables into the new object,
so no value is copied; `clone` copies. Inside a transformation both are new, as JAX recreates them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, TypeVar, overload

import jax

from weft.errors import (
    GraphStructureError,
    ObjectArgumentError,
    warn_deprecated,
)
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
    split_flat_state,
    to_flat_state,
)
from weft.nnx.variables import Variable, is_variable, map_value, value_of
from weft.typing import PyTree

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")


def _flattened(
    node: PyTree, graph: bool | None, indices: Mapping[Any, int] | None = None
) -> FlatGraph:
    """Splits an object as a graph, or without graphs as a tree."""
    is_graph, _ = settings.resolve_graph_options(graph)
    places = None if is_graph else TreePlaces()
    return flatten_graph(node, indices=indices or {}, places=places)


def _build(graphdef: GraphDef[T], leaves: Iterable[PyTree]) -> T:
    """Returns a new object that holds the given variables themselves."""
    root, _ = build_graph(graphdef, leaves, share=True)
    return root


def _one_or_all(states: Sequence[T]) -> T | tuple[T, ...]:
    return states[0] if len(states) == 1 else tuple(states)


PureState = tuple[GraphDef[T], State]
"""An object split in two, as `split` returns it."""


@overload
def split(
    node: T, first: Filter = ..., /, *, graph: bool | None = ...
) -> tuple[GraphDef[T], State]: ...
@overload
def split(
    node: T,
    first: Filter,
    second: Filter,
    /,
    *filters: Filter,
    graph: bool | None = ...,
) -> tuple[GraphDef[T], State, State, *tuple[State, ...]]: ...
@overload
def split(
    node: T, *filters: Filter, graph: bool | None = ...
) -> tuple[GraphDef[T], *tuple[State, ...]]: ...
def split(
    node: PyTree, *filters: Filter, graph: bool | None = None
) -> tuple[Any, ...]:
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
    if not filters:
        return flat.graphdef, from_flat_state(flat.items())
    # Of paths, which filters need; a nested state would be taken apart again.
    groups = split_flat_state(FlatState(flat.items()), filters)
    states = [group.to_nested_state() for group in groups]
    return flat.graphdef, *states


@overload
def merge(
    graphdef_or_graphstate: GraphDef[T],
    /,
    *states: PyTree,
    copy: bool = ...,
    recreate_variables: bool = ...,
) -> T: ...
@overload
def merge(
    graphdef_or_graphstate: GraphState,
    /,
    *states: PyTree,
    copy: bool = ...,
    recreate_variables: bool = ...,
) -> Any: ...
def merge(
    graphdef_or_graphstate: GraphDef[T] | GraphState,
    /,
    *states: PyTree,
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
    return _build(graphdef, copies(leaves) if copy else leaves)


def _check_disjoint(states: Sequence[PyTree]) -> None:
    counts: Counter[Path] = Counter()
    for state in states:
        counts.update(path for path, _ in to_flat_state(state))
    for path, count in counts.items():
        if count > 1:
            raise GraphStructureError(
                f"merge was given {count} values at {path_text(path)!r}, in several states; remove "
                "all but one, or join the states with nnx.merge_state, where the last one counts."
            )


def _graphdef_and_states(
    first: GraphDef | GraphState, states: tuple[PyTree, ...]
) -> tuple[GraphDef, tuple[PyTree, ...]]:
    if isinstance(first, GraphState):
        return first._graphdef, (first, *states)
    if isinstance(first, GraphDef):
        return first, states
    raise ObjectArgumentError(
        f"merge was given a {type(first).__name__} first; give the description that nnx.split "
        "returned, and then the states, or the result of nnx.unpack."
    )


@overload
def unpack(node: PyTree, *, graph: bool | None = None) -> GraphState: ...
@overload
def unpack(
    node: PyTree, only: Filter, /, *, graph: bool | None = None
) -> GraphState: ...
@overload
def unpack(
    node: PyTree,
    first: Filter,
    second: Filter,
    /,
    *filters: Filter,
    graph: bool | None = None,
) -> tuple[GraphState, ...]: ...


def unpack(
    node: PyTree, *filters: Filter, graph: bool | None = None
) -> GraphState | tuple[GraphState, ...]:
    """Splits an object like `split`, into `GraphState`s, which include its description.

    >>> params, rest = unpack(nnx.Dict(w=nnx.Param(1.0), n=nnx.Cache(2)), nnx.Param, ...)
    >>> nnx.merge(params, rest).w.get_value(), list(rest)
    (1.0, ['n'])
    """
    graphdef, *states = split(node, *filters, graph=graph)
    return _one_or_all([GraphState(graphdef, state) for state in states])


@overload
def state(node: PyTree, *, graph: bool | None = None) -> State: ...
@overload
def state(
    node: PyTree, only: Filter, /, *, graph: bool | None = None
) -> State: ...
@overload
def state(
    node: PyTree,
    first: Filter,
    second: Filter,
    /,
    *filters: Filter,
    graph: bool | None = None,
) -> tuple[State, ...]: ...


def state(
    node: PyTree, *filters: Filter, graph: bool | None = None
) -> State | tuple[State, ...]:
    """Returns the variables and arrays of an object, or one state per filter with those it matches.

    >>> nnx.to_pure_dict(nnx.state(nnx.Dict(w=nnx.Param(1.0), n=nnx.Cache(2)), nnx.Param))
    {'w': 1.0}
    """
    groups, _ = grouped(_flattened(node, graph).items(), filters or (...,))
    return _one_or_all([from_flat_state(group) for group in groups])


variables = state
"""The same as `state`."""


def graphdef(node: T, /, *, graph: bool | None = None) -> GraphDef[T]:
    """Returns an object's description; equal for objects that differ only in values."""
    return _flattened(node, graph).graphdef


def clone(
    node: T,
    variables: bool = True,
    *,
    arrays: bool = False,
    graph: bool | None = None,
) -> T:
    """Returns a copy of an object, with its sharing preserved.

    Args:
        variables: whether to copy variables; otherwise they are shared.
        arrays: whether to copy arrays as well.
    """

    def copy_array(x: PyTree) -> PyTree:
        return x.copy() if arrays and isinstance(x, jax.Array) else x

    flat = _flattened(node, graph)
    leaves: list[PyTree] = []
    for leaf in flat.leaves:
        copy = map_value(copy_array, leaf) if variables else copy_array(leaf)
        leaves.append(copy)
    return _build(flat.graphdef, leaves)


def map(
    f: Callable[[Path, Any], PyTree],
    node: T,
    /,
    *,
    graph: bool | None = None,
    recreate_variables: bool = True,
) -> T:
    """Returns a copy of an object with `f(path, value)` in place of each variable and array.

    Args:
        f: returns a variable, which the copy holds itself, or the value of one.
        recreate_variables: whether a value becomes a variable; otherwise an attribute is the value.
    """
    flat = _flattened(node, graph)
    graphdef = flat.graphdef
    leaves = [f(path, x) for path, x in flat.items()]
    if not recreate_variables:
        graphdef, leaves = with_plain_values(graphdef, leaves)
    return _build(graphdef, leaves)


def as_pure(tree: PyTree) -> PyTree:
    """Returns a pytree with variables replaced by their values.

    >>> as_pure([nnx.Param(1), 2])
    [1, 2]
    """
    return jax.tree.map(value_of, tree, is_leaf=is_variable)


def pure(tree: PyTree) -> PyTree:
    """Returns `as_pure(tree)`; deprecated."""
    warn_deprecated("nnx.pure", "call nnx.as_pure")
    return as_pure(tree)


def flatten(
    node: T,
    /,
    *,
    with_paths: bool = True,
    ref_index: RefMap[Any, int] | None = None,
    ref_outer_index: Mapping[Any, int] | None = None,
    graph: bool | None = None,
) -> tuple[GraphDef[T], Any]:
    """Returns an object as a description and a flat state.

    Args:
        with_paths: whether to return a flat state; otherwise a list of variables' values.
        ref_index: indices of objects in other descriptions; updated with new objects.
        ref_outer_index: indices in another description to record for objects of this one.

    >>> graphdef, leaves = nnx.flatten(nnx.List([nnx.Param(1.0)]), with_paths=False)
    >>> nnx.unflatten(graphdef, leaves)[0][...]
    1.0
    """
    indices: Mapping[Any, int] = RefMap() if ref_index is None else ref_index
    first_index = 1 + max(indices.values(), default=-1)
    flat = _flattened(node, graph, indices)
    graphdef = flat.graphdef
    new_objects = list(enumerate(flat.objects, first_index))
    if ref_index is not None:
        for index, x in new_objects:
            ref_index[x] = index
    if ref_outer_index is not None:
        outer_indices: dict[int, int] = {}
        for index, x in new_objects:
            if x in ref_outer_index:
                outer_indices[index] = ref_outer_index[x]
        graphdef = graphdef.with_outer_index(outer_indices)
    if with_paths:
        return graphdef, FlatState(flat.items(), sort=False)
    values: list[PyTree] = []
    for leaf in flat.leaves:
        is_variable = isinstance(leaf, Variable)
        values.append(leaf.get_raw_value() if is_variable else leaf)
    return graphdef, values


def unflatten(
    graphdef: GraphDef[T],
    state: PyTree,
    /,
    *,
    index_ref: dict[int, Any] | None = None,
    outer_index_outer_ref: Mapping[int, Any] | None = None,
    copy_variables: bool = False,
    recreate_variables: bool = True,
) -> T:
    """Returns the object of a description and values; the inverse of `flatten`.

    Args:
        state: state, or list of values in the order of the description.
        index_ref: objects of other descriptions by index; updated with new objects.
        outer_index_outer_ref: objects to update, by recorded index (see `GraphDef.outer`).
        recreate_variables: ignored, see `merge`.

    Raises GraphStructureError if a value is missing or unexpected, or an object is unknown.
    """
    leaves = leaves_of(graphdef, state)
    outer_objects = outer_index_outer_ref or {}
    existing: dict[int, Any] = {}
    for index, outer_index in graphdef.outer:
        if outer_index in outer_objects:
            existing[index] = outer_objects[outer_index]
    root, objects = build_graph(
        graphdef,
        copies(leaves) if copy_variables else leaves,
        share=True,
        existing=existing,
        known_objects=index_ref or {},
    )
    for (part, _), leaf in zip(leaf_defs(graphdef), leaves, strict=True):
        if isinstance(part, VariableDef) and part.index in existing:
            _update_variable(existing[part.index], leaf)
    if index_ref is not None:
        # `objects` has those of the other descriptions too, all in the order of their indices.
        indices = set(index_ref)
        for node in graphdef.nodes:
            if node.index is not None:
                indices.add(node.index)
        index_ref.update(zip(sorted(indices), objects, strict=True))
    return root


def _update_variable(variable: PyTree, leaf: PyTree) -> None:
    """Updates an existing variable from the state's variable or value."""
    if not isinstance(variable, Variable) or variable is leaf:
        return
    if isinstance(leaf, Variable):
        variable.update_from_state(leaf)
    else:
        variable.set_raw_value(leaf)


def as_abstract(tree: T, graph: bool | None = None) -> T:
    """Returns a copy of objects with shapes and dtypes in place of arrays.

    >>> as_abstract(nnx.Dict(w=nnx.Param(jnp.ones(2)))).w[...]
    ShapeDtypeStruct(shape=(2,), dtype=float32)
    """

    def to_shape(x: PyTree) -> PyTree:
        if is_array(x) or isinstance(x, jax.Ref):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x

    return map(lambda _, x: map_value(to_shape, x), tree, graph=graph)


def set_metadata(
    node: PyTree, /, *, only: Filter = Variable, **metadata: Any
) -> None:
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

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphState, (self._graphdef, self._state)


_Static = tuple[GraphDef, tuple[Hashable, ...]]


def _flatten(state: GraphState) -> tuple[tuple[PyTree, ...], _Static]:
    values, keys = _flatten_state(state)
    return values, (state._graphdef, keys)


def _flatten_with_keys(
    state: GraphState,
) -> tuple[list[tuple[Any, PyTree]], _Static]:
    values, keys = _flatten_state_with_keys(state)
    return values, (state._graphdef, keys)


def _unflatten(static: _Static, values: Iterable[PyTree]) -> GraphState:
    graphdef, keys = static
    nested = dict(zip(keys, values, strict=True))
    return GraphState(graphdef, State(nested, _copy=False))


jax.tree_util.register_pytree_with_keys(
    GraphState, _flatten_with_keys, _unflatten, _flatten
)


class RefMap(MutableMapping[K, V]):
    """Mapping by identity, which accepts unhashable keys such as variables and arrays.

    >>> a, b = nnx.Param(1), nnx.Param(1)
    >>> seen = RefMap([(a, 0)])
    >>> a in seen, b in seen
    (True, False)
    """

    def __init__(self, items: Iterable[tuple[K, V]] = ()):
        self._items: dict[int, tuple[K, V]] = {}
        for key, value in items:
            self[key] = value

    def __getitem__(self, key: K) -> V:
        _, value = self._items[id(key)]
        return value

    def __setitem__(self, key: K, value: V) -> None:
        # With the key, which keeps its id from being reused.
        self._items[id(key)] = (key, value)

    def __delitem__(self, key: K) -> None:
        del self._items[id(key)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._items

    def __iter__(self) -> Iterator[K]:
        for key, _ in self._items.values():
            yield key

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        items: list[str] = []
        for key, value in self._items.values():
            items.append(f"{type(key).__name__}: {value!r}")
        return f"RefMap({{{', '.join(items)}}})"


def with_vars(
    node: T,
    /,
    *,
    hijax: bool | None = None,
    ref: bool | None = None,
    mutable: bool | None = None,
    only: Filter = ...,
    allow_duplicates: bool = False,
) -> T:
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
    options = {"hijax": hijax, "ref": ref, "mutable": mutable}
    storage = {name: x for name, x in options.items() if x is not None}
    matches = to_predicate(All(OfType(Variable), only))
    flat = flatten_graph(node)
    leaves: list[PyTree] = []
    for path, leaf in flat.items():
        if matches(path, leaf):
            leaf = _with_storage(leaf, storage)
        leaves.append(leaf)
    if storage and not allow_duplicates:
        for first_path, *further_paths in find_duplicates(node, only=matches):
            paths = ", ".join(repr(path_text(path)) for path in further_paths)
            raise GraphStructureError(
                f"the variable at {path_text(first_path)!r} is also at {paths}, but JAX accepts "
                "a reference only once; give allow_duplicates=True, or a copy at one place."
            )
    return _build(flat.graphdef, leaves)


@functools.wraps(with_vars, assigned=("__annotations__",))
def vars_as(node: T, /, **options: Any) -> T:
    """Returns `with_vars(node, **options)`; deprecated."""
    warn_deprecated("nnx.vars_as", "call nnx.with_vars")
    return with_vars(node, **options)


def _with_storage(
    variable: Variable[Any], storage: Mapping[str, bool]
) -> Variable[Any]:
    """Returns a copy that is held as `storage` says; itself if it is held so already."""
    metadata = {"mutable": True, **variable.get_metadata()}
    updates: dict[str, bool] = {}
    for name, value in storage.items():
        if metadata[name] != value:
            updates[name] = value
    if not updates:
        return variable
    value = variable.get_raw_value()
    if updates.get("ref") or updates.get("hijax"):
        metadata = {**variable._metadata, **updates}
        value = initial_ref(value, metadata, updates, type(variable).__name__)
    new_variable = variable.copy(value, **updates)
    if updates.get("mutable"):
        new_variable.del_metadata("mutable")
    return new_variable
