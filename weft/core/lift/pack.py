"""Transformations of functions of scopes with explicit groups of variables."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from weft.core.filters import (
    Filter,
    canonical,
    group_collections,
    intersect_filters,
    union_filters,
)
from weft.core.rngs import LazyRng
from weft.core.scope import Scope
from weft.core.scope_kind import Group, ScopeKind, Select
from weft.core.variable_store import copy_dicts
from weft.errors import TransformArgumentError
from weft.lifting.kind import Parts, Returned, is_carrier
from weft.typing import Fn, PyTree

Filters = Sequence[Filter]
Variables = dict[str, Any]
Streams = dict[str, LazyRng]


def pack(
    fn: Fn,
    in_variable_filters: Filters,
    out_variable_filters: Filters,
    rng_filters: Filters,
    name: str | None = None,
    enable_kwargs: bool = False,
) -> Fn:
    """Returns a transformation of functions of scopes, based on a function of groups of variables.

    The result takes a scope, or a pytree of scopes, and `args`. A group is a tuple with one dict
    for each scope that is not below another one.

    Args:
        fn: `fn(scope_fn, repack_fn, variable_groups, rng_groups, *args)` returns a pair of its
            result and that of `repack_fn`. `scope_fn(variable_groups, rng_groups,
            mutable_filter=True)` creates the inner scope, and `repack_fn(scope)` returns its
            variables in groups.
        in_variable_filters: collections of each input group. A collection is in the first group
            that matches; one without a match cannot be used.
        out_variable_filters: collections of each output group; no others can be changed.
        rng_filters: PRNG streams of each group.

    Raises:
        TransformArgumentError: if `fn` gets unexpected keyword arguments or does not return a pair.

    >>> from weft.core import init, nn
    >>> def doubled(scope_fn, repack_fn, variable_groups, rng_groups, x):
    ...     scope = scope_fn(variable_groups, rng_groups)
    ...     return 2 * nn.dense(scope, x, 4), repack_fn(scope)
    >>> packed = pack(doubled, (True,), (True,), (True,))
    >>> y, _ = init(packed)(jax.random.key(0), jax.numpy.ones(3))
    >>> y.shape
    (4,)
    """
    title = name or getattr(fn, "__name__", "pack")

    @functools.wraps(fn)
    def call(scope: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if kwargs and not enable_kwargs:
            raise TransformArgumentError(
                f"{title}: it takes no arguments by name, and was given {sorted(kwargs)}; give "
                "them by position, or make it with pack(..., enable_kwargs=True)."
            )
        packed = _PackedCall(
            ScopeKind(title),
            scope,
            in_variable_filters,
            out_variable_filters,
            rng_filters,
        )
        try:
            pair = fn(
                packed.scope_fn,
                packed.repack_fn,
                packed.variable_groups,
                packed.rng_groups,
                *args,
                **kwargs,
            )
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TransformArgumentError(
                    f"{title}: the function returned a {type(pair).__name__}; expected a pair of "
                    "its result and what repack_fn gave."
                )
            result, changed_groups = pair
            packed.commit(changed_groups)
        finally:
            packed.end()
        return result

    return call


class _PackedCall:
    """Call of `pack`; of the scopes, only the roots cross, which are not below another one.

    Attributes:
        variable_groups: for each filter of collections, the variables of each root.
        rng_groups: for each filter of streams, the PRNG streams of each root.
    """

    def __init__(
        self,
        kind: ScopeKind,
        scope: PyTree,
        in_filters: Filters,
        out_filters: Filters,
        rng_filters: Filters,
    ):
        self._kind, self._out_filters = kind, out_filters
        scopes, self._structure = jax.tree.flatten(
            scope, is_leaf=is_carrier(kind)
        )
        selects = [Select(collections) for collections in in_filters]
        selects += [Select(rngs=streams) for streams in rng_filters]
        # No group has a role: the function of groups applies the transformation.
        parts = tuple((select, None) for select in selects)
        self._parts: list[Parts] = [parts] * len(scopes)
        self._outer, self._static, groups = kind.split(scopes, self._parts)

        self._root_indices: list[int] = []
        self._root_mutable: list[Filter] = []
        root_groups: list[tuple[Group, ...]] = []
        for index, static in enumerate(self._static):
            if hasattr(static, "mutable"):
                self._root_indices.append(index)
                self._root_mutable.append(scopes[index].mutable)
                root_groups.append(groups[index])
        # From groups by root to roots by group.
        groups_by_select = list(zip(*root_groups, strict=True))
        num_variable_groups = len(in_filters)
        variable_groups: list[tuple[Variables, ...]] = []
        for groups_of_roots in groups_by_select[:num_variable_groups]:
            variable_groups.append(
                tuple(copy_dicts(group.variables) for group in groups_of_roots)
            )
        rng_groups: list[tuple[Streams, ...]] = []
        for groups_of_roots in groups_by_select[num_variable_groups:]:
            rng_groups.append(tuple(group.streams for group in groups_of_roots))
        self.variable_groups = tuple(variable_groups)
        self.rng_groups = tuple(rng_groups)
        self._scopes_by_run: list[list[Scope]] = []

    def scope_fn(
        self,
        variable_groups: Sequence[Sequence[Variables]],
        rng_groups: Sequence[Sequence[Streams]],
        mutable_filter: Filter = True,
    ) -> PyTree:
        changeable = functools.reduce(union_filters, self._out_filters, False)
        changeable = intersect_filters(changeable, mutable_filter)
        statics: list[Any] = list(self._static)
        groups: list[tuple[Group, ...]] = [()] * len(statics)
        for root, index in enumerate(self._root_indices):
            mutable = intersect_filters(self._root_mutable[root], changeable)
            statics[index] = dataclasses.replace(
                statics[index], mutable=canonical(mutable)
            )
            root_groups = [
                Group(variables[root], {}, {}) for variables in variable_groups
            ]
            root_groups += [
                Group({}, streams[root], {}) for streams in rng_groups
            ]
            groups[index] = tuple(root_groups)
        _, inner_scopes = self._kind.merge(tuple(statics), groups)
        self._scopes_by_run.append(inner_scopes)
        return self._structure.unflatten(inner_scopes)

    def repack_fn(self, scope: PyTree) -> tuple[tuple[Variables, ...], ...]:
        scopes = jax.tree.leaves(scope, is_leaf=is_carrier(self._kind))
        root_groups: list[Sequence[Variables]] = []
        for index in self._root_indices:
            variables = scopes[index].mutable_variables()
            root_groups.append(group_collections(variables, self._out_filters))
        return tuple(zip(*root_groups, strict=True))

    def commit(self, changed_groups: Sequence[Sequence[Variables]]) -> None:
        if not self._scopes_by_run:
            self.scope_fn(self.variable_groups, self.rng_groups)
        last_scopes = self._scopes_by_run[-1]
        # Only the static half counts: the function itself has returned the groups.
        collected, _, _ = self._kind.collect(
            None, self._static, last_scopes, self._parts, Returned(None, [], [])
        )
        groups: list[tuple[Group, ...]] = [()] * len(self._static)
        for root, index in enumerate(self._root_indices):
            groups[index] = tuple(
                Group(variables[root], {}, {}) for variables in changed_groups
            )
        self._kind.commit(self._outer, collected, groups, [])

    def end(self) -> None:
        for scopes in self._scopes_by_run:
            for scope in scopes:
                scope.invalidate()
