"""cond and switch: one of several functions of objects runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weft import lifting
from weft.core.tracebacks import entry_point
from weft.errors import TransformArgumentError
from weft.nnx.naming import origin
from weft.nnx.transforms.calls import Call, opened, recorded
from weft.nnx.transforms.kind import ObjectKind
from weft.nnx.transforms.modes import references_and_structure


@entry_point
def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """`jax.lax.cond` of functions of objects.

    Args:
        pred: which of the two.
        true_fun: takes the operands.
        false_fun: likewise; what it returns is alike.
        *operands: arrays and objects in pytrees.
        graph: see `nnx.set_graph_mode`.
        graph_updates: see `nnx.set_graph_updates`.

    Raises:
        BranchStructureError: if the functions return, or leave in variables, what is not alike.
        BranchObjectsError: if they change references or static attributes in different ways. New
            attributes that hold variables are made for both.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> n = nnx.Variable(jnp.array(1))
        >>> def double(n):
        ...     n[...] *= 2
        >>> nnx.cond(True, double, lambda n: None, n)
        >>> int(n)
        2
    """
    kind = ObjectKind("cond", *references_and_structure(graph, graph_updates), is_branch=True)
    chosen = lifting.cond(kind, recorded(true_fun), recorded(false_fun))
    with opened(Call("cond", true_fun, operands, ("operands", "the result"), place=origin())):
        return chosen(pred, *operands)


@entry_point
def switch(
    index: Any,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """`jax.lax.switch` of functions of objects.

    Args:
        index: which of them; clamped to those that there are.
        branches: functions of the operands, whose results are alike.
        *operands: arrays and objects in pytrees.
        graph: see `nnx.set_graph_mode`.
        graph_updates: see `nnx.set_graph_updates`.

    Raises:
        TransformArgumentError: if there is no branch. What else is raised: see `cond`.
    """
    if not branches:
        raise TransformArgumentError("switch: there are no branches; give at least one function.")
    kind = ObjectKind("switch", *references_and_structure(graph, graph_updates), is_branch=True)
    chosen = lifting.switch(kind, tuple(map(recorded, branches)))
    with opened(Call("switch", branches[0], operands, ("operands", "the result"), place=origin())):
        return chosen(index, *operands)
