"""Passing an `InvocationContext` through a JAX transformation.

The entries of a context, as filters name them: `state`, `prng_key`, `shared` (the states of modules
shared from above) are inputs; `summaries`, `state_updates`, `module_outputs` are outputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
from jax.tree_util import KeyPath

from weft import errors, lifting
from weft.core.filters import group_collections
from weft.hierarchy import context as context_lib
from weft.hierarchy.context import (
    InvocationContext,
    ModuleNode,
    OutputCollection,
)
from weft.lifting import signature
from weft.lifting.kind import Parts
from weft.typing import PyTree, Tensor

P = ParamSpec("P")
R = TypeVar("R")

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
def fork_key(prng_key: Tensor, n: int) -> Tensor:
    """Splits `n` keys off a key, sequentially, along a new leading axis."""

    def step(key: Tensor, _: None) -> tuple[Tensor, Tensor]:
        key, child_key = jax.random.split(key)
        return key, child_key

    # A loop, so that the program does not grow with the number of layers.
    _, child_keys = jax.lax.scan(step, prng_key, None, length=n)
    return child_keys


def _shared_states(context: InvocationContext) -> dict[ModuleNode, PyTree]:
    """Returns the states of shared modules that are not below the context's own module."""
    module = context.module
    if module is None:
        return {}
    states: dict[ModuleNode, PyTree] = {}
    for shared_module in module.shared_modules().values():
        if module.find_descendant(shared_module) is None:
            states[shared_module] = context.state_of(shared_module)
    return states


class ContextKind(lifting.Kind):
    """Kind of `InvocationContext`; see `weft.lifting.kind.Kind`."""

    carrier_types = (InvocationContext,)
    carriers_are_leaves = True

    def split(
        self, carriers: Sequence[InvocationContext], parts: Sequence[Parts]
    ):
        statics: list[_Static] = []
        groups: list[tuple[dict[str, Any], ...]] = []
        for context, context_parts in zip(carriers, parts, strict=True):
            shared_states = _shared_states(context)
            entries = {
                "state": context.state,
                "prng_key": context.prng_key,
                "shared": list(shared_states.values()),
            }
            groups.append(group_collections(entries, _filters(context_parts)))
            statics.append(
                _Static(
                    name=context.name,
                    module=context.module,
                    is_training=context.is_training,
                    shared=tuple(shared_states),
                    is_from_outer_trace=context.is_from_outer_trace(),
                    path=context.path(),
                )
            )
        return list(carriers), tuple(statics), groups

    def merge(
        self,
        static: tuple[_Static, ...],
        groups: Sequence[tuple[dict[str, Any], ...]],
    ):
        contexts: list[InvocationContext] = []
        for fields, context_groups in zip(static, groups, strict=True):
            entries = _flatten_groups(context_groups)
            # A root at this trace level: the caller's contexts, with their outputs, stay outside.
            context = InvocationContext(
                fields.name,
                parent=None,
                module=fields.module,
                state=entries.get("state", {}),
                is_training=fields.is_training,
                prng_key=entries.get("prng_key"),
            )
            # Without a role for `shared`, there are no states.
            shared_states = zip(
                fields.shared, entries.get("shared", []), strict=False
            )
            context._shared_states = dict(shared_states)
            context._path = fields.path
            if fields.is_from_outer_trace:
                context._trace = (
                    None  # not that of the call, as of the context outside
                )
            contexts.append(context)
        return None, contexts

    def collect(self, inner, static, carriers, parts, returned):
        if returned.carriers:
            raise TypeError(
                f"a transformed function returned the context {returned.carriers[0].path()}; "
                "return arrays, the context's outputs are passed on automatically."
            )
        groups: list[tuple[dict[str, Any], ...]] = []
        for context, context_parts in zip(carriers, parts, strict=True):
            outputs = context.output_collection._asdict()
            groups.append(group_collections(outputs, _filters(context_parts)))
        return None, groups, []

    def commit(
        self, outer: Sequence[InvocationContext], static, groups, new_groups
    ):
        # All or nothing: no outputs are added before those of all contexts were checked.
        updates: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for context, context_groups in zip(outer, groups, strict=True):
            if context.is_from_outer_trace():
                continue  # there are no outputs, only the names of children
            for kind, new_outputs in _flatten_groups(context_groups).items():
                outputs = getattr(context.output_collection, kind)
                common_names = sorted(outputs.keys() & new_outputs.keys())
                if common_names:
                    raise errors.OutputConflictError(
                        f"{common_names} are added twice to the {kind} of {context.path()}, the "
                        "second time inside of a transformed function; use other names there."
                    )
                updates.append((outputs, new_outputs))
        for outputs, new_outputs in updates:
            outputs.update(new_outputs)
        return []

    def fork(self, group: dict[str, Any], n: int) -> dict[str, Any]:
        key = group.get("prng_key")
        return group if key is None else {**group, "prng_key": fork_key(key, n)}

    def created(
        self, inputs: dict[str, Any], outputs: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Returns the state entries that a call updates; other branches leave them unchanged."""
        entries = _state_entries_at(
            inputs.get("state", {}), outputs.get("state_updates", {})
        )
        return {"state_updates": entries} if entries else None

    def union(
        self, group: dict[str, Any], other: dict[str, Any]
    ) -> dict[str, Any]:
        return _merge_nested(_outputs_of(group), _outputs_of(other))

    def location(
        self, static: tuple[_Static, ...], carrier: int | None, path: KeyPath
    ) -> str:
        if carrier is None:
            return super().location(static, carrier, path)
        return _describe_entry(
            static[carrier].module, static[carrier].path, path
        )

    def place_of(
        self, context: InvocationContext, kind: str, path: KeyPath
    ) -> str:
        """Returns the location of an output, by its kind and path; for errors."""
        return _describe_entry(
            context.module, context.path(), (jax.tree_util.DictKey(kind), *path)
        )


def _describe_entry(
    module: ModuleNode | None, context_path: str, path: KeyPath
) -> str:
    module_path = context_path if module is None else module.path()
    entry = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"{entry!r} of the module {module_path!r}"


def _filters(parts: Parts) -> list[Any]:
    return [entry_filter for entry_filter, _ in parts]


def _flatten_groups(
    groups: tuple[dict[str, Any] | None, ...],
) -> dict[str, Any]:
    """Returns the entries of all groups; a group that is None has none."""
    entries: dict[str, Any] = {}
    for group in groups:
        entries.update(group or {})
    return entries


def _outputs_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: entries for name, entries in group.items() if name in OUTPUTS}


def _state_entries_at(
    state: PyTree, updates: Mapping[str, PyTree]
) -> dict[str, PyTree]:
    """Returns the entries of a nested state at the places of updates, where present."""
    entries: dict[str, PyTree] = {}
    if not isinstance(state, dict):
        return entries
    for name, update in updates.items():
        entry = state.get(name)
        if isinstance(update, dict):
            entry = _state_entries_at(entry, update) or None
        if entry is not None:
            entries[name] = entry
    return entries


def _merge_nested(entries: PyTree, new_entries: PyTree) -> PyTree:
    """Returns nested dicts with the leaves of both; at the same place, the new leaf."""
    if not isinstance(entries, dict) or not isinstance(new_entries, dict):
        return new_entries
    merged = dict(entries)
    for name, new_entry in new_entries.items():
        if name in entries:
            new_entry = _merge_nested(entries[name], new_entry)
        merged[name] = new_entry
    return merged


CONTEXT_KIND = ContextKind()


def in_context(
    fn: Callable[P, R],
) -> Callable[Concatenate[InvocationContext, P], R]:
    """Returns `fn` with an additional first argument: the context to run in."""

    def call(
        context: InvocationContext, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        with context_lib.set_current_context(context, require_parent=False):
            return fn(*args, **kwargs)

    return signature.named_after(fn, call, leading=("context",))


def with_packed_args(
    fn: Callable[..., R],
) -> Callable[[InvocationContext, tuple[Any, ...], dict[str, Any]], R]:
    """Returns `fn` as a function of a context, a tuple of arguments and a dict of keywords."""
    run_in_context = in_context(fn)

    def call(
        context: InvocationContext,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> R:
        return run_in_context(context, *args, **kwargs)

    return signature.named_after(fn, call)
