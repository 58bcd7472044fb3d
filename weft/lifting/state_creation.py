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

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax.core
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from weft.errors import CarryStructureError
from weft.lifting.kind import Group, Kind, PureResults, StateNode, Static
from weft.lifting.roles import CARRY, Role
from weft.lifting.signature import named_after
from weft.lifting.units import Units
from weft.typing import Fn, PyTree, Tensor


class TracedFunction:
    """Function of pytrees of arrays that is traced once and evaluated repeatedly.

    JAX sees the name of the user's function `named`. `closed` is the jaxpr.
    """

    def __init__(self, named: Fn, fn: Fn, *args: PyTree):
        self._fn = fn
        arg_leaves, args_structure = jax.tree.flatten(args)
        result_structures: list[Any] = []

        # JAX returns no references: their numbers among the results, and among the arguments.
        self._refs: dict[int, int] = {}

        def of_leaves(*leaves: PyTree) -> list[PyTree]:
            self._refs.clear()
            results, structure = jax.tree.flatten(
                fn(*args_structure.unflatten(leaves))
            )
            result_structures.append(structure)
            input_numbers = {
                id(x): i for i, x in enumerate(leaves) if isinstance(x, jax.Ref)
            }
            for number, result in enumerate(results):
                if id(result) in input_numbers:
                    self._refs[number] = input_numbers[id(result)]
                    results[number] = 0
            return results

        with jax.disable_jit(False):
            self.closed = jax.make_jaxpr(named_after(named, of_leaves))(
                *arg_leaves
            )
        (self._result_structure,) = result_structures

    @property
    def shapes(self) -> PyTree:
        """Returns the result, with types in place of arrays."""
        return self._unflatten(self.closed.out_avals, self.closed.in_avals)

    def _unflatten(
        self, results: Sequence[PyTree], inputs: Sequence[PyTree]
    ) -> PyTree:
        leaves = list(results)
        for number, input_number in self._refs.items():
            leaves[number] = inputs[input_number]
        return self._result_structure.unflatten(leaves)

    def __call__(self, *args: PyTree) -> PyTree:
        """Returns the result. Without jit, runs the function again, so that it can be debugged."""
        if is_jit_disabled():
            return self._fn(*args)
        leaves = jax.tree.leaves(args)
        results = jax.core.eval_jaxpr(
            self.closed.jaxpr, self.closed.consts, *leaves
        )
        return self._unflatten(results, leaves)

    def used_inputs(self, outputs: Sequence[int]) -> list[bool]:
        """Returns for each leaf of the arguments whether some leaves of the result depend on it."""
        _, is_used = self._reduced(outputs)
        return is_used

    def only(self, outputs: Sequence[int], *args: PyTree) -> list[Tensor]:
        """Returns some leaves of the result, computed without the others."""
        jaxpr, is_used = self._reduced(outputs)
        inputs = list(itertools.compress(jax.tree.leaves(args), is_used))
        results = jax.core.eval_jaxpr(jaxpr, self.closed.consts, *inputs)
        results_by_number = dict(
            zip(sorted(set(outputs)), results, strict=True)
        )
        # A constant of the trace would be no array, and a change of it would be computed by NumPy.
        return [jnp.asarray(results_by_number[number]) for number in outputs]

    def is_like(
        self, output: int, other: TracedFunction, other_output: int
    ) -> bool:
        """Returns whether a leaf of the result is computed as one of another trace.

        Both traces have the same arguments. Equal computations that differ in the text of their
        jaxprs, or that use constants of different arrays, count as different.
        """
        consts, other_consts = self.closed.consts, other.closed.consts
        if len(consts) != len(other_consts):
            return False
        if any(a is not b for a, b in zip(consts, other_consts, strict=True)):
            return False
        jaxpr, is_used = self._reduced([output])
        other_jaxpr, is_used_by_other = other._reduced([other_output])
        return is_used == is_used_by_other and str(jaxpr) == str(other_jaxpr)

    def _reduced(self, outputs: Sequence[int]) -> tuple[Jaxpr, list[bool]]:
        """Returns the jaxpr of some leaves of the result, and which inputs it has."""
        jaxpr = without_debugging(self.closed).jaxpr
        is_output = [False] * len(jaxpr.outvars)
        for number in outputs:
            is_output[number] = True
        return dce_jaxpr(jaxpr, is_output)


_DEBUGGING = ("debug_callback", "debug_print")


def without_debugging(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr without `jax.debug.print` and `jax.debug.callback`.

    They show the runs of a function; the computation of some of its results is not a run.
    """
    if not closed.jaxpr.effects:
        return closed
    removed_effects: set[Any] = set()

    def clean_param(param: Any) -> Any:
        if isinstance(param, Jaxpr):
            return clean_jaxpr(param)
        if isinstance(param, ClosedJaxpr):
            return param.replace(jaxpr=clean_jaxpr(param.jaxpr))
        if isinstance(param, tuple):
            return tuple(map(clean_param, param))
        return param

    def clean_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
        eqns: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in _DEBUGGING:
                removed_effects.update(eqn.effects)
                continue
            if eqn.effects:
                params = {
                    name: clean_param(param)
                    for name, param in eqn.params.items()
                }
                eqn = eqn.replace(
                    params=params, effects=eqn.effects - removed_effects
                )
            eqns.append(eqn)
        return jaxpr.replace(eqns=eqns, effects=jaxpr.effects - removed_effects)

    return closed.replace(jaxpr=clean_jaxpr(closed.jaxpr))


def consts_and_carry(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many inputs of a scan of JAX are constant, and how many the carry."""
    if "ft_in" in params:  # since JAX 0.12
        consts, carry, _ = map(len, params["ft_in"].unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def is_jit_disabled() -> bool:
    """Returns whether loops run in Python, in `jax.disable_jit()`."""
    return jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


class FirstIteration(NamedTuple):
    """Results of a loop's first iteration, a pytree.

    Attributes:
        created: for each group, the entries that the loop has to begin with, or None. It is None if
            there are none at all; otherwise there is no next carry yet.
        static: the static half that the iteration has collected.
        carry, y: the next carry and the slices of the results.
    """

    created: list[Group | None] | None
    static: Static
    carry: list[Tensor]
    y: list[Tensor]


class Body(Protocol):
    """Body of a loop, see `weft.lifting.scan.LoopBody`."""

    fn: Fn
    transformation: str

    def __call__(
        self, carry: list[Tensor], x: PyTree
    ) -> tuple[list[Tensor], list[Tensor]]: ...

    def first_iteration(
        self, carry: list[Tensor], x: PyTree
    ) -> FirstIteration: ...


BodyT = TypeVar("BodyT", bound=Body)
Step = Callable[[list[Tensor], PyTree], tuple[list[Tensor], list[Tensor]]]


class PreparedLoop(NamedTuple, Generic[BodyT]):
    """A loop whose state exists.

    Attributes:
        step: the body as the function that JAX loops over; evaluates its trace if there is one.
        created: the created entries of each group, with their initial values, or None.
    """

    body: BodyT
    step: Step
    created: list[Group | None]


def prepare_loop(
    make_body: Callable[[Units], BodyT],
    units: Units,
    first_inputs: Callable[[BodyT], tuple[list[Tensor], PyTree]],
) -> PreparedLoop[BodyT]:
    """Returns a loop's body, after creating its state.

    Args:
        make_body: returns the body of a loop over these units.
        first_inputs: returns the carry and `x` of the first iteration of a body.
    """
    kind, static = units.kind, units.static
    nothing_created = [None] * len(units.groups())
    body_static = kind.static_of_run(static)
    body = make_body(units.with_static(body_static))
    # Without jit the body runs in Python, and what its trace collects must be known before.
    needs_collected = is_jit_disabled() and body_static is not static
    if not may_create(units) and not needs_collected:
        return PreparedLoop(body, body, nothing_created)

    inputs = first_inputs(body)
    traced = TracedFunction(body.fn, body.first_iteration, *inputs)
    first: FirstIteration = traced.shapes
    if first.created is None:
        # The trace of the first iteration is that of all.
        if not needs_collected:
            return PreparedLoop(body, _step_of(traced), nothing_created)
        body_static = kind.static_of_run(static, collected=first.static.value)
        body = make_body(units.with_static(body_static))
        return PreparedLoop(body, body, nothing_created)

    # Only what the created state depends on is computed, and not the rest of the iteration.
    created_structure = jax.tree.structure(first.created)
    created_leaves = traced.only(range(created_structure.num_leaves), *inputs)
    created = created_structure.unflatten(created_leaves)
    units = _with_created(units, created)
    body_static = kind.static_of_run(static, first.static.value)
    body = make_body(units.with_static(body_static))
    if is_jit_disabled() and body_static is not static:
        second = TracedFunction(
            body.fn, body.first_iteration, *first_inputs(body)
        ).shapes
        if second.created is None:
            body_static = kind.static_of_run(
                static, first.static.value, second.static.value
            )
            body = make_body(units.with_static(body_static))

    # This trace finds the state, so it has the same carry before and after.
    traced = TracedFunction(body.fn, body.first_iteration, *first_inputs(body))
    created_later = traced.shapes.created
    if created_later is not None:
        path, _ = jax.tree_util.tree_leaves_with_path(created_later)[0]
        raise CarryStructureError(
            f"{body.transformation}: {units.location_in_groups(path)} is made only where the body "
            "finds the state that its first run has made; a loop begins with all carried state, so "
            "make it in the first run, too, or before the loop."
        )
    return PreparedLoop(body, _step_of(traced), created)


def _step_of(traced: TracedFunction) -> Step:
    def step(
        carry: list[Tensor], x: PyTree
    ) -> tuple[list[Tensor], list[Tensor]]:
        iteration: FirstIteration = traced(carry, x)
        return iteration.carry, iteration.y

    return step


def _with_created(units: Units, created: list[Group | None]) -> Units:
    """Returns the units with the created entries of each group."""
    created_groups = iter(created)
    values: list[PyTree] = []
    for unit, value in units.items():
        if unit.carrier is not None:
            created_group = next(created_groups)
            if created_group is not None:
                value = units.kind.union(value, created_group)
        values.append(value)
    return units.with_values(values)


def may_create(units: Units) -> bool:
    """Returns whether a call may create state that must exist before it."""
    for unit in units.layout.units:
        exists_before = unit.carrier is not None and _exists_before(unit.role)
        if exists_before and units.kind.may_create(units.static, unit.where):
            return True
    return False


def created_groups(
    units: Units, results: PureResults
) -> list[Group | None] | None:
    """Returns the created state of each group that a loop carries or shares, or None."""
    created: list[Group | None] = []
    for group, changed_group, role in groups_before_and_after(units, results):
        created_group = None
        if _exists_before(role):
            created_group = units.kind.created(group, changed_group)
        created.append(created_group)
    is_any_created = any(group is not None for group in created)
    return created if is_any_created else None


def _exists_before(role: Role) -> bool:
    """Returns whether a loop begins with the state of a role, which it carries or shares."""
    return role is None or role is CARRY


def final_results(
    kind: Kind, results: PureResults, created: Sequence[Group | None]
) -> PureResults:
    """Returns the results of a loop or of branches, with the initial values of created state."""
    created_groups = iter(created)
    state_nodes: list[StateNode] = []
    for node in results.state_nodes:
        groups: list[Group] = []
        for group in node.groups:
            created_group = next(created_groups)
            if created_group is not None and group is not None:
                group = kind.with_created(group, created_group)
            groups.append(group)
        state_nodes.append(StateNode(tuple(groups)))
    return results._replace(state_nodes=state_nodes)


def groups_before_and_after(
    units: Units, results: PureResults
) -> list[tuple[Group, Group, Role]]:
    """Returns each group of the input carriers: before, what has changed after, and its role."""
    changed_groups: list[Group] = []
    for node in results.state_nodes:
        changed_groups.extend(node.groups)
    roles = [
        unit.role for unit in units.layout.units if unit.carrier is not None
    ]
    return list(zip(units.groups(), changed_groups, roles, strict=True))
