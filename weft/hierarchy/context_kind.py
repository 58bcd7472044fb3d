"""Passing an `InvocationContext` through a JAX transformation.

The entries of a context, as filters name them: `state`, `prng_key`, `shared` (the states of modules
shared from above) are inputs; `summaries`, `state_updates`, `module_outputs` are outputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import KeyPath

from weft import errors, lifting
from weft.core.filters import group_collections
from weft.hierarchy import context as context_lib
from weft.hierarchy.context import InvocationContext, ModuleNode, OutputCollection
from weft.lifting import signature
from weft.lifting.kind import Parts
from weft.typing import Tensor

OUTPUTS = OutputCollection._fields


@dataclasses.dataclass(frozen=True)
class _Static:
    """Static part of a context. Its path is for errors and ignored in comparisons."""

    name: str
    module: ModuleNode | None
    is_training: bool
    shared: tuple[ModuleNode, ...]
    is_from_outer_trace: bool
    path: str = dataclasses.field(compare=False)


# Jitted, since outside of a compiled function the loop would be compiled at each call.
@functools.partial(jax.jit, static_argnums=1)
def fork_key(prng_key: Tensor, n: int) -> Any:
    """Splits `n` keys off a key, sequentially, along a new leading axis."""

    def step(key: Tensor, _: None) -> tuple[Any, Any]:
        key, child = jax.random.split(key)
        return key, child

    # A loop, so that the program does not grow with the number of layers.
    return jax.lax.scan(step, prng_key, None, length=n)[1]


def _shared_states(context: InvocationContext) -> dict[ModuleNode, Any]:
    """Returns the states of shared modules that are not below the context's own module."""
    module = context.module
    if module is None:
        return {}
    shared = module.shared_modules().values()
    return {m: context.state_of(m) for m in shared if module.find_descendant(m) is None}


class ContextKind(lifting.Kind):
    """Kind of `InvocationContext`; see `weft.lifting.kind.Kind`."""

    carrier_types = (InvocationContext,)
    carriers_are_leaves = True

    def split(self, carriers: Sequence[InvocationContext], parts: Sequence[Parts]):
        statics, groups = [], []
        for context, context_parts in zip(carriers, parts, strict=True):
            shared = _shared_states(context)
            states = list(shared.values())
            entries = {"state": context.state, "prng_key": context.prng_key, "shared": states}
            groups.append(group_collections(entries, [where for where, _ in context_parts]))
            is_foreign, path = context.is_from_outer_trace(), context.path()
            fields = (context.name, context.module, context.is_training, tuple(shared))
            statics.append(_Static(*fields, is_foreign, path))
        return list(carriers), tuple(statics), groups

    def merge(self, static: tuple[_Static, ...], groups: Sequence[tuple[dict[str, Any], ...]]):
        contexts = []
        for fields, of_context in zip(static, groups, strict=True):
            entries = _flatten_groups(of_context)
            state, key = entries.get("state", {}), entries.get("prng_key")
            context = InvocationContext(
                fields.name, None, fields.module, state, fields.is_training, key
            )
            states = entries.get("shared", [])
            context._shared_states = dict(zip(fields.shared, states, strict=False))
            context._path = fields.path
            if fields.is_from_outer_trace:
                context._trace = None  # foreign, as the context that it was derived from
            contexts.append(context)
        return None, contexts

    def collect(self, inner, static, carriers, parts, returned):
        if returned.carriers:
            raise TypeError(
                f"a transformed function returned the context {returned.carriers[0].path()}; "
                "return arrays, the context's outputs are passed on automatically."
            )
        groups: list[tuple[Any, ...]] = []
        for context, context_parts in zip(carriers, parts, strict=True):
            outputs = context.output_collection._asdict()
            groups.append(group_collections(outputs, [where for where, _ in context_parts]))
        return None, groups, []

    def commit(self, outer: Sequence[InvocationContext], static, groups, new_groups):
        # A foreign context has only the names of children in its outputs.
        pairs = zip(outer, groups, strict=True)
        current = [(context, of) for context, of in pairs if not context.is_from_outer_trace()]
        for context, of_context in current:
            for name, entries in _flatten_groups(of_context).items():
                present = getattr(context.output_collection, name)
                if twice := sorted(present.keys() & entries.keys()):
                    raise errors.OutputConflictError(
                        f"{twice} are added twice to the {name} of {context.path()}, the second "
                        "time inside of a transformed function; use other names there."
                    )
        for context, of_context in current:
            for name, entries in _flatten_groups(of_context).items():
                getattr(context.output_collection, name).update(entries)
        return []

    def fork(self, group: dict[str, Any], n: int) -> dict[str, Any]:
        key = group.get("prng_key")
        return group if key is None else {**group, "prng_key": fork_key(key, n)}

    def created(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the state entries that a call updates; other branches leave them unchanged."""
        entries = _state_entries_at(before.get("state", {}), after.get("state_updates", {}))
        return {"state_updates": entries} if entries else None

    def union(self, group: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        return _merge_nested(
            *({k: v for k, v in g.items() if k in OUTPUTS} for g in (group, other))
        )

    def location(self, static: tuple[_Static, ...], carrier: int | None, path: KeyPath) -> str:
        if carrier is None:
            return super().location(static, carrier, path)
        return _describe_entry(static[carrier].module, static[carrier].path, path)

    def place_of(self, context: InvocationContext, kind: str, path: KeyPath) -> str:
        """Returns the location of an output, by its kind and path; for errors."""
        return _describe_entry(context.module, context.path(), (jax.tree_util.DictKey(kind), *path))


def _describe_entry(module: ModuleNode | None, path_of_context: str, path: KeyPath) -> str:
    shown = path_of_context if module is None else module.path()
    entry = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"{entry!r} of the module {shown!r}"


def _flatten_groups(groups: tuple[dict[str, Any] | None, ...]) -> dict[str, Any]:
    return {name: value for group in groups for name, value in (group or {}).items()}


def _state_entries_at(state: object, updates: Mapping[str, object]) -> dict[str, Any]:
    """Returns the entries of a nested state at the places of updates, where present."""
    present: dict[str, Any] = {}
    if isinstance(state, dict):
        for name, update in updates.items():
            entry = state.get(name)
            if isinstance(update, dict):
                if below := _state_entries_at(entry, update):
                    present[name] = below
            elif entry is not None:
                present[name] = entry
    return present


def _merge_nested(a: object, b: object) -> Any:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return b
    return {**a, **{name: _merge_nested(a[name], x) if name in a else x for name, x in b.items()}}


CONTEXT_KIND = ContextKind()


def in_context(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` with an additional first argument: the context to run in."""

    def call(context: InvocationContext, *args: object, **kwargs: object) -> Any:
        with context_lib.set_current_context(context, require_parent=False):
            return fn(*args, **kwargs)

    return signature.named_after(fn, call, leading=("context",))


def with_packed_args(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` as a function of a context, a tuple of arguments and a dict of keywords."""

    def call(context: InvocationContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return in_context(fn)(context, *args, **kwargs)

    return signature.named_after(fn, call)
