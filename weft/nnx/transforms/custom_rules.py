"""custom_vjp and custom_jvp: functions of objects with their own derivatives."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from weft import errors, lifting
from weft.core.tracing import entry_point
from weft.lifting import DIFF, Roles, kind, signature
from weft.nnx import graph, pytree
from weft.nnx.filters import Everything, to_predicate
from weft.nnx.settings import GraphOptions, resolve_graph_options
from weft.nnx.split_merge import state
from weft.nnx.state import from_flat_state, path_text, to_flat_state
from weft.nnx.transforms import calls, object_state, state_roles
from weft.nnx.transforms.kind import ObjectKind, is_object
from weft.nnx.variables import Variable, is_variable, map_value, value_of
from weft.nnx.versions import TransformCall, origin

NondiffArgnums = int | state_roles.DiffState | Sequence[int | state_roles.DiffState]
# Binds the arguments without a gradient to a function.
Bind = Callable[[Callable[..., Any]], Callable[..., Any]]


class _RuleArguments:
    def __init__(self, kind: ObjectKind, args: tuple[Any, ...], where: Sequence[Any]):
        self._tree = jax.tree.structure(args, is_leaf=is_object)
        given = [
            (x, wanted)
            for arg, wanted in zip(args, where, strict=True)
            for x in jax.tree.leaves(arg, is_leaf=is_object)
        ]
        self._is_object = [is_object(x) for x, _ in given]
        objects = [x for x, _ in given if is_object(x)]
        self._is_variable = [isinstance(x, Variable) for x in objects]
        self._wanted = [to_predicate(wanted) for x, wanted in given if is_object(x)]
        flat = kind.flatten(objects)
        self._graphdefs = [graph.flatten_graph(x, places=kind.places()).graphdef for x in objects]
        # Variables with shapes as values, as templates.
        self._leaves = [(path, map_value(jax.typeof, x)) for path, x in flat.items()]

    def roles(self) -> Any:
        of_objects = (Roles(((wanted, DIFF), (Everything(), None))) for wanted in self._wanted)
        return self._tree.unflatten(
            next(of_objects) if is_object else DIFF for is_object in self._is_object
        )

    def to_arguments(
        self, groups: Sequence[object_state.Group], arrays: Sequence[Any] | None, is_whole: bool
    ) -> Any:
        """Returns values of objects (missing ones as zeros) and arrays in the arguments' tree.

        `arrays=None` sets all arrays to None; without `is_whole`, a `State` replaces each object.
        """

        def of_object(i: int, group: object_state.Group) -> Any:
            items = {
                path[2:]: group.get(n, map_value(_zeros_like, leaf))
                for n, (path, leaf) in enumerate(self._leaves)
                if path[1] == i
            }
            if self._is_variable[i]:
                return next(iter(items.values()), None)
            if not is_whole:
                return from_flat_state(items.items())
            graphdef = self._graphdefs[i]
            return graph.build_graph(graphdef, [items[path] for path in graphdef.paths])[0]

        of_objects = itertools.starmap(of_object, enumerate(groups))
        of_arrays = itertools.repeat(None) if arrays is None else iter(arrays)
        of_leaves = (next(of_objects if x else of_arrays) for x in self._is_object)
        return self._tree.unflatten(of_leaves)

    def updates(self, groups: Sequence[object_state.Group]) -> Any:
        """Returns the tree of the arguments, with None for all but the variables in the groups."""
        keep = {
            (path[1], path[2:])
            for n, (path, _) in enumerate(self._leaves)
            if any(n in group for group in groups)
        }
        numbers = itertools.count()

        def pruned(x: Any) -> Any:
            if not is_object(x):
                return None
            i = next(numbers)

            def at(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
                return leaf if (i, tuple(map(pytree.key_of, path))) in keep else None

            return jax.tree_util.tree_map_with_path(at, x, is_leaf=is_variable)

        given = self.to_arguments(groups, None, is_whole=True)
        return jax.tree.map(pruned, given, is_leaf=is_object)

    def to_groups(self, name: str, given: object) -> list[Any]:
        """Converts a rule's result, one value per argument, to groups of objects, then arrays.

        Raises TransformArgumentError if it does not fit the arguments.
        """
        trees = self._tree.children()
        if not isinstance(given, tuple | list) or len(given) != len(trees):
            n = len(given) if isinstance(given, tuple | list) else 1
            raise errors.TransformArgumentError(
                f"{name}: the rule returns {n} values for {len(trees)} arguments; return a tuple "
                "with one per argument, None for no gradient."
            )
        found: list[Any] = []
        for tree, value in zip(trees, given, strict=True):
            found += [None] * tree.num_leaves if value is None else tree.flatten_up_to(value)
        objects = [x for x, is_obj in zip(found, self._is_object, strict=True) if is_obj]
        arrays = [x for x, is_obj in zip(found, self._is_object, strict=True) if not is_obj]
        return [*(self._group(name, i, value) for i, value in enumerate(objects)), *arrays]

    def _group(self, name: str, i: int, value: Any) -> dict[int, Any]:
        found = to_flat_state(state(value) if is_object(value) else {} if value is None else value)
        by_path = {path: value_of(v) for path, v in found}
        # A state has a variable that is at several places at the first of them.
        leaves = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_variable)
        values_by_place = {tuple(map(pytree.key_of, path)): value_of(v) for path, v in leaves}
        group = {}
        for n, (path, leaf) in enumerate(self._leaves):
            if path[1] != i or not self._wanted[i](path[2:], leaf):
                continue
            if path[2:] in by_path:
                x = by_path.pop(path[2:])
                group[n] = leaf.copy(x) if isinstance(leaf, Variable) else x
            elif path[2:] in values_by_place:
                x = values_by_place[path[2:]]
                group[n] = leaf.copy(x) if isinstance(leaf, Variable) else x
            else:
                group[n] = map_value(_zeros_like, leaf)
        if by_path:
            raise errors.TransformArgumentError(
                f"{name}: the rule returns a gradient at {path_text(next(iter(by_path)))!r}, "
                "where the argument has no differentiated variable; remove it."
            )
        return group


def _zeros_like(x: jax.Array | jax.ShapeDtypeStruct) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.zeros(x.shape, x.dtype) if is_float else np.zeros(x.shape, jax.dtypes.float0)


class _CustomRule:
    name: str

    def __init__(
        self, fun: Callable[..., Any], nondiff_argnums: NondiffArgnums, options: GraphOptions
    ):
        calls.check_unbound(self.name, fun)
        self._place = origin()
        functools.update_wrapper(self, fun)
        self._fun = fun
        modes = resolve_graph_options(**options)
        self._kind = ObjectKind(self.name, *modes, is_result_free=True, has_rule=True)
        is_one = isinstance(nondiff_argnums, int | state_roles.DiffState)
        given = (nondiff_argnums,) if is_one else tuple(nondiff_argnums)
        self._fixed = frozenset(x for x in given if isinstance(x, int))
        signature.check_argnums(f"nnx.{self.name}", "nondiff_argnums", fun, self._fixed)
        self._filters = {x.argnum: x.filter for x in given if isinstance(x, state_roles.DiffState)}

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @entry_point
    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        if kwargs:
            args, kwargs = calls.bind_positional(self._fun, args, kwargs)
        at = {i + len(args) if i < 0 else i for i in self._fixed}
        fixed = [args[i] for i in sorted(at)]
        others = tuple(x for i, x in enumerate(args) if i not in at)
        where = [self._filters.get(i, ...) for i in range(len(args)) if i not in at]

        def bound(fn: Callable[..., Any]) -> Callable[..., Any]:
            def call(*others: object) -> Any:
                rest = iter(others)
                given = iter(fixed)
                every = (next(given) if i in at else next(rest) for i in range(len(args)))
                return fn(*every, **kwargs)

            return signature.copy_name(fn, call)

        names = [x for i, x in enumerate(calls.parameter_names(self._fun)) if i not in at]
        specs = ("nondiff_argnums", "the result")
        with TransformCall(self.name, self._fun, others, specs, names=names, place=self._place):
            return self._lifted(bound, fixed, _RuleArguments(self._kind, others, where))(*others)

    def _lifted(self, bound: Bind, fixed: list[Any], objects: _RuleArguments) -> Callable[..., Any]:
        raise NotImplementedError

    def _require_rule(self, rule: object, method: str) -> Any:
        if rule is None:
            raise errors.TransformArgumentError(
                f"nnx.{self.name}({getattr(self._fun, '__name__', self._fun)}) has no rule; call "
                f"f.{method} first."
            )
        return rule


class CustomVjp(_CustomRule):
    """A function with its own rule for gradients."""

    name = "custom_vjp"
    _rules: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Sets the rule.

        Args:
            fwd: takes the arguments; returns result and residuals, a pytree of arrays and objects.
            bwd: takes the arguments of `nondiff_argnums`, the residuals and `g`; returns a tuple
                of gradients, one for each other argument, None for zeros: for an object a `State`
                or an object of its class. `g` is a pair: cotangents of the arguments' state after
                the call (a `State` for an object, None for an array), and the cotangent of the
                result, with a `State` for an object. All differentiated values of an argument, also
                unchanged ones, have the gradient that the rule returns for them; cotangents of a
                variable that is part of the result are among those of the state. In tree mode `g`
                is only the cotangent of the result, with an object for an object; a `bwd` with a
                parameter `updates_g` also gets the cotangents of changed variables, in the tree of
                the arguments, with None elsewhere.
        """
        self._rules = fwd, bwd

    def _lifted(self, bound: Bind, fixed: list[Any], objects: _RuleArguments) -> Callable[..., Any]:
        fwd, bwd = self._require_rule(self._rules, "defvjp(fwd, bwd)")

        def forward(*others: Any) -> tuple[Any, Any]:
            result, residuals = bound(fwd)(*others)
            flat = graph.flatten_graph(residuals)
            values = [x.get_raw_value() if isinstance(x, Variable) else x for x in flat.leaves]
            return result, (kind.Static(flat.graphdef), values)

        takes_updates = "updates_g" in signature.signature_of(bwd).parameters

        def backward(
            residuals: Any, cotangent: Any, of_state: Sequence[object_state.Groups], collected: Any
        ) -> list[Any]:
            graphdef, values = residuals
            g = self._kind.cotangents(collected, cotangent)
            groups = [{n: x for group in of for n, x in group.items()} for of in of_state]
            more: dict[str, Any] = {}
            if self._kind.structure:
                g = objects.to_arguments(groups, None, is_whole=False), g
            elif takes_updates:
                more = {"updates_g": objects.updates(groups)}
            given = bwd(*fixed, graph.build_graph(graphdef.value, values)[0], g, **more)
            return objects.to_groups(self.name, given)

        return lifting.custom_vjp(
            self._kind,
            bound(self._fun),
            signature.copy_name(fwd, forward),
            signature.copy_name(bwd, backward),
            wrt=objects.roles(),
            of_state=True,
        )


class CustomJvp(_CustomRule):
    """A function with its own rule for tangents."""

    name = "custom_jvp"
    _rule: Callable[..., Any] | None = None

    def defjvp(self, jvp: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the rule; usable as a decorator.

        Args:
            jvp: takes the arguments of `nondiff_argnums`, a tuple of the other arguments and one of
                their tangents (for an object a `State`, in tree mode an object of its class);
                returns the result and its tangent, for an object a `State` or an object of its
                class. Variables of arguments that the result contains have the tangents that it has
                there, zero if they are missing; the others keep theirs, or zero if changed.
        """
        self._rule = jvp
        return jvp

    def _lifted(self, bound: Bind, fixed: list[Any], objects: _RuleArguments) -> Callable[..., Any]:
        rule = self._require_rule(self._rule, "defjvp(rule)")

        def pushed(tangents: list[Any], *others: object) -> tuple[Any, Any]:
            groups = [x for x in tangents if isinstance(x, dict)]
            arrays = tangents[len(groups) :]
            is_whole = not self._kind.structure
            return rule(*fixed, others, objects.to_arguments(groups, arrays, is_whole))

        return lifting.custom_jvp(
            self._kind,
            bound(self._fun),
            signature.copy_name(rule, pushed),
            wrt=objects.roles(),
            pack_tangent=self._kind.tangents,
        )


@calls.optional_function
def custom_vjp(
    fun: Callable[..., Any] = calls.MISSING,
    *,
    nondiff_argnums: NondiffArgnums = (),
    **options: Unpack[GraphOptions],
) -> Any:
    """Applies `jax.custom_vjp` to a function of objects; without one, returns a decorator.

    Args:
        nondiff_argnums: positions of arguments without a gradient, which `bwd` takes first, and
            `DiffState(position, filter)` for an object that is differentiated in part.

    The function's `defvjp(fwd, bwd)` sets the rule.

    Raises TransformArgumentError when called without a rule, or when differentiated if the result
    of the rule does not fit the arguments.

    >>> @nnx.custom_vjp
    ... def scaled(w, x):
    ...     return w * x
    >>> def fwd(w, x):
    ...     return w * x, (w, x)
    >>> def bwd(residuals, g):
    ...     w, x = residuals
    ...     _, out_g = g
    ...     return nnx.Param(100 * out_g * x), out_g * w
    >>> scaled.defvjp(fwd, bwd)
    >>> float(nnx.grad(scaled)(nnx.Param(2.0), 3.0)[...])
    300.0
    """
    return CustomVjp(fun, nondiff_argnums, options)


@calls.optional_function
def custom_jvp(
    fun: Callable[..., Any] = calls.MISSING,
    *,
    nondiff_argnums: NondiffArgnums = (),
    **options: Unpack[GraphOptions],
) -> Any:
    """Applies `jax.custom_jvp` to a function of objects; without one, returns a decorator.

    The function's `defjvp(rule)` sets the rule; see `custom_vjp` for `nondiff_argnums`.

    Raises TransformArgumentError when called without a rule.

    >>> @nnx.custom_jvp
    ... def square(w):
    ...     return w[...] ** 2
    >>> @square.defjvp
    ... def rule(primals, tangents):
    ...     (w,), (t,) = primals, tangents
    ...     return w[...] ** 2, 100 * w[...] * t[...]
    >>> float(nnx.grad(square)(nnx.Param(3.0))[...])
    300.0
    """
    return CustomJvp(fun, nondiff_argnums, options)
