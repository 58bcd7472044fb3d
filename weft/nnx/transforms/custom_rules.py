"""custom_vjp and custom_jvp: functions of objects with their own derivatives."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from weft import errors, lifting
from weft.core.tracing import entry_point
from weft.lifting import DIFF, Roles, kind, signature
from weft.nnx import graph, pytree
from weft.nnx.filters import Everything, Path, Predicate, to_predicate
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
    """The arguments of a call that are differentiated: their tree, and what each object holds.

    Between the engine and a user's rule, the values of an object are a group, by their number, and
    those of the rule are a `State` or another object of the class.
    """

    def __init__(self, kind: ObjectKind, args: tuple[Any, ...], filters: Sequence[Any]):
        self._tree = jax.tree.structure(args, is_leaf=is_object)
        self._is_object: list[bool] = []  # of each leaf of the arguments
        self._is_wanted: list[Predicate] = []  # of each object, whether an entry is differentiated
        objects: list[Any] = []
        for arg, filter_of_arg in zip(args, filters, strict=True):
            for leaf in jax.tree.leaves(arg, is_leaf=is_object):
                self._is_object.append(is_object(leaf))
                if is_object(leaf):
                    objects.append(leaf)
                    self._is_wanted.append(to_predicate(filter_of_arg))
        self._is_variable = [isinstance(x, Variable) for x in objects]
        self._graphdefs = [graph.flatten_graph(x, places=kind.places()).graphdef for x in objects]
        # The values by number: the object, the path in it, and a variable with its shape as value.
        self._values: list[_ObjectValue] = []
        for (_, i, *path), leaf in kind.flatten(objects).items():
            object_index: Any = i
            template = map_value(jax.typeof, leaf)
            self._values.append(_ObjectValue(object_index, tuple(path), template))

    def roles(self) -> Any:
        """Returns the tree of the arguments' roles."""
        wanted = iter(self._is_wanted)
        roles: list[Any] = []
        for is_object_leaf in self._is_object:
            if is_object_leaf:
                roles.append(Roles(((next(wanted), DIFF), (Everything(), None))))
            else:
                roles.append(DIFF)
        return self._tree.unflatten(roles)

    def to_arguments(
        self, groups: Sequence[object_state.Group], arrays: Sequence[Any] | None, is_whole: bool
    ) -> Any:
        """Returns values of objects (missing ones as zeros) and arrays in the arguments' tree.

        `arrays=None` sets all arrays to None; without `is_whole`, a `State` replaces each object.
        """
        remaining_objects = (self._to_object(i, x, is_whole) for i, x in enumerate(groups))
        remaining_arrays = itertools.repeat(None) if arrays is None else iter(arrays)
        leaves: list[Any] = []
        for is_object_leaf in self._is_object:
            leaves.append(next(remaining_objects if is_object_leaf else remaining_arrays))
        return self._tree.unflatten(leaves)

    def _to_object(self, i: int, group: object_state.Group, is_whole: bool) -> Any:
        """Returns the values of an object as a variable, an object or a `State`."""
        value_of_path: dict[Path, Any] = {}
        for n, value in enumerate(self._values):
            if value.object_index == i:
                zeros = map_value(_zeros_like, value.template)
                value_of_path[value.path] = group.get(n, zeros)
        if self._is_variable[i]:
            return next(iter(value_of_path.values()), None)
        if not is_whole:
            return from_flat_state(value_of_path.items())
        graphdef = self._graphdefs[i]
        x, _ = graph.build_graph(graphdef, [value_of_path[path] for path in graphdef.paths])
        return x

    def updates(self, groups: Sequence[object_state.Group]) -> Any:
        """Returns the tree of the arguments, with None for all but the variables in the groups."""
        updated: set[tuple[int, Path]] = set()
        for n, value in enumerate(self._values):
            if any(n in group for group in groups):
                updated.add((value.object_index, value.path))
        object_indices = itertools.count()

        def pruned(x: Any) -> Any:
            if not is_object(x):
                return None
            i = next(object_indices)

            def updated_or_none(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
                return leaf if (i, tuple(map(pytree.key_of, path))) in updated else None

            return jax.tree_util.tree_map_with_path(updated_or_none, x, is_leaf=is_variable)

        arguments = self.to_arguments(groups, None, is_whole=True)
        return jax.tree.map(pruned, arguments, is_leaf=is_object)

    def to_groups(self, name: str, gradients: object) -> list[Any]:
        """Converts a rule's result, one value per argument, to groups of objects, then arrays.

        Raises TransformArgumentError if it does not fit the arguments.
        """
        trees = self._tree.children()
        is_sequence = isinstance(gradients, tuple | list)
        if not is_sequence or len(gradients) != len(trees):
            num_values = len(gradients) if is_sequence else 1
            raise errors.TransformArgumentError(
                f"{name}: the rule returns {num_values} values for {len(trees)} arguments; return "
                "a tuple with one per argument, None for no gradient."
            )
        leaves: list[Any] = []
        for tree, gradient in zip(trees, gradients, strict=True):
            if gradient is None:
                leaves += [None] * tree.num_leaves
            else:
                leaves += tree.flatten_up_to(gradient)
        groups: list[Any] = []
        arrays: list[Any] = []
        for leaf, is_object_leaf in zip(leaves, self._is_object, strict=True):
            if is_object_leaf:
                groups.append(self._to_group(name, len(groups), leaf))
            else:
                arrays.append(leaf)
        return [*groups, *arrays]

    def _to_group(self, name: str, i: int, gradient: Any) -> dict[int, Any]:
        """Returns the gradient of an object, a `State` or another object, as a group."""
        gradient_state: Any = {}
        if is_object(gradient):
            gradient_state = state(gradient)
        elif gradient is not None:
            gradient_state = gradient
        value_of_path: dict[Path, Any] = {}
        for path, leaf in to_flat_state(gradient_state):
            value_of_path[path] = value_of(leaf)
        # A state has a variable that is at several places at the first of them.
        value_of_place: dict[Path, Any] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient, is_leaf=is_variable):
            value_of_place[tuple(map(pytree.key_of, path))] = value_of(leaf)
        group: dict[int, Any] = {}
        for n, (object_index, path, template) in enumerate(self._values):
            if object_index != i or not self._is_wanted[i](path, template):
                continue
            if path in value_of_path:
                value = value_of_path.pop(path)
            elif path in value_of_place:
                value = value_of_place[path]
            else:
                group[n] = map_value(_zeros_like, template)
                continue
            group[n] = template.copy(value) if isinstance(template, Variable) else value
        if value_of_path:
            raise errors.TransformArgumentError(
                f"{name}: the rule returns a gradient at {path_text(next(iter(value_of_path)))!r}, "
                "where the argument has no differentiated variable; remove it."
            )
        return group


class _ObjectValue(NamedTuple):
    """A value of the arguments: the object's index, the path in it, and its shape in its place."""

    object_index: int
    path: Path
    template: Any


def _zeros_like(x: jax.Array | jax.ShapeDtypeStruct) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros(x.shape, x.dtype)
    return np.zeros(x.shape, jax.dtypes.float0)


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
        if isinstance(nondiff_argnums, int | state_roles.DiffState):
            nondiff_argnums = (nondiff_argnums,)
        self._fixed_argnums = frozenset(x for x in nondiff_argnums if isinstance(x, int))
        signature.check_argnums(f"nnx.{self.name}", "nondiff_argnums", fun, self._fixed_argnums)
        self._filters: dict[int, Any] = {}
        for x in nondiff_argnums:
            if isinstance(x, state_roles.DiffState):
                self._filters[x.argnum] = x.filter

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @entry_point
    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        if kwargs:
            args, kwargs = calls.bind_positional(self._fun, args, kwargs)
        num_args = len(args)
        fixed_argnums = {i + num_args if i < 0 else i for i in self._fixed_argnums}
        other_argnums = [i for i in range(num_args) if i not in fixed_argnums]
        fixed_args = [args[i] for i in sorted(fixed_argnums)]
        other_args = tuple(args[i] for i in other_argnums)
        filters = [self._filters.get(i, ...) for i in other_argnums]

        def bound(fn: Callable[..., Any]) -> Callable[..., Any]:
            """Returns a function of the other arguments alone."""
            # It may outlive the call, and does not keep the other arguments alive.
            args_template = [arg if i in fixed_argnums else None for i, arg in enumerate(args)]

            def call(*others: object) -> Any:
                all_args = list(args_template)
                for i, arg in zip(other_argnums, others, strict=True):
                    all_args[i] = arg
                return fn(*all_args, **kwargs)

            return signature.copy_name(fn, call)

        names = calls.parameter_names(self._fun)
        other_names = [name for i, name in enumerate(names) if i not in fixed_argnums]
        specs = ("nondiff_argnums", "the result")
        with TransformCall(
            self.name, self._fun, other_args, specs, names=other_names, place=self._place
        ):
            objects = _RuleArguments(self._kind, other_args, filters)
            return self._lifted(bound, fixed_args, objects)(*other_args)

    def _lifted(self, bound: Bind, fixed: list[Any], objects: _RuleArguments) -> Callable[..., Any]:
        raise NotImplementedError

    def _require_rule(self, rule: object, method: str) -> Any:
        if rule is None:
            function_name = getattr(self._fun, "__name__", self._fun)
            raise errors.TransformArgumentError(
                f"nnx.{self.name}({function_name}) has no rule; call f.{method} first."
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
            values: list[Any] = []
            for leaf in flat.leaves:
                values.append(leaf.get_raw_value() if isinstance(leaf, Variable) else leaf)
            return result, (kind.Static(flat.graphdef), values)

        takes_updates = "updates_g" in signature.signature_of(bwd).parameters

        def backward(
            residuals: Any,
            cotangent: Any,
            state_cotangents: Sequence[object_state.Groups],
            collected: Any,
        ) -> list[Any]:
            graphdef, values = residuals
            g = self._kind.cotangents(collected, cotangent)
            cotangents_by_object: list[object_state.Group] = []
            for groups in state_cotangents:
                cotangents: object_state.Group = {}
                for group in groups:
                    cotangents.update(group)
                cotangents_by_object.append(cotangents)
            updates: dict[str, Any] = {}
            if self._kind.structure:
                g = objects.to_arguments(cotangents_by_object, None, is_whole=False), g
            elif takes_updates:
                updates = {"updates_g": objects.updates(cotangents_by_object)}
            rule_residuals, _ = graph.build_graph(graphdef.value, values)
            gradients = bwd(*fixed, rule_residuals, g, **updates)
            return objects.to_groups(self.name, gradients)

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
