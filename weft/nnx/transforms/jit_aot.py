"""Calls of functions compiled ahead of time, which take no static arguments, as in JAX."""

from __future__ import annotations

from typing import Any

import jax

from weft.errors import CompiledCallError
from weft.nnx.graph import GraphDef, NodeDef
from weft.nnx.transforms.jit_program import Layout, Options, Program, found_anywhere


class Call:
    """The call for which a function is compiled."""

    def __init__(
        self, program: Program, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
    ):
        self._program, self._options = program, options
        self._n_args = len(args)
        self._static = {i: x for i, x in enumerate(args) if i in options.static_argnums}
        self._named = {k: x for k, x in kwargs.items() if k in options.static_argnames}
        self._names = sorted(kwargs.keys() - self._named.keys())

    def run(self, compiled: jax.stages.Compiled, args: Any, kwargs: Any) -> Any:
        """Calls the compiled program, writes the changed values, and returns the result.

        Raises:
            CompiledCallError: if the structure of an object or the number of arguments differs.
        """
        if len(args) != self._n_args - len(self._static) or sorted(kwargs) != self._names:
            raise CompiledCallError(
                f"a function compiled for {self._n_args - len(self._static)} positional "
                f"arguments and {self._names} by name is called with {len(args)} and "
                f"{sorted(kwargs)}; pass them as to lower, without the static ones."
            )
        rest = iter(args)
        every = (self._static[i] if i in self._static else next(rest) for i in range(self._n_args))
        found = found_anywhere(self._options, tuple(every), {**kwargs, **self._named})
        if found.layout != self._program.layout:
            raise _other_objects(self._program.layout, found.layout)
        given = [x for i, x in enumerate(found.rest) if i not in self._static]
        named = {k: x for k, x in found.named.items() if k not in self._named}
        outputs = compiled(*self._program.values_of(found.flat), *given, **named)
        return self._program.finish(found.flat, outputs)


def _other_objects(before: Layout, now: Layout) -> CompiledCallError:
    path = _difference(before.static.graphdef, now.static.graphdef)
    what = f"differs at {path}" if path else "has other variables or other metadata"
    return CompiledCallError(
        f"a compiled function is called with objects unlike those it was compiled for: the new "
        f"argument {what}; pass objects of the same structure, or lower and compile it for these."
    )


def _difference(before: GraphDef, now: GraphDef) -> str:
    """Returns the path of the first difference between two graphs."""

    def walk(a: Any, b: Any, path: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if a == b:
            return None
        if isinstance(a, NodeDef) and isinstance(b, NodeDef) and a.type is b.type:
            old, new = dict(a.attributes), dict(b.attributes)
            for name in {**old, **new}:
                if name not in old or name not in new:
                    return (*path, name)
            for name in old:
                if (found := walk(old[name], new[name], (*path, name))) is not None:
                    return found
        return path

    first, *below = (walk(before.root, now.root, ()) or ())[1:] or (None,)
    if first is None:
        return ""
    return f"object {first}" + "".join(f".{x}" if isinstance(x, str) else f"[{x}]" for x in below)
