"""Branches, and loops of unknown length, of functions that invoke modules."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from weft import lifting
from weft.errors import LoopOutputError, OutputConflictError
from weft.hierarchy.context import InvocationContext, require_context
from weft.hierarchy.in_context import CONTEXTS, in_context
from weft.lifting import CARRY, FORK, Roles
from weft.lifting.names import named_after

_OF_LOOP = Roles((("prng_key", FORK), (True, None)))


def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], init_val: Any) -> Any:
    """Runs `jax.lax.while_loop` on functions that invoke modules, inside an invocation.

    Every iteration has the same state and its own PRNG key.

    Raises:
        LoopOutputError: if a function adds a summary, state update or module output, which the loop
            cannot collect per iteration.
    """
    lifted = lifting.while_loop(
        CONTEXTS,
        _without_outputs(cond_fn, "while_loop"),
        _without_outputs(body_fn, "while_loop"),
        in_axes=(_OF_LOOP, CARRY),
    )
    return lifted(require_context("while_loop"), init_val)


def fori_loop(
    lower: Any,
    upper: Any,
    body_fn: Callable[..., Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """Runs `jax.lax.fori_loop` on a function that invokes modules; see `while_loop`.

    With Python numbers as bounds, the loop is reverse-differentiable and `unroll` applies.
    """
    of_body = _without_outputs(body_fn, "fori_loop")

    def body(i: Any, context: InvocationContext, carry: Any) -> Any:
        return of_body(context, i, carry)

    lifted = lifting.fori_loop(
        CONTEXTS,
        lower,
        upper,
        named_after(body_fn, body),
        in_axes=(_OF_LOOP, CARRY),
        unroll=unroll,
    )
    return lifted(require_context("fori_loop"), init_val)


def _without_outputs(fn: Callable[..., Any], loop: str) -> Callable[..., Any]:
    def call(context: InvocationContext, *args: Any) -> Any:
        result = in_context(fn)(context, *args)
        for kind, outputs in context.output_collection._asdict().items():
            for path, _ in jax.tree_util.tree_leaves_with_path(outputs):
                raise LoopOutputError(
                    f"{CONTEXTS.place_of(context, kind, path)} is added in a {loop}, which cannot "
                    "collect outputs per iteration. Return it with the carry and add it "
                    "after the loop, or use `scan_in_context`, which stacks outputs."
                )
            outputs.clear()  # the names of children, which may also be called outside
        return result

    return named_after(fn, call)


def cond(
    pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any
) -> Any:
    """Runs `jax.lax.cond` on functions that invoke modules; see `switch`."""
    index = jnp.asarray(pred, bool).astype(jnp.int32)
    return _switch("cond", index, (false_fun, true_fun), operands, ("false_fun", "true_fun"))


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Runs `jax.lax.switch` on functions that invoke modules, inside an invocation.

    Args:
        index: of the branch to run.
        branches: functions of `operands`, with results of the same structure. They add the same
            summaries and module outputs. A state update made by only some of them leaves the state
            unchanged in the others.

    Raises:
        OutputConflictError: if a branch invokes a child that was invoked before.
        BranchStructureError: if results, summaries or module outputs differ in structure, shape or
            dtype, or the state has no entry for an update that only some branches make.
    """
    return _switch("switch", index, tuple(branches), operands, None)


def _switch(
    name: str,
    index: Any,
    branches: tuple[Callable[..., Any], ...],
    operands: tuple[Any, ...],
    names: tuple[str, ...] | None,
) -> Any:
    context = require_context(name)
    called: set[str] = set()

    def in_branch(branch: Callable[..., Any]) -> Callable[..., Any]:
        def call(inner: InvocationContext, *operands: Any) -> Any:
            result = in_context(branch)(inner, *operands)
            # Entries without outputs differ between branches and are not part of the result.
            outputs = inner.output_collection
            called.update(set.intersection(*(set(part) for part in outputs)))
            if twice := sorted(called & context.output_collection.summaries.keys()):
                raise OutputConflictError(
                    f"{twice} are invoked in one invocation of {context.path()} and again in a "
                    f"branch of {name}, where their randomness would be the same. Name the second "
                    "call: `with child_context('another_name', module=...)`."
                )
            for part in outputs:
                _drop_empty(part)
            return result

        return named_after(branch, call)

    lifted = lifting.switch(CONTEXTS, [in_branch(branch) for branch in branches], names=names)
    result = lifted(index, context, *operands)
    for child in sorted(called):
        context.output_collection.child(child)
    return result


def _drop_empty(outputs: dict[str, Any]) -> None:
    for name, value in list(outputs.items()):
        if isinstance(value, dict):
            _drop_empty(value)
            if not value:
                del outputs[name]
