"""PRNG streams: a key and the path of a scope.

The n-th key that a scope draws from a stream is the stream's root key with one number folded in:
the first four bytes of the SHA-1 digest of the scope's path and n. A key thus depends on the path
and the stream, not on other draws of the program. Only the root key is an array; the path and the
counts of draws are part of the structure.

For compatibility with Flax, a scan's body draws as if it had run once before: if one run draws n
keys, the loop's keys begin after the next n. Since n is unknown while the body is traced, and it is
traced once, the folded number is the result of an operation without operands, `digest`. It becomes
a constant when the program is compiled or evaluated, after the loop's trace has ended.

A body that creates state which a scan carries or shares runs once more before the loop, to create
it. That run draws m keys of a stream in a scope; each run with existing state draws n. Carried
state uses the keys of the first iteration, m + 1 to 2m, as in a body whose every iteration creates
it; shared state uses the keys 1 to m of the run before, as in Flax. All iterations draw the keys m
+ 1 to m + n. If n is less than m, iterations draw the keys after the last one used to create state,
so that no later key equals it.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from weft import errors, struct
from weft.core.settings import settings

Path = tuple[str, ...]
Key = tuple[Path, str]
K = TypeVar("K")

RngKeys = jax.Array | Mapping[str, jax.Array] | None
"""A key for the stream `params`, or keys by stream name."""


class Loop:
    """Traced loop; `draws` is the number of keys of one run by scope and stream, once known."""

    def __init__(self, draws: dict[Key, int] | None = None):
        self.draws = draws


@dataclasses.dataclass(frozen=True)
class LoopKeyNumber:
    """Number of a key drawn in a loop.

    Attributes:
        counted: the number without keys that loops skip.
        loops: the surrounding loops, with the keys of the same counts there.
    """

    counted: int
    loops: tuple[tuple[Loop, Key], ...]

    def number(self) -> int:
        """Returns the number, which is known after the trace of the outermost loop."""
        skipped = 0
        for loop, key in self.loops:
            if loop.draws is None:
                raise errors.InvalidRngError(
                    "a PRNG key is drawn in jax.ensure_compile_time_eval() in the body of a loop, "
                    "whose keys are known only after it was traced; draw it outside of that."
                )
            skipped += loop.draws.get(key, 0)
        return self.counted + skipped

    def __repr__(self) -> str:
        return f"{self.counted}+"


SuffixPart = str | int | LoopKeyNumber


@functools.lru_cache(maxsize=4096)
def _digest(suffix: tuple[str | int, ...], separator: bytes) -> int:
    data = b"".join(
        separator + token.encode()
        if isinstance(token, str)
        else separator + token.to_bytes((token.bit_length() + 7) // 8)
        for token in suffix
    )
    return int.from_bytes(hashlib.sha1(data, usedforsecurity=False).digest()[:4])


def _suffix_digest(suffix: tuple[SuffixPart, ...]) -> np.uint32:
    known = (token.number() if isinstance(token, LoopKeyNumber) else token for token in suffix)
    return np.uint32(_digest(tuple(known), b"\0" if settings.fix_rng_separator else b""))


@functools.cache
def _digest_p() -> Any:
    from jax.extend.core import Primitive  # as in `weft.core.tracing`

    made = Primitive("digest")
    made.def_impl(lambda *, suffix: jnp.asarray(_suffix_digest(suffix)))
    made.def_abstract_eval(lambda *, suffix: jax.core.ShapedArray((), np.dtype("uint32")))
    mlir.register_lowering(made, lambda ctx, *, suffix: [mlir.ir_constant(_suffix_digest(suffix))])
    return made


class LazyRng(struct.PyTreeNode):
    """PRNG stream as seen by one scope; `suffix` has the names from the root to the scope."""

    rng: Any
    suffix: tuple[SuffixPart, ...] = struct.field(pytree_node=False, default=())

    @staticmethod
    def create(rng: "LazyRng | jax.Array", *suffix: SuffixPart) -> "LazyRng":
        """Returns the stream of a key, or of a scope below that of another stream."""
        return rng.at(*suffix) if isinstance(rng, LazyRng) else LazyRng(rng, suffix)

    def clear_suffix(self) -> "LazyRng":
        """Returns the stream of the root."""
        return LazyRng(self.rng)

    def at(self, *suffix: SuffixPart) -> "LazyRng":
        """Returns the stream of a scope further down."""
        return LazyRng(self.rng, (*self.suffix, *suffix))

    def as_jax_rng(self) -> Any:
        """Returns the stream's key."""
        if not self.suffix:
            return self.rng
        if any(isinstance(token, LoopKeyNumber) for token in self.suffix):
            return jax.random.fold_in(self.rng, _digest_p().bind(suffix=self.suffix))
        return jax.random.fold_in(self.rng, jnp.uint32(_suffix_digest(self.suffix)))


def is_key(x: Any) -> bool:
    """Returns whether `x` is a PRNG key: typed, or an array as returned by `PRNGKey`."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    return len(x.shape) == 1 and x.dtype == jnp.uint32


def check_keys(rngs: Mapping[str, Any]) -> None:
    """Raises InvalidRngError if a stream's value is not a key."""
    for stream, key in rngs.items():
        if not is_key(key):
            given = f"{key.dtype}{key.shape}" if hasattr(key, "shape") else repr(key)
            raise errors.InvalidRngError(
                f"the PRNG stream {stream!r} was given {given}; expected a key, such as "
                "jax.random.key(0), or a dict of keys by the name of their stream."
            )


@dataclasses.dataclass(frozen=True)
class FrozenCounts:
    """Hashable form of `Counts`, which crosses transformations.

    Attributes:
        loops: the surrounding loops, each with the path from its scope to this one.
        begins: whether a loop begins here.
        creation_draws: number of keys, on top of the table, drawn by the run that created a loop's
        state.
        draws: number of keys that the loop skips, if known, or skipped if it has ended.
    """

    table: frozenset[tuple[Key, int]] = frozenset()
    loops: tuple[tuple[Loop, Path], ...] = ()
    begins: bool = False
    creation_draws: frozenset[tuple[Key, int]] = frozenset()
    draws: frozenset[tuple[Key, int]] | None = None


class Counts:
    """Numbers of keys drawn by all scopes below one root, without keys that loops skip."""

    def __init__(self, frozen: FrozenCounts | None = None):
        self._initial = frozen = frozen or FrozenCounts()
        self._table = dict(frozen.table)
        self._loops = frozen.loops
        if frozen.begins or frozen.creation_draws:
            loop = Loop(None if frozen.draws is None else dict(frozen.draws))
            self._loops = (*frozen.loops, (loop, ()))

    def draw(self, key: Key) -> int | LoopKeyNumber:
        """Counts one more key and returns its number, from 1."""
        self._table[key] = n = self._table.get(key, 0) + 1
        if not self._loops:
            return n
        path, stream = key
        return LoopKeyNumber(
            n, tuple((loop, ((*base, *path), stream)) for loop, base in self._loops)
        )

    def freeze(self) -> FrozenCounts:
        return FrozenCounts(frozenset(self._table.items()), self._loops)

    def below(self, path: Path) -> FrozenCounts:
        """Returns the counts of the scopes from `path` on, by relative path."""
        n = len(path)
        table = frozenset(
            ((p[n:], stream), count) for (p, stream), count in self._table.items() if p[:n] == path
        )
        return FrozenCounts(table, tuple((loop, (*base, *path)) for loop, base in self._loops))

    def update_below(self, path: Path, after: FrozenCounts) -> None:
        """Updates the counts with the draws of a transformation; inverts `below`."""
        self._table.update({((*path, *p), stream): count for (p, stream), count in after.table})

    def end(self, made: "CreatedScopes | None" = None) -> FrozenCounts:
        """Returns the counts after the transformation, which ends a loop that began here.

        `made` are the scopes in which the body has created state that the loop carries or shares,
        in a run before the loop. The loop then continues the counts of that run.
        """
        if not (self._initial.begins or self._initial.creation_draws):
            return self.freeze()
        before = dict(self._initial.table)
        drawn = {key: n for key, count in self._table.items() if (n := count - before.get(key, 0))}
        if self._initial.creation_draws:
            # The run that created the state has drawn additional keys.
            skipped = {key: m for key, m in self._initial.creation_draws if drawn.get(key, 0) < m}
            creation_draws = frozenset()
        else:
            skipped = drawn if made is None else made.skipped(drawn)
            creation_draws = frozenset() if made is None else frozenset(skipped.items())
        self._loops[-1][0].draws = skipped
        # The run that creates the state precedes the loop and skips the keys that it draws.
        more = skipped if made is None else {}
        table = frozenset(
            (key, before.get(key, 0) + drawn.get(key, 0) + more.get(key, 0))
            for key in {**before, **drawn, **more}
        )
        draws = frozenset(skipped.items())
        return FrozenCounts(table, self._initial.loops, creation_draws=creation_draws, draws=draws)


class CreatedScopes(NamedTuple):
    """Scopes in which a scan's body has created carried or shared state, as paths."""

    carried: frozenset[Path]
    shared: frozenset[Path]

    def skipped(self, draws: Mapping[Key, int]) -> dict[Key, int]:
        """Returns which of one run's keys the loop skips before the state is created."""
        drawing = sorted({path for path, _ in draws}, key=len, reverse=True)

        def scope_of(made: Path) -> Path | None:
            """Returns the nearest scope that has drawn keys, with which the state was created."""
            return next((path for path in drawing if made[: len(path)] == path), None)

        carried, shared = ({scope_of(path) for path in paths} for paths in self)
        return {key: n for key, n in draws.items() if key[0] in carried or key[0] not in shared}


def counts_for_loop(before: FrozenCounts, after: FrozenCounts | None = None) -> FrozenCounts:
    """Returns a loop body's initial counts from those before and, if known, after the loop."""
    return dataclasses.replace(before, begins=True, draws=after and after.draws)


def counts_after_creation(before: FrozenCounts, made: FrozenCounts) -> FrozenCounts:
    """Returns the initial counts of a loop without a run before, after `made` created its state."""
    known = dict(before.table)
    creation_draws = frozenset((key, n - known.get(key, 0)) for key, n in made.table)
    return dataclasses.replace(before, creation_draws=creation_draws)


def max_counts(a: FrozenCounts, b: FrozenCounts) -> FrozenCounts:
    """Returns the counts after one of two branches has run."""
    return dataclasses.replace(a, table=max_by_key(a.table, b.table))


def max_by_key(
    a: frozenset[tuple[K, int]], b: frozenset[tuple[K, int]]
) -> frozenset[tuple[K, int]]:
    """Returns the larger number for each key of two tables."""
    table = dict(a)
    for key, n in b:
        table[key] = max(n, table.get(key, 0))
    return frozenset(table.items())
