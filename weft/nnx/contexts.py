"""Splitting and merging several objects that share parts, across a JAX transformation and back.

A `split_context` replaces objects that it has already split by references, which a `merge_context`
resolves. An `update_context` connects four of them around a transformation: split outside, merge
inside, split inside, and merge outside, which then updates the original objects instead of creating
new ones:

    with update_context("f"):
        with split_context("f") as ctx: parts = ctx.split(model)
        @jax.jit
        def f(state):
            with merge_context("f", inner=True) as ctx: model = ctx.merge(parts[0], state)
            ...
            with split_context("f") as ctx: return ctx.split(model)
        with merge_context("f", inner=False) as ctx: ctx.merge(*f(parts[1]))
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Hashable, Iterator
from typing import Any

from weft.errors import GraphStructureError
from weft.nnx.filters import Filter
from weft.nnx.graph import GraphDef
from weft.nnx.ref_map import RefMap
from weft.nnx.splitting import flatten, unflatten
from weft.nnx.state import FlatState, merge_state, split_state


@dataclasses.dataclass
class SplitContext:
    """Context that splits objects; objects split before in the context become references.

    Attributes:
        ref_index: indices of the objects seen.
        is_inner: whether it is inside the transformation; None without an update context.
    """

    ctxtag: Hashable | None
    ref_index: RefMap
    is_inner: bool | None

    def split(self, node: Any, *filters: Filter) -> tuple[Any, ...]:
        """Splits like `nnx.split`; states leave out objects seen before."""
        graphdef, flat = self._flat(node)
        whole = flat.to_nested_state()
        if not filters:
            return graphdef, whole
        states = split_state(whole, *filters)
        return graphdef, *(states if len(filters) > 1 else (states,))

    def flatten(self, node: Any, *filters: Filter, with_paths: bool = True) -> tuple[Any, ...]:
        """Flattens like `nnx.flatten`, with one flat state per filter.

        Raises:
            GraphStructureError: if there are filters, and `with_paths` is False.
        """
        if not with_paths and filters:
            raise GraphStructureError(
                "flatten was given filters and with_paths=False, but filters need the paths; omit "
                "one of them."
            )
        graphdef, flat = self._flat(node, with_paths)
        if not filters:
            return graphdef, flat
        groups = flat.split(*filters)
        return graphdef, *(groups if len(filters) > 1 else (groups,))

    def _flat(self, node: Any, with_paths: bool = True) -> tuple[GraphDef, Any]:
        update = current_update_context(self.ctxtag) if self.ctxtag is not None else None
        graphdef, flat = flatten(
            node,
            with_paths=with_paths,
            ref_index=self.ref_index,
            ref_outer_index=update.inner_ref_outer_index if update is not None else None,
        )
        if update is not None and update.static_cache is not None:
            graphdef = update.static_cache.setdefault(graphdef, graphdef)
        return graphdef, flat


@dataclasses.dataclass
class MergeContext:
    """Context that merges objects; references resolve to objects merged before in the context.

    Attributes:
        index_ref: objects that were created, by index.
        is_inner: whether it is inside the transformation; None without an update context.
    """

    ctxtag: Hashable | None
    index_ref: dict[int, Any]
    is_inner: bool | None

    def merge(self, graphdef: GraphDef, state: Any, /, *states: Any) -> Any:
        """Merges like `nnx.merge` with copied variables; outside, updates the original objects."""
        return self._made(graphdef, merge_state(state, *states) if states else state, copy=True)

    def unflatten(self, graphdef: GraphDef, flat_state: Any, /, *flat_states: Any) -> Any:
        """Unflattens like `nnx.unflatten`; accepts several flat states."""
        if flat_states:
            flat_state = FlatState.merge(flat_state, *flat_states)
        return self._made(graphdef, flat_state, copy=False)

    def _made(self, graphdef: GraphDef, state: Any, copy: bool) -> Any:
        outer = None
        if self.is_inner is False:
            outer = current_update_context(self.ctxtag).outer_index_outer_ref
        return unflatten(
            graphdef,
            state,
            index_ref=self.index_ref,
            outer_index_outer_ref=outer,
            copy_variables=copy,
        )


@dataclasses.dataclass
class UpdateContext:
    """Context that maps objects to their copies inside a transformation, and back.

    Attributes:
        outer_ref_outer_index: indices of the original objects.
        outer_index_inner_ref: their copies inside, by index.
        outer_index_outer_ref: the original objects, by index.
        inner_ref_outer_index: indices of the copies inside.
        static_cache: interned descriptions; JAX compares identical objects faster.
    """

    tag: Hashable
    outer_ref_outer_index: RefMap | None = None
    outer_index_inner_ref: dict[int, Any] | None = None
    outer_index_outer_ref: dict[int, Any] | None = None
    inner_ref_outer_index: RefMap | None = None
    static_cache: dict[Any, Any] | None = dataclasses.field(default_factory=dict)

    def flatten_end(self, ref_index: RefMap) -> None:
        """Records the objects of a split context; inside, drops the inner objects."""
        if self.inner_ref_outer_index is None:
            self.outer_ref_outer_index = ref_index
            self.outer_index_outer_ref = {i: x for x, i in ref_index.items()}
        else:
            self.outer_index_inner_ref = self.inner_ref_outer_index = None

    def unflatten_end(self, index_ref: dict[int, Any], inner_merge: bool) -> None:
        """Records the objects of a merge context."""
        if inner_merge:
            self.outer_index_inner_ref = index_ref
            self.inner_ref_outer_index = RefMap((x, i) for i, x in index_ref.items())


class _Open(threading.local):
    def __init__(self) -> None:
        self.contexts: list[UpdateContext] = []


_OPEN = _Open()


@contextlib.contextmanager
def update_context(tag: Hashable) -> Iterator[UpdateContext]:
    """Connects split and merge contexts, so that a transformation's results update its inputs.

    A nested context hides an outer one with the same tag.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> model = nnx.Dict(w=nnx.Param(jnp.array(1.0)))
        >>> with update_context("f"):
        ...     with split_context("f") as ctx:
        ...         graphdef, state = ctx.split(model)
        ...     @jax.jit
        ...     def f(state):
        ...         with merge_context("f", inner=True) as ctx:
        ...             inner = ctx.merge(graphdef, state)
        ...         inner.new = nnx.Param(inner.w * 2)
        ...         with split_context("f") as ctx:
        ...             return ctx.split(inner)
        ...     with merge_context("f", inner=False) as ctx:
        ...         same = ctx.merge(*f(state))
        >>> same is model, float(model.new)
        (True, 2.0)
    """
    _OPEN.contexts.append(UpdateContext(tag))
    try:
        yield _OPEN.contexts[-1]
    finally:
        _OPEN.contexts.pop()


def current_update_context(tag: Hashable) -> UpdateContext:
    """Returns the innermost open update context with a tag.

    Raises:
        GraphStructureError: if there is none.
    """
    for context in reversed(_OPEN.contexts):
        if context.tag == tag:
            return context
    tags = ", ".join(repr(context.tag) for context in _OPEN.contexts) or "none"
    raise GraphStructureError(
        f"there is no update context {tag!r} here; open in this thread: {tags}. Enter "
        f"nnx.update_context({tag!r}) around it."
    )


@contextlib.contextmanager
def split_context(ctxtag: Hashable | None = None) -> Iterator[SplitContext]:
    """Splits several objects, each shared part once.

    Raises:
        GraphStructureError: if there is no update context with the tag `ctxtag`.

    Example:
        >>> from weft import nnx
        >>> w = nnx.Param(1.0)
        >>> with split_context() as ctx:
        ...     first, second = ctx.split({"a": w}), ctx.split({"b": w})
        >>> len(first[1]), len(second[1])
        (1, 0)
        >>> with merge_context() as ctx:
        ...     a, b = ctx.merge(*first), ctx.merge(*second)
        >>> a["a"] is b["b"]
        True
    """
    update = current_update_context(ctxtag) if ctxtag is not None else None
    is_inner = update.inner_ref_outer_index is not None if update is not None else None
    context = SplitContext(ctxtag, RefMap(), is_inner)
    yield context
    if update is not None:
        update.flatten_end(context.ref_index)


@contextlib.contextmanager
def merge_context(
    ctxtag: Hashable | None = None, inner: bool | None = None
) -> Iterator[MergeContext]:
    """Merges what a split context has split.

    Args:
        ctxtag: tag of an update context to connect to.
        inner: whether it is inside the transformation; required with a tag.

    Raises:
        GraphStructureError: if there is no update context with the tag, or `inner` is missing.
    """
    update = current_update_context(ctxtag) if ctxtag is not None else None
    if update is not None and inner is None:
        raise GraphStructureError(
            f"merge_context({ctxtag!r}) needs inner; give inner=True inside the transformed "
            "function, and inner=False after it."
        )
    context = MergeContext(ctxtag, {}, inner if update is not None else None)
    yield context
    if update is not None:
        update.unflatten_end(context.index_ref, bool(inner))
