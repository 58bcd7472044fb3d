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
from weft.lifting.kind import Returned, is_carrier

Filters = Sequence[Filter]


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
    filters = in_variable_filters, out_variable_filters, rng_filters

    @functools.wraps(fn)
    def call(scope: object, *args: object, **kwargs: object) -> Any:
        if kwargs and not enable_kwargs:
            raise TransformArgumentError(
                f"{title}: it takes no arguments by name, and was given {sorted(kwargs)}; give "
                "them by position, or make it with pack(..., enable_kwargs=True)."
            )
        packed = _PackedCall(ScopeKind(title), scope, *filters)
        try:
            pair = fn(packed.scope_fn, packed.repack_fn, *packed.groups, *args, **kwargs)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TransformArgumentError(
                    f"{title}: the function returned a {type(pair).__name__}; expected a pair of "
                    "its result and what repack_fn gave."
                )
            result, changed = pair
            packed.commit(changed)
        finally:
            packed.end()
        return result

    return call


class _PackedCall:
    """Call of `pack`; `groups` are the variable groups and the groups of PRNG streams."""

    def __init__(self, kind: ScopeKind, scope: object, ins: Filters, outs: Filters, rngs: Filters):
        self._kind, self._outs = kind, outs
        scopes, self._tree = jax.tree.flatten(scope, is_leaf=is_carrier(kind))
        selects = [*map(Select, ins), *(Select(rngs=where) for where in rngs)]
        self._filters = [tuple((select, None) for select in selects)] * len(scopes)
        self._outer, self._static, groups = kind.split(scopes, self._filters)
        self._roots = [i for i, fields in enumerate(self._static) if hasattr(fields, "mutable")]
        self._mutable = [scopes[i].mutable for i in self._roots]
        by_select = [[groups[i][k] for i in self._roots] for k in range(len(selects))]
        self.groups = (
            tuple(tuple(copy_dicts(g.variables) for g in of) for of in by_select[: len(ins)]),
            tuple(tuple(g.streams for g in of) for of in by_select[len(ins) :]),
        )
        self._made: list[list[Scope]] = []

    def scope_fn(self, variable_groups: Any, rng_groups: Any, mutable_filter: Filter = True) -> Any:
        changeable = functools.reduce(union_filters, self._outs, False)
        changeable = intersect_filters(changeable, mutable_filter)
        static: list[Any] = list(self._static)
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
        scopes = jax.tree.leaves(scope, is_leaf=is_carrier(self._kind))
        by_root = [
            group_collections(scopes[i].mutable_variables(), self._outs) for i in self._roots
        ]
        return tuple(tuple(groups[k] for groups in by_root) for k in range(len(self._outs)))

    def commit(self, changed: Any) -> None:
        if not self._made:
            self.scope_fn(*self.groups)
        last = self._made[-1]
        collected, _, _ = self._kind.collect(
            None, self._static, last, self._filters, Returned(None, [], [])
        )
        groups: list[tuple[Group, ...]] = [()] * len(self._static)
        for root, i in enumerate(self._roots):
            groups[i] = tuple(Group(group[root], {}, {}) for group in changed)
        self._kind.commit(self._outer, collected, groups, [])

    def end(self) -> None:
        for scopes in self._made:
            for scope in scopes:
                scope.invalidate()
