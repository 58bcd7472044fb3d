"""Splitting and merging several objects that share parts, across a JAX transformation and back.

In a `split_context` an object that was split before is only referred to, so what two arguments
share crosses once; in a `merge_context` the references are found again. Four of them around a
transformation make a round trip, in which an `update_context` remembers what was which: split
outside, merge inside, split inside, and merge outside, which then changes the objects that went in
instead of making new ones:

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
    """Splits objects; what was split before in the context is referred to.

    Attributes:
        ctxtag: the tag of the update context, if there is one.
        ref_index: the objects that were met, by index.
        is_inner: whether it is inside of the transformation; None without an update context.
    """

    ctxtag: Hashable | None
    ref_index: RefMap
    is_inner: bool | None

    def split(self, node: Any, *filters: Filter) -> tuple[Any, ...]:
        """See `nnx.split`; what was met before has no part in the states."""
        graphdef, flat = self._flat(node)
        whole = flat.to_nested_state()
        if not filters:
            return graphdef, whole
        states = split_state(whole, *filters)
        return graphdef, *(states if len(filters) > 1 else (states,))

    def flatten(self, node: Any, *filters: Filter, with_paths: bool = True) -> tuple[Any, ...]:
        """See `nnx.flatten`.

        Args:
            node: the object.
            *filters: for each a flat state with what it matches.
            with_paths: otherwise there is a list of what the variables hold.

        Raises:
            GraphStructureError: if there are filters, and no paths.
        """
        if not with_paths and filters:
            raise GraphStructureError(
                "flatten was given filters and with_paths=False, and filters need the paths; leave "
                "one of them out."
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
    """Merges objects; those that were merged before in the context are referred to.

    Attributes:
        ctxtag: the tag of the update context, if there is one.
        index_ref: the objects that were made, by index.
        is_inner: whether it is inside of the transformation; None without an update context.
    """

    ctxtag: Hashable | None
    index_ref: dict[int, Any]
    is_inner: bool | None

    def merge(self, graphdef: GraphDef, state: Any, /, *states: Any) -> Any:
        """See `nnx.merge`; after the transformation, it changes the objects that went in.

        Variables are copies of those in the states.
        """
        return self._made(graphdef, merge_state(state, *states) if states else state, copy=True)

    def unflatten(self, graphdef: GraphDef, flat_state: Any, /, *flat_states: Any) -> Any:
        """See `nnx.unflatten`; several flat states have the values together."""
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
    """What was which on the way into a transformation and back.

    Attributes:
        tag: its tag.
        outer_ref_outer_index: the objects that went in, with their indices.
        outer_index_inner_ref: the objects that were made of them inside, by these indices.
        outer_index_outer_ref: the objects that went in, by index.
        inner_ref_outer_index: the objects that were made of them inside, with these indices.
        static_cache: the descriptions that were split in the context; equal ones are one object,
            which JAX finds sooner.
    """

    tag: Hashable
    outer_ref_outer_index: RefMap | None = None
    outer_index_inner_ref: dict[int, Any] | None = None
    outer_index_outer_ref: dict[int, Any] | None = None
    inner_ref_outer_index: RefMap | None = None
    static_cache: dict[Any, Any] | None = dataclasses.field(default_factory=dict)

    def flatten_end(self, ref_index: RefMap) -> None:
        """Notes what a split context has met; inside, that the inner objects are done with."""
        if self.inner_ref_outer_index is None:
            self.outer_ref_outer_index = ref_index
            self.outer_index_outer_ref = {i: x for x, i in ref_index.items()}
        else:
            self.outer_index_inner_ref = self.inner_ref_outer_index = None

    def unflatten_end(self, index_ref: dict[int, Any], inner_merge: bool) -> None:
        """Notes what a merge context has made."""
        if inner_merge:
            self.outer_index_inner_ref = index_ref
            self.inner_ref_outer_index = RefMap((x, i) for i, x in index_ref.items())


class _Open(threading.local):
    def __init__(self) -> None:
        self.contexts: list[UpdateContext] = []


_OPEN = _Open()


@contextlib.contextmanager
def update_context(tag: Hashable) -> Iterator[UpdateContext]:
    """Remembers what goes into a transformation, so that what comes out changes it.

    Args:
        tag: by which the split and merge contexts find it; one that is inside of another with the
            same tag hides it.

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
    """The innermost open update context with a tag.

    Raises:
        GraphStructureError: if there is none.
    """
    for context in reversed(_OPEN.contexts):
        if context.tag == tag:
            return context
    tags = ", ".join(repr(context.tag) for context in _OPEN.contexts) or "none"
    raise GraphStructureError(
        f"there is no update context {tag!r} here; open in this thread are: {tags}. Enter "
        f"nnx.update_context({tag!r}) around it."
    )


@contextlib.contextmanager
def split_context(ctxtag: Hashable | None = None) -> Iterator[SplitContext]:
    """Splits several objects, each part that they share once.

    Args:
        ctxtag: the tag of an update context that notes it.

    Raises:
        GraphStructureError: if there is no update context with the tag.

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
    """Merges what was split in a split context.

    Args:
        ctxtag: the tag of an update context.
        inner: whether it is inside of the transformation; it must be said if there is a tag.

    Raises:
        GraphStructureError: if there is no update context with the tag, or `inner` is missing.
    """
    update = current_update_context(ctxtag) if ctxtag is not None else None
    if update is not None and inner is None:
        raise GraphStructureError(
            f"merge_context({ctxtag!r}) does not say where it is; give inner=True inside of the "
            "transformed function, and inner=False after it."
        )
    context = MergeContext(ctxtag, {}, inner if update is not None else None)
    yield context
    if update is not None:
        update.unflatten_end(context.index_ref, bool(inner))
