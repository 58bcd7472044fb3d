"""custom_vjp and custom_jvp: functions of objects with their own derivatives.

A user's rule sees objects and states, the engine's sees groups, the values of an object by number:

    the user's    fwd(model, x) -> y, residuals     bwd(residuals, (states, y_g)) -> model_g, x_g
    the engine's  forward(model, x) -> y, arrays    backward(arrays, y_g, groups) -> [group, x_g]
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from weft import errors, lifting
from weft.core.tracing import entry_point
from weft.lifting import DIFF, Roles, kind, signature
from weft.lifting.roles import Role
from weft.nnx import graph, pytree
from weft.nnx.filters import Filter, Path, Predicate, to_predicate
from weft.nnx.pytree import is_object, objects_in
from weft.nnx.settings import GraphOptions, resolve_graph_options
from weft.nnx.state import from_flat_state, path_text
from weft.nnx.transforms import calls, object_state, state_roles
from weft.nnx.transforms.autodiff import diff_roles, split_path, value_by_path
from weft.nnx.transforms.kind import ObjectKind
from weft.nnx.variables import Variable, is_variable, map_value, value_of
from weft.nnx.versions import TransformCall, origin
from weft.typing import Fn, PyTree

NondiffArgnums = (
    int | state_roles.DiffState | Sequence[int | state_roles.DiffState]
)
# Turns a function of all arguments into one of those with a gradient.
Bind = Callable[[Fn], Fn]


class _RuleArguments:
    """The arguments of a call that are differentiated: their tree, and what each object holds.

    Between the engine and a user's rule, the values of an object are a group, by their number, and
    those of the rule are a `State` or another object of the class.
    """

    def __init__(
        self,
        kind: ObjectKind,
        args: tuple[PyTree, ...],
        filters: Sequence[Filter],
    ):
        # None of it holds arrays: JAX keeps a rule, and with it this object.
        self._tree = jax.tree.structure(args, is_leaf=is_object)
        self._is_object: list[bool] = []  # of each leaf of the arguments
        # Of each object: the filter of the values that are differentiated.
        self._differentiated: list[Predicate] = []
        for arg, arg_filter in zip(args, filters, strict=True):
            for leaf in jax.tree.leaves(arg, is_leaf=is_object):
                self._is_object.append(is_object(leaf))
                if is_object(leaf):
                    self._differentiated.append(to_predicate(arg_filter))
        objects = objects_in(args)
        self._graphdefs: list[graph.GraphDef] = []
        for x in objects:
            flat = graph.flatten_graph(x, places=kind.places())
            self._graphdefs.append(flat.graphdef)
        self._values: list[_ObjectValue] = []  # by number
        for path, leaf in kind.flatten(objects).items():
            template = map_value(jax.typeof, leaf)
            self._values.append(_ObjectValue(*split_path(path), template))

    def roles(self) -> PyTree:
        """Returns the tree of the arguments' roles."""
        differentiated = iter(self._differentiated)
        roles: list[Role | Roles] = []
        for is_object_leaf in self._is_object:
            if is_object_leaf:
                roles.append(diff_roles(next(differentiated)))
            else:
                roles.append(DIFF)
        return self._tree.unflatten(roles)

    def to_arguments(
        self,
        groups: Sequence[object_state.Group],
        arrays: Sequence[PyTree] | None,
        is_whole: bool,
    ) -> PyTree:
        """Returns values of objects (missing ones as zeros) and arrays in the arguments' tree.

        `arrays=None` sets all arrays to None; without `is_whole`, a `State` replaces each object.
        """
        remaining_arrays: Iterator[PyTree] = itertools.repeat(None)
        if arrays is not None:
            remaining_arrays = iter(arrays)
        object_indices = itertools.count()
        leaves: list[PyTree] = []
        for is_object_leaf in self._is_object:
            if is_object_leaf:
                i = next(object_indices)
                leaves.append(self._to_object(i, groups[i], is_whole))
            else:
                leaves.append(next(remaining_arrays))
        return self._tree.unflatten(leaves)

    def _to_object(
        self, i: int, group: object_state.Group, is_whole: bool
    ) -> PyTree:
        """Returns the values of an object as a variable, an object or a `State`."""
        value_of_path: dict[Path, PyTree] = {}
        for number, value in enumerate(self._values):
            if value.object_index == i:
                zeros = map_value(_zeros_like, value.template)
                value_of_path[value.path] = group.get(number, zeros)
        graphdef = self._graphdefs[i]
        if isinstance(graphdef.root, graph.VariableDef):
            return value_of_path.get(())
        if not is_whole:
            return from_flat_state(value_of_path)
        values = [value_of_path[path] for path in graphdef.paths]
        x, _ = graph.build_graph(graphdef, values)
        return x

    def updates(self, groups: Sequence[object_state.Group]) -> PyTree:
        """Returns the tree of the arguments, with None for all but the variables in the groups."""
        leaves: list[PyTree] = []
        arguments = self.to_arguments(groups, None, is_whole=True)
        object_indices = itertools.count()
        for leaf in self._tree.flatten_up_to(arguments):
            if is_object(leaf):
                leaf = self._only_updates(next(object_indices), leaf, groups)
            leaves.append(leaf)
        return self._tree.unflatten(leaves)

    def _only_updates(
        self, i: int, x: PyTree, groups: Sequence[object_state.Group]
    ) -> PyTree:
        updated_paths: set[Path] = set()
        for number, value in enumerate(self._values):
            is_updated = any(number in group for group in groups)
            if value.object_index == i and is_updated:
                updated_paths.add(value.path)

        def updated_or_none(
            jax_path: jax.tree_util.KeyPath, leaf: PyTree
        ) -> PyTree:
            return leaf if _path_of(jax_path) in updated_paths else None

        return jax.tree_util.tree_map_with_path(
            updated_or_none, x, is_leaf=is_variable
        )

    def to_groups(self, name: str, gradients: PyTree) -> list[PyTree]:
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
        leaves: list[PyTree] = []
        for tree, gradient in zip(trees, gradients, strict=True):
            if gradient is None:
                leaves += [None] * tree.num_leaves
            else:
                leaves += tree.flatten_up_to(gradient)
        groups: list[object_state.Group] = []
        arrays: list[PyTree] = []
        for leaf, is_object_leaf in zip(leaves, self._is_object, strict=True):
            if is_object_leaf:
                groups.append(self._to_group(name, len(groups), leaf))
            else:
                arrays.append(leaf)
        return [*groups, *arrays]

    def _to_group(
        self, name: str, i: int, gradient: PyTree
    ) -> object_state.Group:
        """Returns the gradient of an object, a `State` or another object, as a group."""
        value_of_path = {} if gradient is None else value_by_path(gradient)
        # A state has a variable that is at several places at the first of them.
        value_of_place: dict[Path, PyTree] = {}
        for jax_path, leaf in jax.tree_util.tree_leaves_with_path(
            gradient, is_leaf=is_variable
        ):
            value_of_place[_path_of(jax_path)] = value_of(leaf)
        group: object_state.Group = {}
        for number, (object_index, path, template) in enumerate(self._values):
            if object_index != i or not self._differentiated[i](path, template):
                continue
            if path in value_of_path:
                value = value_of_path.pop(path)
            elif path in value_of_place:
                value = value_of_place[path]
            else:
                group[number] = map_value(_zeros_like, template)
                continue
            if isinstance(template, Variable):
                value = template.copy(value)
            group[number] = value
        if value_of_path:
            unknown_path = next(iter(value_of_path))
            raise errors.TransformArgumentError(
                f"{name}: the rule returns a gradient at {path_text(unknown_path)!r}, where the "
                "argument has no differentiated variable; remove it."
            )
        return group


class _ObjectValue(NamedTuple):
    """A value of the arguments: the object's index, the path in it, and its shape in its place.

    The template of a variable is a variable with a shape as its value.
    """

    object_index: int
    path: Path
    template: PyTree


def _path_of(jax_path: jax.tree_util.KeyPath) -> Path:
    return tuple(map(pytree.key_of, jax_path))


def _zeros_like(x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | np.ndarray:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros(x.shape, x.dtype)
    return np.zeros(x.shape, jax.dtypes.float0)


class _CustomRule:
    """A function with a rule: `__call__` differentiates the arguments not in `nondiff_argnums`."""

    name: str

    def __init__(
        self, fun: Fn, nondiff_argnums: NondiffArgnums, options: GraphOptions
    ):
        calls.check_unbound(self.name, fun)
        self._place = origin()
        functools.update_wrapper(self, fun)
        self._fun = fun
        modes = resolve_graph_options(**options)
        self._kind = ObjectKind(
            self.name, *modes, is_result_free=True, has_rule=True
        )
        if not isinstance(nondiff_argnums, Iterable):
            nondiff_argnums = (nondiff_argnums,)
        fixed_argnums: list[int] = []
        self._filters: dict[int, Filter] = {}
        for argnum in nondiff_argnums:
            if isinstance(argnum, state_roles.DiffState):
                self._filters[argnum.argnum] = argnum.filter
            else:
                fixed_argnums.append(argnum)
        signature.check_argnums(
            f"nnx.{self.name}", "nondiff_argnums", fun, fixed_argnums
        )
        self._fixed_argnums = set(fixed_argnums)

    def __get__(self, instance: object, owner: type | None = None) -> Fn:
        return self if instance is None else functools.partial(self, instance)

    @entry_point
    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if kwargs:
            args, kwargs = calls.bind_positional(self._fun, args, kwargs)
        diff_argnums: list[int] = []
        filters: list[Filter] = []
        fixed_args: list[PyTree] = []
        for i, arg in enumerate(args):
            # `nondiff_argnums` may count from the end.
            if {i, i - len(args)} & self._fixed_argnums:
                fixed_args.append(arg)
            else:
                diff_argnums.append(i)
                filters.append(self._filters.get(i, ...))
        diff_args = tuple(args[i] for i in diff_argnums)

        def bind(fn: Fn) -> Fn:
            """Returns a function of the differentiated arguments alone."""
            # JAX may keep it after the call, so it does not hold these arguments.
            args_template = list(args)
            for i in diff_argnums:
                args_template[i] = None

            def call(*diff_args: PyTree) -> PyTree:
                all_args = list(args_template)
                for i, arg in zip(diff_argnums, diff_args, strict=True):
                    all_args[i] = arg
                return fn(*all_args, **kwargs)

            return signature.copy_name(fn, call)

        names = calls.parameter_names(self._fun)
        diff_names = [names[i] for i in diff_argnums if i < len(names)]
        with TransformCall(
            self.name,
            self._fun,
            diff_args,
            ("nondiff_argnums", "the result"),
            names=diff_names,
            place=self._place,
        ):
            arguments = _RuleArguments(self._kind, diff_args, filters)
            return self._lifted(bind, fixed_args, arguments)(*diff_args)

    def _lifted(
        self, bind: Bind, fixed_args: list[PyTree], arguments: _RuleArguments
    ) -> Fn:
        """Returns the function of the differentiated arguments with its rule."""
        raise NotImplementedError

    def _no_rule_error(self, method: str) -> errors.TransformArgumentError:
        function_name = getattr(self._fun, "__name__", self._fun)
        return errors.TransformArgumentError(
            f"nnx.{self.name}({function_name}) has no rule; call f.{method} first."
        )


class CustomVjp(_CustomRule):
    """A function with its own rule for gradients."""

    name = "custom_vjp"
    _rules: tuple[Fn, Fn] | None = None

    def defvjp(self, fwd: Fn, bwd: Fn) -> None:
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

    def _lifted(
        self, bind: Bind, fixed_args: list[PyTree], arguments: _RuleArguments
    ) -> Fn:
        if self._rules is None:
            raise self._no_rule_error("defvjp(fwd, bwd)")
        fwd, bwd = self._rules

        def forward(*diff_args: PyTree) -> tuple[PyTree, PyTree]:
            result, residuals = bind(fwd)(*diff_args)
            # JAX takes arrays as residuals, and a rule also returns objects.
            flat = graph.flatten_graph(residuals)
            values: list[PyTree] = []
            for leaf in flat.leaves:
                if isinstance(leaf, Variable):
                    leaf = leaf.get_raw_value()
                values.append(leaf)
            return result, (kind.Static(flat.graphdef), values)

        takes_updates = "updates_g" in signature.signature_of(bwd).parameters

        def backward(
            residuals: tuple[kind.Static, list[PyTree]],
            cotangent: PyTree,
            state_cotangents: Sequence[object_state.Groups],
            collected: object_state.ChangedObjects | None,
        ) -> list[PyTree]:
            graphdef, values = residuals
            g = self._kind.cotangents(collected, cotangent)
            cotangents_by_object: list[object_state.Group] = []
            # One group per object, without the marks of what a rule inside it has passed.
            for groups in state_cotangents:
                cotangents: object_state.Group = {}
                for group in groups:
                    cotangents = self._kind.union(cotangents, group)
                cotangents_by_object.append(cotangents)
            updates: dict[str, PyTree] = {}
            if self._kind.structure:
                states = arguments.to_arguments(
                    cotangents_by_object, None, is_whole=False
                )
                g = states, g
            elif takes_updates:
                updates["updates_g"] = arguments.updates(cotangents_by_object)
            rule_residuals, _ = graph.build_graph(graphdef.value, values)
            gradients = bwd(*fixed_args, rule_residuals, g, **updates)
            return arguments.to_groups(self.name, gradients)

        return lifting.custom_vjp(
            self._kind,
            bind(self._fun),
            signature.copy_name(fwd, forward),
            signature.copy_name(bwd, backward),
            wrt=arguments.roles(),
            of_state=True,
        )


class CustomJvp(_CustomRule):
    """A function with its own rule for tangents."""

    name = "custom_jvp"
    _rule: Fn | None = None

    def defjvp(self, jvp: Fn) -> Fn:
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

    def _lifted(
        self, bind: Bind, fixed_args: list[PyTree], arguments: _RuleArguments
    ) -> Fn:
        if self._rule is None:
            raise self._no_rule_error("defjvp(rule)")
        rule = self._rule

        def jvp_fn(
            tangents: list[PyTree], *primals: PyTree
        ) -> tuple[PyTree, PyTree]:
            # First the groups of the objects, which are dicts, then the arrays.
            groups = [x for x in tangents if isinstance(x, dict)]
            arrays = tangents[len(groups) :]
            is_whole = not self._kind.structure
            rule_tangents = arguments.to_arguments(groups, arrays, is_whole)
            return rule(*fixed_args, primals, rule_tangents)

        return lifting.custom_jvp(
            self._kind,
            bind(self._fun),
            signature.copy_name(rule, jvp_fn),
            wrt=arguments.roles(),
            pack_tangent=self._kind.tangents,
        )


@calls.optional_function
def custom_vjp(
    fun: Fn = calls.MISSING,
    *,
    nondiff_argnums: NondiffArgnums = (),
    **options: Unpack[GraphOptions],
) -> CustomVjp:
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
    fun: Fn = calls.MISSING,
    *,
    nondiff_argnums: NondiffArgnums = (),
    **options: Unpack[GraphOptions],
) -> CustomJvp:
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
