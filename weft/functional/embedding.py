"""Embeddings of tokens and of positions, and codebooks.

For longer contexts than in training, `yarn_frequencies` (Peng et al., 2023) keeps the frequency of
pairs of dimensions that turn often within the original context. Pairs that turn less than once have
it divided, so that no angle is new to the model; those between are interpolated. Logits are raised
a little (`yarn_magnitude`), because attention spreads over more keys. `llama3_frequencies`, of
Llama 3.1, compares full periods with the context instead, and does not scale logits.

A codebook, of vector quantization, has `codes` vectors for each of `groups` parts of an input,
which are chosen separately.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Num

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import arrays, linear
from weft.functional.arrays import OutSharding

RotaryLayout = Literal["interleaved", "half"]
OneHots = Float[Array, "batch time groups codes"]
Paddings = Bool[Array, "batch time"] | Num[Array, "batch time"]


def lookup(
    table: Float[Array, "vocab ..."],
    ids: Int[Array, "*shape"],
    *,
    out_sharding: OutSharding = None,
) -> Float[Array, "*shape ..."]:
    """Returns the rows of the table at the ids, each of one or more axes.

    An id outside returns NaN (in a table of integers the smallest one), so that the error shows.

    Args:
        ids: negative ids count from the end.
        out_sharding: as in `jax.Array.at[].get`; by default, over Explicit axes of a mesh, that of
            the ids, and of the table's other axes.

    Raises ArgumentValueError if NumPy ids do not fit into JAX's integers.

    >>> lookup(jnp.array([[0.0, 1.0], [2.0, 3.0]]), jnp.array([1, 1, 0])).tolist()
    [[2.0, 3.0], [2.0, 3.0], [0.0, 1.0]]
    """
    ids = as_ids(ids)
    if out_sharding is None:
        out_sharding = _sharding_of_rows(table, ids)
    if out_sharding is not None:
        return table.at[ids].get(mode="fill", out_sharding=out_sharding)
    return jnp.take(table, ids, axis=0, mode="fill")


def _sharding_of_rows(table: Array, ids: Array) -> NamedSharding | None:
    """Returns the sharding of the rows at ids; None if nothing is sharded over Explicit axes."""
    ids_spec = arrays.explicit_spec(ids)
    vocab_entry, *dim_entries = arrays.explicit_spec(table)
    ids_are_sharded = any(ids_spec)
    if vocab_entry is None and not ids_are_sharded:
        return None
    # Each axis of the mesh shards one axis at most.
    mesh_axes_of_ids = set(jax.tree.leaves(ids_spec))
    spec = list(ids_spec)
    for entry in dim_entries:
        is_free = mesh_axes_of_ids.isdisjoint(jax.tree.leaves(entry))
        spec.append(entry if is_free else None)
    mesh = jax.typeof(ids if ids_are_sharded else table).sharding.mesh
    return NamedSharding(mesh, PartitionSpec(*spec))


def as_ids(
    ids: Num[Array, "..."] | npt.ArrayLike, layer: str | None = None
) -> Array:
    """Returns ids as a JAX array, of 32 bits unless x64 is enabled.

    Raises ArgumentValueError if an id needs more bits, which JAX would drop, or, for a `layer`, if
    ids are not integers.

    >>> as_ids([3, 1]).tolist()
    [3, 1]
    """
    if not isinstance(ids, jax.Array):
        ids = np.asarray(ids)
        _check_range(ids)
    ids = jnp.asarray(ids)
    if layer is not None and not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ArgumentValueError(
            f"{layer} was given ids of dtype {ids.dtype}; expected integers: convert them with "
            "ids.astype(int)."
        )
    return ids


def _check_range(ids: np.ndarray) -> None:
    """Raises if JAX's dtype for the ids, of 32 bits unless x64 is enabled, cannot hold them."""
    jax_dtype = jax.dtypes.canonicalize_dtype(ids.dtype)
    if (
        jax_dtype == ids.dtype
        or ids.size == 0
        or not jnp.issubdtype(jax_dtype, jnp.integer)
    ):
        return
    smallest, largest = int(ids.min()), int(ids.max())
    limits = jnp.iinfo(jax_dtype)
    if smallest < limits.min or largest > limits.max:
        raise ArgumentValueError(
            f"ids of dtype {ids.dtype} range from {smallest} to {largest}, which do not fit "
            f"into {jax_dtype}, the dtype JAX converts them to; pass ids within the table, "
            "or enable jax_enable_x64."
        )


def attend(
    table: Float[Array, "vocab dim"],
    x: Float[Array, "*batch dim"],
    *,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: OutSharding = None,
) -> Float[Array, "*batch vocab"]:
    """Returns the inner product of `x` with every row: the logits of a model with tied embeddings.

    `precision`, `preferred_element_type` and `out_sharding` are those of `jax.lax.dot_general`.

    >>> attend(jnp.eye(3), jnp.array([[1.0, 2.0, 3.0]])).tolist()
    [[1.0, 2.0, 3.0]]
    """
    options = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    if x.dtype == table.dtype and linear.merges_axes(x, table, out_sharding):
        return linear.product_of_matrices(x, table, None, 1, 1, **options)
    return jnp.dot(x, table.T, out_sharding=out_sharding, **options)


def sinusoidal_positions(
    positions: Num[Array, "*shape"],
    *,
    dim: int,
    min_timescale: float = 1.0,
    max_timescale: float = 1e4,
) -> Float[Array, "*shape dim"]:
    """Returns sines and cosines of positions at geometric timescales (Vaswani et al., 2017).

    The first `dim / 2` numbers are `sin(position / timescale)`, the others the cosines. Timescales,
    periods over 2π, run from `min_timescale` to `max_timescale`, both inclusive.

    Raises ArgumentValueError if `dim` is odd.

    >>> sinusoidal_positions(jnp.array([0]), dim=4).tolist()
    [[0.0, 0.0, 1.0, 1.0]]
    """
    _require_even(dim)
    num_timescales = dim // 2
    log_ratio = math.log(max_timescale / min_timescale) / max(
        num_timescales - 1, 1
    )
    index = jnp.arange(num_timescales, dtype=jnp.float32)
    frequencies = jnp.exp(-log_ratio * index) / min_timescale
    return jnp.concatenate(sincos(positions, frequencies), axis=-1)


def rotary_sincos(
    positions: Num[Array, "*shape"], *, dim: int, theta: float = 1e4
) -> tuple[Float[Array, "*shape half_dim"], Float[Array, "*shape half_dim"]]:
    """Returns sine and cosine of the angles `position * theta ** (-2 i / dim)`.

    Computed in float32, in which positions are exact up to 2²⁴.

    Raises ArgumentValueError if `dim`, the size of the vectors to rotate, is odd.

    >>> sin, cos = rotary_sincos(jnp.array([0, 1]), dim=4)
    >>> sin.shape, cos[0].tolist()
    ((2, 2), [1.0, 1.0])
    """
    return sincos(positions, rotary_frequencies(dim, theta))


def rotary_frequencies(
    dim: int, theta: float = 1e4
) -> Float[Array, " half_dim"]:
    """Returns `theta ** (-2 i / dim)`, the rotation of each pair of dimensions per position.

    Raises ArgumentValueError if `dim`, the size of the vectors to rotate, is odd.
    """
    _require_even(dim)
    return theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)


def sincos(
    positions: Num[Array, "*shape"], frequencies: Float[Array, " half_dim"]
) -> tuple[Float[Array, "*shape half_dim"], Float[Array, "*shape half_dim"]]:
    """Returns sine and cosine of the angles `position * frequency`, in float32."""
    frequencies = arrays.to_ndim(frequencies, positions.ndim + 1)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.sin(angles), jnp.cos(angles)


def apply_rotary(
    x: Float[Array, "*batch dim"],
    sin: Float[Array, "*#batch half_dim"],
    cos: Float[Array, "*#batch half_dim"],
    *,
    layout: RotaryLayout = "interleaved",
) -> Float[Array, "*batch dim"]:
    """Rotates pairs of dimensions of `x` by the angles (Su et al., 2021).

    Pair `i` is `(2 i, 2 i + 1)` in the layout `"interleaved"`, used by RoFormer and the RoFormer
    layers of `weft.hierarchy`, and `(i, i + dim / 2)` in the layout `"half"`, used by Llama's
    published weights. Permuting dimensions converts between the two.

    Args:
        x: the vectors. With heads, `(batch, time, heads, dim)`, sines and cosines need the axis of
            the heads as well: `sin[:, :, None]`.
        sin, cos: of the angles, broadcastable to `x` except for the last axis, half as long.

    Raises:
        ArgumentShapeError: if there are not half as many angles as dimensions.
        ArgumentValueError: if the layout is unknown.

    >>> quarter_turn = jnp.ones(1), jnp.zeros(1)
    >>> apply_rotary(jnp.array([1.0, 0.0]), *quarter_turn).tolist()
    [0.0, 1.0]
    """
    if x.shape[-1] != 2 * sin.shape[-1]:
        raise ArgumentShapeError(
            f"x has {x.shape[-1]} dimensions (shape {x.shape}), so there must be "
            f"{x.shape[-1] / 2:g} angles, but sin has shape {sin.shape}."
        )
    sin = arrays.to_ndim(sin, x.ndim)
    cos = arrays.to_ndim(cos, x.ndim)
    y = x.astype(jnp.promote_types(x.dtype, sin.dtype))
    if layout == "half":
        first, second = jnp.split(y, 2, axis=-1)
        rotated = first * cos - second * sin, second * cos + first * sin
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
    if layout != "interleaved":
        raise ArgumentValueError(
            f"layout={layout!r} must be 'interleaved' or 'half'."
        )
    # (a, b) becomes (a, b) cos + (b, a) (-sin, sin), without slices of every second number, whose
    # gradient is a sum of padded arrays.
    pairs = y.reshape(*y.shape[:-1], -1, 2)
    swapped = jax.lax.rev(pairs, (y.ndim,)).reshape(y.shape)
    factor_shape = (*sin.shape[:-1], x.shape[-1])
    factors = jnp.stack((cos, cos), axis=-1).reshape(factor_shape)
    swapped_factors = jnp.stack((-sin, sin), axis=-1).reshape(factor_shape)
    return (y * factors + swapped * swapped_factors).astype(x.dtype)


def alibi_slopes(num_heads: int) -> Float[Array, " heads"]:
    """Returns the slope by which each head's logits fall with distance (Press et al., 2022).

    For `2 ** k` heads, the geometric sequence of ratio and first element `2 ** (-8 / num_heads)`;
    otherwise that of the next smaller power of two, then every other slope of the next larger one.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """

    def geometric_sequence(n: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    power_of_two = 2 ** (num_heads.bit_length() - 1)
    slopes = geometric_sequence(power_of_two)
    further_slopes = geometric_sequence(2 * power_of_two)[::2]
    slopes += further_slopes[: num_heads - power_of_two]
    return jnp.array(slopes, jnp.float32)


def alibi_bias(
    slopes: Float[Array, " heads"],
    query_positions: Int[Array, "batch target"],
    key_positions: Int[Array, "batch source"],
) -> Float[Array, "batch heads target source"]:
    """Returns `-slope * |query position - key position|`, to add to attention logits.

    >>> alibi_bias(jnp.array([0.5]), jnp.array([[2]]), jnp.array([[0, 1, 2]])).tolist()
    [[[[-1.0, -0.5, -0.0]]]]
    """
    keys = arrays.gathered(key_positions, -1)[
        :, None, None, :
    ]  # (batch, 1, 1, source)
    queries = query_positions[:, None, :, None]  # (batch, 1, target, 1)
    distance = jnp.abs(queries - keys)
    return arrays.to_ndim(-slopes[:, None, None], distance.ndim) * distance


def relative_position_buckets(
    distances: Int[Array, "*batch"],
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    is_causal: bool = False,
) -> Int[Array, "*batch"]:
    """Returns the bucket of each distance `key position - query position` (Raffel et al., 2020).

    Half of the buckets are for single distances, the others for ranges that grow with the distance,
    up to `max_distance`; the last is for all beyond. Later keys have buckets of their own, half of
    all, unless `is_causal`; then they have that of the distance 0.

    Raises:
        ArgumentValueError: if there are too few buckets, or `max_distance` is too small for them.

    >>> distances = jnp.array([-200, -20, -3, 0, 3])
    >>> relative_position_buckets(distances).tolist()
    [15, 10, 3, 0, 19]
    >>> relative_position_buckets(distances, is_causal=True).tolist()
    [31, 17, 3, 0, 0]
    """
    num_ranges = num_buckets if is_causal else num_buckets // 2
    num_exact = num_ranges // 2
    if num_exact < 1 or max_distance <= num_exact:
        least = 2 if is_causal else 4
        raise ArgumentValueError(
            f"num_buckets={num_buckets} and max_distance={max_distance}: there must be {least} "
            f"buckets or more, and max_distance must be above {max(num_exact, 1)}, the number of "
            "buckets for single distances."
        )
    # A table, made on the host: where a logarithm is nearly whole, devices round it differently.
    far = np.arange(num_exact, max_distance + 1, dtype=np.float32)
    share = np.log(far / np.float32(num_exact)) / np.float32(
        math.log(max_distance / num_exact)
    )
    ranges = num_exact + (share * (num_ranges - num_exact)).astype(np.int32)
    table = np.concatenate([np.arange(num_exact, dtype=np.int32), ranges]).clip(
        max=num_ranges - 1
    )
    if is_causal:
        sizes, offsets = jnp.maximum(-distances, 0), 0
    else:
        sizes = jnp.abs(distances)
        offsets = jnp.where(distances > 0, num_ranges, 0)
    return (
        lookup(jnp.asarray(table), jnp.minimum(sizes, max_distance)) + offsets
    )


def _require_even(dim: int) -> None:
    if dim % 2:
        raise ArgumentValueError(
            f"dim={dim} must be even: positions take it in pairs."
        )


def llama3_frequencies(
    dim: int,
    theta: float = 5e5,
    *,
    original_max_seq_length: int,
    scaling_factor: float = 8.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> Float[Array, " half_dim"]:
    """Returns the rotation of each pair of dimensions per position.

    Args:
        dim, theta: as in `rotary_frequencies`.
        original_max_seq_length: the context length before the extension.
        scaling_factor: divides the frequencies of slow pairs.
        low_freq_factor: pairs with fewer turns within the original context are slow.
        high_freq_factor: pairs with more turns keep their frequency; it is interpolated between.

    >>> plain = rotary_frequencies(8, 1e4)
    >>> scaled = llama3_frequencies(8, 1e4, original_max_seq_length=100, scaling_factor=4.0)
    >>> [round(x, 2) for x in (plain / scaled).tolist()]
    [1.0, 2.51, 4.0, 4.0]
    """
    plain = rotary_frequencies(dim, theta)
    turns = original_max_seq_length * plain / (2 * math.pi)
    fastness = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    plain_share = jnp.clip(fastness, 0.0, 1.0)
    return plain * plain_share + plain / scaling_factor * (1.0 - plain_share)


def yarn_frequencies(
    dim: int,
    theta: float = 1e4,
    *,
    original_max_seq_length: int,
    scaling_factor: float = 1.0,
    extrapolation_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = False,
) -> Float[Array, " half_dim"]:
    """Returns the rotation of each pair of dimensions per position; see `llama3_frequencies`.

    Fast pairs keep their frequency, slow pairs are divided by the scaling factor, and between them
    the share of the divided frequency grows linearly with the index of the pair (Peng et al., 2023,
    section 3.2).

    Args:
        scaling_factor: the ratio of the new to the original context length.
        extrapolation_factor: how far fast pairs keep their frequency; 0 divides all frequencies.
        beta_fast: pairs with more turns within the original context are fast.
        beta_slow: pairs with fewer turns are slow.
        truncate: whether to round the indices of the last fast and the first slow pair outwards, as
            most published checkpoints do.

    >>> plain = rotary_frequencies(8)
    >>> scaled = yarn_frequencies(8, original_max_seq_length=64, scaling_factor=4.0, truncate=True)
    >>> [round(x, 2) for x in (plain / scaled).tolist()]
    [1.0, 1.6, 4.0, 4.0]
    """
    plain = rotary_frequencies(dim, theta)

    def pair_that_turns(times: float) -> float:
        """Solves `original_max_seq_length * theta ** (-2 i / dim) = 2 pi times` for i."""
        timescale = original_max_seq_length / (2 * math.pi * times)
        return dim * math.log(timescale) / (2 * math.log(theta))

    last_fast = pair_that_turns(beta_fast)
    first_slow = pair_that_turns(beta_slow)
    if truncate:
        last_fast = math.floor(last_fast)
        first_slow = math.ceil(first_slow)
    last_fast = max(last_fast, 0)
    first_slow = min(first_slow, dim - 1)
    width = max(first_slow - last_fast, 1e-3)
    slowness = jnp.clip((jnp.arange(dim // 2) - last_fast) / width, 0.0, 1.0)
    plain_share = (1.0 - slowness) * extrapolation_factor
    return plain * plain_share + plain / scaling_factor * (1.0 - plain_share)


def yarn_magnitude(scaling_factor: float, attn_factor: float = 1.0) -> float:
    """Returns the factor of sines and cosines, for queries and keys: `0.1 ln(scaling) + 1`.

    It is 1 for `scaling_factor <= 1`, and multiplied by `attn_factor`.

    >>> yarn_magnitude(1.0), round(yarn_magnitude(4.0), 4)
    (1.0, 1.1386)
    """
    if scaling_factor <= 1:
        return attn_factor
    return (0.1 * math.log(scaling_factor) + 1.0) * attn_factor


def nearest_codes(
    x: Float[Array, "*batch groups dim"],
    codebook: Float[Array, "codes groups dim"],
    *,
    metric: Literal["l2_distance", "dot_product"] = "l2_distance",
) -> Int[Array, "*batch groups"]:
    """Returns the index of the most similar entry: of least distance, or largest scalar product.

    Similarities are computed in float32.

    >>> codebook = jnp.array([[[0.0]], [[2.0]]])
    >>> nearest_codes(jnp.array([[[0.9]], [[1.1]]]), codebook).tolist()
    [[0], [1]]
    """
    x = x.astype(jnp.float32)
    codebook = codebook.astype(jnp.float32)
    similarity = jnp.einsum("...gd,vgd->...gv", x, codebook)
    if metric == "l2_distance":
        # The squared distance |x|² - 2xy + |y|² is least where xy - |y|² / 2 is largest.
        half_squares = (
            jnp.sum(jnp.square(codebook), axis=-1).T / 2
        )  # (groups, codes)
        similarity -= arrays.to_ndim(half_squares, similarity.ndim)
    return jnp.argmax(similarity, axis=-1)


def codebook_entries(
    codebook: Float[Array, "codes groups dim"], ids: Int[Array, "*batch groups"]
) -> Float[Array, "*batch groups dim"]:
    """Returns the entries of a codebook with the given indices, one for each group.

    >>> codebook_entries(jnp.array([[[0.0]], [[2.0]]]), jnp.array([[1], [0]])).tolist()
    [[[2.0]], [[0.0]]]
    """
    group_index = arrays.positions(codebook.shape[1], ids.ndim)
    spec = arrays.explicit_spec(ids)
    sharding = None
    if any(spec):
        sharding = NamedSharding(
            jax.typeof(ids).sharding.mesh, PartitionSpec(*spec, None)
        )
    return codebook.at[ids, group_index].get(out_sharding=sharding)


def code_shares(
    onehots: OneHots, paddings: Paddings
) -> Float[Array, "groups codes"]:
    """Returns the share of each entry among the choices that are not padding.

    >>> onehots = jax.nn.one_hot(jnp.array([[[0], [1], [1], [1]]]), 2)
    >>> code_shares(onehots, jnp.zeros((1, 4))).tolist()
    [[0.25, 0.75]]
    """
    is_real = 1.0 - paddings.astype(onehots.dtype)
    # A sum, not a contraction: over sharded axes, JAX derives the sharding of its result.
    counts = jnp.sum(is_real[:, :, None, None] * onehots, axis=(0, 1))
    return counts / jnp.maximum(1, jnp.sum(is_real))


def compute_code_coverage(
    onehots: OneHots, paddings: Paddings
) -> Float[Array, ""]:
    """Returns the share of entries that were chosen at least once, the mean over groups.

    >>> onehots = jax.nn.one_hot(jnp.array([[[0], [2]]]), 4)
    >>> compute_code_coverage(onehots, jnp.zeros((1, 2))).item()
    0.5
    """
    return jnp.mean(code_shares(onehots, paddings) > 0)


def compute_code_pplx(
    onehots: OneHots, paddings: Paddings
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns perplexity and entropy, in nats, of the choices, each the mean over groups.

    >>> onehots = jax.nn.one_hot(jnp.array([[[0], [2]]]), 4)
    >>> pplx, entropy = compute_code_pplx(onehots, jnp.zeros((1, 2)))
    >>> round(pplx.item(), 4), round(entropy.item(), 4)
    (2.0, 0.6931)
    """
    shares = code_shares(onehots, paddings)
    entropies = jnp.sum(jax.scipy.special.entr(shares), axis=-1)  # (groups,)
    return jnp.mean(jnp.exp(entropies)), jnp.mean(entropies)
