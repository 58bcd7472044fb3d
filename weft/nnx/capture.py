"""`capture`: calls that return sown values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax

from weft.errors import GraphStructureError, ObjectArgumentError
from weft.nnx import intercept, pytree
from weft.nnx.filters import Path
from weft.nnx.module import CAPTURED, SownValues, append_sown
from weft.nnx.state import State, from_flat_state, path_text, to_flat_state
from weft.nnx.variables import Variable
from weft.typing import PyTree

T = TypeVar("T")
_Kind = type[Variable[Any]]


def capture(
    fn: Callable[..., Any] | _Kind,
    /,
    *var_types: _Kind,
    init: State | None = None,
    method_outputs: _Kind | None = None,
) -> Callable[..., Any]:
    """Wraps a function to also return what modules sow and perturb in the call.

    The modules are those among the arguments, and that of `fn` if it is a module or a method. They
    are unchanged afterwards, and sow only the requested kinds.

    Args:
        fn: function, module or method. If omitted, the result is a decorator.
        *var_types: kinds of variables, one state each; the first that a variable is an instance of.
        init: initial values of variables by path, such as perturbations.
        method_outputs: kind under which to sow each method's result, by method name.

    Raises:
        ObjectArgumentError: if a kind is not a class of variables, or `fn` is not callable.
        GraphStructureError: if `init` does not fit the modules, two arguments sow at the same path,
            or a module merged inside a JAX transformation sows and its state is not returned.

    >>> class Double(nnx.Module):
    ...     def __call__(self, x):
    ...         self.sow(nnx.Intermediate, "doubled", 2 * x)
    ...         return 2 * x + 1
    >>> y, seen = capture(Double(), nnx.Intermediate)(3)
    >>> y, nnx.to_pure_dict(seen)
    (7, {'doubled': (6,)})
    """
    if isinstance(fn, type) and issubclass(fn, Variable):
        all_types = (fn, *var_types)

        def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
            return capture(
                function, *all_types, init=init, method_outputs=method_outputs
            )

        return decorator
    _check_kinds(var_types)
    if method_outputs is not None:
        _check_kinds((method_outputs,))
    if not callable(fn):
        raise ObjectArgumentError(
            f"capture was given a {type(fn).__name__}, which is not callable; give a function, a "
            "module with a __call__, or a method."
        )
    is_module = isinstance(fn, pytree.Pytree)
    owner = fn if is_module else getattr(fn, "__self__", None)

    def call_and_capture(*args: PyTree, **kwargs: PyTree) -> PyTree:
        roots = [*args, *kwargs.values()]
        if owner is not None:
            roots.insert(0, owner)
        modules = _CapturedModules(roots, var_types, init, method_outputs)
        try:
            result = fn(*args, **kwargs)
            states = modules.states()
        finally:
            modules.close()
        _stop_capturing_in(result)
        if not var_types:
            return result
        return (result, *states)

    if is_module:
        return call_and_capture
    return functools.wraps(fn)(call_and_capture)


def _check_kinds(kinds: Sequence[_Kind]) -> None:
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Variable)):
            raise ObjectArgumentError(
                f"capture was given {kind!r}; give kinds of variables, such as nnx.Intermediate."
            )


class _CapturedModule(NamedTuple):
    """Module in the arguments of a call.

    Attributes:
        argument: number of the argument.
        path: path of the module in the argument.
        outer_captured: what an enclosing `capture` collects from the module.
    """

    argument: int
    path: Path
    module: pytree.Pytree
    outer_captured: SownValues | None


class _SownVariable(NamedTuple):
    argument: int
    variable: Variable[Any]


class _CapturedModules:
    """Modules of one call that collect sown values."""

    def __init__(
        self,
        roots: Sequence[PyTree],
        kinds: tuple[_Kind, ...],
        init: State | None,
        outputs: _Kind | None,
    ):
        self._kinds = kinds
        self._modules: list[_CapturedModule] = []
        visited_ids: set[int] = set()
        for argument, root in enumerate(roots):
            for path, module in intercept.iter_objects(root):
                if id(module) in visited_ids:
                    continue
                visited_ids.add(id(module))
                outer_captured = vars(module).get(CAPTURED)
                self._modules.append(
                    _CapturedModule(argument, path, module, outer_captured)
                )
        initial_variables = self._variables_by_module(init)
        for _, path, module, _ in self._modules:
            variables = initial_variables.get(path, {})
            _set_captured(module, SownValues(kinds, outputs, variables))
            if outputs is not None:
                intercept.intercept_calls(module, _sow_output)

    def _variables_by_module(
        self, init: State | None
    ) -> dict[Path, dict[str, Variable[Any]]]:
        """Returns the initial variables by the path of their module and name."""
        if init is None:
            return {}
        module_paths = {path for _, path, _, _ in self._modules}
        variables_by_module: dict[Path, dict[str, Variable[Any]]] = {}
        for path, variable in to_flat_state(init):
            problem = None
            if not isinstance(variable, Variable):
                problem = "it is not a variable"
            elif path[:-1] not in module_paths:
                problem = "no module is there"
            if problem is not None:
                raise GraphStructureError(
                    f"init has a {type(variable).__name__} at {path_text(path)!r}, but {problem}; "
                    "give a state that capture returned for these arguments."
                )
            *module_path, name = path
            variables = variables_by_module.setdefault(tuple(module_path), {})
            variables[str(name)] = variable
        return variables_by_module

    def states(self) -> list[State]:
        """Returns the collected values, by kind."""
        sown_by_path = self._sown_variables()
        states: list[State] = []
        for number, kind in enumerate(self._kinds):
            earlier_kinds = self._kinds[:number]
            variables: dict[Path, Variable[Any]] = {}
            for path, (_, variable) in sown_by_path.items():
                # A kind of `init` that was not asked for belongs to no state.
                if type(variable) not in self._kinds:
                    continue
                if isinstance(variable, kind) and not isinstance(
                    variable, earlier_kinds
                ):
                    variables[path] = variable
            states.append(from_flat_state(variables))
        return states

    def _sown_variables(self) -> dict[Path, _SownVariable]:
        """Returns what all modules sowed, after a check that none of it would be lost."""
        sown_by_path: dict[Path, _SownVariable] = {}
        for argument, module_path, module, _ in self._modules:
            captured: SownValues = vars(module)[CAPTURED]
            for name in captured.unreturned():
                raise GraphStructureError(
                    f"the value sown or perturbed at {path_text((*module_path, name))!r} is "
                    "lost: a copy of the module, merged inside a JAX transformation, sowed it, "
                    "and its state was not returned; return nnx.state(module, kind) from the "
                    "transformed function, and pass it to nnx.update outside."
                )
            for name, variable in captured.values():
                path = (*module_path, name)
                earlier = sown_by_path.get(path)
                if earlier is not None and earlier.argument != argument:
                    raise GraphStructureError(
                        f"two modules among the arguments sow at {path_text(path)!r}, so one of "
                        "the values would be lost; capture their calls one at a time, or pass "
                        "them together as one list or dict."
                    )
                sown_by_path[path] = _SownVariable(argument, variable)
        return sown_by_path

    def close(self) -> None:
        """Restores the modules."""
        for _, _, module, outer_captured in self._modules:
            intercept.stop_intercepting(module)
            _set_captured(module, outer_captured)


def _set_captured(module: pytree.Pytree, captured: SownValues | None) -> None:
    # Not by setattr, so that modules of another trace, in a function's closure, can sow.
    if captured is None:
        vars(module).pop(CAPTURED, None)
    else:
        vars(module)[CAPTURED] = captured
    module._info.changed()


def _stop_capturing_in(result: PyTree) -> None:
    """Restores modules in the result of a call, such as copies of those in its arguments."""
    for root in jax.tree.leaves(result, is_leaf=_is_object):
        if not _is_object(root):
            continue
        for _, module in intercept.iter_objects(root):
            intercept.stop_intercepting(module)
            _set_captured(module, None)


def _is_object(x: object) -> TypeGuard[pytree.Pytree]:
    return isinstance(x, pytree.Pytree)


def _sow_output(
    module: pytree.Pytree,
    name: str,
    method: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> T:
    result = method(*args, **kwargs)
    captured: SownValues | None = vars(module).get(CAPTURED)
    if captured is not None and captured.outputs is not None:
        captured.sow(captured.outputs, name, result, append_sown, tuple)
    return result
