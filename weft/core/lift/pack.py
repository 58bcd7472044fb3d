"""Transformations of functions of scopes with explicit groups of variables."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from weft.core.filters import Filter, canonical, group_collections, intersect_filters, union_filters
from weft.core.scope import Scope
from weft.core.scope_kind import Group, ScopeKind, Select
from weft.core.variable_store import copy_dicts
from weft.errors import TransformArgumentError


def pack(
    fn: Callable[..., Any],
    in_variable_filters: Sequence[Filter],
    out_variable_filters: Sequence[Filter],
    rng_filters: Sequence[Filter],
    name: str | None = None,
    enable_kwargs: bool = False,
) -> Callable[..., Any]:
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
    ins = [Select(where) for where in in_variable_filters]
    rngs = [Select(rngs=where) for where in rng_filters]
    kind = ScopeKind(title)

    @functools.wraps(fn)
    def call(scope: object, *args: object, **kwargs: object) -> Any:
        if kwargs and not enable_kwargs:
            raise TransformArgumentError(
                f"{title}: it takes no arguments by name, and was given {sorted(kwargs)}; give "
                "them by position, or make it with pack(..., enable_kwargs=True)."
            )
        scopes, tree = jax.tree.flatten(scope, is_leaf=kind.is_carrier)
        packed_call = _PackedCall(kind, scopes, tree, ins, rngs, out_variable_filters)
        try:
            pair = fn(
                packed_call.scope_fn,
                packed_call.repack_fn,
                packed_call.variable_groups,
                packed_call.rng_groups,
                *args,
                **kwargs,
            )
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TransformArgumentError(
                    f"{title}: the function returned a {type(pair).__name__}; expected a pair of "
                    "its result and what repack_fn gave."
                )
            result, changed = pair
            packed_call.commit(changed)
        finally:
            packed_call.end()
        return result

    return call


class _PackedCall:
    def __init__(
        self,
        kind: ScopeKind,
        scopes: list[Scope],
        tree: Any,
        ins: list[Select],
        rngs: list[Select],
        outs: Sequence[Filter],
    ):
        self._kind, self._tree, self._outs = kind, tree, outs
        self._filters = [tuple((where, None) for where in (*ins, *rngs))] * len(scopes)
        self._outer, self._static, groups = kind.split(scopes, self._filters)
        self._roots = [i for i, fields in enumerate(self._static) if hasattr(fields, "mutable")]
        self._mutable = [scopes[i].mutable for i in self._roots]
        n = len(ins)
        self.variable_groups = tuple(
            tuple(copy_dicts(groups[i][k].variables) for i in self._roots) for k in range(n)
        )
        self.rng_groups = tuple(
            tuple(groups[i][k].streams for i in self._roots) for k in range(n, n + len(rngs))
        )
        self._made: list[list[Scope]] = []

    def scope_fn(self, variable_groups: Any, rng_groups: Any, mutable_filter: Filter = True) -> Any:
        changeable = functools.reduce(union_filters, self._outs, False)
        changeable = intersect_filters(changeable, mutable_filter)
        static = list(self._static)
        groups: list[tuple[Group, ...]] = [()] * len(static)
        for root, (i, mutable) in enumerate(zip(self._roots, self._mutable, strict=True)):
            inside = canonical(intersect_filters(mutable, changeable))
            static[i] = dataclasses.replace(static[i], mutable=inside)
            of_vars = (Group(group[root], {}, {}) for group in variable_groups)
            groups[i] = (*of_vars, *(Group({}, group[root], {}) for group in rng_groups))
        _, inner = self._kind.merge(tuple(static), groups)
        self._made.append(inner)
        return self._tree.unflatten(inner)

    def repack_fn(self, scope: object) -> Any:
        scopes = jax.tree.leaves(scope, is_leaf=self._kind.is_carrier)
        by_root = [
            group_collections(scopes[i].mutable_variables(), self._outs) for i in self._roots
        ]
        return tuple(tuple(groups[k] for groups in by_root) for k in range(len(self._outs)))

    def commit(self, changed: Any) -> None:
        if not self._made:
            self.scope_fn(self.variable_groups, self.rng_groups)
        last = self._made[-1]
        collected, _, _ = self._kind.collect(None, self._static, last, self._filters, [], [])
        groups: list[tuple[Group, ...]] = [()] * len(self._static)
        for root, i in enumerate(self._roots):
            groups[i] = tuple(Group(group[root], {}, {}) for group in changed)
        self._kind.commit(self._outer, collected, groups, [])

    def end(self) -> None:
        for scopes in self._made:
            for scope in scopes:
                scope.invalidate()
