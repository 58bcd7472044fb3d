"""PRNG streams as objects: a key, and a count that increases with each draw.

The n-th key of a stream is its key with n folded in. Streams consist of variables, so they pass
through transformations like other state; `split_rngs` gives each index of an axis its own stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft.errors import InvalidRngError, RngStreamNotFoundError, warn_deprecated
from weft.nnx.filters import Filter, Path, to_predicate
from weft.nnx.pytree import Pytree, iter_graph
from weft.nnx.settings import resolve_graph_options
from weft.nnx.split_merge import clone
from weft.nnx.variables import Variable


class RngState(Variable[Any]):
    """Part of a PRNG stream."""

    __slots__ = ()


class RngKey(RngState):
    """Key of a PRNG stream."""

    __slots__ = ()


class RngCount(RngState):
    """Number of keys that a PRNG stream has returned."""

    __slots__ = ()


def _as_key(seed: object, name: str) -> jax.Array:
    if isinstance(seed, RngStream):
        return seed.key.get_value()
    if isinstance(seed, Variable):
        seed = seed.get_value()
    if isinstance(seed, jax.Array | np.ndarray | np.generic):
        if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            return jnp.asarray(seed)
        if seed.dtype == jnp.uint32 and seed.ndim == 1:
            return jax.random.wrap_key_data(jnp.asarray(seed))
        if seed.ndim == 0 and jnp.issubdtype(seed.dtype, jnp.integer):
            return jax.random.key(jnp.asarray(seed))
    if isinstance(seed, int):
        return jax.random.key(seed)
    raise InvalidRngError(
        f"the PRNG stream {name!r} was given {seed!r}; expected a number, a key such as "
        "jax.random.key(0), or another stream."
    )


def _method_of(draw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(draw)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return draw(self(), *args, **kwargs)

    return method


def _initializer_of(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def method(self: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        initialize = factory(*args, **kwargs)
        return lambda *args, **kwargs: initialize(self(), *args, **kwargs)

    return method


_DRAWS = (
    "ball", "bernoulli", "beta", "binomial", "bits", "categorical", "cauchy", "chisquare", "choice",
    "dirichlet", "double_sided_maxwell", "exponential", "f", "gamma", "generalized_normal",
    "geometric", "gumbel", "laplace", "loggamma", "logistic", "lognormal", "maxwell", "multinomial",
    "multivariate_normal", "normal", "orthogonal", "pareto", "permutation", "poisson", "rademacher",
    "randint", "rayleigh", "t", "triangular", "truncated_normal", "uniform", "wald", "weibull_min",
)  # fmt: skip
_INITIALIZERS = (
    "delta_orthogonal", "glorot_normal", "glorot_uniform", "he_normal", "he_uniform",
    "kaiming_normal", "kaiming_uniform", "lecun_normal", "lecun_uniform", "variance_scaling",
    "xavier_normal", "xavier_uniform",
)  # fmt: skip


class Draws(Pytree):
    """Base class with `jax.random`'s functions as methods that draw their own key.

    Initializers of `jax.nn.initializers` are methods that return a keyless initializer.
    """


for _name in _DRAWS:
    setattr(Draws, _name, _method_of(getattr(jax.random, _name)))
for _name in _INITIALIZERS:
    setattr(Draws, _name, _initializer_of(getattr(jax.nn.initializers, _name)))


Sizes = int | tuple[int, ...] | Mapping[Any, Any]


class RngStream(Draws):
    """PRNG stream.

    Args:
        key: a key, a seed, or a stream to take the key of.
        tag: name of the stream, and tag of its variables.

    Raises InvalidRngError if the key is none of these.

    >>> stream = RngStream(0, tag="dropout")
    >>> stream.uniform((2,)).shape, int(stream.count[...])
    ((2,), 1)
    """

    def __init__(self, key: object, *, tag: str = "default"):
        key = _as_key(key, tag)
        self.tag = tag
        self.key = RngKey(key, tag=tag)
        self.count = RngCount(jnp.zeros(key.shape, jnp.uint32), tag=tag)

    def __call__(self) -> jax.Array:
        key, count = self.key.get_value(), self.count.get_value()
        self.count.set_value(count + 1)
        return jax.random.fold_in(key, count)

    def split(self, k: int | tuple[int, ...]) -> "RngStream":
        """Returns a stream per index of new leading axes, from one key of this stream."""
        return RngStream(jax.random.split(self(), k), tag=self.tag)

    def broadcast(self, k: int | tuple[int, ...]) -> "RngStream":
        """Returns one stream for all indices of new leading axes, from one key of this stream."""
        shape = (k,) if isinstance(k, int) else k
        key = self()
        return RngStream(jnp.broadcast_to(key, (*shape, *key.shape)), tag=self.tag)

    def fork(self, *, split: int | tuple[int, ...] | None = None) -> "RngStream":
        """Returns an independent stream, from one key; `split` is deprecated: see `split`."""
        if split is None:
            return RngStream(self(), tag=self.tag)
        warn_deprecated("fork(split=sizes)", "call split(sizes)")
        return self.split(split)


class Rngs(Draws):
    """PRNG streams by name.

    Args:
        default: seed or key of the stream `default`, which replaces missing names; or a mapping
            from names to seeds or keys.
        **rngs: seeds or keys of the other streams.

    Raises RngStreamNotFoundError on access to a missing stream without a default.

    >>> rngs = Rngs(0, dropout=1)
    >>> rngs.params.normal((2,)).shape, rngs.dropout().shape
    ((2,), ())
    """

    def __init__(self, default: object = None, **rngs: object):
        if isinstance(default, Mapping):
            rngs, default = {**default, **rngs}, None
        given = rngs if default is None else {**rngs, "default": default}
        for name, seed in given.items():
            setattr(self, name, RngStream(seed, tag=name))

    def _stream(self, name: str) -> RngStream:
        streams = vars(self)
        for key in (name, "default"):
            if isinstance(streams.get(key), RngStream):
                return streams[key]
        there = ", ".join(repr(key) for key in self) or "none"
        raise RngStreamNotFoundError(
            f"unknown PRNG stream {name!r}, and no default stream; streams: {there}. Create one: "
            f"nnx.Rngs({name}=0)."
        )

    def __getattr__(self, name: str) -> RngStream:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._stream(name)

    def __getitem__(self, name: str) -> RngStream:
        return self._stream(name)

    def __call__(self) -> jax.Array:
        """Returns a key of the stream `default`."""
        return self._stream("default")()

    def __contains__(self, name: object) -> bool:
        return isinstance(vars(self).get(name), RngStream)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in vars(self).items() if isinstance(value, RngStream))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def items(self) -> list[tuple[str, RngStream]]:
        """Returns the streams by name."""
        return [(name, self._stream(name)) for name in self]

    def keys(self) -> list[str]:
        """Returns the names of the streams."""
        return list(self)

    def split(self, k: Sizes, /) -> "Rngs":
        """Returns streams per index of new leading axes, from one key of each stream.

        `k` has the sizes, or sizes by filter; unmatched streams keep keys and restart counts.
        """
        return self._each(split=k)

    def broadcast(self, k: Sizes, /) -> "Rngs":
        """Returns the same streams for each index of new leading axes; `k` as for `split`."""
        return self._each(broadcast=k)

    def fork(self, *, split: Sizes | None = None) -> "Rngs":
        """Returns independent streams, from one key of each; `split` is deprecated: see `split`."""
        if split is not None:
            warn_deprecated("fork(split=sizes)", "call split(sizes)")
        return self._each(split=split, fork=...)

    def _each(self, **changes: Any) -> "Rngs":
        made = Rngs()
        for name, stream in self.items():
            setattr(made, name, _changed(stream, (name,), **changes))
        return made


_UNMATCHED: Any = object()


def _sizes_of(sizes: object, path: Path, stream: RngStream, unmatched: object = None) -> Any:
    if not isinstance(sizes, Mapping):
        return sizes
    for where, of_stream in sizes.items():
        if to_predicate(where)(path, stream.key):
            return of_stream
    return unmatched


def _changed(
    stream: RngStream,
    path: Path,
    split: object = None,
    broadcast: object = None,
    fork: Filter = None,
) -> RngStream:
    if (sizes := _sizes_of(split, path, stream)) is not None:
        return stream.split(sizes)
    if (sizes := _sizes_of(broadcast, path, stream)) is not None:
        return stream.broadcast(sizes)
    if to_predicate(fork)(path, stream.key):
        return stream.fork()
    return RngStream(stream, tag=stream.tag)


def _streams(node: object, only: Filter) -> list[tuple[Path, RngStream]]:
    matches = to_predicate(only)
    return [
        (path, x)
        for path, x in iter_graph(node)
        if isinstance(x, RngStream) and (matches(path, x) or matches((*path, "key"), x.key))
    ]


class Backups(tuple[tuple[RngStream, Any, Any], ...]):
    """Backups of streams before a split or fork; as a context, restores them."""

    __slots__ = ()

    def __enter__(self) -> "Backups":
        return self

    def __exit__(self, *args: object) -> None:
        restore_rngs(self)


def restore_rngs(backups: Sequence[tuple[RngStream, Any, Any]], /) -> None:
    """Restores the keys and counts of streams from a result of `split_rngs` or `fork_rngs`."""
    for stream, key, count in backups:
        stream.key.set_value(key)
        stream.count.set_value(count)


NewKey = Callable[[Path, RngStream], jax.Array | None]


def _change_streams(node: Any, in_place: bool, only: Filter, new_key: NewKey) -> Any:
    """Gives streams new keys and restarts their counts, in place or in a copy of the object.

    Streams whose new key is None are unchanged. Returns backups, or a copy with other streams.
    """
    node, backups = node if in_place else clone(node, variables=False), []
    for path, stream in _streams(node, only):
        if (key := new_key(path, stream)) is None:
            continue
        if in_place:
            backups.append((stream, stream.key.get_value(), stream.count.get_value()))
            _restart(stream, key)
        else:
            count = jnp.zeros(key.shape, jnp.uint32)
            stream.key, stream.count = stream.key.copy(key), stream.count.copy(count)
    return Backups(backups) if in_place else node


def _restart(stream: RngStream, key: jax.Array) -> None:
    stream.key.set_value(key)
    stream.count.set_value(jnp.zeros(key.shape, jnp.uint32))


def _change_or_decorate(node: object, in_place: bool, only: Filter, new_key: NewKey) -> Any:
    """Changes streams as `_change_streams`; without an object, those of the arguments of calls."""
    if node is not None:
        return _change_streams(node, in_place, only, new_key)

    def decorator(f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            changed = _change_streams((args, kwargs), in_place, only, new_key)
            if not in_place:
                args, kwargs = changed
                return f(*args, **kwargs)
            with changed:
                return f(*args, **kwargs)

        return call

    return decorator


def split_rngs(
    node: object = None,
    /,
    *,
    splits: int | tuple[int, ...],
    only: Filter = ...,
    squeeze: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Splits the PRNG streams of an object along new leading axes, in place.

    Args:
        node: object; if omitted, returns a decorator that splits streams of arguments in calls.
        only: filter of the streams, such as their name.
        squeeze: whether to drop the axis, of size 1.
        graph, graph_updates: see `nnx.set_graph_mode` and `nnx.set_graph_updates`; without updates,
            a copy is changed, which shares everything but these streams.

    Returns backups for `restore_rngs`, which as a context manager restore them on exit; or the
    copy. Raises InvalidRngError if `squeeze` is set and the size is not 1.

    >>> rngs = Rngs(0)
    >>> with split_rngs(rngs, splits=5):
    ...     rngs.default.key.shape
    (5,)
    >>> rngs.default.key.shape
    ()
    """
    if squeeze and splits != 1:
        raise InvalidRngError(f"squeeze=True needs an axis of size 1, and splits={splits!r}.")
    _, in_place = resolve_graph_options(graph, graph_updates)

    def new_key(_: Path, stream: RngStream) -> jax.Array:
        key = jax.random.split(stream(), splits)
        return key[0] if squeeze else key

    return _change_or_decorate(node, in_place, only, new_key)


def fork_rngs(
    node: object = None,
    /,
    *,
    split: object = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Forks the PRNG streams of an object like `split_rngs`, optionally along new leading axes.

    `split` has the sizes, or by filter sizes or None for no axes; unmatched streams are unchanged.
    """
    _, in_place = resolve_graph_options(graph, graph_updates)

    def new_key(path: Path, stream: RngStream) -> jax.Array | None:
        sizes = _sizes_of(split, path, stream, _UNMATCHED)
        if sizes is _UNMATCHED:
            return None
        return (stream.fork() if sizes is None else stream.split(sizes)).key.get_value()

    return _change_or_decorate(node, in_place, ..., new_key)


def reseed(
    node: object,
    /,
    *,
    graph: bool | None = None,
    policy: str | Callable[[Path, jax.Array, tuple[int, ...]], jax.Array] = "scalars_only",
    **stream_keys: object,
) -> None:
    """Sets new keys of PRNG streams in an object, and restarts their counts.

    Args:
        policy: for split streams "scalars_only" raises, "match_shape" splits the new key to their
            shape; or a function of path, new key and old key's shape that returns the key.
        **stream_keys: seeds, keys or streams by stream name; each stream receives its own key.

    Raises InvalidRngError for a split stream under "scalars_only", or an unknown policy.

    >>> rngs = Rngs(0, dropout=1)
    >>> reseed(rngs, dropout=2)
    >>> bool(rngs.dropout.key[...] == RngStream(2)())
    True
    """
    if isinstance(policy, str) and policy not in ("scalars_only", "match_shape"):
        raise InvalidRngError(
            f'policy={policy!r} is none; give "scalars_only", "match_shape" or a function.'
        )
    sources = {name: RngStream(seed, tag=name) for name, seed in stream_keys.items()}
    found = [(path, x) for path, x in _streams(node, ...) if x.tag in sources]
    for path, stream in found:
        if policy == "scalars_only" and stream.key.shape:
            raise InvalidRngError(
                f"the PRNG stream at {'/'.join(map(str, path))!r} was split to the shape "
                f'{stream.key.shape}; give policy="match_shape", or restore it first.'
            )
    for path, stream in found:
        key, shape = sources[stream.tag](), stream.key.shape
        if callable(policy):
            key = policy(path, key, shape)
        elif shape:
            key = jax.random.split(key, shape)
        _restart(stream, key)


def with_rngs(
    node: object = None,
    /,
    *,
    split: Sizes | None = None,
    fork: Filter = None,
    broadcast: Sizes | None = None,
    only: Filter = True,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Returns a copy of an object with other PRNG streams, which shares all other parts.

    Args:
        node: object, whose streams each draw one key for the copy's. If omitted, returns a
            decorator that copies the arguments.
        split: sizes of new leading axes to split streams along, or sizes by filter.
        broadcast: sizes of new leading axes to repeat streams along, or sizes by filter.

    >>> rngs = Rngs(0, dropout=1)
    >>> with_rngs(rngs, split={"dropout": 3}).dropout.key.shape, rngs.dropout.key.shape
    ((3,), ())
    """

    def new_key(path: Path, stream: RngStream) -> jax.Array | None:
        key = _changed(stream, path, split, broadcast, fork).key.get_value()
        return None if key is stream.key.get_value() else key

    return _change_or_decorate(node, False, only, new_key)
