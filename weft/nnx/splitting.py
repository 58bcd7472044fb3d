"""Conversion of objects to descriptions and states, and back: split, merge and related functions.

A state holds the object's own variables, and merging puts a state's variables into the new object,
so no value is copied; `clone` copies. Inside a transformation both are new, as JAX recreates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax

from weft.errors import GraphStructureError, ObjectArgumentError
from weft.nnx.assembling import put_together
from weft.nnx.filters import Filter, Path, grouped, to_predicate
from weft.nnx.graph import Flat, GraphDef, VariableDef, is_array, leaf_parts, take_apart
from weft.nnx.graph_state import GraphState
from weft.nnx.ref_map import RefMap
from weft.nnx.state import (
    FlatState,
    from_flat_state,
    merge_state,
    shown_path,
    split_state,
    to_flat_state,
)
from weft.nnx.variables import Variable

T = TypeVar("T")


def split(node: Any, *filters: Filter, graph: bool | None = None) -> tuple[Any, ...]:
    """Splits an object into a description and states.

    Args:
        node: object, or pytree of objects.
        *filters: one state each; without filters, one state with everything.
        graph: ignored; references are kept either way.

    Raises:
        StateFilterError: if no filter matches a value.

    Example:
        >>> from weft import nnx
        >>> class Scale(nnx.Module):
        ...     def __init__(self):
        ...         self.factor = nnx.Param(2.0)
        >>> graphdef, state = nnx.split(Scale())
        >>> nnx.merge(graphdef, state).factor.get_value()
        2.0
    """
    flat = take_apart(node)
    whole = from_flat_state(_items(flat))
    if not filters:
        return flat.graphdef, whole
    states = split_state(whole, *filters)
    return flat.graphdef, *(states if len(filters) > 1 else (states,))


def _items(flat: Flat) -> list[tuple[Path, Any]]:
    return list(zip(flat.graphdef.paths, flat.leaves, strict=True))


def merge(
    graphdef_or_graphstate: Any,
    /,
    *states: Any,
    copy: bool = False,
    recreate_variables: bool = True,
) -> Any:
    """Returns the object of a description and states; the inverse of `split` and `unpack`.

    Args:
        graphdef_or_graphstate: description, or a state from `unpack`, which includes it.
        copy: whether to copy the states' variables.
        recreate_variables: ignored; values become new variables.

    Raises:
        GraphStructureError: if a value is missing or unexpected.
        ObjectArgumentError: if the first argument is not a description.
    """
    graphdef, states = _with_description(graphdef_or_graphstate, states)
    found = dict(to_flat_state(merge_state(*states))) if states else {}
    _check_paths(graphdef, found)
    leaves = [found[path] for path in graphdef.paths]
    return put_together(graphdef, _copies(leaves) if copy else leaves, share=True)[0]


def _copies(leaves: Iterable[Any]) -> list[Any]:
    return [x.copy() if isinstance(x, Variable) else x for x in leaves]


def _with_description(first: Any, states: tuple[Any, ...]) -> tuple[GraphDef, tuple[Any, ...]]:
    if isinstance(first, GraphState):
        return first._graphdef, (first, *states)
    if isinstance(first, GraphDef):
        return first, states
    raise ObjectArgumentError(
        f"merge was given a {type(first).__name__} first; give the description that nnx.split "
        "returned, and then the states, or the result of nnx.unpack."
    )


def _check_paths(graphdef: GraphDef, found: Mapping[Path, Any]) -> None:
    missing = [path for path in graphdef.paths if path not in found]
    extra = set(found) - set(graphdef.paths)
    if missing or extra:
        what, paths = ("has no value for", missing) if missing else ("has values for", extra)
        shown = ", ".join(sorted(shown_path(path) for path in paths)[:5]) + (
            " ..." if len(paths) > 5 else ""
        )
        raise GraphStructureError(
            f"the state {what} {shown}, which the description has"
            + ("; give all states that split returned." if missing else " not; remove it.")
        )


def unpack(node: Any, *filters: Filter, graph: bool | None = None) -> Any:
    """Splits an object like `split`, into `GraphState`s, which include its description.

    Example:
        >>> from weft import nnx
        >>> params, rest = unpack(nnx.Dict(w=nnx.Param(1.0), n=nnx.Cache(2)), nnx.Param, ...)
        >>> nnx.merge(params, rest).w.get_value(), list(rest)
        (1.0, ['n'])
    """
    graphdef, *states = split(node, *filters)
    made = [GraphState(graphdef, state) for state in states]
    return made[0] if len(made) == 1 else tuple(made)


def state(node: Any, *filters: Filter, graph: bool | None = None) -> Any:
    """Returns the variables and arrays of an object, or one state per filter with those it matches.

    Example:
        >>> from weft import nnx
        >>> nnx.state(nnx.Dict(w=nnx.Param(1.0), n=nnx.Cache(2)), nnx.Param).to_pure_dict()
        {'w': 1.0}
    """
    groups, _ = grouped(_items(take_apart(node)), filters or (...,))
    states = [from_flat_state(group) for group in groups]
    return states[0] if len(states) == 1 else tuple(states)


variables = state


def graphdef(node: Any, /, *, graph: bool | None = None) -> GraphDef:
    """Returns an object's description; equal for objects that differ only in values."""
    return take_apart(node).graphdef


def clone(node: T, variables: bool = True, *, arrays: bool = False, graph: bool | None = None) -> T:
    """Returns a copy of an object, with its sharing preserved.

    Args:
        variables: whether to copy variables; otherwise they are shared.
        arrays: whether to copy arrays as well.
    """

    def copied(x: Any) -> Any:
        return x.copy() if arrays and isinstance(x, jax.Array) else x

    flat = take_apart(node)
    if variables:
        leaves = [
            x.copy(jax.tree.map(copied, x.get_raw_value()))
            if isinstance(x, Variable)
            else copied(x)
            for x in flat.leaves
        ]
        return put_together(flat.graphdef, leaves)[0]
    return put_together(flat.graphdef, [copied(x) for x in flat.leaves], share=True)[0]


def call(graphdef_state: tuple[GraphDef, Any], /) -> Any:
    """Calls a method of a split object, given as a pair of description and state, purely.

    Returns:
        A proxy of the object; a call of it or its methods returns the result and the new pair.

    Example:
        >>> from weft import nnx
        >>> class Counter(nnx.Module):
        ...     def __init__(self):
        ...         self.n = nnx.Variable(0)
        ...     def count(self, by):
        ...         self.n.set_value(self.n.get_value() + by)
        ...         return self.n.get_value()
        >>> n, (graphdef, state) = nnx.call(nnx.split(Counter())).count(3)
        >>> n, state.n.get_value()
        (3, 3)
    """
    return _Calls(graphdef_state, ())


class _Calls:
    def __init__(self, graphdef_state: tuple[GraphDef, Any], path: tuple[Any, ...]):
        self._graphdef_state = graphdef_state
        self._path = path

    def __getattr__(self, name: str) -> "_Calls":
        return _Calls(self._graphdef_state, (*self._path, name))

    def __getitem__(self, key: Any) -> "_Calls":
        return _Calls(self._graphdef_state, (*self._path, [key]))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        root = merge(*self._graphdef_state, copy=True)
        at = root
        for part in self._path:
            at = at[part[0]] if isinstance(part, list) else getattr(at, part)
        result = at(*args, **kwargs)
        return result, split(root)


def map(
    f: Callable[[Path, Any], Any],
    node: Any,
    /,
    *,
    graph: bool | None = None,
    recreate_variables: bool = True,
) -> Any:
    """Returns a copy of an object with `f(path, value)` in place of each variable and array.

    `f` returns a variable, or the value of one; `recreate_variables` is ignored.
    """
    flat = take_apart(node)
    leaves = [f(path, x) for path, x in zip(flat.graphdef.paths, flat.leaves, strict=True)]
    return put_together(flat.graphdef, _copies(leaves), share=True)[0]


def pure(tree: Any) -> Any:
    """Returns a pytree with variables replaced by their values.

    Example:
        >>> from weft import nnx
        >>> pure([nnx.Param(1), 2])
        [1, 2]
    """
    return jax.tree.map(
        lambda x: x.get_value() if isinstance(x, Variable) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Variable),
    )


as_pure = pure


def flatten(
    node: Any,
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

    Example:
        >>> from weft import nnx
        >>> graphdef, leaves = nnx.flatten(nnx.List([nnx.Param(1.0)]), with_paths=False)
        >>> nnx.unflatten(graphdef, leaves)[0][...]
        1.0
    """
    known = RefMap() if ref_index is None else ref_index
    first = 1 + max(known.values(), default=-1)
    flat = take_apart(node, known=known)
    graphdef, new = flat.graphdef, list(enumerate(flat.objects, first))
    if ref_index is not None:
        ref_index.update((x, i) for i, x in new)
    if ref_outer_index is not None:
        there = {i: ref_outer_index[x] for i, x in new if x in ref_outer_index}
        graphdef = graphdef.with_outer_index(there)
    if with_paths:
        return graphdef, FlatState(_items(flat), sort=False)
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
        copy_variables: whether to copy the state's variables.
        recreate_variables: ignored, see `merge`.

    Raises:
        GraphStructureError: if a value is missing or unexpected, or a referenced object is unknown.
    """
    if isinstance(state, list) and not isinstance(state, FlatState):
        leaves = state
    else:
        found = dict(state if isinstance(state, FlatState) else to_flat_state(state))
        _check_paths(graphdef, found)
        leaves = [found[path] for path in graphdef.paths]
    there = outer_index_outer_ref or {}
    existing = {i: there[outer] for i, outer in graphdef.outer if outer in there}
    root, objects = put_together(
        graphdef,
        _copies(leaves) if copy_variables else leaves,
        True,
        existing,
        known=index_ref or {},
    )
    for part, leaf in zip(leaf_parts(graphdef), leaves, strict=True):
        variable = existing.get(part.index) if isinstance(part, VariableDef) else None
        if isinstance(variable, Variable) and variable is not leaf:
            is_variable = isinstance(leaf, Variable)
            variable.update_from_state(leaf) if is_variable else variable.set_raw_value(leaf)
    if index_ref is not None:
        indices = sorted({*index_ref, *(n.index for n in graphdef.nodes if n.index is not None)})
        index_ref.update(zip(indices, objects, strict=True))
    return root


def as_abstract(tree: Any, graph: bool | None = None) -> Any:
    """Returns a copy of objects with shapes and dtypes in place of arrays; `graph` is ignored.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> as_abstract(nnx.Dict(w=nnx.Param(jnp.ones(2)))).w[...]
        ShapeDtypeStruct(shape=(2,), dtype=float32)
    """

    def abstract(x: Any) -> Any:
        is_kept = is_array(x) or isinstance(x, jax.Ref)
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_kept else x

    def of_leaf(_: Path, x: Any) -> Any:
        if isinstance(x, Variable):
            return x.copy(jax.tree.map(abstract, x.get_raw_value()))
        return abstract(x)

    return map(of_leaf, tree)


def set_metadata(node: Any, /, *, only: Filter = Variable, **metadata: Any) -> None:
    """Sets metadata of an object's variables that `only` matches."""
    matches = to_predicate(only)
    flat = take_apart(node)
    for path, x in zip(flat.graphdef.paths, flat.leaves, strict=True):
        if isinstance(x, Variable) and matches(path, x):
            x.set_metadata(**metadata)
