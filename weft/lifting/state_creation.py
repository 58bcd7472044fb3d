"""State created by a loop's body or only by some branches.

A loop's carry has a fixed structure, and branches return the same structure, so new state is
created before:

    traced = trace(body, first state)       # finds what the body creates
    initial = traced, reduced to the created state, at the inputs of the first iteration
    traced = trace(body, first state + initial)
    loop over traced

A body that creates no state which the loop carries or shares is traced once; the first trace is the
loop. So the innermost of d nested loops that all create such state is traced d + 1 times: the first
trace of a loop contains both traces of the inner loop, and its second one finds the state. The
number does not depend on whether a model is initialized. State stacked along an axis needs no
second trace. Branches are traced once each.

If nothing can be created, since no collection of the call is mutable or since the kind creates no
state in loops, JAX traces the body directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.core
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from weft.errors import CarryStructureError
from weft.lifting.kind import Kind, PureResults, StateNode, Units
from weft.lifting.roles import CARRY
from weft.lifting.signature import named_after
from weft.typing import Fn


class TracedFunction:
    """Function of pytrees of arrays that is traced once and evaluated repeatedly.

    JAX sees the name of the user's function `named`. `closed` is the jaxpr.
    """

    def __init__(self, named: Fn, fn: Fn, *args: object):
        self._fn = fn
        leaves, tree = jax.tree.flatten(args)
        trees: list[Any] = []

        # JAX returns no references: their numbers among the results, and among the arguments.
        self._refs: dict[int, int] = {}

        def of_leaves(*leaves: object) -> list[Any]:
            outputs, out_tree = jax.tree.flatten(fn(*tree.unflatten(leaves)))
            trees.append(out_tree)
            inputs = {id(x): i for i, x in enumerate(leaves) if isinstance(x, jax.Ref)}
            self._refs = {n: inputs[id(x)] for n, x in enumerate(outputs) if id(x) in inputs}
            return [0 if n in self._refs else x for n, x in enumerate(outputs)]

        with jax.disable_jit(False):
            self.closed = jax.make_jaxpr(named_after(named, of_leaves))(*leaves)
        (self._tree,) = trees

    @property
    def shapes(self) -> Any:
        """Returns the result, with types in place of arrays."""
        return self._with_refs(self.closed.out_avals, self.closed.in_avals)

    def _with_refs(self, results: Sequence[Any], inputs: Sequence[Any]) -> Any:
        refs = self._refs
        leaves = [inputs[refs[n]] if n in refs else x for n, x in enumerate(results)]
        return self._tree.unflatten(leaves)

    def __call__(self, *args: object) -> Any:
        """Returns the result. Without jit, runs the function again, so that it can be debugged."""
        if is_jit_disabled():
            return self._fn(*args)
        leaves = jax.tree.leaves(args)
        results = jax.core.eval_jaxpr(self.closed.jaxpr, self.closed.consts, *leaves)
        return self._with_refs(results, leaves)

    def used(self, outputs: Sequence[int], *args: object) -> tuple[Any, ...]:
        """Returns for each array of the arguments whether the given leaves depend on it."""
        _, inputs = self._reduced(outputs)
        return jax.tree.unflatten(jax.tree.structure(args), inputs)

    def _reduced(self, outputs: Sequence[int]) -> tuple[Any, list[bool]]:
        """Returns the trace of some leaves of the result, and which inputs it has."""
        wanted = set(outputs)
        jaxpr = without_debugging(self.closed).jaxpr
        return dce_jaxpr(jaxpr, [i in wanted for i in range(len(jaxpr.outvars))])

    def is_like(self, output: int, other: TracedFunction, of_other: int) -> bool:
        """Returns whether a leaf of the result is computed as one of another trace.

        Both traces have the same arguments. Equal computations that differ in the text of their
        jaxprs, or that use constants of different arrays, count as different.
        """
        (mine, inputs), (its, of_its) = self._reduced([output]), other._reduced([of_other])
        consts = zip(self.closed.consts, other.closed.consts, strict=False)
        return (
            inputs == of_its
            and len(self.closed.consts) == len(other.closed.consts)
            and all(a is b for a, b in consts)
            and str(mine) == str(its)
        )

    def only(self, outputs: Sequence[int], *args: object) -> list[Any]:
        """Returns some leaves of the result, computed without the others."""
        jaxpr, is_input = self._reduced(outputs)
        inputs = [x for x, is_used in zip(jax.tree.leaves(args), is_input, strict=True) if is_used]
        results = jax.core.eval_jaxpr(jaxpr, self.closed.consts, *inputs)
        values = dict(zip(sorted(set(outputs)), results, strict=True))
        # A constant of the trace would be no array, and a change of it would be computed by NumPy.
        return [jnp.asarray(values[i]) for i in outputs]


_DEBUGGING = ("debug_callback", "debug_print")


def without_debugging(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr without `jax.debug.print` and `jax.debug.callback`.

    They show the runs of a function; the computation of some of its results is not a run.
    """
    removed: set[Any] = set()

    def of_param(x: Any) -> Any:
        if isinstance(x, Jaxpr):
            return of_jaxpr(x)
        if isinstance(x, ClosedJaxpr):
            return x.replace(jaxpr=of_jaxpr(x.jaxpr))
        return tuple(map(of_param, x)) if isinstance(x, tuple) else x

    def of_jaxpr(jaxpr: Any) -> Any:
        eqns = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in _DEBUGGING:
                removed.update(eqn.effects)
                continue
            if eqn.effects:
                params = {name: of_param(x) for name, x in eqn.params.items()}
                eqn = eqn.replace(params=params, effects=eqn.effects - removed)
            eqns.append(eqn)
        return jaxpr.replace(eqns=eqns, effects=jaxpr.effects - removed)

    return of_param(closed) if closed.jaxpr.effects else closed


def consts_and_carry(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many inputs of a scan of JAX are constant, and how many the carry."""
    if "ft_in" in params:  # since JAX 0.12
        consts, carry, _ = map(len, params["ft_in"].unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def is_jit_disabled() -> bool:
    """Returns whether loops run in Python, in `jax.disable_jit()`."""
    return jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


class CreatedState(NamedTuple):
    """State created by a run of a body: its structure, and the static half of the run."""

    tree: Any
    static: Any


def body_with_state(make: Fn, units: Units, first: Fn) -> tuple[Any, Fn, list[Any]]:
    """Returns a loop's body, after creating its state.

    Args:
        make: returns the body, a `weft.lifting.scan.LoopBody`, for units.
        first: returns the arguments of the first run of such a body.

    Returns the body, the function for the loop, and the created state of each group, or None.
    """
    kind, static = units.kind, units.static
    nothing = [None] * sum(units.is_group)
    inside = kind.static_of_run(static)
    # Without jit the body runs in Python, and what its trace collects must be known before.
    needs_collected = is_jit_disabled() and inside is not static
    body = make(units.with_static(inside))
    if not may_create(units) and not needs_collected:
        return body, body, nothing

    args = first(body)
    traced = TracedFunction(body.fn, body, *args)
    if body.created is None:
        if not needs_collected:
            return body, traced, nothing
        body = make(units.with_static(kind.static_of_run(static, after=body.collected.value)))
        return body, body, nothing

    created_by = body.created
    values = traced.only(range(created_by.tree.num_leaves), *args)
    created = created_by.tree.unflatten(values)
    units = _with_created(units, created)
    followed = kind.static_of_run(static, created_by.static)
    body = make(units.with_static(followed))
    if is_jit_disabled() and followed is not static:
        TracedFunction(body.fn, body, *first(body))
        if body.created is None:
            after = body.collected.value
            followed = kind.static_of_run(static, created_by.static, after)
            body = make(units.with_static(followed))

    again = TracedFunction(body.fn, body, *first(body))
    if body.created is not None:
        raise _created_later_error(body.transformation, units, body.created.tree)
    return body, again, created


def _with_created(units: Units, created: list[Any]) -> Units:
    groups = iter(created)
    values: list[Any] = []
    for value, is_group in zip(units.values, units.is_group, strict=True):
        of_group = next(groups) if is_group else None
        values.append(value if of_group is None else units.kind.union(value, of_group))
    return units.with_values(values)


def may_create(units: Units) -> bool:
    """Returns whether a call may create state that must exist before it."""
    parts = zip(units.is_group, units.roles, units.filters, strict=True)
    return any(
        is_group and (role is None or role is CARRY) and units.kind.may_create(units.static, where)
        for is_group, role, where in parts
    )


def created_groups(units: Units, results: PureResults) -> list[Any] | None:
    """Returns the created state of each group that a loop carries or shares, or None."""
    created: list[Any] = []
    for before, after, role in groups_before_and_after(units, results):
        is_kept = role is None or role is CARRY
        created.append(units.kind.created(before, after) if is_kept else None)
    return created if any(of_group is not None for of_group in created) else None


def _created_later_error(transformation: str, units: Units, tree: Any) -> Exception:
    path, _ = jax.tree_util.tree_leaves_with_path(tree.unflatten(range(tree.num_leaves)))[0]
    return CarryStructureError(
        f"{transformation}: {units.location_in_groups(path)} is made only where the body finds "
        "the state that its first run has made; a loop begins with all carried state, so make it "
        "in the first run, too, or before the loop."
    )


def final_results(kind: Kind, results: PureResults, created: list[Any]) -> PureResults:
    """Returns the results of a loop or of branches, with the initial values of created state."""
    of_groups = iter(created)
    nodes: list[StateNode] = []
    for node in results.state_nodes:
        groups: list[Any] = []
        for group in node.groups:
            of_group = next(of_groups)
            is_complete = of_group is None or group is None
            groups.append(group if is_complete else kind.with_created(group, of_group))
        nodes.append(StateNode(tuple(groups)))
    return results._replace(state_nodes=nodes)


def groups_before_and_after(units: Units, results: PureResults) -> list[tuple[Any, Any, Any]]:
    """Returns each group of the input carriers: before, after, and its role."""
    after = [group for state_node in results.state_nodes for group in state_node.groups]
    return [(b, a, role) for (b, role), a in zip(units.groups(), after, strict=True)]
