"""cond and switch: selection between functions of objects."""

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
    """Applies `jax.lax.cond` to functions of objects.

    Args:
        pred: whether to call `true_fun`.
        true_fun: takes the operands.
        false_fun: takes the operands; its result has the same structure.
        *operands: pytrees of arrays and objects.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.

    Raises:
        BranchStructureError: if results or values of variables differ in structure, shape or dtype.
        BranchObjectsError: if the functions change references or static attributes differently,
            except for new attributes with variables, which are made for both.

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
    """Applies `jax.lax.switch` to functions of objects.

    Args:
        index: index of the branch, clamped to the range of `branches`.
        branches: functions of the operands, with results of the same structure.
        *operands: pytrees of arrays and objects.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.

    Raises:
        TransformArgumentError: if there is no branch. For other errors see `cond`.
    """
    if not branches:
        raise TransformArgumentError("switch: there are no branches; give at least one function.")
    kind = ObjectKind("switch", *references_and_structure(graph, graph_updates), is_branch=True)
    chosen = lifting.switch(kind, tuple(map(recorded, branches)))
    with opened(Call("switch", branches[0], operands, ("operands", "the result"), place=origin())):
        return chosen(index, *operands)
