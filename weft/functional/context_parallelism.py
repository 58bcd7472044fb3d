"""Context parallelism: attention in which each device of a mesh axis has a part of the sequence.

Ring (Liu et al., 2023, https://arxiv.org/abs/2310.01889): queries stay, and keys and values move
from device to device. In each step a device adds the keys that it has to the softmax of its
queries, by the recurrence of `weft.functional.blockwise_attention`; none ever has all keys. The
backward pass moves keys and values again, together with their gradients.

If attention is causal, later queries have more keys. With `2N` chunks on `N` devices, each device
therefore swaps the second of its two chunks with the device at the other end, and has the same work
as all others in each step (Brandon et al., 2023, https://arxiv.org/abs/2311.09431, balance it in
another way):

    device              0      1      2      3
    chunks, swapped    0 7    2 5    4 3    6 1

A short window is balanced without that, and swapped chunks that are neighbors, such as 1 and 2,
would be far apart. With `C` positions on each device, queries need the keys of `ceil(window / C)`
devices before them. Keys go no further around the ring, and their gradients return at once:

    device                   0      1      2      3      a causal window of C or less
    visits its own keys      0      1      2      3
    and after one step      (3)     0      1      2      none of those of device 3 is in the window

All-to-all (Jacobs et al., 2023, https://arxiv.org/abs/2309.14509): devices exchange heads for
positions, so that each has some heads of all queries, keys and values, and exchange them back
afterwards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Key

from weft.errors import ArgumentShapeError, MeshError
from weft.functional import attention_mask
from weft.functional import blockwise_attention as blocks
from weft.functional.arrays import INLINE, explicit_spec, to_ndim
from weft.functional.attention import (
    check_shared_heads,
    dot_product_attention,
)
from weft.functional.attention_mask import AttentionMask, MaskFn
from weft.functional.fused_attention import AttentionImplementation

ContextParallelism = Literal["ring", "all_to_all"]
"""Ways of attention over a sequence that is split over devices."""


class _Operands(NamedTuple):
    """Arrays of attention, or their layouts over the mesh axis."""

    query: Any  # (batch, target, heads, dim)
    key: Any  # (batch, source, kv_heads, dim)
    value: Any  # (batch, source, kv_heads, value_dim)
    bias: Any  # (#batch, #heads, #target, #source)
    slopes: Any  # (heads,)
    sink: Any  # (heads,)
    mask: AttentionMask
    dropout_key: Any


def ring_attention(
    query: Float[Array, "batch target heads dim"],
    key: Float[Array, "batch source kv_heads dim"],
    value: Float[Array, "batch source kv_heads value_dim"],
    *,
    axis_name: str,
    replicated_axes: Collection[str] = (),
    bias: Float[Array, "#batch #heads #target #source"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    mask: Bool[Array, "#batch #heads #target #source"]
    | MaskFn
    | AttentionMask
    | None = None,
    scale: float | None = None,
    logit_cap: float | None = None,
    logit_sink: Float[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "batch target heads value_dim"]:
    """Returns attention as `dot_product_attention` does; keys and values move around a mesh axis.

    Arguments and result are whole arrays, whose time axes are split over that axis. A device
    computes as "blockwise" does, in memory linear in its part of the lengths. Of a bias, and of a
    mask that is an array, it has the rows of its queries. If the mask is a window, such as
    `sliding_window_causal_mask`, without positions, arrays or a bias, keys move no further than the
    window reaches. Dropout draws other masks than on one device. There is a gradient, but no
    forward-mode derivative.

    Args:
        axis_name: an axis of the mesh of `jax.set_mesh`. Arrays may be split over other axes, too.
        replicated_axes: axes over which no array is split, which a `jax.vmap` around this may have
            as its `spmd_axis_name`.

    Raises:
        ArgumentShapeError: if the axis does not divide both lengths.
        ArgumentValueError: if dropout has no key, or in forward-mode differentiation.
        MeshError: if the mesh has no such axis.

    >>> x = jnp.ones((1, 4, 2, 8))
    >>> with jax.set_mesh(jax.make_mesh((1,), ("seq",))):
    ...     ring_attention(x, x, x, axis_name="seq").shape
    (1, 4, 2, 8)
    """
    size = _axis_size(axis_name, query, key)
    mask = attention_mask.as_attention_mask(mask)
    target, source = query.shape[1], key.shape[1]
    never_empty = bias is None and blocks.attends_to_itself(
        mask, target == source
    )
    ring = _ring_for(axis_name, size, mask, target, source, never_empty)
    # A block with queries of both halves would skip no keys between them.
    chunk = target // size
    if ring.is_balanced:
        chunk //= 2
    num_blocks = math.ceil(
        chunk / blocks.default_block_size(query.shape[0], query.shape[2])
    )

    def attend(operands: _Operands) -> Array:
        operands = ring.exchange_halves(operands)
        options, arrays, constants = blocks.prepare(
            operands.query,
            operands.key,
            operands.value,
            bias=operands.bias,
            alibi_slopes=operands.slopes,
            mask=operands.mask,
            scale=scale,
            logit_cap=logit_cap or None,
            logit_sink=operands.sink,
            dropout_rate=dropout_rate,
            dropout_key=operands.dropout_key,
            precision=precision,
            block_size=math.ceil(chunk / num_blocks),
        )
        # The mask of a device does not tell whether a query has a key on another one.
        options = options._replace(never_empty=never_empty)
        out: Any = _attend_in_ring(ring, options, arrays, constants)
        return ring.exchange(blocks.with_all_heads(out), 1)

    operands = _Operands(
        query,
        key,
        value,
        None if bias is None else to_ndim(bias, 4),
        alibi_slopes,
        logit_sink,
        _with_ids(mask, target, source, has_slopes=alibi_slopes is not None),
        dropout_key,
    )
    in_time = PartitionSpec(None, axis_name)
    whole = PartitionSpec()

    def by_rows(x: Array) -> PartitionSpec:
        if x.shape[-2] == 1:
            return whole
        return PartitionSpec(None, None, axis_name)

    mask_specs = jax.tree.map(lambda _: in_time, operands.mask)
    specs = _Operands(
        query=in_time,
        key=in_time,
        value=in_time,
        bias=jax.tree.map(by_rows, operands.bias),
        slopes=whole,
        sink=whole,
        mask=mask_specs.replace(
            arrays=tuple(map(by_rows, operands.mask.arrays))
        ),
        dropout_key=whole,
    )
    with blocks.naming_forward_mode():
        return _over_axis(attend, axis_name, replicated_axes, operands, specs)


def _axis_size(axis_name: str, query: Array, key: Array) -> int:
    """Returns the size of a mesh axis that divides the lengths of queries and keys."""
    check_shared_heads(query, key)
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name not in mesh.axis_names:
        raise MeshError(
            f"attention is to be parallel over the mesh axis {axis_name!r}, and the mesh has "
            f"{mesh.axis_names or 'no axes'}; use one of its axes, or enter a mesh that has it "
            "by jax.set_mesh."
        )
    size = mesh.shape[axis_name]
    target, source = query.shape[1], key.shape[1]
    if target % size or source % size:
        raise ArgumentShapeError(
            f"attention of {target} queries to {source} keys cannot be parallel over the mesh axis "
            f"{axis_name!r} of {size} devices, which does not divide both: pad the sequences to a "
            f"multiple of {size}, or use dot_product_attention."
        )
    return size


def _with_ids(
    mask: AttentionMask, target: int, source: int, *, has_slopes: bool
) -> AttentionMask:
    """Returns a mask that has all positions and segments, to be split as queries and keys are."""
    query_segments, key_segments = mask.query_segments, mask.key_segments
    if query_segments is not None:
        if key_segments is None:
            key_segments = query_segments
        query_segments = jnp.atleast_2d(query_segments)
        key_segments = jnp.atleast_2d(key_segments)
    query_positions = key_positions = None
    if mask.mask_fn is not None or has_slopes:
        query_positions, key_positions = mask.positions(target, source)
    arrays = [to_ndim(jnp.asarray(x, bool), 4) for x in mask.arrays]
    return AttentionMask(
        mask.mask_fn,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segments=query_segments,
        key_segments=key_segments,
        arrays=tuple(arrays),
    )


def _over_axis(
    fn: Callable[[_Operands], Array],
    axis_name: str,
    replicated_axes: Collection[str],
    operands: _Operands,
    specs: _Operands,
) -> Array:
    """Calls `fn` on the part of each device of a mesh axis; other axes are left to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    axis_types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if axis_types[axis_name] is AxisType.Explicit:
        operands = jax.tree.map(
            lambda spec, x: jax.tree.map(
                functools.partial(_resharded, axis_name, spec), x
            ),
            specs,
            operands,
        )
    on_devices = jax.shard_map(
        fn,
        in_specs=(specs,),
        out_specs=PartitionSpec(None, axis_name),
        axis_names={axis_name, *replicated_axes},
        check_vma=False,
    )
    # Outside of jit, JAX does not map over some axes of a mesh only.
    return jax.jit(on_devices, inline=INLINE)(operands)


def _resharded(axis_name: str, spec: PartitionSpec, x: Array) -> Array:
    """Returns an array that is split over an Explicit axis as in `spec`, else as it was."""
    entries: list[Any] = []
    for entry in explicit_spec(x):
        names = entry if isinstance(entry, tuple) else (entry,)
        others = tuple(name for name in names if name not in (None, axis_name))
        entries.append(others or None)
    if axis_name in spec:
        entries[spec.index(axis_name)] = axis_name
    return jax.sharding.reshard(x, PartitionSpec(*entries))


class _Ring(NamedTuple):
    """Devices of a mesh axis, each with a part of the queries and of the keys.

    A device visits the keys of the devices from `ahead` after it to `behind` before it.
    """

    axis_name: str
    size: int
    is_balanced: bool  # whether devices exchange halves
    behind: int
    ahead: int

    def exchange_halves(self, operands: _Operands) -> _Operands:
        """Returns operands after the exchange along all axes of time."""

        def exchange_time(tree: Any) -> Any:
            return jax.tree.map(lambda x: self.exchange(x, 1), tree)

        def exchange_rows(tree: Any) -> Any:
            return jax.tree.map(lambda x: self.exchange(x, 2), tree)

        mask = operands.mask
        return operands._replace(
            query=exchange_time(operands.query),
            key=exchange_time(operands.key),
            value=exchange_time(operands.value),
            bias=exchange_rows(operands.bias),
            mask=exchange_time(mask.replace(arrays=())).replace(
                arrays=exchange_rows(mask.arrays)
            ),
        )

    def exchange(self, x: Array, axis: int) -> Array:
        """Swaps the second half with the device at the other end; the inverse is the same."""
        if not self.is_balanced or x.shape[axis] == 1:
            return x
        first, second = jnp.split(x, 2, axis)
        swaps = [(i, self.size - 1 - i) for i in range(self.size)]
        second = jax.lax.ppermute(second, self.axis_name, swaps)
        return jnp.concatenate([first, second], axis)

    @property
    def num_steps(self) -> int:
        """Number of steps in which a device passes keys on, after it has visited them."""
        return self.behind + self.ahead

    def shift(self, tree: Any, distance: int) -> Any:
        """Moves arrays to the device at a distance; negative for devices before this one."""
        if distance % self.size == 0:
            return tree
        moves = [(i, (i + distance) % self.size) for i in range(self.size)]
        return jax.lax.ppermute(tree, self.axis_name, moves)

    def origin(self, step: Any) -> Array:
        """Returns from which device the keys come that this one visits in a step."""
        index = jax.lax.axis_index(self.axis_name)
        return (index + self.ahead - step) % self.size

    def columns(self, x: Array, origin: Array) -> Array:
        """Returns the columns, of those for all keys, that belong to the keys of a device."""
        if x.shape[-1] == 1:
            return x
        chunk = x.shape[-1] // self.size
        starts = [origin * chunk]
        if self.is_balanced:
            chunk //= 2
            starts = [
                2 * origin * chunk,
                (2 * (self.size - origin) - 1) * chunk,
            ]
        parts = [
            jax.lax.dynamic_slice_in_dim(x, start, chunk, -1)
            for start in starts
        ]
        return jnp.concatenate(parts, -1)


def _ring_for(
    axis_name: str,
    size: int,
    mask: AttentionMask,
    target: int,
    source: int,
    never_empty: bool,
) -> _Ring:
    """Returns the ring that attention with this mask needs, with as few steps as are known."""
    window, _ = attention_mask.window_of(mask.mask_fn)
    left, right = window.left_context, window.right_context
    # Other positions are values, which are not known here. A query without any key attends to all.
    is_by_index = mask.query_positions is None and mask.key_positions is None
    if never_empty and is_by_index and left is not None and right is not None:
        chunk = source // size
        behind = math.ceil(left / chunk)
        ahead = math.ceil(right / chunk)
        # A causal window of more than half of the sequence is more balanced with swapped halves,
        # in less time for the products.
        if right == 0:
            is_short = 2 * behind < size
        else:
            is_short = behind + ahead + 1 < size
        if is_short:
            return _Ring(axis_name, size, False, behind, ahead)
    has_halves = target == source and target % (2 * size) == 0
    return _Ring(axis_name, size, has_halves and right == 0, size - 1, 0)


class _Keys(NamedTuple):
    """Arrays that move around the ring."""

    key: Array
    value: Array
    positions: Array | None
    segments: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_in_ring(
    ring: _Ring,
    options: blocks.Options,
    arrays: blocks.Arrays,
    constants: blocks.Constants,
) -> Array:
    out, _ = _forward(ring, options, arrays, constants)
    return out


def _forward(
    ring: _Ring,
    options: blocks.Options,
    arrays: blocks.Arrays,
    constants: blocks.Constants,
) -> tuple[Array, blocks.Residuals]:
    def visit(
        step: Any, keys: _Keys, softmax: blocks.Softmax
    ) -> blocks.Softmax:
        step_arguments = _at_step(ring, arrays, constants, step, keys)
        return blocks.accumulate(options, *step_arguments, softmax)

    def visit_and_pass_on(
        step: Any, state: tuple[_Keys, blocks.Softmax]
    ) -> tuple[_Keys, blocks.Softmax]:
        keys, softmax = state
        # Neither needs the other's result, so that keys can move during the products.
        return ring.shift(keys, 1), visit(step, keys, softmax)

    softmax = blocks.empty_softmax(arrays.query, arrays.value)
    state = (_first_keys(ring, arrays, constants), softmax)
    last = ring.num_steps
    keys, softmax = jax.lax.fori_loop(0, last, visit_and_pass_on, state)
    output = blocks.output_of(visit(last, keys, softmax), arrays)
    return output.out, (arrays, constants, output)


def _backward(
    ring: _Ring,
    options: blocks.Options,
    residuals: blocks.Residuals,
    dout: Array,
) -> tuple[blocks.Arrays, None]:
    arrays, constants, output = residuals

    def visit(step: Any, keys: _Keys, grads: blocks.Arrays) -> blocks.Arrays:
        step_arguments = _at_step(ring, arrays, constants, step, keys)
        residuals = (*step_arguments, output)
        if grads.bias is None:
            return blocks.add_gradients(options, residuals, dout, grads)

        def columns(bias: Array) -> Array:
            return ring.columns(bias, ring.origin(step))

        # The gradient of a choice of columns puts them back in their places.
        chosen, from_columns = jax.vjp(columns, grads.bias)
        start = grads._replace(bias=jnp.zeros_like(chosen))
        sums = blocks.add_gradients(options, residuals, dout, start)
        (dbias,) = from_columns(sums.bias)
        return sums._replace(bias=grads.bias + dbias)

    def passed_on(grads: blocks.Arrays, distance: int) -> blocks.Arrays:
        dkey, dvalue = ring.shift((grads.key, grads.value), distance)
        return grads._replace(key=dkey, value=dvalue)

    def visit_and_pass_on(
        step: Any, state: tuple[_Keys, blocks.Arrays]
    ) -> tuple[_Keys, blocks.Arrays]:
        keys, grads = state
        return ring.shift(keys, 1), passed_on(visit(step, keys, grads), 1)

    grads = jax.tree.map(blocks.zeros_like, arrays._replace(sink=None))
    state = (_first_keys(ring, arrays, constants), grads)
    last = ring.num_steps
    keys, grads = jax.lax.fori_loop(0, last, visit_and_pass_on, state)
    # The last keys are those of the device `behind` this one, where their gradients return to.
    grads = passed_on(visit(last, keys, grads), -ring.behind)
    if arrays.sink is not None:
        dsink = blocks.sink_gradient(arrays.sink, output, dout)
        grads = grads._replace(sink=dsink)
    return blocks.in_dtypes_of(arrays, grads), None


_attend_in_ring.defvjp(_forward, _backward)


def _first_keys(
    ring: _Ring, arrays: blocks.Arrays, constants: blocks.Constants
) -> _Keys:
    """Returns the keys of the first step, which are those of the device `ahead`."""
    mask = constants.mask
    own_keys = _Keys(
        arrays.key, arrays.value, mask.key_positions, mask.key_segments
    )
    return ring.shift(own_keys, -ring.ahead)


def _at_step(
    ring: _Ring,
    arrays: blocks.Arrays,
    constants: blocks.Constants,
    step: Any,
    keys: _Keys,
) -> tuple[blocks.Arrays, blocks.Constants]:
    """Returns the arguments of attention to the keys that a device has in a step."""
    origin = ring.origin(step)
    mask, dropout_key = constants
    mask = mask.replace(
        key_positions=keys.positions,
        key_segments=keys.segments,
        arrays=tuple(ring.columns(x, origin) for x in mask.arrays),
    )
    if dropout_key is not None:
        pair = jax.lax.axis_index(ring.axis_name) * ring.size + origin
        dropout_key = jax.random.fold_in(dropout_key, pair)
    bias = arrays.bias
    if bias is not None:
        bias = ring.columns(bias, origin)
    arrays = arrays._replace(
        key=keys.key, value=keys.value, bias=bias, sink=None
    )
    return arrays, blocks.Constants(mask, dropout_key)


def all_to_all_attention(
    query: Float[Array, "batch target heads dim"],
    key: Float[Array, "batch source kv_heads dim"],
    value: Float[Array, "batch source kv_heads value_dim"],
    *,
    axis_name: str,
    replicated_axes: Collection[str] = (),
    bias: Float[Array, "#batch #heads #target #source"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    mask: Bool[Array, "#batch #heads #target #source"]
    | MaskFn
    | AttentionMask
    | None = None,
    scale: float | None = None,
    logit_cap: float | None = None,
    logit_sink: Float[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "batch target heads value_dim"]:
    """Returns attention as `dot_product_attention` does; each device computes some of the heads.

    Arguments and result are whole arrays, whose time axes are split over a mesh axis, as for
    `ring_attention`. With fewer heads of keys than devices, or a number that these do not divide,
    devices have copies of heads. Dropout draws other masks than on one device.

    Args:
        axis_name: an axis of the mesh of `jax.set_mesh`. Arrays may be split over other axes, too.
        replicated_axes: axes over which no array is split, which a `jax.vmap` around this may have
            as its `spmd_axis_name`.
        implementation: how a device computes its heads.

    Raises:
        ArgumentShapeError: if the axis does not divide both lengths and the heads of queries.
        ArgumentValueError: if `implementation` cannot compute it.
        MeshError: if the mesh has no such axis.

    >>> x = jnp.ones((1, 4, 2, 8))
    >>> with jax.set_mesh(jax.make_mesh((1,), ("seq",))):
    ...     all_to_all_attention(x, x, x, axis_name="seq").shape
    (1, 4, 2, 8)
    """
    size = _axis_size(axis_name, query, key)
    mask = attention_mask.as_attention_mask(mask)
    num_heads, kv_heads = query.shape[2], key.shape[2]
    if num_heads % size:
        raise ArgumentShapeError(
            f"{num_heads} heads of queries cannot be exchanged for positions over the mesh axis "
            f"{axis_name!r} of {size} devices, which does not divide them: use ring_attention, or "
            "an axis of another size."
        )
    if _differs_by_head(mask.mask_fn):
        mask = AttentionMask(
            arrays=(mask.to_array(query.shape[1], key.shape[1]),)
        )
    copies = size // math.gcd(kv_heads, size)
    # Device `i` has the key heads `i, i + size, ...`, and their queries. A split of consecutive
    # heads instead would cross the devices of another mesh axis that has heads.
    heads = _Heads(
        kv_heads * copies // size, size, num_heads // (kv_heads * copies)
    )

    def attend(operands: _Operands) -> Array:
        def exchange(x: Array, heads: _Heads) -> Array:
            x = jax.lax.all_to_all(
                heads.split(x, 2),
                axis_name,
                split_axis=3,
                concat_axis=1,
                tiled=True,
            )
            return heads.merge(x, 2)

        heads_of_keys = heads._replace(group=1)
        dropout_key = operands.dropout_key
        if dropout_key is not None:
            index = jax.lax.axis_index(axis_name)
            dropout_key = jax.random.fold_in(dropout_key, index)
        vectors = (operands.slopes, operands.sink)
        slopes, sink = jax.tree.map(lambda x: heads.merge(x, 0), vectors)
        tables = (operands.bias, operands.mask.arrays)
        bias, mask_arrays = jax.tree.map(heads.merge_table, tables)
        out = dot_product_attention(
            exchange(operands.query, heads),
            exchange(operands.key, heads_of_keys),
            exchange(operands.value, heads_of_keys),
            bias=bias,
            alibi_slopes=slopes,
            mask=operands.mask.replace(arrays=mask_arrays),
            scale=scale,
            logit_cap=logit_cap,
            logit_sink=sink,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            precision=precision,
            implementation=implementation,
        )
        out = jax.lax.all_to_all(
            heads._replace(size=1).split(out, 2),
            axis_name,
            split_axis=1,
            concat_axis=3,
            tiled=True,
        )
        return heads.merge(out, 2)

    vectors = (alibi_slopes, logit_sink)
    slopes, sink = jax.tree.map(lambda x: heads.split(x, 0), vectors)
    tables = (bias, mask.arrays)
    bias, mask_arrays = jax.tree.map(heads.split_table, tables)
    operands = _Operands(
        query,
        jnp.repeat(key, copies, 2),
        jnp.repeat(value, copies, 2),
        bias,
        slopes,
        sink,
        mask.replace(arrays=mask_arrays),
        dropout_key,
    )
    in_time = PartitionSpec(None, axis_name)
    whole = PartitionSpec()

    def by_heads(x: Array) -> PartitionSpec:
        if x.ndim == 4:
            return whole
        return PartitionSpec(None, None, axis_name)

    mask_specs = jax.tree.map(lambda _: whole, operands.mask)
    specs = _Operands(
        query=in_time,
        key=in_time,
        value=in_time,
        bias=jax.tree.map(by_heads, bias),
        slopes=in_time,
        sink=in_time,
        mask=mask_specs.replace(arrays=tuple(map(by_heads, mask_arrays))),
        dropout_key=whole,
    )
    return _over_axis(attend, axis_name, replicated_axes, operands, specs)


def _differs_by_head(mask_fn: MaskFn | None) -> bool:
    if mask_fn is None:
        return False
    position = jnp.zeros((1, 1), jnp.int32)
    evaluate = functools.partial(attention_mask.evaluate_mask, mask_fn)
    return jax.eval_shape(evaluate, position, position).shape[-3] > 1


class _Heads(NamedTuple):
    """Division of an axis of heads into three: `number`, `size` and `group`.

    A device has one index along the axis of size `size`: `number` heads of keys, and `group` heads
    of queries with each.
    """

    number: int
    size: int
    group: int

    def split(self, x: Array, axis: int) -> Array:
        return x.reshape(*x.shape[:axis], *self, *x.shape[axis + 1 :])

    def merge(self, x: Array, axis: int) -> Array:
        size = math.prod(x.shape[axis : axis + 3])
        return x.reshape(*x.shape[:axis], size, *x.shape[axis + 3 :])

    def split_table(self, x: Array) -> Array:
        """Splits the heads of a table of all pairs, unless it is the same for all."""
        x = to_ndim(x, 4)
        return x if x.shape[1] == 1 else self.split(x, 1)

    def merge_table(self, x: Array) -> Array:
        return x if x.ndim == 4 else self.merge(x, 1)
