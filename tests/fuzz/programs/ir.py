"""Programs as data: nested transformations around statements that make, change and read state.

A program is a block. A block is a function of `x`, a float32, and `i`, the index of the innermost
loop or mapped axis around it; it returns the next `x`. Variables belong to collections and live in
scopes. A variable's name is unique in its scope and collection, and all its uses agree.
"""

import dataclasses
from typing import Literal

Axis = int
Role = Axis | Literal["carry"] | None
COLLECTIONS = ("params", "st", "cache")
STREAMS = ("params", "noise")
LOOPS = ("scan", "fori", "while")
CUSTOM = ("custom_jvp", "custom_vjp")
START = 0.25


@dataclasses.dataclass(frozen=True)
class Use:
    """Makes a variable where it is missing, reads it, and with `write` changes it before.

    Attributes:
        col: its collection.
        name: its name in the scope.
        first: what it begins with: a constant, `x`, or something random.
        write: how it is changed: not at all, by counting, or from `x`.
        wide: whether its shape is (2,) instead of ().
        boxed: whether it comes in a box with the names of its axes.
    """

    col: str
    name: str
    first: Literal["const", "x", "key"] = "const"
    write: Literal["", "count", "mix"] = ""
    wide: bool = False
    boxed: bool = False


@dataclasses.dataclass(frozen=True)
class Draw:
    """Draws a key."""

    stream: str = "noise"


@dataclasses.dataclass(frozen=True)
class Level:
    """A transformation of a block.

    Attributes:
        kind: which.
        body: the block.
        scope: the name of a scope of its own, "" for that of the block around it.
        size: of the loop or the mapped axis.
        roles: of each collection, in loops and `vmap`.
        split: the streams that give each index its own keys.
        taken: which branch runs: its number, or None for one that depends on `i`.
        others: the other branches.
        reverse: whether a scan runs from the last index to the first.
    """

    kind: str
    body: "Block"
    scope: str = ""
    size: int = 2
    roles: tuple[tuple[str, Role], ...] = ()
    split: tuple[str, ...] = ()
    taken: int | None = 0
    others: tuple["Block", ...] = ()
    reverse: bool = False


Statement = Use | Draw | Level


@dataclasses.dataclass(frozen=True)
class Block:
    """Statements, one after the other."""

    statements: tuple[Statement, ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """A block in a way of writing.

    Attributes:
        way: of writing.
        block: the outermost block.
        dropped: the collections that `apply` makes again.
        how: whether the whole runs as Python, under `jax.jit`, or traced by JAX and interpreted.
    """

    way: str
    block: Block
    dropped: tuple[str, ...] = ()
    how: Literal["traced", "eager", "jit"] = "traced"
