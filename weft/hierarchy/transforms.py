"""JAX transformations of functions that invoke modules.

Inside a module's method, a function that calls children reads their state from the context and adds
outputs to it. These transformations pass the entries of the context as arguments and results
instead of closing over them. Transformed functions must be called inside an invocation.

- Parameters are mapped, shared, differentiated or sharded as the transformation specifies.
- PRNG keys are those of the untransformed call, except that each index or iteration has its own.
- Outputs are unchanged by `jit`, `remat`, derivatives, `checkify` and branches, and stacked along a
  new axis 0 by `vmap`, `pmap`, `shard_map` and scans; loops refuse them, `eval_shape` drops them.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from weft import lifting
from weft.errors import ArgumentValueError, LoopOutputError, OutputConflictError
from weft.hierarchy import context as context_lib
from weft.hierarchy.context_kind import CONTEXT_KIND, OUTPUTS, in_context, with_packed_args
from weft.lifting import CARRY, DIFF, FORK, Roles
from weft.lifting.signature import as_tuple, check_argnums, named_after, resolve_argnums
from weft.typing import ArrayLike

Carry = TypeVar("Carry")
SHARED = jax.sharding.PartitionSpec()


def _mapped_roles(state_axis: int | None) -> Roles:
    """Returns the roles of a context along a new axis: separate keys, stacked outputs."""
    return Roles((("state", state_axis), ("prng_key", FORK), ("shared", None), (OUTPUTS, 0)))


def remat(fn: Callable[..., Any], **remat_kwargs: Any) -> Callable[..., Any]:
    """Applies `jax.checkpoint` to a function that invokes modules.

    `fn` takes arrays and other arguments; `remat_kwargs` are `prevent_cse` and `policy`, as there.
    """

    def call(*args: object, **kwargs: object) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        _, arrays, join_leaves = _split_at(leaves, {i for i, yes in enumerate(is_array) if not yes})

        def of_arrays(*arrays: object) -> Any:
            args, kwargs = tree.unflatten(join_leaves(arrays))
            return fn(*args, **kwargs)

        lifted = lifting.remat(CONTEXT_KIND, in_context(of_arrays), **remat_kwargs)
        return lifted(context_lib.require_context("remat"), *arrays)

    return call


def vmap(
    fn: Callable[..., Any],
    *,
    state_axis: int | None = 0,
    in_axes: object = 0,
    out_axes: object = 0,
    **vmap_kwargs: Any,
) -> Callable[..., Any]:
    """Applies `jax.vmap` to a function that invokes modules.

    Each index has its own PRNG key; outputs of modules are stacked along axis 0.

    Args:
        state_axis: axis of the state to map over; None to share the state.
        **vmap_kwargs: `axis_size`, `axis_name`, `spmd_axis_name`.
    """
    return _map_args(lifting.vmap, fn, state_axis, in_axes, out_axes, **vmap_kwargs)


def _map_args(
    map_: Callable[..., Callable[..., Any]],
    fn: Callable[..., Any],
    state_axis: int | None,
    in_axes: object,
    out_axes: object,
    **options: object,
) -> Callable[..., Any]:
    """Applies `lifting.vmap` or `lifting.pmap` to a function that invokes modules."""

    def call(*args: object) -> Any:
        per_arg = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        roles = (_mapped_roles(state_axis), *per_arg)
        lifted = map_(CONTEXT_KIND, in_context(fn), in_axes=roles, out_axes=out_axes, **options)
        return lifted(context_lib.require_context(map_.__name__), *args)

    return named_after(fn, call, leading=())


def scan(
    context: context_lib.InvocationContext,
    fn: Callable[..., tuple[Carry, Any]],
    carry: Carry,
    xs: Any,
    *,
    state_axis: int | None,
    length: int | None = None,
    unroll: int | bool = 1,
    remat_kwargs: dict[str, Any] | None = None,
    drop_output: Callable[[str], bool] | None = None,
) -> tuple[Carry, Any]:
    """Runs `jax.lax.scan` on a function that invokes modules in `context`.

    Args:
        context: context of the body. Its outputs are stacked along axis 0.
        fn: takes the carry and a slice of `xs`; returns the next carry and values to stack.
        state_axis: axis along which iterations have separate state; None to share the state.
        length: number of iterations, if neither `xs` nor the state determines it.
        remat_kwargs: if given, the body is recomputed in the backward pass, as by `remat`.
        drop_output: predicate for paths of outputs to drop, such as `module_outputs/layer/x`.
    """
    # The named scope of the current context is already open.
    caller = context_lib.current_context()
    is_child = caller is not None and context.parent is caller

    def body(context: context_lib.InvocationContext, carry: Carry, x: object) -> tuple[Carry, Any]:
        scope = jax.named_scope(context.name) if is_child else contextlib.nullcontext()
        with scope, context_lib.set_current_context(context, require_parent=False):
            result = fn(carry, x)
        if drop_output is not None:
            for kind, outputs in context.output_collection._asdict().items():
                _drop_outputs(outputs, kind, drop_output)
        return result

    named_after(fn, body)
    if remat_kwargs is not None:
        body = lifting.remat(CONTEXT_KIND, body, **{"prevent_cse": False, **remat_kwargs})
    in_axes = (_mapped_roles(state_axis), CARRY, 0)
    lifted = lifting.scan(
        CONTEXT_KIND, body, in_axes=in_axes, out_axes=(CARRY, 0), length=length, unroll=unroll
    )
    return lifted(context, carry, xs)


def _drop_outputs(outputs: dict[str, Any], path: str, drop: Callable[[str], bool]) -> None:
    for name in list(outputs):
        below = f"{path}/{name}"
        if isinstance(outputs[name], dict):
            _drop_outputs(outputs[name], below, drop)
        elif drop(below):
            del outputs[name]


def scan_in_context(
    fn: Callable[..., tuple[Carry, Any]],
    *,
    carry: Carry,
    xs: Any,
    drop_output: Callable[[str], bool] | None = None,
    child_name_prefix: str = "iter",
    unroll: int | bool = 1,
    remat_kwargs: dict[str, Any] | None = None,
    merge_summaries: bool = False,
) -> tuple[Carry, Any]:
    """Runs `scan` in the current context; iterations share the state, each with its own key.

    Args:
        fn, drop_output, unroll, remat_kwargs: as for `scan`.
        xs: arrays to scan along axis 0; or a dict with these as "xs" or "x", and as "state" and
            "prng_key" those that replace the ones of the current context.
        child_name_prefix, merge_summaries: as for `propagate_repeated_output_collections`.

    Raises ArgumentValueError if `xs` has "xs" and names other than "state" and "prng_key".
    """
    context = context_lib.require_context("scan_in_context")
    scanned = next((name for name in ("xs", "x") if isinstance(xs, Mapping) and name in xs), None)
    if scanned is not None:
        if other := xs.keys() - {scanned, "state", "prng_key"}:
            raise ArgumentValueError(
                f"xs of scan_in_context has {scanned!r} and {sorted(map(str, other))}; only "
                "'state' and 'prng_key' replace fields of the context. Write `xs={'xs': xs}` to "
                "scan all of it."
            )
        fn = _with_context_fields(fn, scanned)
    inner = context.fork()
    result = scan(
        inner,
        fn,
        carry,
        xs,
        state_axis=None,
        unroll=unroll,
        remat_kwargs=remat_kwargs,
        drop_output=drop_output,
    )
    propagate_repeated_output_collections(
        inner.output_collection,
        child_name_prefix=child_name_prefix,
        target_output_collection=context.output_collection,
        merge_summaries=merge_summaries,
    )
    return result


def _with_context_fields(fn: Callable[..., Any], scanned: str) -> Callable[..., Any]:
    def call(carry: Any, xs: Mapping[str, Any]) -> Any:
        fields = dict(xs)
        x = fields.pop(scanned)
        context = context_lib.require_context("scan_in_context").fork_with_outputs(**fields)
        with context_lib.set_current_context(context, require_parent=False):
            return fn(carry, x)

    return named_after(fn, call)


def propagate_repeated_output_collections(
    repeated_output_collection: context_lib.OutputCollection,
    *,
    child_name_prefix: str,
    target_output_collection: context_lib.OutputCollection,
    merge_summaries: bool = False,
) -> None:
    """Adds the outputs of a loop's iterations to those of the enclosing invocation.

    Args:
        repeated_output_collection: outputs with a leading axis of iterations.
        child_name_prefix: summaries of iteration i are added under this prefix followed by i;
            module outputs, unchanged, under the prefix.
        target_output_collection: changed in place. State updates are added unchanged.
        merge_summaries: whether to add one summary for all iterations under the prefix alone:
            the mean of arrays, the sum of other summable values such as a `WeightedScalar`.

    Raises OutputConflictError for an existing path, such as of another loop of the same prefix.
    """
    target = target_output_collection
    summaries, state_updates, module_outputs = repeated_output_collection
    _add_outputs(target.state_updates, state_updates, "state_updates")
    if jax.tree.leaves(module_outputs):
        _add_outputs(target.module_outputs, {child_name_prefix: module_outputs}, "module_outputs")
    leaves = jax.tree.leaves(summaries)
    if not leaves:
        return
    iterations = [jax.tree.map(lambda x, i=i: x[i], summaries) for i in range(len(leaves[0]))]
    if merge_summaries:
        by_name = {child_name_prefix: reduce_summaries(iterations)}
    else:
        by_name = {f"{child_name_prefix}{i}": x for i, x in enumerate(iterations)}
    _add_outputs(target.summaries, by_name, "summaries")


def _add_outputs(target: dict[str, Any], new: Mapping[str, Any], path: str) -> None:
    for name, value in new.items():
        below = f"{path}/{name}"
        if isinstance(value, dict) and isinstance(target.setdefault(name, {}), dict):
            _add_outputs(target[name], value, below)
        elif name in target:
            raise OutputConflictError(
                f"two loops, or a loop and its caller, add the output {below!r}; give one of the "
                "loops another child_name_prefix, or call another child in it."
            )
        else:
            target[name] = value


def reduce_summaries(summaries: Sequence[Any]) -> Any:
    """Merges trees of summaries of the same structure, at least one.

    Arrays are averaged; other summable values, such as a `WeightedScalar`, are added.
    """
    return jax.tree.map(_reduce, *summaries, is_leaf=_is_summable)


def _is_summable(x: object) -> bool:
    return not isinstance(x, dict | jax.Array) and hasattr(x, "__add__")


def _reduce(*values: Any) -> Any:
    if _is_summable(values[0]):
        return functools.reduce(lambda a, b: a + b, values)
    return jnp.mean(jnp.stack(values), axis=0)


# Transformations with the same signatures as in JAX.


def jit(
    fn: Callable[..., Any],
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    inline: bool = False,
) -> Callable[..., Any]:
    """Applies `jax.jit` to a function that invokes modules; takes the same arguments."""
    check_argnums("jit", "static_argnums", fn, static_argnums)
    check_argnums("jit", "donate_argnums", fn, donate_argnums)

    def shifted(argnums: int | Sequence[int]) -> tuple[int, ...]:
        return tuple(i + 1 if i >= 0 else i for i in as_tuple(argnums))

    lifted = lifting.jit(
        CONTEXT_KIND,
        in_context(fn),
        static_argnums=shifted(static_argnums),
        static_argnames=static_argnames,
        donate_argnums=shifted(donate_argnums),
        inline=inline,
    )

    def call(*args: object, **kwargs: object) -> Any:
        return lifted(context_lib.require_context("jit"), *args, **kwargs)

    return named_after(fn, call, leading=())


def shard_map(
    fn: Callable[..., Any],
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    in_specs: Any,
    out_specs: object,
    state_spec: jax.sharding.PartitionSpec = SHARED,
    axis_names: frozenset[str] = frozenset(),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Applies `jax.shard_map` to a function that invokes modules.

    Each device has its own PRNG key; outputs of modules are stacked along a new axis 0 of devices.

    Args:
        fn: a function of the shards of its arguments on one device.
        mesh, in_specs, out_specs, check_vma: as for `jax.shard_map`.
        state_spec: sharding of the state; replicated by default.
        axis_names: mesh axes that are manual in `fn`; all by default.
    """
    of_devices = jax.sharding.PartitionSpec(tuple(axis_names or mesh.axis_names))
    roles = Roles(
        (("state", state_spec), ("prng_key", FORK), ("shared", SHARED), (OUTPUTS, of_devices))
    )

    def of_device(context: context_lib.InvocationContext, *args: object) -> Any:
        result = in_context(fn)(context, *args)
        for part in context.output_collection:
            part.update(jax.tree.map(lambda x: jnp.asarray(x)[None], part))
        return result

    def call(*args: object) -> Any:
        is_one = isinstance(in_specs, jax.sharding.PartitionSpec)
        per_arg = (in_specs,) * len(args) if is_one else tuple(in_specs)
        lifted = lifting.shard_map(
            CONTEXT_KIND,
            named_after(fn, of_device),
            mesh=mesh,
            in_specs=(roles, *per_arg),
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
        )
        return lifted(context_lib.require_context("shard_map"), *args)

    return named_after(fn, call, leading=())


def pmap(
    fn: Callable[..., Any],
    axis_name: str = "devices",
    *,
    state_axis: int | None = 0,
    in_axes: object = 0,
    out_axes: object = 0,
    devices: Sequence[Any] | None = None,
) -> Callable[..., Any]:
    """Applies `vmap` with one device per index.

    Args:
        state_axis, in_axes, out_axes: as for `vmap`.
        devices: by default as many of `jax.devices()` as needed.
    """
    return _map_args(
        lifting.pmap, fn, state_axis, in_axes, out_axes, axis_name=axis_name, devices=devices
    )


def checkify(fn: Callable[..., Any], errors: object = None) -> Callable[..., tuple[Any, Any]]:
    """Applies `jax.experimental.checkify.checkify` to a function that invokes modules.

    The new function returns the error, possibly empty, and the result of `fn`. The checks are
    `errors`, by default `checkify.user_checks`.
    """
    lifted = lifting.checkify(CONTEXT_KIND, with_packed_args(fn), errors=errors)

    def call(*args: object, **kwargs: object) -> tuple[Any, Any]:
        return lifted(context_lib.require_context("checkify"), args, kwargs)

    return named_after(fn, call, leading=())


def eval_shape(fn: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Applies `jax.eval_shape` to a function that invokes modules, and calls it.

    Arguments are arrays or `jax.ShapeDtypeStruct`s. No outputs of modules are added.
    """
    inputs = Roles(((("state", "prng_key", "shared"), None),))
    lifted = lifting.eval_shape(CONTEXT_KIND, with_packed_args(fn), in_axes=(inputs, None, None))
    return lifted(context_lib.require_context("eval_shape"), args, kwargs)


_LOOP_ROLES = Roles((("prng_key", FORK), (True, None)))


def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], init_val: object) -> Any:
    """Runs `jax.lax.while_loop` on functions that invoke modules, inside an invocation.

    Every iteration has the same state and its own PRNG key. Raises LoopOutputError if a function
    adds a summary, state update or module output, which the loop cannot collect per iteration.
    """
    fns = [_refuse_outputs(fn, "while_loop") for fn in (cond_fn, body_fn)]
    lifted = lifting.while_loop(CONTEXT_KIND, *fns, in_axes=(_LOOP_ROLES, CARRY))
    return lifted(context_lib.require_context("while_loop"), init_val)


def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fn: Callable[..., Any],
    init_val: object,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """Runs `jax.lax.fori_loop` on a function that invokes modules; see `while_loop`.

    With Python numbers as bounds, the loop is reverse-differentiable and `unroll` applies.
    """
    of_body = _refuse_outputs(body_fn, "fori_loop")

    def body(i: ArrayLike, context: context_lib.InvocationContext, carry: Any) -> Any:
        return of_body(context, i, carry)

    named_after(body_fn, body)
    lifted = lifting.fori_loop(
        CONTEXT_KIND, lower, upper, body, in_axes=(_LOOP_ROLES, CARRY), unroll=unroll
    )
    return lifted(context_lib.require_context("fori_loop"), init_val)


def _refuse_outputs(fn: Callable[..., Any], loop: str) -> Callable[..., Any]:
    def call(context: context_lib.InvocationContext, *args: object) -> Any:
        result = in_context(fn)(context, *args)
        for kind, outputs in context.output_collection._asdict().items():
            for path, _ in jax.tree_util.tree_leaves_with_path(outputs):
                raise LoopOutputError(
                    f"{CONTEXT_KIND.place_of(context, kind, path)} is added in a {loop}, which "
                    "cannot collect outputs per iteration. Return it with the carry and add it "
                    "after the loop, or use `scan_in_context`, which stacks outputs."
                )
            outputs.clear()  # the names of children, which may also be called outside
        return result

    return named_after(fn, call)


def cond(
    pred: object, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: object
) -> Any:
    """Runs `jax.lax.cond` on functions that invoke modules; see `switch`."""
    index = jnp.asarray(pred, bool).astype(jnp.int32)
    return _switch("cond", index, (false_fun, true_fun), operands, ("false_fun", "true_fun"))


def switch(index: ArrayLike, branches: Sequence[Callable[..., Any]], *operands: object) -> Any:
    """Runs `jax.lax.switch` on functions that invoke modules, inside an invocation.

    Args:
        branches: functions of `operands`, with results of the same structure. They add the same
            summaries and module outputs. A state update of only some of them changes no others.

    Raises:
        OutputConflictError: if a branch invokes a child that was invoked before.
        BranchStructureError: if results, summaries or module outputs differ in structure, shape or
            dtype, or the state has no entry for an update that only some branches make.
    """
    return _switch("switch", index, tuple(branches), operands, None)


def _switch(
    name: str,
    index: ArrayLike,
    branches: tuple[Callable[..., Any], ...],
    operands: tuple[Any, ...],
    names: tuple[str, ...] | None,
) -> Any:
    context = context_lib.require_context(name)
    called: set[str] = set()

    def in_branch(branch: Callable[..., Any]) -> Callable[..., Any]:
        def call(inner: context_lib.InvocationContext, *operands: object) -> Any:
            result = in_context(branch)(inner, *operands)
            # Entries without outputs differ between branches and are not part of the result.
            outputs = inner.output_collection
            called.update(set.intersection(*(set(part) for part in outputs)))
            if twice := sorted(called & context.output_collection.summaries.keys()):
                raise OutputConflictError(
                    f"{twice} are invoked in one invocation of {context.path()} and again in a "
                    f"branch of {name}, where their randomness would be the same. Name the second "
                    "call: `with child_context('another_name', module=...)`."
                )
            for part in outputs:
                context_lib.drop_empty(part)
            return result

        return named_after(branch, call)

    lifted = lifting.switch(CONTEXT_KIND, [in_branch(branch) for branch in branches], names=names)
    result = lifted(index, context, *operands)
    for child in sorted(called):
        context.output_collection.child(child)
    return result


def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Applies `jax.value_and_grad` to a function that invokes modules; takes the same arguments.

    Derivatives are with respect to arguments; `vjp` also returns those of parameters.

    Returns a function with the arguments of `fn`, to be called inside an invocation. It returns the
    value, or with `has_aux` a pair of the value and the rest, and the gradients.
    """

    def call(*args: object, **kwargs: object) -> tuple[Any, Any]:
        at = resolve_argnums("value_and_grad", "argnums", fn, argnums, args)
        lifted = lifting.value_and_grad(
            CONTEXT_KIND,
            with_packed_args(fn),
            wrt=(None, tuple(DIFF if i in at else None for i in range(len(args))), None),
            has_aux=has_aux,
            holomorphic=holomorphic,
            allow_int=allow_int,
        )
        value, (_, grads, _) = lifted(context_lib.require_context("value_and_grad"), args, kwargs)
        return value, grads[at[0]] if isinstance(argnums, int) else tuple(grads[i] for i in at)

    return named_after(fn, call, leading=())


def grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Applies `jax.grad` to a function that invokes modules; see `value_and_grad`.

    The new function returns the gradients, or with `has_aux` a pair of them and the rest.
    """
    value_and_grads = value_and_grad(fn, argnums, has_aux=has_aux, **kwargs)

    def call(*args: object, **kwargs: object) -> Any:
        value, grads = value_and_grads(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return named_after(fn, call, leading=())


_STATE_ROLES = Roles((("state", DIFF), (True, None)))
# In a custom rule, state shared from above would have a derivative that no rule returns.
_OWN_STATE_ROLES = Roles((("state", DIFF), (("prng_key", *OUTPUTS), None)))


def vjp(fn: Callable[..., Any], *primals: object, has_aux: bool = False) -> tuple[Any, ...]:
    """Applies `jax.vjp` to a function that invokes modules, inside an invocation.

    Returns the result, a function from its cotangent to the gradients of the current module's state
    and of each argument, and with `has_aux` the rest.
    """
    wrt = (_STATE_ROLES, DIFF, None)
    lifted = lifting.vjp(CONTEXT_KIND, with_packed_args(fn), wrt=wrt, has_aux=has_aux)
    value, pullback, *aux = lifted(context_lib.require_context("vjp"), primals, {})
    return value, jax.tree_util.Partial(_apply_pullback, pullback), *aux


def _apply_pullback(pullback: Callable[[Any], Any], cotangent: object) -> tuple[Any, ...]:
    (of_state, _), of_primals, _ = pullback(cotangent)
    return of_state["state"], *of_primals


def jvp(
    fn: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    state_tangents: object = None,
    *,
    has_aux: bool = False,
) -> tuple[Any, ...]:
    """Applies `jax.jvp` to a function that invokes modules, inside an invocation.

    Args:
        state_tangents: of the module's state, a dict like it; None where the state is constant.

    Returns the result, its tangent, and with `has_aux` the auxiliary values.
    """
    of_state = () if state_tangents is None else ({"state": state_tangents},)
    wrt = (_STATE_ROLES if of_state else None, DIFF, None)
    lifted = lifting.jvp(CONTEXT_KIND, with_packed_args(fn), wrt=wrt, has_aux=has_aux)
    arguments = context_lib.require_context("jvp"), tuple(primals), {}
    return lifted(arguments, [*of_state, *jax.tree.leaves(tuple(tangents))])


def custom_vjp(
    fn: Callable[..., Any],
    forward_fn: Callable[..., Any],
    backward_fn: Callable[..., Any],
    *,
    nondiff_argnums: Sequence[int] = (),
) -> Callable[..., Any]:
    """Applies `jax.custom_vjp` to a function that invokes modules.

    Args:
        forward_fn: takes the arguments of `fn`; returns the result of `fn` and the residuals for
            `backward_fn`, such as the function returned by `vjp`.
        backward_fn: `backward_fn(*nondiff, residuals, cotangent)` returns the gradients of the
            current module's state and of each argument not in `nondiff_argnums`.

    Returns a function with the arguments and results of `fn`, to be called inside an invocation.
    Outputs come from `forward_fn` where derivatives are taken. It cannot call modules shared from
    above the current one, since `backward_fn` could not return their gradients.
    """

    def call(*args: object) -> Any:
        at = resolve_argnums("custom_vjp", "nondiff_argnums", fn, nondiff_argnums, args)
        nondiff, diff, join_args = _split_at(args, at)

        def backward(residuals: object, cotangent: object) -> list[Any]:
            of_state, *of_args = backward_fn(*nondiff, residuals, cotangent)
            return [{"state": of_state}, *jax.tree.structure(diff).flatten_up_to(tuple(of_args))]

        lifted = lifting.custom_vjp(
            CONTEXT_KIND,
            in_context(named_after(fn, lambda diff: fn(*join_args(diff)))),
            in_context(named_after(forward_fn, lambda diff: forward_fn(*join_args(diff)))),
            named_after(backward_fn, backward),
            wrt=(_OWN_STATE_ROLES, DIFF),
        )
        return lifted(context_lib.require_context("custom_vjp"), diff)

    return named_after(fn, call, leading=())


def custom_jvp(
    fn: Callable[..., Any], jvp_fn: Callable[..., Any], *, nondiff_argnums: Sequence[int] = ()
) -> Callable[..., Any]:
    """Applies `jax.custom_jvp` to a function that invokes modules.

    Args:
        jvp_fn: `jvp_fn(*nondiff, primals, tangents, state_tangents)` returns what `jvp` does.

    Returns a function with the arguments and results of `fn`; as for `custom_vjp`.
    """

    def call(*args: object) -> Any:
        at = resolve_argnums("custom_jvp", "nondiff_argnums", fn, nondiff_argnums, args)
        nondiff, diff, join_args = _split_at(args, at)

        def rule(
            tangents: list[Any], context: context_lib.InvocationContext, diff: tuple[Any, ...]
        ) -> Any:
            of_state, *of_args = tangents
            of_args = jax.tree.structure(diff).unflatten(of_args)
            return in_context(jvp_fn)(context, *nondiff, diff, of_args, of_state["state"])

        lifted = lifting.custom_jvp(
            CONTEXT_KIND,
            in_context(named_after(fn, lambda diff: fn(*join_args(diff)))),
            named_after(jvp_fn, rule),
            wrt=(_OWN_STATE_ROLES, DIFF),
        )
        return lifted(context_lib.require_context("custom_jvp"), diff)

    return named_after(fn, call, leading=())


def _split_at(
    args: Sequence[Any], at: Collection[int]
) -> tuple[tuple[Any, ...], tuple[Any, ...], Callable[[Any], list[Any]]]:
    diff = tuple(x for i, x in enumerate(args) if i not in at)
    fixed = [x if i in at else None for i, x in enumerate(args)]

    def join_args(diff: Iterable[object]) -> list[Any]:
        rest = iter(diff)
        return [x if i in at else next(rest) for i, x in enumerate(fixed)]

    return tuple(args[i] for i in sorted(at)), diff, join_args
