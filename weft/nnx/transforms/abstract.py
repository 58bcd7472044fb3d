"""eval_shape, make_jaxpr and checkify: the shapes, the program and the errors of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from weft import lifting
from weft.core.tracebacks import entry_point
from weft.lifting.crossing import depart, run
from weft.nnx.naming import origin
from weft.nnx.splitting import as_abstract
from weft.nnx.spmd import lay_out_shapes
from weft.nnx.transforms.calls import (
    MISSING,
    Call,
    StaticArguments,
    check_unbound,
    opened,
    recorded,
    taking_named,
    transformed,
)
from weft.nnx.transforms.kind import ObjectKind
from weft.nnx.transforms.modes import references_and_structure


@entry_point
def eval_shape(
    f: Callable[..., Any],
    *args: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Returns the result of `f` with shapes in place of arrays, without computing it.

    The shapes in variables carry the `NamedSharding` that their values would have over the mesh in
    their metadata, or else over that of `jax.set_mesh`.

    Args:
        f: the function; it gets copies of the objects, and objects that it creates hold shapes.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.

    Example:
        >>> from weft import nnx
        >>> nnx.eval_shape(lambda: nnx.Dict(w=nnx.Param(jax.numpy.ones(3)))).w[...]
        ShapeDtypeStruct(shape=(3,), dtype=float32)
    """
    check_unbound("eval_shape", f)
    kind = ObjectKind("eval_shape", *references_and_structure(graph, graph_updates))
    abstract_args, abstract_kwargs = as_abstract((args, kwargs))
    call = recorded(taking_named(f))
    specs = ("args", "the result")
    with opened(Call("eval_shape", f, abstract_args, specs, named=abstract_kwargs, place=origin())):
        result = lifting.eval_shape(kind, call)(abstract_kwargs, *abstract_args)
    lay_out_shapes(result)
    return result


def make_jaxpr(
    f: Callable[..., Any] = MISSING,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Applies `jax.make_jaxpr` to a function of objects, which keep their state.

    Args:
        f: the function; without it, a decorator is returned.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.
        static_argnums: positions of static, hashable arguments.

    Returns:
        A function that returns the jaxpr of a call. Its inputs are the arrays among the arguments
        and the values of objects, ordered by attribute name; its outputs are the results of `f`.

    Example:
        >>> from weft import nnx
        >>> w = nnx.Param(jax.numpy.float32(1.0))
        >>> print(nnx.make_jaxpr(lambda w, x: w + x)(w, jax.numpy.float32(2.0)))
        { lambda ; a:f32[] b:f32[]. let c:f32[] = add a b in (c,) }
    """
    if f is MISSING:
        return functools.partial(
            make_jaxpr, graph=graph, graph_updates=graph_updates, static_argnums=static_argnums
        )
    kind = ObjectKind("make_jaxpr", *references_and_structure(graph, graph_updates))
    static = StaticArguments("make_jaxpr", "static_argnums", f, static_argnums)
    fn = recorded(taking_named(static.fn))

    def call(kwargs: dict[str, Any], *args: Any) -> Any:
        _, cargo = depart(kind, (kwargs, *static.wrapped(args)), None)
        return jax.make_jaxpr(lambda cargo: run(kind, lambda args: fn(*args), cargo).packed)(cargo)

    return transformed("make_jaxpr", f, call)


def checkify(
    f: Callable[..., Any],
    errors: Any = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """Applies `jax.experimental.checkify.checkify` to a function of objects.

    Args:
        errors: enabled checks; None for `checkify.user_checks`.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.

    Returns:
        A function that returns a `checkify.Error` and the result of `f`.

    Example:
        >>> from jax.experimental import checkify
        >>> from weft import nnx
        >>> def positive(m):
        ...     checkify.check(m.n > 0, "not positive")
        >>> error, _ = nnx.checkify(positive)(nnx.Dict(n=nnx.Variable(jax.numpy.array(-1))))
        >>> error.get().split(" (")[0]
        'not positive'
    """
    kind = ObjectKind("checkify", *references_and_structure(graph, graph_updates))
    return transformed(
        "checkify", f, lifting.checkify(kind, recorded(taking_named(f)), errors=errors)
    )
