"""State created by a loop's body or only by some branches.

A loop's carry has a fixed structure, and branches return the same structure, so new state is
created before. Each function is first traced on the state of its first run:

- A loop's body that creates no state which the loop carries or shares is traced once; that trace is
  the loop. Otherwise, the initial values are computed from that trace, with the inputs and keys of
  the first iteration, and the body is traced again on the existing state.
- Branches are traced once each. State that only some of them create gets its initial value before.

The innermost of d nested loops that all carry or share the state they create is thus traced d + 1
times: the first trace of a loop contains both traces of the inner loop, and its second trace finds
the state. The number does not depend on whether a model is initialized. State stacked along an axis
needs no second trace; an inner loop that carries it traces its body twice in each.

State of a carrier that the outer body makes is missing in each trace, too. In the first trace of an
outer loop, an inner one that creates only such state is traced once, and its results are undefined:
they have types, no values. The primitive `undefined` makes them depend on the inputs that the loop
would read, also under `vmap` and in derivatives, so that results computed from them contain it; it
cannot be evaluated or compiled. If the initial values of the outer loop depend on them, its first
trace is repeated with all values.

If all collections of the call are immutable, nothing is created, and JAX traces the body directly.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.core
import jax.numpy as jnp
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, subjaxprs, unmapped_aval
from jax.interpreters import ad, batching
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
            given = {id(x): i for i, x in enumerate(leaves) if isinstance(x, jax.Ref)}
            self._refs = {n: given[id(x)] for n, x in enumerate(outputs) if id(x) in given}
            return [0 if n in self._refs else x for n, x in enumerate(outputs)]

        with jax.disable_jit(False):
            self.closed = jax.make_jaxpr(named_after(named, of_leaves))(*leaves)
        (self._tree,) = trees

    @property
    def shapes(self) -> Any:
        """Returns the result, with types in place of arrays."""
        return self._with_refs(self.closed.out_avals, self.closed.in_avals)

    def _with_refs(self, results: Sequence[Any], given: Sequence[Any]) -> Any:
        of = self._refs
        return self._tree.unflatten(given[of[n]] if n in of else x for n, x in enumerate(results))

    def __call__(self, *args: object) -> Any:
        """Returns the result. Without jit, runs the function again, so that it can be debugged."""
        if is_jit_disabled():
            return self._fn(*args)
        consts = self.closed.consts
        leaves = jax.tree.leaves(args)
        return self._with_refs(jax.core.eval_jaxpr(self.closed.jaxpr, consts, *leaves), leaves)

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

    def uses(self) -> list[bool]:
        """Returns for each leaf of the arguments whether the result depends on it.

        A value that an inner loop replaces in every iteration does not count.
        """
        jaxpr, is_used = self._reduced(range(len(self.closed.out_avals)))
        rest = iter(_passed_inputs(jaxpr))
        return [of_leaf and next(rest) != [] for of_leaf in is_used]

    def is_undefined(self, outputs: Sequence[int] | None = None) -> bool:
        """Returns whether some leaves of the result, by default all, depend on undefined values."""
        return has_undefined(self.closed.jaxpr if outputs is None else self._reduced(outputs)[0])

    def only(self, outputs: Sequence[int], *args: object) -> list[Any]:
        """Returns some leaves of the result, computed without the others."""
        jaxpr, inputs = self._reduced(outputs)
        wanted = set(outputs)
        leaves = [x for x, is_used in zip(jax.tree.leaves(args), inputs, strict=True) if is_used]
        results = iter(jax.core.eval_jaxpr(jaxpr, self.closed.consts, *leaves))
        # A constant of the trace would be no array, and a change of it would be computed by NumPy.
        found = {i: jnp.asarray(next(results)) for i in sorted(wanted)}
        return [found[i] for i in outputs]


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


def _passed_inputs(jaxpr: Any) -> list[list[int] | None]:
    """Returns for each input the outputs that may be the input itself; None if it is used."""
    origins: dict[Any, set[int]] = {x: {i} for i, x in enumerate(jaxpr.invars)}
    used: set[int] = set()
    for eqn in jaxpr.eqns:
        given = [set() if isinstance(x, Literal) else origins.get(x, set()) for x in eqn.invars]
        if not any(given):
            continue
        for inputs, passed in zip(given, _passed_by_equation(eqn), strict=True):
            if passed is None:
                used |= inputs
            for n in passed or ():
                origins.setdefault(eqn.outvars[n], set()).update(inputs)
    found: list[list[int]] = [[] for _ in jaxpr.invars]
    for n, x in enumerate(jaxpr.outvars):
        for i in set() if isinstance(x, Literal) else origins.get(x, set()):
            found[i].append(n)
    return [None if i in used else passed for i, passed in enumerate(found)]


def _passed_by_equation(eqn: Any) -> list[list[int] | None]:
    """Returns for each input of an operation the same as `_passed_inputs`."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        of_branches = [_passed_inputs(branch.jaxpr) for branch in params["branches"]]
        joined = (
            None if None in passed else sorted(set().union(*passed))
            for passed in zip(*of_branches, strict=True)
        )
        return [None, *joined]
    if name == "scan":
        passed = _passed_inputs(params["jaxpr"].jaxpr)
        return _passed_by_loop(passed, *consts_and_carry(params))
    if name == "while":
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        by_cond = _passed_inputs(params["cond_jaxpr"].jaxpr)[of_cond:]
        by_body = _passed_inputs(params["body_jaxpr"].jaxpr)
        carry = _passed_by_loop(by_body, of_body, len(by_cond))[of_body:]
        pairs = zip(by_cond, carry, strict=True)
        carried = [None if is_on is None else passed for is_on, passed in pairs]
        return [*[None] * (of_cond + of_body), *carried]
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    if inner is None or len(inner.invars) != len(eqn.invars):
        return [None] * len(eqn.invars)
    return _passed_inputs(inner)


def consts_and_carry(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many inputs of a scan of JAX are constant, and how many the carry."""
    if "ft_in" in params:  # since JAX 0.12
        consts, carry, _ = map(len, params["ft_in"].unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def _passed_by_loop(
    by_body: Sequence[list[int] | None], first: int, size: int
) -> list[list[int] | None]:
    """Returns the same for a loop, whose carry are `size` inputs of the body from `first` on."""

    def passed(i: int, outputs: list[int] | None) -> list[int] | None:
        if outputs == []:
            return outputs
        return outputs if first <= i < first + size and outputs == [i - first] else None

    return [passed(i, outputs) for i, outputs in enumerate(by_body)]


def is_jit_disabled() -> bool:
    """Returns whether loops run in Python, in `jax.disable_jit()`."""
    return jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


class CreatedState(NamedTuple):
    """State created by a run of a body: its structure, and the static half of the run."""

    tree: Any
    static: Any


class _UndefinedState(Exception):
    """Raised if initial values depend on undefined values."""


def body_with_state(make: Fn, units: Units, first: Fn) -> tuple[Any, Fn | None, list[Any]]:
    """Returns a loop's body, after creating its state.

    Args:
        make: returns the body, a `weft.lifting.scan.LoopBody`, for units.
        first: returns the arguments of the first run of such a body.

    Returns the body, the function for the loop, and the created state of each group, or None. The
    function is None if the results of the loop are undefined.
    """
    inside = units.kind.static_in_loop(units.static)
    if not may_create(units):
        body = make(units.with_static(inside))
        if not (is_jit_disabled() and inside is not units.static):
            return body, body, [None] * sum(units.is_group)
    discarding = units.kind.static_in_first_run(inside)
    run = functools.partial(_body_with_state, make, units, first)
    if discarding is inside:
        return run(inside)
    before = _DISCARDED.count
    try:
        return run(discarding, may_be_undefined=False)
    except _UndefinedState:
        pass
    except Exception:
        # An operation or a transformation may not take undefined values.
        if _DISCARDED.count == before:
            raise
    return run(inside)


def _body_with_state(
    make: Fn, units: Units, first: Fn, inside: object, may_be_undefined: bool = True
) -> tuple[Any, Fn | None, list[Any]]:
    """Returns the same; `inside` is the static half for the first run."""
    kind, static, given = units.kind, units.static, units
    body = make(units.with_static(inside))
    args = first(body)
    traced = TracedFunction(body.fn, body, *args)
    if body.created is None:
        if not may_be_undefined and traced.is_undefined():
            raise _UndefinedState
        if not (is_jit_disabled() and inside is not static):
            return body, traced, [None] * sum(units.is_group)
        # The body runs in Python, so the results of its trace must be known before.
        body = make(units.with_static(kind.static_in_loop(static, body.collected.value)))
        return body, body, [None] * sum(units.is_group)
    run = _CreatingRun(body, traced, args, may_be_undefined)
    begun = kind.initial_state(static, run.numbered, run.used)
    has_refs = any(isinstance(x, jax.Ref) for x in jax.tree.leaves(units.values))
    if kind.is_discarded(body.created.static) and not has_refs:
        _DISCARDED.count += 1
        body.used = jax.tree.unflatten(jax.tree.structure(args), traced.uses())
        return body, None, run.undefined(begun)
    created = run.values(begun)
    units = _with_created(given, created)
    followed = kind.static_after_creation(static, body.created.static)
    is_counted = is_jit_disabled() and followed is not static
    before, body = body.created.static, make(units.with_static(followed))
    if is_counted:
        TracedFunction(body.fn, body, *first(body))
        if body.created is None:
            after = kind.static_after_creation(static, before, body.collected.value)
            body = make(units.with_static(after))

    again = TracedFunction(body.fn, body, *first(body))
    if body.created is not None:
        raise _created_later_error(body.transformation, units, body.created.tree)
    changes = body.changes(again.uses()[: len(body.carry)])
    settled = kind.initial_state(static, run.numbered, run.used, changes)
    if jax.tree.flatten(settled) != jax.tree.flatten(begun):
        created = run.values(settled)
        body.restart(_with_created(given, created))
    return body, again, created


class _DiscardedLoops(threading.local):
    count = 0


_DISCARDED = _DiscardedLoops()


class _CreatingRun:
    """A run of a body that has created state.

    Attributes:
        numbered: the created state of each group, with the numbers of its arrays.
    """

    def __init__(
        self, body: Any, traced: TracedFunction, args: tuple[Any, ...], may_be_undefined: bool
    ):
        tree = body.created.tree
        self.numbered = tree.unflatten(range(tree.num_leaves))
        self._body, self._traced, self._args = body, traced, args
        self._may_be_undefined = may_be_undefined
        self._computed: dict[int, Any] = {}

    def used(self, entries: list[Any]) -> list[tuple[Any, Any]]:
        """Returns each group with its role, and whether entries depend on its arrays."""
        wanted = jax.tree.leaves(entries)
        return self._body.inside(*self._traced.used(wanted, *self._args)).groups()

    def values(self, entries: list[Any]) -> list[Any]:
        """Returns numbered entries with their arrays."""
        wanted = [i for i in jax.tree.leaves(entries) if i not in self._computed]
        if not self._may_be_undefined and self._traced.is_undefined(wanted):
            raise _UndefinedState
        values = self._traced.only(wanted, *self._args)
        self._computed.update(zip(wanted, values, strict=True))
        return jax.tree.map(self._computed.__getitem__, entries)

    def undefined(self, entries: list[Any]) -> list[Any]:
        """Returns numbered entries with undefined arrays."""
        numbers, tree = jax.tree.flatten(entries)
        created, _ = self._traced.shapes
        types = [created[i] for i in numbers]
        return tree.unflatten(undefined(types, jax.tree.leaves(self._args)))


def _with_created(units: Units, created: list[Any]) -> Units:
    groups = iter(created)
    values = [
        units.kind.union(value, new) if is_group and (new := next(groups)) is not None else value
        for value, is_group in zip(units.values, units.is_group, strict=True)
    ]
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
    kind = units.kind
    made = [
        kind.created(before, after) if role is None or role is CARRY else None
        for before, after, role in groups_before_and_after(units, results)
    ]
    is_new = any(of_group is not None for of_group in made)
    return made if is_new or kind.creates_structure(results.static.value) else None


def _created_later_error(transformation: str, units: Units, tree: Any) -> Exception:
    path, _ = jax.tree_util.tree_leaves_with_path(tree.unflatten(range(tree.num_leaves)))[0]
    return CarryStructureError(
        f"{transformation}: {units.location_in_groups(path)} is made only where the body finds "
        "the state that its first run has made; a loop begins with all carried state, so make it "
        "in the first run, too, or before the loop."
    )


def final_results(
    kind: Kind, results: PureResults, made: list[Any], *ends: list[Any]
) -> PureResults:
    """Returns the results of a loop or of branches.

    Args:
        made: the initial values of each group's state that was created before.
        ends: the groups after the body or each branch, see `collected_groups`.
    """
    rest = zip(made, *ends, strict=True)

    def final(group: Any) -> Any:
        created, *of_runs = next(rest)
        return kind.final_group(created, group, of_runs)

    nodes = [StateNode(tuple(map(final, node.groups))) for node in results.state_nodes]
    return results._replace(state_nodes=nodes)


def collected_groups(results: PureResults) -> list[Any]:
    """Returns all groups of the input carriers, with True in place of arrays."""
    groups = [group for state_node in results.state_nodes for group in state_node.groups]
    return jax.tree.map(lambda _: True, groups)


def groups_before_and_after(units: Units, results: PureResults) -> list[tuple[Any, Any, Any]]:
    """Returns each group of the input carriers: before, after, and its role."""
    after = [group for state_node in results.state_nodes for group in state_node.groups]
    return [(b, a, role) for (b, role), a in zip(units.groups(), after, strict=True)]


_undefined = Primitive("undefined")
_undefined.multiple_results = True


def undefined(types: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns arrays of abstract values `types` that depend on all `inputs`."""
    return _undefined.bind(*inputs, types=tuple(types)) if types else []


def has_undefined(jaxpr: Any) -> bool:
    """Returns whether an equation of a jaxpr, or of one inside, computes undefined arrays."""
    return any(eqn.primitive is _undefined for eqn in jaxpr.eqns) or any(
        map(has_undefined, subjaxprs(jaxpr))
    )


@_undefined.def_abstract_eval
def _types(*_: Any, types: tuple[Any, ...]) -> tuple[Any, ...]:
    return types


def _batched(
    inputs: Sequence[Any], axes: Sequence[int | None], *, types: tuple[Any, ...]
) -> tuple[list[Any], list[int]]:
    sizes = [x.shape[axis] for x, axis in zip(inputs, axes, strict=True) if axis is not None]
    batched = [unmapped_aval(sizes[0], 0, aval) for aval in types]
    return undefined(batched, inputs), [0] * len(types)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, types: tuple[Any, ...]
) -> tuple[list[Any], list[Any]]:
    of_tangents = [aval.to_tangent_aval() for aval in types]
    known = [t for t in tangents if not isinstance(t, ad.Zero)]
    floats = [aval for aval in of_tangents if aval.dtype != float0]
    rest = iter(undefined(floats, known))
    zeros_or_undefined = [
        ad.Zero(aval) if aval.dtype == float0 else next(rest) for aval in of_tangents
    ]
    return undefined(types, primals), zeros_or_undefined


def _transposed(cotangents: Sequence[Any], *inputs: Any, types: tuple[Any, ...]) -> list[Any]:
    known = [ct for ct in cotangents if not isinstance(ct, ad.Zero)]
    return undefined([x.aval for x in inputs], known)


batching.primitive_batchers[_undefined] = _batched
ad.primitive_jvps[_undefined] = _jvp
ad.primitive_transposes[_undefined] = _transposed
