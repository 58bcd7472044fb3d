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
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from weft import lifting
from weft.errors import ArgumentValueError, LoopOutputError, OutputConflictError
from weft.hierarchy import context as context_lib
from weft.hierarchy.context_kind import (
    CONTEXT_KIND,
    OUTPUTS,
    in_context,
    with_packed_args,
)
from weft.lifting import CARRY, DIFF, FORK, Roles
from weft.lifting.signature import (
    as_tuple,
    check_argnums,
    named_after,
    resolve_argnums,
)
from weft.typing import ArrayLike, PyTree, Tensor

if TYPE_CHECKING:
    from jax.experimental.checkify import Error

Carry = TypeVar("Carry")
P = ParamSpec("P")
R = TypeVar("R")
SHARED = jax.sharding.PartitionSpec()


def _mapped_roles(state_axis: int | None) -> Roles:
    """Returns the roles of a context along a new axis: separate keys, stacked outputs."""
    return Roles(
        (
            ("state", state_axis),
            ("prng_key", FORK),
            ("shared", None),
            (OUTPUTS, 0),
        )
    )


class _SplitArgs:
    """Arguments of a call, divided by their positions.

    Attributes:
        static: the arguments at the given positions.
        traced: all others, which may be replaced.
    """

    def __init__(self, args: Sequence[Any], static_positions: Collection[int]):
        static_args: dict[int, Any] = {}
        traced_args: list[Any] = []
        for position, arg in enumerate(args):
            if position in static_positions:
                static_args[position] = arg
            else:
                traced_args.append(arg)
        self._num_args = len(args)
        self._static_args = static_args
        self.static = tuple(static_args.values())
        self.traced = tuple(traced_args)

    def join(self, traced: Iterable[Any]) -> list[Any]:
        """Returns all arguments, with these in place of `traced`."""
        remaining = iter(traced)
        args: list[Any] = []
        for position in range(self._num_args):
            is_static = position in self._static_args
            args.append(
                self._static_args[position] if is_static else next(remaining)
            )
        return args


def remat(fn: Callable[P, R], **remat_kwargs: Any) -> Callable[P, R]:
    """Applies `jax.checkpoint` to a function that invokes modules.

    `fn` takes arrays and other arguments; `remat_kwargs` are `prevent_cse` and `policy`, as there.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # `jax.checkpoint` takes arrays only: all other leaves of the arguments stay outside.
        leaves, structure = jax.tree.flatten((args, kwargs))
        static_positions: set[int] = set()
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, jax.Array | np.ndarray):
                static_positions.add(position)
        split_leaves = _SplitArgs(leaves, static_positions)

        def fn_of_arrays(*arrays: Tensor) -> R:
            args, kwargs = structure.unflatten(split_leaves.join(arrays))
            untyped_fn: Callable[..., R] = fn
            return untyped_fn(*args, **kwargs)

        lifted = lifting.remat(
            CONTEXT_KIND, in_context(fn_of_arrays), **remat_kwargs
        )
        return lifted(
            context_lib.require_context("remat"), *split_leaves.traced
        )

    return call


def vmap(
    fn: Callable[..., R],
    *,
    state_axis: int | None = 0,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    **vmap_kwargs: Any,
) -> Callable[..., R]:
    """Applies `jax.vmap` to a function that invokes modules.

    Each index has its own PRNG key; outputs of modules are stacked along axis 0.

    Args:
        state_axis: axis of the state to map over; None to share the state.
        **vmap_kwargs: `axis_size`, `axis_name`, `spmd_axis_name`.
    """
    return _map_args(
        lifting.vmap, fn, state_axis, in_axes, out_axes, **vmap_kwargs
    )


def _map_args(
    map_: Callable[..., Callable[..., R]],
    fn: Callable[..., R],
    state_axis: int | None,
    in_axes: PyTree,
    out_axes: PyTree,
    **options: Any,
) -> Callable[..., R]:
    """Applies `lifting.vmap` or `lifting.pmap` to a function that invokes modules."""

    def call(*args: PyTree) -> R:
        axes_by_arg = (
            in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        )
        roles = (_mapped_roles(state_axis), *axes_by_arg)
        lifted = map_(
            CONTEXT_KIND,
            in_context(fn),
            in_axes=roles,
            out_axes=out_axes,
            **options,
        )
        return lifted(context_lib.require_context(map_.__name__), *args)

    return named_after(fn, call, leading=())


def scan(
    context: context_lib.InvocationContext,
    fn: Callable[..., tuple[Carry, Any]],
    carry: Carry,
    xs: PyTree,
    *,
    state_axis: int | None,
    length: int | None = None,
    unroll: int | bool = 1,
    remat_kwargs: dict[str, Any] | None = None,
    drop_output: Callable[[str], bool] | None = None,
) -> tuple[Carry, PyTree]:
    """Runs `jax.lax.scan` on a function that invokes modules in `context`.

    Args:
        context: context of the body. Its outputs are stacked along axis 0.
        fn: takes the carry and a slice of `xs`; returns the next carry and values to stack.
        state_axis: axis along which iterations have separate state; None to share the state.
        length: number of iterations, if neither `xs` nor the state determines it.
        remat_kwargs: if given, the body is recomputed in the backward pass, as by `remat`.
        drop_output: predicate for paths of outputs to drop, such as `module_outputs/layer/x`.
    """
    caller = context_lib.current_context()
    is_child = caller is not None and context.parent is caller

    def body(
        context: context_lib.InvocationContext, carry: Carry, x: PyTree
    ) -> tuple[Carry, PyTree]:
        # The named scope of the current context is already open, but not that of a child.
        scope = (
            jax.named_scope(context.name)
            if is_child
            else contextlib.nullcontext()
        )
        with (
            scope,
            context_lib.set_current_context(context, require_parent=False),
        ):
            result = fn(carry, x)
        if drop_output is not None:
            drop_outputs(context.output_collection, drop_output)
        return result

    named_after(fn, body)
    if remat_kwargs is not None:
        body = lifting.remat(
            CONTEXT_KIND, body, **{"prevent_cse": False, **remat_kwargs}
        )
    in_axes = (_mapped_roles(state_axis), CARRY, 0)
    lifted = lifting.scan(
        CONTEXT_KIND,
        body,
        in_axes=in_axes,
        out_axes=(CARRY, 0),
        length=length,
        unroll=unroll,
    )
    return lifted(context, carry, xs)


def drop_outputs(
    collection: context_lib.OutputCollection, drop: Callable[[str], bool]
) -> None:
    """Removes outputs by their paths, such as `module_outputs/layer/x`, in place."""
    for kind, outputs in collection._asdict().items():
        _drop_outputs(outputs, kind, drop)


def _drop_outputs(
    outputs: dict[str, Any], path: str, drop: Callable[[str], bool]
) -> None:
    for name, value in list(outputs.items()):
        output_path = f"{path}/{name}"
        if isinstance(value, dict):
            _drop_outputs(value, output_path, drop)
        elif drop(output_path):
            del outputs[name]


def scan_in_context(
    fn: Callable[..., tuple[Carry, Any]],
    *,
    carry: Carry,
    xs: PyTree,
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
    if isinstance(xs, Mapping) and ("xs" in xs or "x" in xs):
        fn = _with_context_fields(fn, xs)
    body_context = context.fork()
    result = scan(
        body_context,
        fn,
        carry,
        xs,
        state_axis=None,
        unroll=unroll,
        remat_kwargs=remat_kwargs,
        drop_output=drop_output,
    )
    propagate_repeated_output_collections(
        body_context.output_collection,
        child_name_prefix=child_name_prefix,
        target_output_collection=context.output_collection,
        merge_summaries=merge_summaries,
    )
    return result


def _with_context_fields(
    fn: Callable[..., R], xs: Mapping[str, PyTree]
) -> Callable[..., R]:
    """Returns the body of a scan over `xs`, whose entries other than "xs" or "x" are for contexts.

    Raises ArgumentValueError for entries that do not replace a field of the context.
    """
    name_of_arrays = "xs" if "xs" in xs else "x"
    unknown_names = xs.keys() - {name_of_arrays, "state", "prng_key"}
    if unknown_names:
        raise ArgumentValueError(
            f"xs of scan_in_context has {name_of_arrays!r} and "
            f"{sorted(map(str, unknown_names))}; only 'state' and 'prng_key' replace fields of "
            "the context. Write `xs={'xs': xs}` to scan all of it."
        )

    def call(carry: PyTree, slices: Mapping[str, PyTree]) -> R:
        fields = dict(slices)
        x = fields.pop(name_of_arrays)
        context = context_lib.require_context(
            "scan_in_context"
        ).fork_with_outputs(**fields)
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
        _add_outputs(
            target.module_outputs,
            {child_name_prefix: module_outputs},
            "module_outputs",
        )
    leaves = jax.tree.leaves(summaries)
    if not leaves:
        return
    num_iterations = len(leaves[0])
    iterations: list[PyTree] = []
    for i in range(num_iterations):
        iterations.append(jax.tree.map(operator.itemgetter(i), summaries))
    if merge_summaries:
        summaries_by_name = {child_name_prefix: reduce_summaries(iterations)}
    else:
        summaries_by_name = {
            f"{child_name_prefix}{i}": x for i, x in enumerate(iterations)
        }
    _add_outputs(target.summaries, summaries_by_name, "summaries")


def _add_outputs(
    target: dict[str, Any], outputs: Mapping[str, Any], path: str
) -> None:
    for name, value in outputs.items():
        output_path = f"{path}/{name}"
        if isinstance(value, dict) and isinstance(
            target.setdefault(name, {}), dict
        ):
            _add_outputs(target[name], value, output_path)
        elif name in target:
            raise OutputConflictError(
                f"two loops, or a loop and its caller, add the output {output_path!r}; give one of "
                "the loops another child_name_prefix, or call another child in it."
            )
        else:
            target[name] = value


def reduce_summaries(summaries: Sequence[PyTree]) -> PyTree:
    """Merges trees of summaries of the same structure, at least one.

    Arrays are averaged; other summable values, such as a `WeightedScalar`, are added.
    """
    return jax.tree.map(_reduce, *summaries, is_leaf=_is_summable)


def _is_summable(x: PyTree) -> bool:
    return not isinstance(x, dict | jax.Array) and hasattr(x, "__add__")


def _reduce(*values: Any) -> PyTree:
    if _is_summable(values[0]):
        return functools.reduce(operator.add, values)
    return jnp.mean(jnp.stack(values), axis=0)


# Transformations with the same signatures as in JAX.


def jit(
    fn: Callable[P, R],
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    inline: bool = False,
) -> Callable[P, R]:
    """Applies `jax.jit` to a function that invokes modules; takes the same arguments."""
    check_argnums("jit", "static_argnums", fn, static_argnums)
    check_argnums("jit", "donate_argnums", fn, donate_argnums)

    def shifted(argnums: int | Sequence[int]) -> tuple[int, ...]:
        # Before the arguments comes the context; negative numbers count from the end.
        return tuple(i + 1 if i >= 0 else i for i in as_tuple(argnums))

    lifted = lifting.jit(
        CONTEXT_KIND,
        in_context(fn),
        static_argnums=shifted(static_argnums),
        static_argnames=static_argnames,
        donate_argnums=shifted(donate_argnums),
        inline=inline,
    )

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return lifted(context_lib.require_context("jit"), *args, **kwargs)

    return named_after(fn, call, leading=())


def shard_map(
    fn: Callable[..., R],
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    in_specs: PyTree,
    out_specs: PyTree,
    state_spec: jax.sharding.PartitionSpec = SHARED,
    axis_names: frozenset[str] = frozenset(),
    check_vma: bool = True,
) -> Callable[..., R]:
    """Applies `jax.shard_map` to a function that invokes modules.

    Each device has its own PRNG key; outputs of modules are stacked along a new axis 0 of devices.

    Args:
        fn: a function of the shards of its arguments on one device.
        mesh, in_specs, out_specs, check_vma: as for `jax.shard_map`.
        state_spec: sharding of the state; replicated by default.
        axis_names: mesh axes that are manual in `fn`; all by default.
    """
    device_axis = jax.sharding.PartitionSpec(
        tuple(axis_names or mesh.axis_names)
    )
    roles = Roles(
        (
            ("state", state_spec),
            ("prng_key", FORK),
            ("shared", SHARED),
            (OUTPUTS, device_axis),
        )
    )

    def run_on_device(
        context: context_lib.InvocationContext, *args: PyTree
    ) -> R:
        result = in_context(fn)(context, *args)
        # The new axis has size 1 on each device.
        for outputs in context.output_collection:
            outputs.update(
                jax.tree.map(lambda x: jnp.asarray(x)[None], outputs)
            )
        return result

    def call(*args: PyTree) -> R:
        if isinstance(in_specs, jax.sharding.PartitionSpec):
            specs_by_arg = (in_specs,) * len(args)
        else:
            specs_by_arg = tuple(in_specs)
        lifted = lifting.shard_map(
            CONTEXT_KIND,
            named_after(fn, run_on_device),
            mesh=mesh,
            in_specs=(roles, *specs_by_arg),
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
        )
        return lifted(context_lib.require_context("shard_map"), *args)

    return named_after(fn, call, leading=())


def pmap(
    fn: Callable[..., R],
    axis_name: str = "devices",
    *,
    state_axis: int | None = 0,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    devices: Sequence[Any] | None = None,
) -> Callable[..., R]:
    """Applies `vmap` with one device per index.

    Args:
        state_axis, in_axes, out_axes: as for `vmap`.
        devices: by default as many of `jax.devices()` as needed.
    """
    return _map_args(
        lifting.pmap,
        fn,
        state_axis,
        in_axes,
        out_axes,
        axis_name=axis_name,
        devices=devices,
    )


def checkify(
    fn: Callable[P, R], errors: frozenset[type[Exception]] | None = None
) -> Callable[P, tuple["Error", R]]:
    """Applies `jax.experimental.checkify.checkify` to a function that invokes modules.

    The new function returns the error, possibly empty, and the result of `fn`. The checks are
    `errors`, by default `checkify.user_checks`.
    """
    lifted = lifting.checkify(CONTEXT_KIND, with_packed_args(fn), errors=errors)

    def call(*args: P.args, **kwargs: P.kwargs) -> tuple["Error", R]:
        return lifted(context_lib.require_context("checkify"), args, kwargs)

    return named_after(fn, call, leading=())


def eval_shape(fn: Callable[..., R], *args: PyTree, **kwargs: PyTree) -> R:
    """Applies `jax.eval_shape` to a function that invokes modules, and calls it.

    Arguments are arrays or `jax.ShapeDtypeStruct`s. No outputs of modules are added.
    """
    inputs = Roles(((("state", "prng_key", "shared"), None),))
    lifted = lifting.eval_shape(
        CONTEXT_KIND, with_packed_args(fn), in_axes=(inputs, None, None)
    )
    return lifted(context_lib.require_context("eval_shape"), args, kwargs)


_LOOP_ROLES = Roles((("prng_key", FORK), (True, None)))


def while_loop(
    cond_fn: Callable[[Carry], ArrayLike],
    body_fn: Callable[[Carry], Carry],
    init_val: Carry,
) -> Carry:
    """Runs `jax.lax.while_loop` on functions that invoke modules, inside an invocation.

    Every iteration has the same state and its own PRNG key. Raises LoopOutputError if a function
    adds a summary, state update or module output, which the loop cannot collect per iteration.
    """
    lifted = lifting.while_loop(
        CONTEXT_KIND,
        _refuse_outputs(cond_fn, "while_loop"),
        _refuse_outputs(body_fn, "while_loop"),
        in_axes=(_LOOP_ROLES, CARRY),
    )
    return lifted(context_lib.require_context("while_loop"), init_val)


def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fn: Callable[[ArrayLike, Carry], Carry],
    init_val: Carry,
    *,
    unroll: int | bool | None = None,
) -> Carry:
    """Runs `jax.lax.fori_loop` on a function that invokes modules; see `while_loop`.

    With Python numbers as bounds, the loop is reverse-differentiable and `unroll` applies.
    """
    checked_body_fn = _refuse_outputs(body_fn, "fori_loop")

    def body(
        i: ArrayLike, context: context_lib.InvocationContext, carry: Carry
    ) -> Carry:
        return checked_body_fn(context, i, carry)

    named_after(body_fn, body)
    lifted = lifting.fori_loop(
        CONTEXT_KIND,
        lower,
        upper,
        body,
        in_axes=(_LOOP_ROLES, CARRY),
        unroll=unroll,
    )
    return lifted(context_lib.require_context("fori_loop"), init_val)


def _refuse_outputs(fn: Callable[..., R], loop: str) -> Callable[..., R]:
    def call(context: context_lib.InvocationContext, *args: PyTree) -> R:
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
    pred: ArrayLike,
    true_fun: Callable[..., R],
    false_fun: Callable[..., R],
    *operands: PyTree,
) -> R:
    """Runs `jax.lax.cond` on functions that invoke modules; see `switch`."""
    index = jnp.asarray(pred, bool).astype(jnp.int32)
    return _switch(
        "cond",
        index,
        (false_fun, true_fun),
        operands,
        ("false_fun", "true_fun"),
    )


def switch(
    index: ArrayLike, branches: Sequence[Callable[..., R]], *operands: PyTree
) -> R:
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
    branches: tuple[Callable[..., R], ...],
    operands: tuple[PyTree, ...],
    names: tuple[str, ...] | None,
) -> R:
    context = context_lib.require_context(name)
    called_children: set[str] = set()

    def in_branch(branch: Callable[..., R]) -> Callable[..., R]:
        def call(
            branch_context: context_lib.InvocationContext, *operands: PyTree
        ) -> R:
            result = in_context(branch)(branch_context, *operands)
            outputs = branch_context.output_collection
            # A child has an entry in each of the three.
            called_children.update(
                outputs.summaries.keys()
                & outputs.state_updates.keys()
                & outputs.module_outputs.keys()
            )
            repeated_children = sorted(
                called_children & context.output_collection.summaries.keys()
            )
            if repeated_children:
                raise OutputConflictError(
                    f"{repeated_children} are invoked in one invocation of {context.path()} and "
                    f"again in a branch of {name}, where their randomness would be the same. Name "
                    "the second call: `with child_context('another_name', module=...)`."
                )
            # Entries without outputs differ between branches and are not part of the result.
            for entries in outputs:
                context_lib.drop_empty(entries)
            return result

        return named_after(branch, call)

    lifted = lifting.switch(
        CONTEXT_KIND, list(map(in_branch, branches)), names=names
    )
    result = lifted(index, context, *operands)
    # So that a second call of such a child is refused, whichever branch has run.
    for child_name in sorted(called_children):
        context.output_collection.child(child_name)
    return result


def value_and_grad(
    fn: Callable[P, R],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[R, PyTree]]:
    """Applies `jax.value_and_grad` to a function that invokes modules; takes the same arguments.

    Derivatives are with respect to arguments; `vjp` also returns those of parameters.

    Returns a function with the arguments of `fn`, to be called inside an invocation. It returns the
    value, or with `has_aux` a pair of the value and the rest, and the gradients.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> tuple[R, PyTree]:
        positions = resolve_argnums(
            "value_and_grad", "argnums", fn, argnums, args
        )
        arg_roles = tuple(
            DIFF if i in positions else None for i in range(len(args))
        )
        lifted = lifting.value_and_grad(
            CONTEXT_KIND,
            with_packed_args(fn),
            wrt=(None, arg_roles, None),
            has_aux=has_aux,
            holomorphic=holomorphic,
            allow_int=allow_int,
        )
        value, (_, grads, _) = lifted(
            context_lib.require_context("value_and_grad"), args, kwargs
        )
        if isinstance(argnums, int):
            return value, grads[positions[0]]
        return value, tuple(grads[i] for i in positions)

    return named_after(fn, call, leading=())


def grad(
    fn: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[P, PyTree]:
    """Applies `jax.grad` to a function that invokes modules; see `value_and_grad`.

    The new function returns the gradients, or with `has_aux` a pair of them and the rest.
    """
    value_and_grads = value_and_grad(fn, argnums, has_aux=has_aux, **kwargs)

    def call(*args: P.args, **kwargs: P.kwargs) -> PyTree:
        value, grads = value_and_grads(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return named_after(fn, call, leading=())


_STATE_ROLES = Roles((("state", DIFF), (True, None)))
# In a custom rule, state shared from above would have a derivative that no rule returns.
_OWN_STATE_ROLES = Roles((("state", DIFF), (("prng_key", *OUTPUTS), None)))


def vjp(
    fn: Callable[..., Any], *primals: PyTree, has_aux: bool = False
) -> tuple[PyTree, ...]:
    """Applies `jax.vjp` to a function that invokes modules, inside an invocation.

    Returns the result, a function from its cotangent to the gradients of the current module's state
    and of each argument, and with `has_aux` the rest.
    """
    wrt = (_STATE_ROLES, DIFF, None)
    lifted = lifting.vjp(
        CONTEXT_KIND, with_packed_args(fn), wrt=wrt, has_aux=has_aux
    )
    value, pullback, *aux = lifted(
        context_lib.require_context("vjp"), primals, {}
    )
    return value, jax.tree_util.Partial(_apply_pullback, pullback), *aux


def _apply_pullback(
    pullback: Callable[[PyTree], PyTree], cotangent: PyTree
) -> tuple[PyTree, ...]:
    (state_grads, _), primal_grads, _ = pullback(cotangent)
    return state_grads["state"], *primal_grads


def jvp(
    fn: Callable[..., Any],
    primals: Sequence[PyTree],
    tangents: Sequence[PyTree],
    state_tangents: PyTree = None,
    *,
    has_aux: bool = False,
) -> tuple[PyTree, ...]:
    """Applies `jax.jvp` to a function that invokes modules, inside an invocation.

    Args:
        state_tangents: of the module's state, a dict like it; None where the state is constant.

    Returns the result, its tangent, and with `has_aux` the auxiliary values.
    """
    all_tangents = jax.tree.leaves(tuple(tangents))
    state_roles = None
    if state_tangents is not None:
        all_tangents = [{"state": state_tangents}, *all_tangents]
        state_roles = _STATE_ROLES
    wrt = (state_roles, DIFF, None)
    lifted = lifting.jvp(
        CONTEXT_KIND, with_packed_args(fn), wrt=wrt, has_aux=has_aux
    )
    arguments = context_lib.require_context("jvp"), tuple(primals), {}
    return lifted(arguments, all_tangents)


def custom_vjp(
    fn: Callable[..., R],
    forward_fn: Callable[..., tuple[R, Any]],
    backward_fn: Callable[..., tuple[PyTree, ...]],
    *,
    nondiff_argnums: Sequence[int] = (),
) -> Callable[..., R]:
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

    def call(*args: PyTree) -> R:
        nondiff_positions = resolve_argnums(
            "custom_vjp", "nondiff_argnums", fn, nondiff_argnums, args
        )
        split_args = _SplitArgs(args, nondiff_positions)
        diff_args = split_args.traced

        def primal(diff_args: tuple[PyTree, ...]) -> R:
            return fn(*split_args.join(diff_args))

        def forward(diff_args: tuple[PyTree, ...]) -> tuple[R, Any]:
            return forward_fn(*split_args.join(diff_args))

        def backward(residuals: Any, cotangent: PyTree) -> list[PyTree]:
            state_grads, *arg_grads = backward_fn(
                *split_args.static, residuals, cotangent
            )
            leaves = jax.tree.structure(diff_args).flatten_up_to(
                tuple(arg_grads)
            )
            return [{"state": state_grads}, *leaves]

        lifted = lifting.custom_vjp(
            CONTEXT_KIND,
            in_context(named_after(fn, primal)),
            in_context(named_after(forward_fn, forward)),
            named_after(backward_fn, backward),
            wrt=(_OWN_STATE_ROLES, DIFF),
        )
        return lifted(context_lib.require_context("custom_vjp"), diff_args)

    return named_after(fn, call, leading=())


def custom_jvp(
    fn: Callable[..., R],
    jvp_fn: Callable[..., tuple[R, PyTree]],
    *,
    nondiff_argnums: Sequence[int] = (),
) -> Callable[..., R]:
    """Applies `jax.custom_jvp` to a function that invokes modules.

    Args:
        jvp_fn: `jvp_fn(*nondiff, primals, tangents, state_tangents)` returns what `jvp` does.

    Returns a function with the arguments and results of `fn`; as for `custom_vjp`.
    """

    def call(*args: PyTree) -> R:
        nondiff_positions = resolve_argnums(
            "custom_jvp", "nondiff_argnums", fn, nondiff_argnums, args
        )
        split_args = _SplitArgs(args, nondiff_positions)

        def primal(diff_args: tuple[PyTree, ...]) -> R:
            return fn(*split_args.join(diff_args))

        def rule(
            tangents: list[PyTree],
            context: context_lib.InvocationContext,
            diff_args: tuple[PyTree, ...],
        ) -> tuple[R, PyTree]:
            state_tangents, *leaves = tangents
            arg_tangents = jax.tree.structure(diff_args).unflatten(leaves)
            run_rule = in_context(jvp_fn)
            return run_rule(
                context,
                *split_args.static,
                diff_args,
                arg_tangents,
                state_tangents["state"],
            )

        lifted = lifting.custom_jvp(
            CONTEXT_KIND,
            in_context(named_after(fn, primal)),
            named_after(jvp_fn, rule),
            wrt=(_OWN_STATE_ROLES, DIFF),
        )
        return lifted(
            context_lib.require_context("custom_jvp"), split_args.traced
        )

    return named_after(fn, call, leading=())
