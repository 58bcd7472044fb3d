"""Derivatives with respect to arguments and parts of the state of objects, and remat."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax

from weft import errors, lifting
from weft.core.tracing import entry_point
from weft.lifting import DIFF, Roles, signature
from weft.nnx import graph, settings, split_merge, versions
from weft.nnx.filters import Everything, OfType, Path, PathIn, Predicate, to_predicate
from weft.nnx.state import State, from_flat_state, path_text, to_flat_state
from weft.nnx.transforms import calls
from weft.nnx.transforms.calls import MISSING, P, R, optional_function
from weft.nnx.transforms.kind import ObjectKind, is_object
from weft.nnx.transforms.state_roles import DiffState
from weft.nnx.variables import Param, Variable, value_of
from weft.typing import as_grad, as_value_and_grad, same_signature

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
    reduce_axes: tuple[Any, ...] = (),
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
        "value_and_grad", f, options, argnums, has_aux, holomorphic, allow_int, reduce_axes
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
    reduce_axes: tuple[Any, ...] = (),
    **options: Unpack[settings.GraphOptions],
) -> Callable[..., Any]:
    """Returns the gradients of `value_and_grad`, with `has_aux` as a pair with the auxiliary value.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)), n=nnx.BatchStat(jnp.array(2.0)))
    >>> grads = nnx.grad(lambda m: m.w * m.n, argnums=nnx.DiffState(0, nnx.BatchStat))(model)
    >>> float(grads.n[...])
    3.0
    """
    both = _differentiate("grad", f, options, argnums, has_aux, holomorphic, allow_int, reduce_axes)

    @entry_point
    @functools.wraps(f)
    def gradients(*args: P.args, **kwargs: P.kwargs) -> Any:
        result, grads = both(*args, **kwargs)
        return (grads, result[1]) if has_aux else grads

    return gradients


@optional_function
def vjp(
    f: Callable[..., Any] = MISSING,
    *primals: object,
    has_aux: bool = False,
    reduce_axes: tuple[Any, ...] = (),
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
        return functools.partial(vjp, f, has_aux=has_aux, reduce_axes=reduce_axes, **options)
    _refuse_reduce_axes("vjp", reduce_axes)
    kind = ObjectKind("vjp", *settings.resolve_graph_options(**options), is_result_free=True)
    wanted = _DiffArguments("vjp", range(len(primals)), kind)
    with versions.TransformCall("vjp", f, primals, ("primals", "the result")):
        fn = _with_object_results(kind, f, has_aux)
        lifted = lifting.vjp(kind, fn, wrt=wanted.roles(primals), has_aux=True)
        of_primals = wanted.of(primals)
        out, backward, aux = lifted(*primals)
    structure = None
    if isinstance(aux, _ObjectResult):
        out, aux = aux
        structure = jax.tree.structure(out)

    def pullback(backward: Any, cotangent: Any) -> tuple[Any, ...]:
        if structure is not None:
            cotangent, found = jax.tree.flatten(cotangent)
            if found != structure:
                raise errors.CallMismatchError(
                    f"vjp: the result of the function has the structure {structure}, and the "
                    f"cotangent {found}; pass a cotangent of the same structure, such as the "
                    "result of jax.tree.map over the result."
                )
        return of_primals(backward(cotangent))

    of_cotangent = jax.tree_util.Partial(pullback, backward)
    return (out, of_cotangent, aux) if has_aux else (out, of_cotangent)


@optional_function
def jvp(
    f: Callable[..., Any] = MISSING,
    primals: tuple[Any, ...] = MISSING,
    tangents: tuple[Any, ...] = MISSING,
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
    if tangents is MISSING or len(primals) != len(tangents):
        n = 0 if tangents is MISSING else len(tangents)
        raise errors.CallMismatchError(
            f"jvp: there are {len(primals)} primals and {n} tangents; pass one tangent per primal."
        )
    kind = ObjectKind("jvp", *settings.resolve_graph_options(**options), is_result_free=True)
    objects = [x for x in jax.tree.leaves(primals, is_leaf=is_object) if is_object(x)]
    flat = kind.flatten(objects)
    wrt, of_objects, of_arrays = _split_primals(kind, tuple(primals), tuple(tangents))
    for index, path in flat.repeated:
        position: Any = path[1]
        below = path[2:]
        if any(other[: len(below)] == below for other in of_objects[position]):
            raise errors.CallMismatchError(
                f"jvp: the same {versions.class_and_shape(flat.objects[index])} is at two places "
                f"of the primals, and has a tangent at each, the second in object {position}; pass "
                "nnx.clone(...) in one of the places."
            )
    groups: list[dict[int, Any]] = [{} for _ in objects]
    for n, (path, leaf) in enumerate(flat.items()):
        i: Any = path[1]
        if path[2:] in of_objects[i]:
            value = of_objects[i][path[2:]]
            groups[i][n] = leaf.copy(value) if isinstance(leaf, Variable) else value
    with versions.TransformCall("jvp", f, primals, ("primals", "the result")):
        fn = _with_object_results(kind, f, has_aux)
        lifted = lifting.jvp(kind, fn, wrt=wrt, has_aux=True)
        out, tangent, aux = lifted(primals, [*groups, *of_arrays])
    if isinstance(aux, _ObjectResult):
        out, aux = aux
        tangent = jax.tree.unflatten(jax.tree.structure(out), tangent)
    return (out, tangent, aux) if has_aux else (out, tangent)


def _split_primals(
    kind: ObjectKind, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Any, list[dict[Path, Any]], list[Any]]:
    """Returns the roles in the arguments, objects' tangents by path, and arrays' tangents."""
    leaves, tree = jax.tree.flatten(primals, is_leaf=is_object)
    found = tree.flatten_up_to(tangents)
    roles, of_objects, of_arrays = [], [], []
    for x, t in zip(leaves, found, strict=True):
        if not is_object(x):
            roles.append(DIFF)
            of_arrays.append(t)
            continue
        items = to_flat_state(split_merge.state(t) if is_object(t) else t)
        by_path = {path: value_of(v) for path, v in items}
        flat = graph.flatten_graph(x, places=kind.places())
        if unknown := by_path.keys() - set(flat.graphdef.paths):
            at = ", ".join(sorted(repr(path_text(path)) for path in unknown))
            raise errors.CallMismatchError(
                f"jvp: the tangent of a {type(x).__name__} is a {type(t).__name__} with a value "
                f"at {at}, where the primal has no variable; pass an object of its structure, or "
                "a State with tangents of its variables."
            )
        of_objects.append(by_path)
        roles.append(Roles(((PathIn(frozenset(by_path)), DIFF), (Everything(), None))))
    return tree.unflatten(roles), of_objects, of_arrays


def _refuse_reduce_axes(name: str, reduce_axes: object) -> None:
    if reduce_axes != ():
        raise errors.TransformOptionError(
            f"{name}: reduce_axes={reduce_axes!r}, which JAX no longer supports; omit it, and sum "
            "over the axes inside the function, as with jax.lax.psum."
        )


class _ObjectResult(NamedTuple):
    """A result with objects, and the auxiliary value."""

    result: Any
    aux: Any


def _with_object_results(
    kind: ObjectKind, f: Callable[..., Any], has_aux: bool
) -> Callable[..., Any]:
    """Returns a function with an auxiliary value, which is an `_ObjectResult` where one is needed.

    JAX differentiates the leaves of such a result, and the objects come back by their kind.
    """

    def of_leaves(*args: object, **kwargs: object) -> tuple[Any, Any]:
        result = f(*args, **kwargs)
        value, aux = result if has_aux else (result, None)
        if not any(is_object(x) for x in jax.tree.leaves(value, is_leaf=is_object)):
            return value, aux
        if kind.structure:
            raise _object_result_error(kind.transformation, ", or set graph=False")
        return jax.tree.leaves(value), _ObjectResult(value, aux)

    return signature.copy_name(f, of_leaves)


def _object_result_error(name: str, more: str = "") -> errors.CallMismatchError:
    return errors.CallMismatchError(
        f"{name}: the function returns an object where its result is differentiated; "
        f"return arrays, and the object as the auxiliary value with has_aux=True{more}."
    )


def _refuse_object_results(name: str, f: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    def checked(*args: object, **kwargs: object) -> Any:
        result = f(*args, **kwargs)
        value = result[0] if has_aux and isinstance(result, tuple | list) else result
        if any(is_object(x) for x in jax.tree.leaves(value, is_leaf=is_object)):
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
    reduce_axes: object,
) -> Callable[P, Any]:
    _refuse_reduce_axes(name, reduce_axes)
    kind = ObjectKind(name, *settings.resolve_graph_options(**options), is_result_free=True)
    wanted = _DiffArguments(name, argnums, kind)

    def call(kwargs: dict[str, Any], *args: object) -> tuple[Any, Any]:
        differentiate = lifting.value_and_grad(
            kind,
            calls.with_kwargs_first(_refuse_object_results(name, f, has_aux)),
            wrt=(None, *wanted.roles(args)),
            has_aux=has_aux,
            holomorphic=holomorphic,
            allow_int=allow_int,
        )
        # The call may move variables.
        of_args = wanted.of(args, (kwargs,))
        result, grads = differentiate(kwargs, *args)
        return result, of_args(grads[1:])

    return calls.wrap_transformed(name, f, call, ("argnums", "the result"))


class _DiffArguments:
    def __init__(self, name: str, argnums: Argnums, kind: ObjectKind):
        self._name, self._kind = name, kind
        self._is_one = isinstance(argnums, int | DiffState)
        self._wanted: list[tuple[int, Predicate | None]] = []
        for given in (argnums,) if isinstance(argnums, int | DiffState) else argnums:
            if isinstance(given, DiffState):
                self._wanted.append((given.argnum, to_predicate(given.filter)))
            elif isinstance(given, int):
                self._wanted.append((given, None))
            else:
                raise errors.TransformArgumentError(
                    f"{name}: argnums has {given!r}; use positions of arguments, or "
                    "nnx.DiffState(position, filter)."
                )

    def _by_position(self, n: int) -> dict[int, Predicate | None]:
        filters: dict[int, Predicate | None] = {}
        for number, where in self._wanted:
            if not -n <= number < n:
                raise errors.CallMismatchError(
                    f"{self._name}: argnums has {number}, but the function was called with {n} "
                    "positional arguments; use positions of these."
                )
            if number % n in filters:
                raise errors.TransformArgumentError(
                    f"{self._name}: argnums has {number} twice; use each position once."
                )
            filters[number % n] = where
        return filters

    def roles(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        filters = self._by_position(len(args))
        usual = OfType(Param) if self._kind.structure else Everything()

        def of(where: Predicate | None, x: object) -> Any:
            if not is_object(x):
                return DIFF
            # A variable that is itself an argument is differentiated whatever its type.
            where = where or (Everything() if isinstance(x, Variable) else usual)
            return Roles(((where, DIFF), (Everything(), None)))

        return tuple(
            jax.tree.map(functools.partial(of, filters[i]), arg, is_leaf=is_object)
            if i in filters
            else None
            for i, arg in enumerate(args)
        )

    def of(
        self, args: tuple[Any, ...], before: tuple[Any, ...] = ()
    ) -> Callable[[tuple[Any, ...]], Any]:
        """Returns a function from gradients of `weft.lifting`, per argument, to those for users."""
        filters = self._by_position(len(args))
        found = [x for x in jax.tree.leaves((before, args), is_leaf=is_object) if is_object(x)]
        flat = self._kind.flatten(found)
        paths, numbers = flat.graphdef.paths, {key: n for n, key in enumerate(self._keys(flat, ()))}
        positions = itertools.count(sum(map(is_object, jax.tree.leaves(before, is_leaf=is_object))))

        def shape_of(x: object) -> Any:
            if not is_object(x):
                return 0
            own = graph.flatten_graph(x, places=self._kind.places())
            keys = self._keys(own, (0, next(positions)))
            return _GradientStructure(own.graphdef, tuple(numbers[key] for key in keys))

        made = [jax.tree.map(shape_of, arg, is_leaf=is_object) for arg in args]

        def of_object(every: Mapping[int, Any], is_whole: bool, x: Any, gradient: Any) -> Any:
            if not isinstance(x, _GradientStructure):
                return gradient
            if is_whole:
                # Each object gets its own copy of a shared gradient.
                return graph.build_graph(x.graphdef, [every[n] for n in x.numbers])[0]
            items = [(paths[n][2:], leaf) for n, leaf in gradient[0].items()]
            if x.graphdef.root.__class__ is graph.VariableDef:
                return items[0][1] if items else State()  # the gradient is at an alias
            return from_flat_state(items)

        def to_user_gradients(grads: tuple[Any, ...]) -> Any:
            every: dict[int, Any] = {}

            def note(x: Any, gradient: Any) -> None:
                if isinstance(x, _GradientStructure):
                    every.update(gradient[0])

            for i in filters:
                jax.tree.map(note, made[i], grads[i])
            found = []
            for i, where in filters.items():
                is_whole = where is None and not self._kind.structure
                of_arg = functools.partial(of_object, every, is_whole)
                found.append(jax.tree.map(of_arg, made[i], grads[i]))
            return found[0] if self._is_one else tuple(found)

        return to_user_gradients

    def _keys(self, flat: graph.FlatGraph, root: Path) -> list[Any]:
        """Returns a key for each value: the variable, or the owner and the attribute.

        In trees it is the path; `root` is that of the graph.
        """
        if not self._kind.references:
            return [(*root, *path) for path in flat.graphdef.paths]
        keys: list[Any] = []
        for leaf, owner in zip(flat.leaves, flat.owners, strict=True):
            keys.append(id(leaf) if owner is None else (id(owner[0]), owner[1]))
        return keys


@dataclasses.dataclass
class _GradientStructure:
    """The structure of an object, and the numbers of its values among those of all arguments."""

    graphdef: graph.GraphDef
    numbers: tuple[int, ...]


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
    return calls.wrap_transformed(
        "remat", f, lambda kwargs, *args: lifted(kwargs, *static.wrapped(args))
    )
