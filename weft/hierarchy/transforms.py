"""JAX transformations of functions that invoke modules.

Inside a module's method, a function that calls children reads their state from the context and adds
outputs to it. These transformations pass the entries of the context as arguments and results
instead of closing over them. Transformed functions must be called inside an invocation.

- Parameters are mapped, shared, differentiated or sharded as the transformation specifies.
- PRNG keys are those of the untransformed call, except that each index or iteration has its own.
- Outputs are unchanged by `jit`, `remat`, derivatives, `checkify` and branches, and stacked along a
  new axis 0 by `vmap`, `pmap`, `shard_map` and scans. `while_loop` and `fori_loop` refuse them, and
  `eval_shape` drops them.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from weft import lifting
from weft.hierarchy.context import (
    InvocationContext,
    OutputCollection,
    current_context,
    require_context,
)
from weft.hierarchy.context_kind import OUTPUTS
from weft.hierarchy.control_flow import cond, fori_loop, switch, while_loop
from weft.hierarchy.derivatives import custom_jvp, custom_vjp, grad, jvp, value_and_grad, vjp
from weft.hierarchy.in_context import CONTEXTS, in_context, spread
from weft.lifting import CARRY, FORK, Roles
from weft.lifting.argnums import as_tuple, check_argnums
from weft.lifting.names import named_after

__all__ = [
    "CONTEXTS",
    "in_context",
    "jit",
    "eval_shape",
    "checkify",
    "vmap",
    "pmap",
    "shard_map",
    "scan",
    "scan_in_context",
    "while_loop",
    "fori_loop",
    "cond",
    "switch",
    "remat",
    "grad",
    "value_and_grad",
    "jvp",
    "vjp",
    "custom_jvp",
    "custom_vjp",
    "merged_summaries",
    "propagate_repeated_output_collections",
]

Carry = TypeVar("Carry")
SHARED = jax.sharding.PartitionSpec()


def _mapped(state_axis: int | None) -> Roles:
    """Returns the roles of a context along a new axis: separate keys, stacked outputs."""
    return Roles((("state", state_axis), ("prng_key", FORK), ("shared", None), (OUTPUTS, 0)))


def remat(fn: Callable[..., Any], **remat_kwargs: Any) -> Callable[..., Any]:
    """Applies `jax.checkpoint` to a function that invokes modules.

    Args:
        fn: takes arrays and arbitrary other arguments.
        **remat_kwargs: `prevent_cse` and `policy`, as for `jax.checkpoint`.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

        def of_arrays(*arrays: Any) -> Any:
            all_leaves = list(leaves)
            for i, array in zip(at, arrays, strict=True):
                all_leaves[i] = array
            args, kwargs = tree.unflatten(all_leaves)
            return fn(*args, **kwargs)

        lifted = lifting.remat(CONTEXTS, in_context(of_arrays), **remat_kwargs)
        return lifted(require_context("remat"), *(leaves[i] for i in at))

    return call


def vmap(
    fn: Callable[..., Any],
    *,
    state_axis: int | None = 0,
    in_axes: Any = 0,
    out_axes: Any = 0,
    **vmap_kwargs: Any,
) -> Callable[..., Any]:
    """Applies `jax.vmap` to a function that invokes modules.

    Each index has its own PRNG key; outputs of modules are stacked along axis 0.

    Args:
        fn: a function of pytrees.
        state_axis: axis of the state to map over; None to share the state.
        in_axes: as for `jax.vmap`: one entry per argument of `fn`, or one for all.
        out_axes: as for `jax.vmap`.
        **vmap_kwargs: `axis_size`, `axis_name`, `spmd_axis_name`.
    """

    def call(*args: Any) -> Any:
        per_arg = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        lifted = lifting.vmap(
            CONTEXTS,
            in_context(fn),
            in_axes=(_mapped(state_axis), *per_arg),
            out_axes=out_axes,
            **vmap_kwargs,
        )
        return lifted(require_context("vmap"), *args)

    return call


def scan(
    context: InvocationContext,
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
        carry: the initial carry.
        xs: arrays to scan along axis 0.
        state_axis: axis along which iterations have separate state; None to share the state.
        length: number of iterations, if neither `xs` nor the state determines it.
        unroll: as for `jax.lax.scan`.
        remat_kwargs: if given, the body is recomputed in the backward pass, as by `remat`.
        drop_output: predicate for paths of outputs to drop, such as `module_outputs/layer/x`.

    Returns:
        The final carry and the stacked values.
    """
    # The named scope of the current context is already open.
    caller = current_context()
    scope = context.name if caller is not None and context.parent is caller else None

    def body(context: InvocationContext, carry: Carry, x: Any) -> tuple[Carry, Any]:
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            result = in_context(fn)(context, carry, x)
        if drop_output is not None:
            for kind, outputs in context.output_collection._asdict().items():
                _drop(outputs, kind, drop_output)
        return result

    named_after(fn, body)
    if remat_kwargs is not None:
        body = lifting.remat(CONTEXTS, body, **{"prevent_cse": False, **remat_kwargs})
    return lifting.scan(
        CONTEXTS,
        body,
        in_axes=(_mapped(state_axis), CARRY, 0),
        out_axes=(CARRY, 0),
        length=length,
        unroll=unroll,
    )(context, carry, xs)


def _drop(outputs: dict[str, Any], path: str, drop: Callable[[str], bool]) -> None:
    for name in list(outputs):
        below = f"{path}/{name}"
        if isinstance(outputs[name], dict):
            _drop(outputs[name], below, drop)
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
        fn: takes the carry and a slice of `xs`; returns the next carry and values to stack.
        carry: the initial carry.
        xs: arrays to scan along axis 0.
        drop_output: predicate for paths of outputs to drop, such as `module_outputs/layer/x`.
        child_name_prefix: summaries of iteration i are added under this prefix followed by i.
        unroll: as for `jax.lax.scan`.
        remat_kwargs: if given, the body is recomputed in the backward pass, as by `remat`.
        merge_summaries: whether to report one summary for all iterations instead of one each.
    """
    context = require_context("scan_in_context")
    inner = context.twin()
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


def propagate_repeated_output_collections(
    repeated_output_collection: OutputCollection,
    *,
    child_name_prefix: str,
    target_output_collection: OutputCollection,
    merge_summaries: bool = False,
) -> None:
    """Adds the outputs of a loop's iterations to those of the enclosing invocation.

    Args:
        repeated_output_collection: outputs with a leading axis of iterations.
        child_name_prefix: summaries of iteration i are added under this prefix followed by i.
        target_output_collection: changed in place. State updates and module outputs are added
            unchanged.
        merge_summaries: whether to add one summary for all iterations under the prefix alone:
            the mean of arrays, the sum of other summable values such as a `WeightedScalar`.
    """
    target = target_output_collection
    target.state_updates.update(repeated_output_collection.state_updates)
    target.module_outputs.update(repeated_output_collection.module_outputs)
    summaries = repeated_output_collection.summaries
    leaves = jax.tree.leaves(summaries)
    if not leaves:
        return
    iterations = [jax.tree.map(lambda x, i=i: x[i], summaries) for i in range(len(leaves[0]))]
    if merge_summaries:
        merged = merged_summaries(iterations)
        target.summaries.setdefault(child_name_prefix, {}).update(merged)
        return
    for i, of_iteration in enumerate(iterations):
        target.summaries.setdefault(f"{child_name_prefix}{i}", {}).update(of_iteration)


def merged_summaries(summaries: Sequence[Any]) -> Any:
    """Merges trees of summaries of the same structure, at least one.

    Arrays are averaged; other summable values, such as a `WeightedScalar`, are added.
    """
    return jax.tree.map(_merged, *summaries, is_leaf=_is_summable)


def _is_summable(x: Any) -> bool:
    return not isinstance(x, dict | jax.Array) and hasattr(x, "__add__")


def _merged(*values: Any) -> Any:
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
        CONTEXTS,
        in_context(fn),
        static_argnums=shifted(static_argnums),
        static_argnames=static_argnames,
        donate_argnums=shifted(donate_argnums),
        inline=inline,
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        return lifted(require_context("jit"), *args, **kwargs)

    return named_after(fn, call, leading=())


def shard_map(
    fn: Callable[..., Any],
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    in_specs: Any,
    out_specs: Any,
    state_spec: jax.sharding.PartitionSpec = SHARED,
    axis_names: frozenset[str] = frozenset(),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Applies `jax.shard_map` to a function that invokes modules.

    Each device has its own PRNG key; outputs of modules are stacked along a new axis 0 of devices.

    Args:
        fn: a function of the shards of its arguments on one device.
        mesh: as for `jax.shard_map`.
        in_specs: as for `jax.shard_map`.
        out_specs: as for `jax.shard_map`.
        state_spec: sharding of the state; replicated by default.
        axis_names: mesh axes that are manual in `fn`; all by default.
        check_vma: as for `jax.shard_map`.
    """
    of_devices = jax.sharding.PartitionSpec(tuple(axis_names or mesh.axis_names))
    roles = Roles(
        (("state", state_spec), ("prng_key", FORK), ("shared", SHARED), (OUTPUTS, of_devices))
    )

    def of_device(context: InvocationContext, *args: Any) -> Any:
        result = in_context(fn)(context, *args)
        for part in context.output_collection:
            part.update(jax.tree.map(lambda x: jnp.asarray(x)[None], part))
        return result

    def call(*args: Any) -> Any:
        is_one = isinstance(in_specs, jax.sharding.PartitionSpec)
        per_arg = (in_specs,) * len(args) if is_one else tuple(in_specs)
        lifted = lifting.shard_map(
            CONTEXTS,
            named_after(fn, of_device),
            mesh=mesh,
            in_specs=(roles, *per_arg),
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
        )
        return lifted(require_context("shard_map"), *args)

    return named_after(fn, call, leading=())


def pmap(
    fn: Callable[..., Any],
    axis_name: str = "devices",
    *,
    state_axis: int | None = 0,
    in_axes: Any = 0,
    out_axes: Any = 0,
    devices: Sequence[Any] | None = None,
) -> Callable[..., Any]:
    """Applies `vmap` with one device per index.

    Args:
        fn: a function of pytrees.
        axis_name: name of the mapped axis for collectives.
        state_axis: as for `vmap`.
        in_axes: as for `vmap`.
        out_axes: as for `vmap`.
        devices: by default as many of `jax.devices()` as needed.
    """

    def call(*args: Any) -> Any:
        per_arg = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        lifted = lifting.pmap(
            CONTEXTS,
            in_context(fn),
            axis_name=axis_name,
            in_axes=(_mapped(state_axis), *per_arg),
            out_axes=out_axes,
            devices=devices,
        )
        return lifted(require_context("pmap"), *args)

    return named_after(fn, call, leading=())


def checkify(fn: Callable[..., Any], errors: Any = None) -> Callable[..., tuple[Any, Any]]:
    """Applies `jax.experimental.checkify.checkify` to a function that invokes modules.

    Returns:
        A function that returns the error, possibly empty, and the result of `fn`. The checks are
        `errors`, by default `checkify.user_checks`.
    """
    lifted = lifting.checkify(CONTEXTS, spread(fn), errors=errors)

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return lifted(require_context("checkify"), args, kwargs)

    return named_after(fn, call, leading=())


def eval_shape(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Applies `jax.eval_shape` to a function that invokes modules, and calls it.

    Arguments are arrays or `jax.ShapeDtypeStruct`s. No outputs of modules are added.
    """
    inputs = Roles(((("state", "prng_key", "shared"), None),))
    lifted = lifting.eval_shape(CONTEXTS, spread(fn), in_axes=(inputs, None, None))
    return lifted(require_context("eval_shape"), args, kwargs)
