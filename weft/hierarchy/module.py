"""Modules: named nodes of a tree that hold configs and children, but no arrays.

Outside an invocation, public methods are plain Python methods. Inside one, a call from another
module's method first opens the called module's context, which holds its state, key and outputs.
`functional` opens the first context and makes the call a pure function.
"""

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, Union

import jax

from weft.config import REQUIRED, Configurable, InstantiableConfig, Required, config_class
from weft.config.functions import CallConfig, ClassConfigBase
from weft.config.names import did_you_mean
from weft.core.tracebacks import entry_point
from weft.core.tracing import with_room_in_trace
from weft.errors import (
    ChildConfigError,
    ChildNameConflictError,
    InvalidDescendantError,
    OutputConflictError,
    UnknownLayerError,
)
from weft.hierarchy.context import (
    ContextStack,
    Entered,
    InvocationContext,
    OutputCollection,
    check_name,
    child_context,
    clone_context_stack,
    current_context,
    install_context_stack,
    new_output_collection,
    require_context,
    set_current_context,
)
from weft.hierarchy.transforms import propagate_repeated_output_collections, scan_in_context
from weft.hierarchy.untransformed import refused
from weft.typing import NestedTensor, Tensor

__all__ = [
    "ChildNameConflictError",
    "ContextStack",
    "InvalidDescendantError",
    "InvocationContext",
    "Module",
    "OutputCollection",
    "OutputConflictError",
    "SharedModule",
    "Summable",
    "child_context",
    "clone_context_stack",
    "current_context",
    "functional",
    "install_context_stack",
    "method_named",
    "new_output_collection",
    "nowrap",
    "observed_calls",
    "propagate_repeated_output_collections",
    "scan_in_context",
    "set_current_context",
]

F = TypeVar("F", bound=Callable[..., Any])


class Summable(Protocol):
    """Summary that supports `+`, so that loop iterations can be added up."""

    def __add__(self, other: Any) -> Any: ...


class SharedModule(NamedTuple):
    """Module that an ancestor shares, with its state and the name under which it is shared."""

    module: "Module"
    state: NestedTensor
    shared_module_name: str


def nowrap(fun: F) -> F:
    """Marks a public method that must not open a context when another module calls it."""
    fun._weft_nowrap = True  # pyright: ignore[reportFunctionMemberAccess]
    return fun


def method_named(module: "Module", name: str) -> Callable[..., Any] | None:
    """Returns the public method called `name`; None for children, fields, properties and others."""
    found = None if name.startswith("_") else inspect.getattr_static(module, name, None)
    is_method = callable(found) and not isinstance(found, type | staticmethod | Module)
    return getattr(module, name) if is_method else None


def _in_own_context(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method so that calls from other modules run in its own module's context."""

    @functools.wraps(method)
    def call(self: "Module", *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None or context.module is self:
            return method(self, *args, **kwargs)
        try:
            with Entered(self._child_context_of(context), context):
                return _observed(_OBSERVERS.stack, self, method, args, kwargs)
        except Exception as error:
            _note_path(error, self, method.__name__)
            raise

    return call


Observer = Callable[["Module", str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Function of a module, a method's name, the method and its arguments; it calls the method."""


class _Observers(threading.local):
    def __init__(self) -> None:
        self.stack: list[Observer] = []


_OBSERVERS = _Observers()


@contextlib.contextmanager
def observed_calls(observer: Observer) -> Iterator[None]:
    """Calls `observer` in place of each method call between modules while the context is open."""
    _OBSERVERS.stack.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.stack.remove(observer)


def _observed(
    observers: list[Observer],
    module: "Module",
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if not observers:
        return module._call_in_context(method, *args, **kwargs)
    *others, last = observers

    def call(*args: Any, **kwargs: Any) -> Any:
        return _observed(others, module, method, args, kwargs)

    return last(module, method.__name__, call, args, kwargs)


def _note_path(error: Exception, module: "Module", method: str) -> None:
    """Notes the path of the innermost module on an error, once."""
    if not getattr(error, "_weft_path_noted", False):
        error._weft_path_noted = True  # pyright: ignore[reportAttributeAccessIssue]
        error.add_note(f"In {type(module).__name__}.{method} of module {module.path()!r}.")


def _child_config(x: Any) -> InstantiableConfig:
    """Returns the config of a child, wrapping layers of other libraries."""
    if isinstance(x, Module.Config):
        return x
    # Imported here because the adapters import this module.
    from weft.interop.hierarchy import as_hierarchy
    from weft.interop.recognition import adapter_of

    makes = x.klass if isinstance(x, ClassConfigBase) else None
    is_layer = makes is not None and adapter_of(makes)
    takes_a_place = isinstance(x, CallConfig) and {"name", "parent"} <= set(x.keys())
    return x if takes_a_place and not is_layer else as_hierarchy(x)


class Module(Configurable):
    """Node of a tree of modules; calling it calls its `forward`.

    A subclass declares fields in a nested `Config`, adds children in `__init__`, and defines
    methods.

    Example:
        >>> class Scale(Module):
        ...     @config_class
        ...     class Config(Module.Config):
        ...         factor: Required[float] = REQUIRED
        ...
        ...     def forward(self, x):
        ...         return self.config.factor * x
        >>> class Twice(Module):
        ...     @config_class
        ...     class Config(Module.Config):
        ...         inner: Scale.Config = Scale.default_config()
        ...
        ...     def __init__(self, cfg, *, parent):
        ...         super().__init__(cfg, parent=parent)
        ...         self._add_child("inner", cfg.inner.set(factor=2.0))
        ...
        ...     def forward(self, x):
        ...         return self.inner(x)
        >>> twice = Twice.default_config().set(name="twice").instantiate(parent=None)
        >>> functional(twice, prng_key=None, state={}, inputs=(3.0,), is_training=False)[0]
        6.0
    """

    @config_class
    class Config(Configurable.Config):
        """Configures a Module.

        Attributes:
            name: unique among its siblings; set by `_add_child`.
            vlog: level up to which `vlog` logs; None inherits the parent's.
        """

        name: Required[str] = REQUIRED
        vlog: int | None = None

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            wanted = inspect.isfunction(value) and not name.startswith("_")
            if wanted and not getattr(value, "_weft_nowrap", False):
                setattr(cls, name, _in_own_context(value))

    def __init__(self, cfg: Config, *, parent: "Module | None"):
        super().__init__(cfg)
        check_name(cfg.name, "a root" if parent is None else f"a child of {parent.path()}")
        self._name = cfg.name
        self._parent = parent
        self._children: dict[str, Module] = {}
        self._shared: dict[str, Module] = {}
        self._vlog_level: int | None = cfg.vlog
        if cfg.vlog is None and parent is not None:
            self._vlog_level = parent._vlog_level

    # The tree.

    @property
    def name(self) -> str:
        return self._name

    @property
    def parent(self) -> "Module | None":
        return self._parent

    @property
    def children(self) -> dict[str, "Module"]:
        """Children by name, in the order of addition."""
        return dict(self._children)

    def path(self) -> str:
        """Returns the names from the root to this module, joined by dots."""
        return self._name if self._parent is None else f"{self._parent.path()}.{self._name}"

    def __getattr__(self, name: str) -> Any:
        children = self.__dict__.get("_children", {})
        if name in children:
            return children[name]
        known = [n for n in (*children, *dir(type(self))) if not n.startswith("_")]
        raise AttributeError(
            f"{type(self).__name__} {self.__dict__.get('_name', '')!r} has no attribute or child "
            f"{name!r}. {did_you_mean(name, known)}"
        )

    def __repr__(self) -> str:
        children = f" of {', '.join(self._children)}" if self._children else ""
        return f"<{type(self).__name__} {self.path()}{children}>"

    def _add_child(self, name: str, child_config: Any, **kwargs: Any) -> "Module":
        """Creates a child.

        Args:
            name: new among the children and attributes of this module.
            child_config: config of a module, without a name; of a function or class that takes
                `name` and `parent` and returns a module; or a layer of another library, its class
                or its config (see `weft.interop.as_hierarchy`).
            **kwargs: further arguments of the child's `__init__`.

        Raises:
            ChildNameConflictError: if the name is taken.
            ModuleNameError: if the name is empty or contains a dot or a slash.
            ChildConfigError: if `child_config` does not make a module of this name and parent.
        """
        check_name(name, f"a child of {self.path()}")
        if name in self._children or name in self.__dict__ or hasattr(type(self), name):
            raise ChildNameConflictError(
                f"{self.path()} already has "
                f"{'a child' if name in self._children else 'an attribute'} {name!r}; "
                "give the child another name."
            )
        wrong = f"the child {name!r} of {self.path()} was given {child_config!r}; "
        config = _child_config(child_config)
        try:
            child = config.clone(name=name).instantiate(parent=self, **kwargs)
        except UnknownLayerError as error:
            if config is child_config:  # it names its own path
                raise
            raise ChildConfigError(
                f"{wrong}expected the config of a Module, such as `Linear.default_config()`, or of "
                "a function with parameters `name` and `parent` that makes a Module, or a layer of "
                "any library that `weft.interop.as_hierarchy` takes."
            ) from error
        if not isinstance(child, Module):
            raise ChildConfigError(
                f"{wrong}it makes an object of type {type(child).__name__}, which is not a Module. "
                "Return a Module whose methods call that object."
            )
        if (child.parent, child.name) != (self, name):
            raise ChildConfigError(
                f"{wrong}it makes {child!r}, which has another name or parent. Pass both on: "
                "`cfg.set(name=name).instantiate(parent=parent)`."
            )
        self._children[name] = child
        return child

    def _add_descendant(
        self, names: str | Sequence[str], child_config: Any, **kwargs: Any
    ) -> "Module":
        """Creates a child of a descendant; see `_add_child`.

        Args:
            names: path from this module to the new one, as a sequence or joined by dots.

        Raises:
            InvalidDescendantError: if a module on the path does not exist.
        """
        *above, name = names.split(".") if isinstance(names, str) else names
        module = self
        for step in above:
            if step not in module._children:
                raise InvalidDescendantError(
                    f"{module.path()} has no child {step!r}, so "
                    f"{'.'.join([*above, name])!r} cannot be added below {self.path()}. "
                    f"{did_you_mean(step, module._children)}"
                )
            module = module._children[step]
        return module._add_child(name, child_config, **kwargs)

    def find_descendant(self, module: "Module") -> list[str] | None:
        """Returns the names from this module to `module`, or None if it is not below this one."""
        names: list[str] = []
        at: Module | None = module
        while at is not None and at is not self:
            names.append(at._name)
            at = at._parent
        return None if at is None else names[::-1]

    def path_to_descendant_module(self, module: "Module") -> list[str]:
        """Returns `find_descendant(module)`, or raises InvalidDescendantError if it is None."""
        names = self.find_descendant(module)
        if names is None:
            raise InvalidDescendantError(
                f"{module.path()} is not below {self.path()}; expected one of its descendants."
            )
        return names

    # Shared modules.

    def _share_with_descendants(self, module: "Module", *, shared_module_name: str) -> None:
        """Lets all modules below this one call `module`, which is this module or below it.

        Raises:
            ChildNameConflictError: if another module is shared here under this name.
            InvalidDescendantError: if `module` is not below this one.
        """
        self.path_to_descendant_module(module)
        if self._shared.get(shared_module_name, module) is not module:
            raise ChildNameConflictError(
                f"{self.path()} already shares {self._shared[shared_module_name].path()} "
                f"as {shared_module_name!r}; share {module.path()} under another name."
            )
        self._shared[shared_module_name] = module

    def shared_modules(self) -> dict[str, "Module"]:
        """Returns the modules shared by this one and its ancestors; the nearest of a name wins."""
        above = {} if self._parent is None else self._parent.shared_modules()
        return {**above, **self._shared}

    def get_shared_module(self, shared_module_or_name: Union["Module", str]) -> SharedModule:
        """Returns a module shared by this one or an ancestor, with its state in this invocation.

        Raises:
            InvalidDescendantError: if the module, or a module of this name, is not shared.
        """
        shared = self.shared_modules()
        for name, module in shared.items():
            if shared_module_or_name in (name, module):
                context = self.get_invocation_context()
                return SharedModule(module, context.state_of(module), name)
        wanted = shared_module_or_name
        wanted = wanted.path() if isinstance(wanted, Module) else wanted
        raise InvalidDescendantError(
            f"{wanted!r} is not shared with {self.path()}. "
            f"{did_you_mean(wanted, shared)} Share it from a module above both with "
            "`self._share_with_descendants(module, shared_module_name=...)`."
        )

    # The invocation.

    def _child_context_of(self, context: InvocationContext) -> InvocationContext:
        """Returns the context for invoking this module from `context`."""
        names = context.module.find_descendant(self) if context.module is not None else None
        if names:
            for name in names[:-1]:
                context = context.passage(name)
            return context.add_child(names[-1])
        shared = context.module.shared_modules() if context.module is not None else {}
        name = next((name for name, module in shared.items() if module is self), self._name)
        return context.add_child(name, module=self)

    def _call_in_context(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method in its open context; subclasses may extend this."""
        return method(self, *args, **kwargs)

    def get_invocation_context(self) -> InvocationContext:
        """Returns the current context, or raises NoContextError outside of an invocation."""
        return require_context(f"the context of {self.path()}")

    @property
    def is_training(self) -> bool:
        """Training flag of the current invocation."""
        return self.get_invocation_context().is_training

    @property
    def prng_key(self) -> Any:
        """PRNG key of the current invocation, or None.

        Inside a plain JAX transformation, access raises ContextTransformError.
        """
        context = self.get_invocation_context()
        key = context.prng_key
        if key is not None and context.is_foreign():
            raise refused(
                context, "the PRNG key is read", "every index or iteration would draw the same"
            )
        return key

    @property
    def state(self) -> Any:
        """State of the module in the current invocation."""
        return self.get_invocation_context().state

    def add_summary(self, name: str, value: Any) -> None:
        """Reports an array, `WeightedScalar`, `Summary` or nested dict of them for this step.

        Raises:
            OutputConflictError: if the name was used before in this invocation.
        """
        jax.tree.map(
            lambda v: v.validate() if hasattr(v, "validate") else None,
            value,
            is_leaf=lambda v: hasattr(v, "validate"),
        )
        self.get_invocation_context().add_summary(name, value)

    def add_state_update(self, name: str, value: Any) -> None:
        """Sets a new value, an array or nested dict, for an entry of the state after the step."""
        self.get_invocation_context().add_state_update(name, value)

    def add_module_output(self, name: str, value: Any) -> None:
        """Adds a side output of the method, any pytree, under a name new to this invocation."""
        self.get_invocation_context().add_module_output(name, value)

    def get_module_outputs(self) -> dict[str, Any]:
        """Returns the module outputs so far, including those of children."""
        return self.get_invocation_context().get_module_outputs()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    # Logging.

    def vlog_is_on(self, level: int) -> bool:
        """Returns whether messages of this level are logged."""
        return self._vlog_level is not None and level <= self._vlog_level

    def vlog(self, level: int, msg: str, *args: Any, **kwargs: Any) -> None:
        """Logs `msg % args` if the config's `vlog` is at least `level`."""
        if self.vlog_is_on(level):
            logging.getLogger(type(self).__module__).info(
                "%s: " + msg, self.path(), *args, **kwargs
            )

    def vprint(self, level: int, msg: str, *args: Any, **kwargs: Any) -> None:
        """Prints `msg.format(*args, **kwargs)`, including traced values, if `vlog` would log."""
        if self.vlog_is_on(level):
            jax.debug.print(f"{self.path()}: {msg}", *args, **kwargs)


@entry_point
def functional(
    module: Module,
    prng_key: Tensor | None,
    state: NestedTensor,
    inputs: Sequence[Any] | dict[str, Any],
    *,
    method: str = "forward",
    is_training: bool,
    drop_output_collections: Sequence[str] = ("module_outputs",),
    copy_args_tree: bool = True,
) -> tuple[Any, OutputCollection]:
    """Invokes a method of a module as a pure function.

    Args:
        module: the module.
        prng_key: a PRNG key; None if the method needs none.
        state: arrays of the module and its descendants, a nested dict.
        inputs: positional arguments as a sequence, or keyword arguments as a dict.
        method: name of the method.
        is_training: value of `Module.is_training`.
        drop_output_collections: side outputs to omit.
        copy_args_tree: whether to copy the containers in `state` and `inputs`, so that the method
            cannot change the caller's.

    Returns:
        The method's result and an `OutputCollection` of side outputs.
    """
    if copy_args_tree:
        state, inputs = jax.tree.map(lambda x: x, (state, inputs))
    context = InvocationContext(
        name=module.name,
        parent=None,
        module=module,
        state=state,
        is_training=is_training,
        prng_key=prng_key,
    )
    bound = getattr(module, method)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with Entered(context, None):
        try:
            result = with_room_in_trace(bound, *args, **kwargs)
        except Exception as error:
            _note_path(error, module, method)
            raise
    outputs = context.output_collection._asdict()
    outputs["summaries"] = _without_empty(outputs["summaries"])
    outputs["module_outputs"] = _without_empty(outputs["module_outputs"])
    return result, OutputCollection(
        **{k: {} if k in drop_output_collections else v for k, v in outputs.items()}
    )


def _without_empty(outputs: dict[str, Any]) -> dict[str, Any]:
    """Drops the dicts of children without outputs."""
    nested = {k: _without_empty(v) if isinstance(v, dict) else v for k, v in outputs.items()}
    return {k: v for k, v in nested.items() if not isinstance(v, dict) or v}
