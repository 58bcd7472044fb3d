"""while_loop and fori_loop: loops whose carry may contain objects, which change in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from weft import lifting
from weft.core.tracebacks import entry_point
from weft.lifting import CARRY
from weft.lifting.names import takes_name
from weft.nnx.naming import origin
from weft.nnx.transforms.calls import Call, opened, parameter_names, recorded
from weft.nnx.transforms.carry import with_objects, without_objects
from weft.nnx.transforms.kind import ObjectKind
from weft.nnx.transforms.modes import references_and_structure
from weft.nnx.variables import Variable

T = TypeVar("T")


@entry_point
def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> T:
    """Applies `jax.lax.while_loop` to a carry that may contain objects.

    Args:
        cond_fun: takes the carry and returns whether to continue. Its changes are dropped.
        body_fun: takes the carry and returns the next one, with the same objects.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.

    Returns:
        The last carry, with the objects of `init_val`.

    Raises:
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        LoopStructureError: if it changes attributes or references of an object, except for new
            attributes with variables, which are made before the loop and carried.
        TransformArgumentError: if it returns another object than it received.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> counter = nnx.Dict(n=nnx.Variable(jnp.array(0)))
        >>> def body(c):
        ...     c.n[...] += 1
        ...     return c
        >>> nnx.while_loop(lambda c: c.n < 5, body, counter) is counter, int(counter.n)
        (True, 5)
    """
    loop = lifting.while_loop(
        ObjectKind("while_loop", *references_and_structure(graph, graph_updates), is_loop=True),
        lambda carry: _read(cond_fun(carry)),
        recorded(_boxing(body_fun)),
        in_axes=CARRY,
    )
    with opened(
        Call("while_loop", body_fun, (init_val,), ("init_val", "the result"), place=origin())
    ):
        return with_objects(init_val, loop(init_val))


@entry_point
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, T], T],
    init_val: T,
    *,
    unroll: int | bool | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> T:
    """Applies `jax.lax.fori_loop` to a carry that may contain objects.

    Args:
        lower: the first index; `upper` is exclusive.
        body_fun: takes the index and the carry, and returns the next carry.
        unroll: number of iterations to unroll, if both bounds are Python numbers.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.

    Returns:
        The last carry, with the objects of `init_val`. For errors see `while_loop`.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> total = nnx.Variable(jnp.array(0))
        >>> def body(i, total):
        ...     total[...] += i
        ...     return total
        >>> int(nnx.fori_loop(0, 5, body, total))
        10
    """
    loop = lifting.fori_loop(
        ObjectKind("fori_loop", *references_and_structure(graph, graph_updates), is_loop=True),
        _read(lower),
        _read(upper),
        recorded(_boxing(body_fun)),
        in_axes=CARRY,
        unroll=unroll,
    )
    specs, names = ("init_val", "the result"), parameter_names(body_fun)[1:]
    with opened(Call("fori_loop", body_fun, (init_val,), specs, names=names, place=origin())):
        return with_objects(init_val, loop(init_val))


def _read(x: Any) -> Any:
    return x.get_value() if isinstance(x, Variable) else x


def _boxing(body_fun: Callable[..., Any]) -> Callable[..., Any]:
    return takes_name(body_fun, lambda *args: without_objects(args[-1], body_fun(*args)))
