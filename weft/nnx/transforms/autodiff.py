"""Derivatives with respect to arguments and parts of the state of objects, and remat.

`weft.lifting` differentiates with respect to arguments and groups with the role DIFF. Here argnums
and filters become roles, and gradients, which are groups, a `State` or an object:

    nnx.DiffState(0, nnx.Param)  ->  roles (Param: DIFF, ...: None) for argument 0
    ({0: Param(g)}, None)        ->  State({"w": Param(g)}), if value 0 of the call is its `w`
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np

from weft import errors, lifting
from weft.core.tracing import entry_point
from weft.lifting import DIFF, Roles, signature
from weft.lifting.kind import Structure
from weft.lifting.roles import Role
from weft.nnx import graph, settings, versions
from weft.nnx.filters import (
    Everything,
    OfType,
    Path,
    PathIn,
    Predicate,
    to_predicate,
)
from weft.nnx.pytree import Pytree, is_object, objects_in
from weft.nnx.split_merge import state
from weft.nnx.state import from_flat_state, path_text, to_flat_state
from weft.nnx.transforms import calls
from weft.nnx.transforms.calls import MISSING, P, R, optional_function
from weft.nnx.transforms.kind import ObjectKind
from weft.nnx.transforms.object_state import Group
from weft.nnx.transforms.state_roles import DiffState
from weft.nnx.variables import Param, Variable, value_of
from weft.typing import Fn, PyTree, as_grad, as_value_and_grad, same_signature

Argnums = int | DiffState | Sequence[int | DiffState]


@as_value_and_grad
@optional_function
def value_and_grad(
    f: Callable[P, Any] = MISSING,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: tuple[str, ...] = (),
    **options: Unpack[settings.GraphOptions],
) -> Callable[..., Any]:
    """Applies `jax.value_and_grad` to a function of objects.

    Args:
        f: returns a scalar, or with `has_aux` a pair of a scalar and any value; without it, a
            decorator is returned.
        argnums: positions of the arguments to differentiate; for an object its `Param` variables,
            or those of a `DiffState(position, filter)`.
        holomorphic, allow_int: as for `jax.grad`; `reduce_axes` must be `()`.

    Returns a function that returns the result of `f` and the gradients for `argnums`: for an object
    a `State` of the differentiated variables; in tree mode an object of the same structure, with
    all variables differentiated.

    Raises:
        TransformArgumentError: if an argument does not exist.
        InconsistentAliasError: if a variable is differentiated in only one of its places.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)))
    >>> loss, grads = nnx.value_and_grad(lambda m: m.w**2)(model)
    >>> float(loss), float(grads.w[...])
    (9.0, 6.0)
    """
    return _differentiate(
        "value_and_grad",
        f,
        options,
        argnums,
        has_aux,
        holomorphic,
        allow_int,
        reduce_axes,
    )


@as_grad
@optional_function
def grad(
    f: Callable[P, Any] = MISSING,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: tuple[str, ...] = (),
    **options: Unpack[settings.GraphOptions],
) -> Callable[..., Any]:
    """Returns the gradients of `value_and_grad`, with `has_aux` as a pair with the auxiliary value.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)), n=nnx.BatchStat(jnp.array(2.0)))
    >>> grads = nnx.grad(lambda m: m.w * m.n, argnums=nnx.DiffState(0, nnx.BatchStat))(model)
    >>> float(grads.n[...])
    3.0
    """
    value_and_gradients = _differentiate(
        "grad",
        f,
        options,
        argnums,
        has_aux,
        holomorphic,
        allow_int,
        reduce_axes,
    )

    @entry_point
    @functools.wraps(f)
    def gradients(*args: P.args, **kwargs: P.kwargs) -> PyTree:
        result, grads = value_and_gradients(*args, **kwargs)
        if has_aux:
            _, aux = result
            return grads, aux
        return grads

    return gradients


@optional_function
def vjp(
    f: Fn = MISSING,
    *primals: PyTree,
    has_aux: bool = False,
    reduce_axes: tuple[str, ...] = (),
    **options: Unpack[settings.GraphOptions],
) -> Any:
    """Applies `jax.vjp` to a function of objects.

    Args:
        f: returns arrays, with `graph=False` or `graph_updates=False` also objects, or with
            `has_aux` a pair of these and any value; without it, a decorator is returned.

    Returns the result of `f`, and a function from its cotangent to a tuple of gradients, one per
    argument in the form of `value_and_grad`; with `has_aux` also the auxiliary value. The cotangent
    has the structure of the result, with objects for objects.

    Raises CallMismatchError if `f` returns an object with references, or the cotangent of objects
    has another structure.

    >>> out, pullback = nnx.vjp(lambda w, x: w * x, nnx.Param(jnp.array(3.0)), 2.0)
    >>> gradients = pullback(jnp.array(1.0))
    >>> float(out), float(gradients[0][...]), float(gradients[1])
    (6.0, 2.0, 3.0)
    """
    if not primals:
        return functools.partial(
            vjp, f, has_aux=has_aux, reduce_axes=reduce_axes, **options
        )
    _refuse_reduce_axes("vjp", reduce_axes)
    kind = ObjectKind(
        "vjp", *settings.resolve_graph_options(**options), is_result_free=True
    )
    diff_arguments = _DiffArguments("vjp", range(len(primals)), kind)
    with versions.TransformCall("vjp", f, primals, ("primals", "the result")):
        lifted = lifting.vjp(
            kind,
            _with_object_results(kind, f, has_aux),
            wrt=diff_arguments.roles(primals),
            has_aux=True,
        )
        gradient_forms = diff_arguments.gradient_forms(primals)
        out, backward, aux = lifted(*primals)
    result_structure: Structure = None
    if isinstance(aux, _ObjectResult):
        out, aux = aux
        result_structure = jax.tree.structure(out)

    def pullback(backward: Fn, cotangent: PyTree) -> tuple[PyTree, ...]:
        if result_structure is not None:
            cotangent, structure = jax.tree.flatten(cotangent)
            if structure != result_structure:
                raise errors.CallMismatchError(
                    f"vjp: the result of the function has the structure {result_structure}, and "
                    f"the cotangent {structure}; pass a cotangent of the same structure, such as "
                    "the result of jax.tree.map over the result."
                )
        return gradient_forms.to_user_gradients(backward(cotangent))

    # A pytree of the residuals, so that it can leave a transformation.
    pullback_of_result = jax.tree_util.Partial(pullback, backward)
    if has_aux:
        return out, pullback_of_result, aux
    return out, pullback_of_result


@optional_function
def jvp(
    f: Fn = MISSING,
    primals: tuple[PyTree, ...] = MISSING,
    tangents: tuple[PyTree, ...] = MISSING,
    *,
    has_aux: bool = False,
    **options: Unpack[settings.GraphOptions],
) -> Any:
    """Applies `jax.jvp` to a function of objects.

    Args:
        f: see `vjp`.
        tangents: one per primal; for an object a `State`, or an object of the same structure, with
            tangents of some or all of its variables.

    Returns the result of `f` and its tangent of the same structure, then any auxiliary value.

    Raises CallMismatchError for another number of tangents, or a result with references.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)))
    >>> out, tangent = nnx.jvp(lambda m: m.w**2, (model,), (nnx.state(model),))
    >>> float(out), float(tangent)
    (9.0, 18.0)
    """
    if primals is MISSING:
        return functools.partial(jvp, f, has_aux=has_aux, **options)
    num_tangents = 0 if tangents is MISSING else len(tangents)
    if tangents is MISSING or len(primals) != num_tangents:
        raise errors.CallMismatchError(
            f"jvp: there are {len(primals)} primals and {num_tangents} tangents; pass one tangent "
            "per primal."
        )
    kind = ObjectKind(
        "jvp", *settings.resolve_graph_options(**options), is_result_free=True
    )
    flat = kind.flatten(objects_in(primals))
    by_object, array_tangents, roles = _split_tangents(
        kind, tuple(primals), tuple(tangents)
    )
    _refuse_tangents_of_aliases(flat, by_object)
    # `lifting` takes the tangents of objects as groups: values by their number in the call.
    groups: list[Group] = [{} for _ in by_object]
    for number, (path, leaf) in enumerate(flat.items()):
        object_index, path_in_object = split_path(path)
        tangent_by_path = by_object[object_index]
        if path_in_object in tangent_by_path:
            value = tangent_by_path[path_in_object]
            if isinstance(leaf, Variable):
                value = leaf.copy(value)
            groups[object_index][number] = value
    with versions.TransformCall("jvp", f, primals, ("primals", "the result")):
        fn = _with_object_results(kind, f, has_aux)
        lifted = lifting.jvp(kind, fn, wrt=roles, has_aux=True)
        out, tangent, aux = lifted(primals, [*groups, *array_tangents])
    if isinstance(aux, _ObjectResult):
        out, aux = aux
        tangent = jax.tree.unflatten(jax.tree.structure(out), tangent)
    if has_aux:
        return out, tangent, aux
    return out, tangent


class _SplitTangents(NamedTuple):
    """Tangents of the objects among the primals, by path in each, those of arrays, and the roles.

    The roles are a tree like the primals.
    """

    by_object: list[dict[Path, PyTree]]
    array_tangents: list[PyTree]
    roles: PyTree


def _split_tangents(
    kind: ObjectKind, primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]
) -> _SplitTangents:
    leaves, tree = jax.tree.flatten(primals, is_leaf=is_object)
    leaf_tangents = tree.flatten_up_to(tangents)
    by_object: list[dict[Path, PyTree]] = []
    array_tangents: list[PyTree] = []
    roles: list[Role | Roles] = []
    for leaf, tangent in zip(leaves, leaf_tangents, strict=True):
        if not is_object(leaf):
            roles.append(DIFF)
            array_tangents.append(tangent)
            continue
        tangent_by_path = value_by_path(tangent)
        flat = graph.flatten_graph(leaf, places=kind.places())
        unknown_paths = tangent_by_path.keys() - set(flat.graphdef.paths)
        if unknown_paths:
            places = sorted(repr(path_text(path)) for path in unknown_paths)
            raise errors.CallMismatchError(
                f"jvp: the tangent of a {type(leaf).__name__} is a {type(tangent).__name__} with "
                f"a value at {', '.join(places)}, where the primal has no variable; pass an object "
                "of its structure, or a State with tangents of its variables."
            )
        by_object.append(tangent_by_path)
        roles.append(diff_roles(PathIn(frozenset(tangent_by_path))))
    return _SplitTangents(by_object, array_tangents, tree.unflatten(roles))


def _refuse_tangents_of_aliases(
    flat: graph.FlatGraph, by_object: list[dict[Path, PyTree]]
) -> None:
    """Raises CallMismatchError for a tangent at a second place of an object or variable."""
    for index, path in flat.repeated:
        object_index, alias_path = split_path(path)
        for tangent_path in by_object[object_index]:
            if tangent_path[: len(alias_path)] == alias_path:
                raise errors.CallMismatchError(
                    f"jvp: the same {versions.class_and_shape(flat.objects[index])} is at two "
                    "places of the primals, and has a tangent at each, the second in object "
                    f"{object_index}; pass nnx.clone(...) in one of the places."
                )


def _refuse_reduce_axes(name: str, reduce_axes: tuple[str, ...]) -> None:
    if reduce_axes != ():
        raise errors.TransformOptionError(
            f"{name}: reduce_axes={reduce_axes!r}, which JAX no longer supports; omit it, and sum "
            "over the axes inside the function, as with jax.lax.psum."
        )


class _ObjectResult(NamedTuple):
    """A result with objects, and the auxiliary value."""

    result: PyTree
    aux: PyTree


def _with_object_results(kind: ObjectKind, f: Fn, has_aux: bool) -> Fn:
    """Returns a function with an auxiliary value, which is an `_ObjectResult` where one is needed.

    JAX differentiates the leaves of such a result, and the objects come back by their kind.
    """

    def leaves_of_result(
        *args: PyTree, **kwargs: PyTree
    ) -> tuple[PyTree, PyTree]:
        result = f(*args, **kwargs)
        value, aux = result if has_aux else (result, None)
        if not objects_in(value):
            return value, aux
        if kind.structure:
            raise _object_result_error(
                kind.transformation, ", or set graph=False"
            )
        return jax.tree.leaves(value), _ObjectResult(value, aux)

    return signature.copy_name(f, leaves_of_result)


def _object_result_error(
    name: str, advice: str = ""
) -> errors.CallMismatchError:
    return errors.CallMismatchError(
        f"{name}: the function returns an object where its result is differentiated; "
        f"return arrays, and the object as the auxiliary value with has_aux=True{advice}."
    )


def _refuse_object_results(name: str, f: Fn, has_aux: bool) -> Fn:
    def checked(*args: PyTree, **kwargs: PyTree) -> PyTree:
        result = f(*args, **kwargs)
        value = result
        # JAX refuses a result that should be a pair and is none.
        if has_aux and isinstance(result, tuple | list):
            value = result[0]
        if objects_in(value):
            raise _object_result_error(name)
        return result

    return signature.copy_name(f, checked)


def _differentiate(
    name: str,
    f: Callable[P, Any],
    options: settings.GraphOptions,
    argnums: Argnums,
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
    reduce_axes: tuple[str, ...],
) -> Callable[P, Any]:
    _refuse_reduce_axes(name, reduce_axes)
    kind = ObjectKind(
        name, *settings.resolve_graph_options(**options), is_result_free=True
    )
    diff_arguments = _DiffArguments(name, argnums, kind)
    fn = calls.with_kwargs_first(_refuse_object_results(name, f, has_aux))

    def call(kwargs: dict[str, PyTree], *args: PyTree) -> tuple[PyTree, PyTree]:
        differentiate = lifting.value_and_grad(
            kind,
            fn,
            wrt=(None, *diff_arguments.roles(args)),
            has_aux=has_aux,
            holomorphic=holomorphic,
            allow_int=allow_int,
        )
        # Before the call, which may move variables.
        gradient_forms = diff_arguments.gradient_forms(args, kwargs)
        result, (_, *grads) = differentiate(kwargs, *args)
        return result, gradient_forms.to_user_gradients(grads)

    return calls.wrap_transformed(name, f, call, ("argnums", "the result"))


class _DiffArguments:
    """The positions of the arguments to differentiate, each with a filter of its state or None."""

    def __init__(self, name: str, argnums: Argnums, kind: ObjectKind):
        self._name = name
        self._kind = kind
        self._is_single = not isinstance(argnums, Iterable)
        self._argnums: list[tuple[int, Predicate | None]] = []
        if not isinstance(argnums, Iterable):
            argnums = (argnums,)
        for argnum in argnums:
            if isinstance(argnum, DiffState):
                matches = to_predicate(argnum.filter)
                self._argnums.append((argnum.argnum, matches))
            elif isinstance(argnum, int):
                self._argnums.append((argnum, None))
            else:
                raise errors.TransformArgumentError(
                    f"{name}: argnums has {argnum!r}; use positions of arguments, or "
                    "nnx.DiffState(position, filter)."
                )

    def _filter_by_position(self, num_args: int) -> dict[int, Predicate | None]:
        """Returns the filters by position from the beginning, in the order of `argnums`."""
        filter_by_position: dict[int, Predicate | None] = {}
        for argnum, matches in self._argnums:
            if not -num_args <= argnum < num_args:
                raise errors.CallMismatchError(
                    f"{self._name}: argnums has {argnum}, but the function was called with "
                    f"{num_args} positional arguments; use positions of these."
                )
            position = argnum % num_args
            if position in filter_by_position:
                raise errors.TransformArgumentError(
                    f"{self._name}: argnums has {argnum} twice; use each position once."
                )
            filter_by_position[position] = matches
        return filter_by_position

    def roles(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Returns the roles of the arguments for `weft.lifting`."""
        filter_by_position = self._filter_by_position(len(args))
        roles: list[PyTree] = []
        for position, arg in enumerate(args):
            role: PyTree = None
            if position in filter_by_position:
                role_of_leaf = functools.partial(
                    self._role, filter_by_position[position]
                )
                role = jax.tree.map(role_of_leaf, arg, is_leaf=is_object)
            roles.append(role)
        return tuple(roles)

    def _role(self, matches: Predicate | None, leaf: PyTree) -> Role | Roles:
        if not is_object(leaf):
            return DIFF
        if matches is None:
            # A variable that is itself an argument is differentiated whatever its type.
            has_params_alone = self._kind.structure and isinstance(leaf, Pytree)
            matches = OfType(Param) if has_params_alone else Everything()
        return diff_roles(matches)

    def gradient_forms(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree] | None = None
    ) -> "_GradientForms":
        """Returns the forms of the gradients of a call with these arguments."""
        filter_by_position = self._filter_by_position(len(args))
        diff_args = [args[position] for position in filter_by_position]
        tree = jax.tree.structure(diff_args, is_leaf=is_object)
        graphdef = self._kind.flatten(objects_in((kwargs, args))).graphdef
        whole_objects: list[_NumberedObject | None] = [None] * tree.num_leaves
        if not self._kind.structure:
            whole_objects = self._whole_objects(args, kwargs, graphdef)
        return _GradientForms(
            positions=[*filter_by_position],
            is_single=self._is_single,
            tree=tree,
            paths=graphdef.paths,
            whole_objects=whole_objects,
        )

    def _whole_objects(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree] | None,
        graphdef: graph.GraphDef,
    ) -> "list[_NumberedObject | None]":
        """Returns the objects whose gradients are objects; see `_GradientForms.whole_objects`."""
        # Copies of the call's objects whose values are numbers show which values each one holds.
        numbers = [np.asarray(n) for n in range(graphdef.num_leaves)]
        (copies, _), _ = graph.build_graph(graphdef, numbers)
        remaining_copies = iter(copies)

        def numbered(leaf: PyTree) -> PyTree:
            return next(remaining_copies) if is_object(leaf) else leaf

        _, numbered_args = jax.tree.map(
            numbered, (kwargs, args), is_leaf=is_object
        )
        whole_objects: list[_NumberedObject | None] = []
        filter_by_position = self._filter_by_position(len(args))
        for position, matches in filter_by_position.items():
            arg = numbered_args[position]
            for leaf in jax.tree.leaves(arg, is_leaf=is_object):
                whole_object = None
                if matches is None and is_object(leaf):
                    whole_object = _numbered_object(self._kind, leaf)
                whole_objects.append(whole_object)
        return whole_objects


class _NumberedObject(NamedTuple):
    """The description of an object, and the numbers of its values among those of the call."""

    graphdef: graph.GraphDef
    numbers: list[int]


def _numbered_object(
    kind: ObjectKind, x: Pytree | Variable[Any]
) -> _NumberedObject:
    """Returns the description of a copy that holds numbers, and these."""
    flat = graph.flatten_graph(x, places=kind.places())
    numbers: list[int] = []
    for leaf in flat.leaves:
        if isinstance(leaf, Variable):
            leaf = leaf.get_raw_value()
        numbers.append(int(leaf))
    return _NumberedObject(flat.graphdef, numbers)


@dataclasses.dataclass(frozen=True)
class _GradientForms:
    """The form in which users get the gradients of one call. It holds no arrays of the call.

    Attributes:
        positions: the differentiated arguments, in the order of `argnums`.
        is_single: whether `argnums` is one position, so that the gradients are not a tuple.
        tree: the tree of these arguments, with objects as leaves.
        paths: the path of each value of the call's objects, by number.
        whole_objects: for each leaf of `tree`, the object if its gradient is an object too; None
            for an object whose gradient is a `State`, and for an array.
    """

    positions: list[int]
    is_single: bool
    tree: Structure
    paths: Sequence[Path]
    whole_objects: list[_NumberedObject | None]

    def to_user_gradients(self, grads: Sequence[PyTree]) -> PyTree:
        """Converts the gradients of `weft.lifting`, one per argument of the call."""
        leaf_gradients = self.tree.flatten_up_to(
            [grads[position] for position in self.positions]
        )
        gradient_by_number: Group = {}
        for gradient in leaf_gradients:
            if isinstance(gradient, tuple):  # the groups of an object
                gradient_by_number.update(gradient[0])
        user_gradients: list[PyTree] = []
        for i, gradient in enumerate(leaf_gradients):
            whole_object = self.whole_objects[i]
            if whole_object is not None:
                # Each object gets its own copy of a shared gradient.
                values = [gradient_by_number[n] for n in whole_object.numbers]
                gradient, _ = graph.build_graph(whole_object.graphdef, values)
            elif isinstance(gradient, tuple):
                # A value that an earlier argument holds too has its gradient there.
                leaf_by_path: dict[Path, PyTree] = {}
                for number, leaf in gradient[0].items():
                    path = split_path(self.paths[number]).in_object
                    leaf_by_path[path] = leaf
                gradient = from_flat_state(leaf_by_path)
            user_gradients.append(gradient)
        gradients = self.tree.unflatten(user_gradients)
        return gradients[0] if self.is_single else tuple(gradients)


class SplitPath(NamedTuple):
    """A path in the pair of a call's objects and results: the index of the object, and the path."""

    object_index: int
    in_object: Path


def split_path(path: Path) -> SplitPath:
    """Splits a path that `ObjectKind.flatten` returns."""
    _, object_index, *in_object = path
    assert isinstance(object_index, int)
    return SplitPath(object_index, tuple(in_object))


def diff_roles(matches: Predicate) -> Roles:
    """Returns the roles of an object that is differentiated in part."""
    return Roles(((matches, DIFF), (Everything(), None)))


def value_by_path(gradient: PyTree) -> dict[Path, PyTree]:
    """Returns the values of a gradient or tangent, an object or a `State`."""
    if is_object(gradient):
        gradient = state(gradient)
    by_path: dict[Path, PyTree] = {}
    for path, leaf in to_flat_state(gradient):
        by_path[path] = value_of(leaf)
    return by_path


@same_signature
@optional_function
def remat(
    f: Callable[P, R] = MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
    **options: Unpack[settings.GraphOptions],
) -> Callable[..., Any]:
    """Applies `jax.checkpoint` to a function of objects; without one, returns a decorator.

    Args:
        prevent_cse: as for `jax.checkpoint`; False inside a scan, where it is not needed.
        static_argnums: positions of static, hashable arguments.
        policy: values to save, one of `jax.checkpoint_policies`.

    >>> w = nnx.Param(jnp.array(2.0))
    >>> float(nnx.grad(nnx.remat(lambda w, x: jnp.sin(w * x)))(w, 0.0)[...])
    0.0
    """
    static = calls.StaticArguments("remat", "static_argnums", f, static_argnums)
    lifted = lifting.remat(
        ObjectKind("remat", *settings.resolve_graph_options(**options)),
        calls.with_kwargs_first(static.fn),
        prevent_cse=prevent_cse,
        policy=policy,
    )

    def call(kwargs: dict[str, PyTree], *args: PyTree) -> PyTree:
        return lifted(kwargs, *static.wrapped(args))

    return calls.wrap_transformed("remat", f, call)
