"""remat: recomputes the values of a function of objects in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from weft import lifting
from weft.nnx.transforms.calls import MISSING, StaticArguments, recorded, taking_named, transformed
from weft.nnx.transforms.kind import ObjectKind
from weft.nnx.transforms.modes import references_and_structure


def remat(
    f: Callable[..., Any] = MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., Any]:
    """Applies `jax.checkpoint` to a function of objects; without one, returns a decorator.

    Args:
        prevent_cse: as for `jax.checkpoint`; False inside a scan, where it is not needed.
        static_argnums: positions of static, hashable arguments.
        policy: values to save, one of `jax.checkpoint_policies`.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> w = nnx.Param(jnp.array(2.0))
        >>> float(nnx.grad(nnx.remat(lambda w, x: jnp.sin(w * x)))(w, 0.0)[...])
        0.0
    """
    if f is MISSING:
        return functools.partial(
            remat,
            prevent_cse=prevent_cse,
            static_argnums=static_argnums,
            policy=policy,
            graph=graph,
            graph_updates=graph_updates,
        )
    static = StaticArguments("remat", "static_argnums", f, static_argnums)
    lifted = lifting.remat(
        ObjectKind("remat", *references_and_structure(graph, graph_updates)),
        recorded(taking_named(static.fn)),
        prevent_cse=prevent_cse,
        policy=policy,
    )
    return transformed("remat", f, lambda kwargs, *args: lifted(kwargs, *static.wrapped(args)))
