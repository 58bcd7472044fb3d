"""PRNG streams: a key, and where in the tree of scopes it is.

The n-th key that a scope draws from a stream is the stream's root key with one number folded in:
the first four bytes of the SHA-1 digest of the scope's path and n. So a key depends on the path and
the stream, not on what else the program draws. The root key alone is an array; the path is a part
of the structure, and so is the count of what each scope has drawn.

A scan's body draws as if it had been run once before, as those who know Flax's numbers expect:
where one run draws n keys, the loop's keys begin after the next n. While the body is traced n is
not known yet, and it is traced once. So the number that is folded in there is the result of an
operation without operands, `digest`, which becomes a constant when the program is compiled or
evaluated. By then the loop's trace has ended.

A body that makes state which a scan carries or shares is run once more before the loop, to make it.
That run draws m keys of a stream in a scope, each run that finds the state draws n. State that is
carried is made with the keys of the first iteration, which are m + 1 to 2m as for a body whose
every iteration makes it; state that is shared with the keys 1 to m of the run before, as Flax does.
All iterations draw the keys m + 1 to m + n. Where n is less than m, keys were drawn to make state,
and the iterations draw those that follow the last of them, so that no later key equals it.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from weft import struct
from weft.errors import InvalidRngError

Path = tuple[str, ...]
Key = tuple[Path, str]


class Loop:
    """A loop whose body is being traced, or was.

    Attributes:
        draws: how many keys one run of the body draws, by scope and stream; None as long as it is
            being traced.
    """

    def __init__(self, draws: dict[Key, int] | None = None):
        self.draws = draws


@dataclasses.dataclass(frozen=True)
class Later:
    """The number of a key that is drawn in a loop.

    Attributes:
        counted: without what the loops skip.
        loops: the loops around, and what counts the same keys there.
    """

    counted: int
    loops: tuple[tuple[Loop, Key], ...]

    def number(self) -> int:
        """The number, which is known after the outermost loop was traced."""
        skipped = 0
        for loop, key in self.loops:
            if loop.draws is None:
                raise InvalidRngError(
                    "a PRNG key is drawn in jax.ensure_compile_time_eval() in the body of a loop, "
                    "whose keys are known only after it was traced; draw it outside of that."
                )
            skipped += loop.draws.get(key, 0)
        return self.counted + skipped

    def __repr__(self) -> str:
        return f"{self.counted}+"


Token = str | int | Later


@functools.lru_cache(maxsize=4096)
def _digest(suffix: tuple[str | int, ...]) -> int:
    data = b"".join(
        token.encode() if isinstance(token, str) else token.to_bytes((token.bit_length() + 7) // 8)
        for token in suffix
    )
    return int.from_bytes(hashlib.sha1(data, usedforsecurity=False).digest()[:4])


def _known_digest(suffix: tuple[Token, ...]) -> np.uint32:
    known = (token.number() if isinstance(token, Later) else token for token in suffix)
    return np.uint32(_digest(tuple(known)))


@functools.cache
def _digest_p() -> Any:
    from jax.extend.core import Primitive  # as in `weft.core.tracing`

    made = Primitive("digest")
    made.def_impl(lambda *, suffix: jnp.asarray(_known_digest(suffix)))
    made.def_abstract_eval(lambda *, suffix: jax.core.ShapedArray((), np.dtype("uint32")))
    mlir.register_lowering(made, lambda ctx, *, suffix: [mlir.ir_constant(_known_digest(suffix))])
    return made


class Stream(struct.PyTreeNode):
    """A PRNG stream as one scope sees it.

    Attributes:
        key: the root key, typed or of two numbers.
        suffix: the names of the scopes from the root to this one.
    """

    key: Any
    suffix: tuple[Token, ...] = struct.field(pytree_node=False, default=())

    def at(self, *suffix: Token) -> "Stream":
        """The stream further down."""
        return Stream(self.key, (*self.suffix, *suffix))

    def as_key(self) -> Any:
        """The key that the stream stands for."""
        if not self.suffix:
            return self.key
        if any(isinstance(token, Later) for token in self.suffix):
            return jax.random.fold_in(self.key, _digest_p().bind(suffix=self.suffix))
        return jax.random.fold_in(self.key, jnp.uint32(_known_digest(self.suffix)))


def is_key(x: Any) -> bool:
    """Whether `x` is a PRNG key: a typed one, or an array of numbers as `PRNGKey` makes."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    return len(x.shape) == 1 and x.dtype == jnp.uint32


def check_keys(rngs: Mapping[str, Any]) -> None:
    """Raises InvalidRngError if a stream was given something else than a key."""
    for stream, key in rngs.items():
        if not is_key(key):
            given = f"{key.dtype}{key.shape}" if hasattr(key, "shape") else repr(key)
            raise InvalidRngError(
                f"the PRNG stream {stream!r} was given {given}; expected a key, such as "
                "jax.random.key(0), or a dict of keys by the name of their stream."
            )


@dataclasses.dataclass(frozen=True)
class FrozenCounts:
    """The hashable form of `Counts`, for a trip through a transformation.

    Attributes:
        table: see `Counts`.
        loops: those around, each with the path from its scope to this one.
        begins: whether a loop begins here.
        making: how many keys, from those in the table on, the run has drawn that made the state
            which a loop finds here.
        draws: what that loop skips, where it is known already; of a loop that has ended, what it
            has skipped.
    """

    table: frozenset[tuple[Key, int]] = frozenset()
    loops: tuple[tuple[Loop, Path], ...] = ()
    begins: bool = False
    making: frozenset[tuple[Key, int]] = frozenset()
    draws: frozenset[tuple[Key, int]] | None = None


class Counts:
    """The keys drawn by all scopes below one root, without what the loops around skip."""

    def __init__(self, frozen: FrozenCounts | None = None):
        self._begun = frozen = frozen or FrozenCounts()
        self._table = dict(frozen.table)
        self._loops = frozen.loops
        if frozen.begins or frozen.making:
            loop = Loop(None if frozen.draws is None else dict(frozen.draws))
            self._loops = (*frozen.loops, (loop, ()))

    def draw(self, key: Key) -> int | Later:
        """Counts one more key; which one it is, from 1."""
        self._table[key] = n = self._table.get(key, 0) + 1
        if not self._loops:
            return n
        path, stream = key
        return Later(n, tuple((loop, ((*base, *path), stream)) for loop, base in self._loops))

    def freeze(self) -> FrozenCounts:
        return FrozenCounts(frozenset(self._table.items()), self._loops)

    def below(self, path: Path) -> FrozenCounts:
        """The counts of the scopes from `path` on, by their paths from there."""
        n = len(path)
        table = frozenset(
            ((p[n:], stream), count) for (p, stream), count in self._table.items() if p[:n] == path
        )
        return FrozenCounts(table, tuple((loop, (*base, *path)) for loop, base in self._loops))

    def update_below(self, path: Path, after: FrozenCounts) -> None:
        """Takes over what was drawn in a transformation; the inverse of `below`."""
        self._table.update({((*path, *p), stream): count for (p, stream), count in after.table})

    def end(self, made: "Made | None" = None) -> FrozenCounts:
        """What the counts are after the transformation: a loop that began here ends.

        Args:
            made: where the body has made state that the loop carries or shares. Then this was a run
                before the loop, and the loop continues the counts from its end.
        """
        if not (self._begun.begins or self._begun.making):
            return self.freeze()
        before = dict(self._begun.table)
        drawn = {key: n for key, count in self._table.items() if (n := count - before.get(key, 0))}
        if self._begun.making:
            # The run that made the state has drawn more: it has drawn keys to make it.
            skipped = {key: m for key, m in self._begun.making if drawn.get(key, 0) < m}
            making = frozenset()
        else:
            skipped = drawn if made is None else made.skipped(drawn)
            making = frozenset() if made is None else frozenset(skipped.items())
        self._loops[-1][0].draws = skipped
        # The run that makes the state is the one before the loop; it skips what it draws itself.
        more = skipped if made is None else {}
        table = frozenset(
            (key, before.get(key, 0) + drawn.get(key, 0) + more.get(key, 0))
            for key in {**before, **drawn, **more}
        )
        draws = frozenset(skipped.items())
        return FrozenCounts(table, self._begun.loops, making=making, draws=draws)


class Made(NamedTuple):
    """The scopes in which a scan's body has made state, as paths.

    Attributes:
        carried: where it is carried from one iteration to the next: made with the keys of the first
            iteration.
        shared: where it is the same in all iterations: made with the keys of the run before.
    """

    carried: frozenset[Path]
    shared: frozenset[Path]

    def skipped(self, draws: Mapping[Key, int]) -> dict[Key, int]:
        """Which of the keys that one run draws the loop skips, before the state is made."""
        drawing = sorted({path for path, _ in draws}, key=len, reverse=True)

        def scope_of(made: Path) -> Path | None:
            """The scope whose keys it was made with: the nearest one that has drawn any."""
            return next((path for path in drawing if made[: len(path)] == path), None)

        carried, shared = ({scope_of(path) for path in paths} for paths in self)
        return {key: n for key, n in draws.items() if key[0] in carried or key[0] not in shared}


def for_loop(before: FrozenCounts, after: FrozenCounts | None = None) -> FrozenCounts:
    """The counts with which a loop's body begins.

    Args:
        before: those outside.
        after: those outside after the same loop, where they are known already.
    """
    return dataclasses.replace(before, begins=True, draws=after and after.draws)


def after_making(before: FrozenCounts, made: FrozenCounts) -> FrozenCounts:
    """The counts with which a loop begins that counts no run before, where one has made its state.

    Args:
        before: those outside.
        made: those after the run that has made the state.
    """
    known = dict(before.table)
    making = frozenset((key, n - known.get(key, 0)) for key, n in made.table)
    return dataclasses.replace(before, making=making)


def larger(a: FrozenCounts, b: FrozenCounts) -> FrozenCounts:
    """For each scope the larger count of two branches."""
    table = dict(a.table)
    for key, count in b.table:
        table[key] = max(count, table.get(key, 0))
    return dataclasses.replace(a, table=frozenset(table.items()))
