"""The invocation context: side inputs and side outputs of a module's methods.

Modules hold no arrays. An `InvocationContext` has the side inputs of an invocation (the module's
state, a PRNG key, whether it is training) and its side outputs (summaries, state updates, module
outputs). Calling a child's method pushes a child context on the thread's stack until it returns.

A JAX transformation such as `jax.vmap(self.child)(x)` does not pass the context through. The child
can read its parameters, so a pure call works. Side effects raise an error: outputs would leak
tracers, and the PRNG key would be the same for every index or iteration.
"""

import contextlib
import dataclasses
import hashlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import jax

from weft import errors
from weft.core.flat_dict import flatten_dict, unflatten_dict
from weft.core.tracing import lifted_names, running_transformation
from weft.lifting.traces import current_trace, is_tracing
from weft.typing import NestedTensor, PyTree, Tensor

P = ParamSpec("P")
R = TypeVar("R")


class ModuleNode(Protocol):
    """Part of `weft.hierarchy.module.Module` that contexts use."""

    @property
    def name(self) -> str: ...

    @property
    def children(self) -> Mapping[str, "ModuleNode"]: ...

    @property
    def parent(self) -> "ModuleNode | None": ...

    def path(self) -> str: ...

    def find_descendant(self, module: "ModuleNode") -> list[str] | None: ...

    def shared_modules(self) -> Mapping[str, "ModuleNode"]: ...


class OutputCollection(NamedTuple):
    """Side outputs of an invocation; each a dict nested as the modules.

    Methods of the module add to them: `add_summary`, `add_state_update`, `add_module_output`.
    """

    summaries: dict[str, Any]
    state_updates: dict[str, Any]
    module_outputs: dict[str, Any]

    def add_child(self, name: str) -> "OutputCollection":
        """Returns the collection of a new child; raises OutputConflictError for a taken name."""
        for kind, outputs in self._asdict().items():
            if name in outputs:
                raise errors.OutputConflictError(
                    f"{name!r} is already among the {kind}, which has "
                    f"{sorted(map(str, outputs))}; use another name."
                )
        return self.child(name)

    def child(self, name: str) -> "OutputCollection":
        """Returns the collection of a child, created if missing."""
        return OutputCollection(
            *(outputs.setdefault(name, {}) for outputs in self)
        )

    def update(self, collection: "OutputCollection") -> None:
        """Adds the top-level entries of `collection`, replacing entries of the same name."""
        for mine, theirs in zip(self, collection, strict=True):
            mine.update(theirs)


def filter_outputs(
    outputs: Mapping[str, Any], keep: Callable[[str], bool]
) -> dict[str, Any]:
    """Returns the outputs in nested dicts whose path `keep` accepts.

    >>> filter_outputs({"decoder": {"x": 1, "y": 2}, "z": 3}, lambda path: path == "decoder/x")
    {'decoder': {'x': 1}}
    """
    accepted_outputs: dict[tuple[str, ...], Any] = {}
    for path, value in flatten_dict(dict(outputs)).items():
        if keep("/".join(path)):
            accepted_outputs[path] = value
    return unflatten_dict(accepted_outputs)


def drop_empty(outputs: dict[str, Any]) -> None:
    """Removes the dicts of children without outputs."""
    for name, value in list(outputs.items()):
        if isinstance(value, dict):
            drop_empty(value)
            if not value:
                del outputs[name]


_SINGULAR = {
    "summaries": "summary",
    "state_updates": "state update",
    "module_outputs": "module output",
}


def new_output_collection() -> OutputCollection:
    """Returns an empty collection."""
    return OutputCollection({}, {}, {})


def check_name(name: object, place: str) -> None:
    """Raises ModuleNameError for a name that cannot be part of a path."""
    if not isinstance(name, str) or not name or "." in name or "/" in name:
        raise errors.ModuleNameError(
            f"{place} is given the name {name!r}; expected a string that is not empty and has no "
            "'.' and no '/', which separate the names in a path. Use another name, such as "
            f"{re.sub('[./]', '_', str(name)) or 'layer'!r}."
        )


def fold_in_name(prng_key: Tensor, name: str) -> Tensor:
    """Returns a child's PRNG key: the parent's key with the child's name folded in."""
    digest = int(
        hashlib.md5(name.encode(), usedforsecurity=False).hexdigest(), 16
    )
    return jax.random.fold_in(prng_key, digest % (2**31 - 1))


@dataclasses.dataclass(frozen=True)
class _ChildKey:
    """Key of a child before its first use; most modules use none, and folding is expensive."""

    parent: "InvocationContext"
    name: str


@dataclasses.dataclass(eq=False)
class InvocationContext:
    """Context of one invocation of a module.

    Attributes:
        name: unique among the children of `parent`; by default the module's name.
        parent: the context of the caller, or None for a root.
        prng_key: the key for this invocation, or None.
    """

    name: str
    parent: "InvocationContext | None"
    module: ModuleNode | None
    state: NestedTensor
    is_training: bool
    prng_key: Any
    output_collection: OutputCollection = dataclasses.field(
        default_factory=new_output_collection
    )

    def __post_init__(self):
        if isinstance(self.prng_key, _ChildKey):
            # `__getattr__` derives it at each use. It is not kept: the first use may be at an inner
            # trace level.
            self._derived = self.prng_key
            del self.prng_key
        # The trace of outputs and keys: that in which the invocation began.
        try:
            self._trace: Any = (
                current_trace() if self.parent is None else self.parent._trace
            )
        except AttributeError:
            raise errors.ArgumentValueError(
                f"parent={self.parent!r} is of type {type(self.parent).__name__}; expected the "
                "InvocationContext of the caller, or None."
            ) from None
        self._child_calls: dict[str, str] = {}
        self._child_views: dict[str, InvocationContext] = {}
        # The states of shared modules above this context, where a transformation has cut the chain
        # of parents.
        self._shared_states: dict[ModuleNode, NestedTensor] = {}
        # The path of this context, where a transformation has cut the chain of parents.
        self._path: str | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "prng_key" and "_derived" in self.__dict__:
            key = self._derived.parent.prng_key
            return (
                None if key is None else fold_in_name(key, self._derived.name)
            )
        raise AttributeError(f"InvocationContext has no attribute {name!r}.")

    def path(self) -> str:
        """Returns the names of the contexts from the root to this one, joined by dots."""
        if self.parent is None:
            return self._path or self.name
        return f"{self.parent.path()}.{self.name}"

    def add_child(
        self, name: str, **override_kwargs: Any
    ) -> "InvocationContext":
        """Returns a new child context for invoking `module`, by default the child of that name.

        Args:
            name: of the context, new among the children of this context.
            **override_kwargs: fields not derived from this context: `module`, `state`, `prng_key`,
                `is_training`, `output_collection`.

        Raises:
            OutputConflictError: if the name was used before in this invocation.
            InvalidDescendantError: if there is no such module, or its state cannot be reached.
        """
        module = override_kwargs.pop("module", None) or self._child_module(name)
        fields: dict[str, Any] = {
            "is_training": self.is_training,
            "prng_key": _ChildKey(self, name),
            **override_kwargs,
        }
        if "output_collection" not in fields:
            if (
                self._trace is not current_trace()
                and self.is_from_outer_trace()
            ):
                # A pure call, which may be traced several times, as branches and loops are.
                fields["output_collection"] = new_output_collection()
            else:
                fields["output_collection"] = self._child_outputs(name, module)
        if "state" not in fields:
            fields["state"] = self.state_of(module)
        return InvocationContext(name, self, module, **fields)

    def is_from_outer_trace(self) -> bool:
        """Returns whether a JAX transformation is running that this invocation did not cross.

        Then outputs would leak tracers, and keys would be equal for all indices.
        """
        return self._trace != current_trace() and is_tracing()

    def child_view(self, name: str) -> "InvocationContext":
        """Returns the context of a child that is only on the path to a descendant."""
        if name not in self._child_views:
            state: Any = self.state
            self._child_views[name] = InvocationContext(
                name,
                parent=self,
                module=self._child_module(name),
                state=state.get(name, {}),
                is_training=self.is_training,
                prng_key=_ChildKey(self, name),
                output_collection=self.output_collection.child(name),
            )
        return self._child_views[name]

    def _child_module(self, name: str) -> ModuleNode:
        children: Mapping[str, ModuleNode] = {}
        if self.module is not None:
            children = self.module.children
        if name not in children:
            raise errors.InvalidDescendantError(
                f"{self.path()} has no child {name!r}. {errors.did_you_mean(name, children)} "
                "Pass module= for a context of another name."
            )
        return children[name]

    def _child_outputs(self, name: str, module: ModuleNode) -> OutputCollection:
        if name in self._child_calls:
            raise errors.OutputConflictError(
                f"{name!r} is invoked twice in one invocation of {self.path()}: first at "
                f"{self._child_calls[name]}, again at {_caller_location()}. Its outputs would "
                "overwrite those of the first call, and its randomness would be the same. Name the "
                f"second call: {self._suggest_call(name, module)}."
            )
        self._child_calls[name] = _caller_location()
        if (
            name in self._child_views
        ):  # a descendant was called first, through this child
            return self.output_collection.child(name)
        return self.output_collection.add_child(name)

    def _suggest_call(self, name: str, module: ModuleNode) -> str:
        """Returns code that calls a module under a new name: `x_2` after `x`, `x_3` after `x_2`."""
        stem, _, digits = name.rpartition("_")
        number = 1
        if stem and digits.isdecimal():
            number = int(digits)
        if number < 2:
            stem = name
        number += 1
        while (
            f"{stem}_{number}" in self._child_calls
            or f"{stem}_{number}" in self._child_views
        ):
            number += 1
        # The code belongs in a method of the module whose context is current.
        caller = (current_context() or self).module
        module_text = _expression_of(module, caller)
        new_name = f"{stem}_{number}"
        return f"`with child_context({new_name!r}, module={module_text}): {module_text}(...)`"

    def state_of(self, module: ModuleNode) -> NestedTensor:
        """Returns the state of this context's module, a descendant, or a shared module."""
        context: InvocationContext | None = self
        while context is not None:
            names = (
                None
                if context.module is None
                else context.module.find_descendant(module)
            )
            if names is not None:
                state: Any = context.state
                for name in names:
                    state = state.get(
                        name, {}
                    )  # modules without parameters may have no entry
                return state
            if module in context._shared_states:
                return context._shared_states[module]
            context = context.parent
        raise errors.InvalidDescendantError(
            f"{module.path()} is neither below {self.path()} nor shared with it, so its state "
            "cannot be reached. Call it from a module above both, or share it there: "
            "`self._share_with_descendants(module, shared_module_name=...)`."
        )

    def functional(
        self, method_fn: Callable[P, R]
    ) -> Callable[P, tuple[R, OutputCollection]]:
        """Returns a pure function that calls `method_fn` in a copy of this context without outputs.

        It returns the result of `method_fn` and an `OutputCollection`.
        """

        def pure(
            *args: P.args, **kwargs: P.kwargs
        ) -> tuple[R, OutputCollection]:
            context = self.fork()
            # The copy belongs to the trace of the call, so its outputs are not those of a leak.
            context._trace = current_trace()
            with set_current_context(context, require_parent=False):
                result = method_fn(*args, **kwargs)
            return result, context.output_collection

        return pure

    def fork(self) -> "InvocationContext":
        """Returns a copy of this context without outputs."""
        return self.fork_with_outputs(output_collection=new_output_collection())

    def fork_with_outputs(self, **fields: Any) -> "InvocationContext":
        """Returns a copy of this context with the same outputs, and other values of some fields."""
        # Not `self.prng_key`, which would derive a key that the copy may never use.
        key = self.__dict__.get("_derived", self.__dict__.get("prng_key"))
        fork = dataclasses.replace(self, **{"prng_key": key, **fields})
        fork._shared_states = self._shared_states
        fork._trace = self._trace
        return fork

    def add_summary(self, name: str, value: PyTree) -> None:
        """Adds a value to report for this step; see `Module.add_summary`."""
        self._add("summaries", name, value)

    def add_state_update(self, name: str, value: PyTree) -> None:
        """Adds a new value for an entry of the state; see `Module.add_state_update`."""
        self._add("state_updates", name, value)

    def add_module_output(self, name: str, value: PyTree) -> None:
        """Adds an output other than the result; see `Module.add_module_output`."""
        self._add("module_outputs", name, value)

    def add_outputs(self, collection: OutputCollection) -> None:
        """Adds the outputs of a call by `functional`, each under a name new to this invocation.

        Raises ArgumentValueError for what is not an OutputCollection.
        """
        if not isinstance(collection, OutputCollection):
            raise errors.ArgumentValueError(
                f"the outputs to add are of type {type(collection).__name__}; expected the "
                "OutputCollection that `functional` returns after the result."
            )
        for kind, outputs in collection._asdict().items():
            for name, value in outputs.items():
                self._add(kind, name, value)

    def _add(self, kind: str, name: str, value: PyTree) -> None:
        outputs: dict[str, Any] = getattr(self.output_collection, kind)
        if self.is_from_outer_trace():
            raise side_effect_error(
                self,
                f"the {_SINGULAR[kind]} {name!r} is added",
                "a tracer would leak",
            )
        if name in outputs:
            raise errors.OutputConflictError(
                f"{name!r} is added twice to the {kind} of {self.path()}; use another name."
            )
        outputs[name] = value

    def set_state_update(self, value: NestedTensor) -> None:
        """Replaces all state updates of this invocation, by a dict or, as a whole, by an array."""
        if self.is_from_outer_trace():
            raise side_effect_error(
                self, "state updates are set", "a tracer would leak"
            )
        updates = self.output_collection.state_updates
        if isinstance(value, dict):
            updates.clear()
            updates.update(value)
            return
        # The parent's dict holds this one's, which cannot become an array: both are replaced.
        if self.parent is not None:
            updates_by_child = self.parent.output_collection.state_updates
            if updates_by_child.get(self.name) is updates:
                updates_by_child[self.name] = value
        self.output_collection = self.output_collection._replace(
            state_updates=value  # pyright: ignore[reportArgumentType] - a leaf of the dict
        )

    def get_summaries(self) -> dict[str, Any]:
        return self.output_collection.summaries

    def get_state_updates(self) -> dict[str, Any]:
        return self.output_collection.state_updates

    def get_module_outputs(self) -> dict[str, Any]:
        return self.output_collection.module_outputs


def _expression_of(module: ModuleNode, caller: ModuleNode | None) -> str:
    """Returns the code by which methods of `caller` name a module below it, or shared with it."""
    shared_name = module.name
    if caller is not None:
        names = caller.find_descendant(module)
        if names is not None:
            return ".".join(["self", *names])
        for name, shared_module in caller.shared_modules().items():
            if shared_module is module:
                shared_name = name
    return f"self.get_shared_module({shared_name!r}).module"


class ContextStack(threading.local):
    """Stack of this thread's open contexts, the current one last."""

    def __init__(self):
        self.stack: list[InvocationContext] = []


_contexts = ContextStack()


def current_context() -> InvocationContext | None:
    """Returns this thread's current context, or None."""
    stack = _contexts.stack
    return stack[-1] if stack else None


def require_context(subject: str) -> InvocationContext:
    """Returns the current context; NoContextError says that `subject` needs an invocation."""
    context = current_context()
    if context is None:
        raise errors.NoContextError(
            f"{subject} belongs to an invocation, and none is under way in this thread; "
            "call the method through `functional(module, prng_key=..., state=..., inputs=..., "
            "is_training=...)`."
        )
    return context


class ActiveContext:
    """Context manager that makes a context current, in the named scope of its module.

    Compiled operations carry their named scopes, which name the module in profiles and dumps.
    `caller` is the context above whose named scope is open; None for a root.
    """

    __slots__ = ("_context", "_scope")

    # A class, since a generator takes three times as many Python calls.
    def __init__(
        self, context: InvocationContext, caller: InvocationContext | None
    ):
        scope_name = context.name
        ancestor = context.parent
        # A call of a descendant further down opens the scopes on the way to it, too.
        while ancestor is not caller and ancestor is not None:
            scope_name = f"{ancestor.name}/{scope_name}"
            ancestor = ancestor.parent
        self._context = context
        self._scope = jax.named_scope(scope_name)

    def __enter__(self) -> InvocationContext:
        self._scope.__enter__()
        _contexts.stack.append(self._context)
        return self._context

    def __exit__(self, *exception: object) -> None:
        _contexts.stack.pop()
        self._scope.__exit__(*exception)


@contextlib.contextmanager
def set_current_context(
    context: InvocationContext, *, require_parent: bool = True
) -> Iterator[InvocationContext]:
    """Makes `context` the current one until the block ends.

    Raises ContextStackError if `require_parent`, and the current context is not its parent.
    """
    current = current_context()
    if require_parent and current is not None and context.parent is not current:
        raise errors.ContextStackError(
            f"{context.path()} is not a child of the current context {current.path()}; "
            "pass require_parent=False to set it anyway."
        )
    _contexts.stack.append(context)
    try:
        yield context
    finally:
        _contexts.stack.pop()


@contextlib.contextmanager
def child_context(name: str, **kwargs: Any) -> Iterator[InvocationContext]:
    """Opens a child of the current context until the block ends.

    Args:
        **kwargs: as for `InvocationContext.add_child`; `module` unless it is the child so named.

    Raises ModuleNameError if the name is empty, or has a dot or a slash in it.
    """
    caller = require_context(f"child_context({name!r})")
    check_name(name, f"a context below {caller.path()}")
    with ActiveContext(caller.add_child(name, **kwargs), caller) as context:
        yield context


def clone_context_stack() -> list[InvocationContext]:
    """Returns a copy of this thread's stack, for `install_context_stack` in another thread."""
    return list(_contexts.stack)


def install_context_stack(stack: Sequence[InvocationContext]) -> None:
    """Makes `stack` this thread's stack; raises ContextStackError if it has open contexts."""
    current = current_context()
    if current is not None:
        raise errors.ContextStackError(
            f"a stack can only be installed in a thread without contexts; {current.path()} is "
            "open in this one."
        )
    _contexts.stack = list(stack)


def _caller_location() -> str:
    frame = sys._getframe(1)
    while (
        frame is not None
        and frame.f_globals.get("__name__") in _INTERNAL_MODULES
    ):
        frame = frame.f_back
    return (
        "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    )


_INTERNAL_MODULES = (__name__, "weft.hierarchy.module", "contextlib")


def side_effect_error(
    context: InvocationContext, effect: str, reason: str
) -> errors.ContextTransformError:
    """Returns the error for a side effect in a transformation that does not lift the context.

    `effect` is such as "the PRNG key is read", `reason` as "every iteration would draw the same".
    """
    location = (
        context.path() if context.module is None else context.module.path()
    )
    jax_transform = running_transformation()
    replacements = "the transformation of the same name"
    if jax_transform:
        names = lifted_names(jax_transform)
        # `scan` has another name in this package.
        names = [
            "scan_in_context" if name == "scan" else name for name in names
        ]
        replacements = "` or `".join(names)
    return errors.ContextTransformError(
        f"{effect} in {location!r} inside of {jax_transform or 'a transformation of JAX'}, "
        f"which does not pass the invocation through, so {reason}. Use `{replacements}` of "
        "`weft.hierarchy.transforms` instead: it passes parameters, keys and outputs through."
    )
