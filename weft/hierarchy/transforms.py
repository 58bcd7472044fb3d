"""JAX transformations of functions that invoke modules.

Inside a module's method, a function that calls children reads their state from the context and adds
outputs to it. These transformations hand the context's entries through, entry by entry, instead of
closing over them.
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
    set_current_context,
)
from weft.hierarchy.context_kind import OUTPUTS, ContextKind
from weft.lifting import CARRY, FORK, Roles
from weft.lifting.names import named_after

CONTEXTS = ContextKind()
Carry = TypeVar("Carry")


def in_context(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with a context as an additional first argument, in which it runs."""

    def call(context: InvocationContext, *args: Any) -> Any:
        with set_current_context(context, require_parent=False):
            return fn(*args)

    return named_after(fn, call, leading=("context",))


def remat(fn: Callable[..., Any], **remat_kwargs: Any) -> Callable[..., Any]:
    """`jax.checkpoint` of a function that invokes modules.

    Args:
        fn: takes arrays, and anything else beside them.
        **remat_kwargs: `prevent_cse` and `policy`, as for `jax.checkpoint`.

    Returns:
        A function with the arguments and results of `fn`, to be called inside an invocation.
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
    """`jax.vmap` of a function that invokes modules.

    Args:
        fn: a function of pytrees.
        state_axis: the axis of the state that is mapped, or None if all share the state.
        in_axes: as for `jax.vmap`, one entry for each argument of `fn` or one for all.
        out_axes: likewise, of its results.
        **vmap_kwargs: `axis_size`, `axis_name`, `spmd_axis_name`.

    Returns:
        A function with the arguments and results of `fn`, to be called inside an invocation. Each
        index has its own PRNG key; outputs of modules are stacked along axis 0.
    """
    roles = Roles((("state", state_axis), ("prng_key", FORK), ("shared", None), (OUTPUTS, 0)))

    def call(*args: Any) -> Any:
        per_arg = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        lifted = lifting.vmap(
            CONTEXTS, in_context(fn), in_axes=(roles, *per_arg), out_axes=out_axes, **vmap_kwargs
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
    """`jax.lax.scan` of a function that invokes modules in `context`.

    Args:
        context: in which the body runs. Its outputs are stacked along axis 0.
        fn: takes the carry and a slice of `xs`, and returns the next carry and what to stack.
        carry: the first carry.
        xs: scanned over along axis 0.
        state_axis: the axis along which iterations have their own state, or None if all share it.
        length: the number of iterations, where neither `xs` nor the state tells it.
        unroll: as for `jax.lax.scan`.
        remat_kwargs: if given, the body is computed again in the backward pass, as by `remat`.
        drop_output: whether to leave out the output at a path such as `module_outputs/layer/x`.

    Returns:
        The last carry and what was stacked.
    """
    # The scope of a context that is current already is open.
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
    roles = Roles((("state", state_axis), ("prng_key", FORK), ("shared", None), (OUTPUTS, 0)))
    return lifting.scan(
        CONTEXTS,
        body,
        in_axes=(roles, CARRY, 0),
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
    """`jax.lax.scan` of a function that invokes modules of the current context.

    The state is the same in each iteration.

    Args:
        fn: takes the carry and a slice of `xs`, and returns the next carry and what to stack.
        carry: the first carry.
        xs: scanned over along axis 0.
        drop_output: whether to leave out the output at a path such as `module_outputs/layer/x`.
        child_name_prefix: summaries of iteration i are found under this prefix followed by i.
        unroll: as for `jax.lax.scan`.
        remat_kwargs: if given, the body is computed again in the backward pass.
        merge_summaries: whether to report one summary for all iterations instead of one for each.

    Returns:
        The last carry and what was stacked. Each iteration has a PRNG key of its own.
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
    """Adds the outputs of a loop's iterations to those of the invocation around it.

    Args:
        repeated_output_collection: outputs with a leading axis of iterations.
        child_name_prefix: summaries of iteration i are added under this prefix followed by i.
        target_output_collection: changed in place. State updates and module outputs are added as
            they are.
        merge_summaries: whether to add one summary for all iterations under the prefix alone: the
            mean of arrays, the sum of what else can be added, such as a `WeightedScalar`.
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
    """One tree of summaries for several: the mean of arrays, the sum of what else can be added.

    Args:
        summaries: trees of the same structure, at least one.
    """
    return jax.tree.map(_merged, *summaries, is_leaf=_is_summable)


def _is_summable(x: Any) -> bool:
    return not isinstance(x, dict | jax.Array) and hasattr(x, "__add__")


def _merged(*values: Any) -> Any:
    if _is_summable(values[0]):
        return functools.reduce(lambda a, b: a + b, values)
    return jnp.mean(jnp.stack(values), axis=0)
