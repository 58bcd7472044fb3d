"""Modules: named nodes of a tree that hold configs and children, but no arrays.

Outside an invocation, public methods are plain Python methods. Inside one, a call from another
module's method first opens the called module's context, which holds its state, key and outputs.
`functional` opens the first context and makes the call a pure function.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import (
    Any,
    Concatenate,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
    runtime_checkable,
)

import jax

from weft import errors
from weft._door import current_door
from weft.config import REQUIRED, Configurable, InstantiableConfig, Required
from weft.core import display, tracing
from weft.hierarchy import context as context_lib
from weft.hierarchy.context import (
    InvocationContext,
    OutputCollection,
    current_context,
)
from weft.typing import NestedTensor, PyTree, Tensor

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
ResultT = TypeVar("ResultT", covariant=True)


@runtime_checkable
class Summable(Protocol):
    """Summary that supports `+`, so that loop iterations can be added up."""

    def __add__(self, other: object) -> Any: ...


class SharedModule(NamedTuple):
    """Module that an ancestor shares, with its state and the name under which it is shared."""

    module: "Module"
    state: NestedTensor
    shared_module_name: str


def nowrap(fun: F) -> F:
    """Marks a public method, and its overrides, to open no context when another module calls it."""
    return mark_method(fun, "_weft_nowrap", "nowrap")


def mark_method(fun: F, mark: str, decorator: str) -> F:
    """Sets an attribute of a method to True, for a decorator.

    Raises ArgumentValueError for what takes no attributes, such as a property.
    """
    try:
        setattr(fun, mark, True)
    except (AttributeError, TypeError):
        raise errors.ArgumentValueError(
            f"{decorator} marks a method, but got {fun!r} of type {type(fun).__name__}; write it "
            "next to the function, below other decorators."
        ) from None
    return fun


def get_public_method(module: "Module", name: str) -> Callable[..., Any] | None:
    """Returns the public method called `name`; None for children, fields, properties and others."""
    if name.startswith("_"):
        return None
    attribute = inspect.getattr_static(module, name, None)
    if not callable(attribute) or isinstance(
        attribute, type | staticmethod | Module
    ):
        return None
    return getattr(module, name)


def check_method(
    owner: "Module", model: "Module", method: str, error: type[Exception]
) -> None:
    """Raises an error if `owner` is to call a public method that the model does not have."""
    if get_public_method(model, method) is None:
        public_names = [
            name for name in dir(type(model)) if not name.startswith("_")
        ]
        raise error(
            f"{owner.path()} is to call {method!r} of the model, but {type(model).__name__} has no "
            f"such method. {errors.did_you_mean(method, public_names)}"
        )


def _in_own_context(
    method: Callable[Concatenate["Module", P], R],
) -> Callable[Concatenate["Module", P], R]:
    """Wraps a method so that calls from other modules run in its own module's context."""

    @functools.wraps(method)
    def call(self: "Module", *args: P.args, **kwargs: P.kwargs) -> R:
        caller = current_context()
        # Outside of an invocation, and for a module's calls of its own methods, nothing changes.
        if caller is None or caller.module is self:
            return method(self, *args, **kwargs)
        try:
            with context_lib.ActiveContext(
                self._child_context_of(caller), caller
            ):
                bound_method = functools.partial(self._in_context(method), self)
                for interceptor in _INTERCEPTORS.get():
                    bound_method = _intercepted(
                        interceptor, self, method.__name__, bound_method
                    )
                return bound_method(*args, **kwargs)
        except Exception as error:
            _add_path_note(error, self, method.__name__)
            raise

    call._weft_method = method  # pyright: ignore[reportAttributeAccessIssue]
    return call


Interceptor = Callable[
    ["Module", str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any
]
"""Function of a module, a method's name, the method and its arguments; it calls the method."""


_INTERCEPTORS: ContextVar[tuple[Interceptor, ...]] = ContextVar(
    "interceptors", default=()
)


@contextlib.contextmanager
def intercept_module_calls(interceptor: Interceptor) -> Iterator[None]:
    """Calls `interceptor` in place of method calls between modules while the context is open."""
    token = _INTERCEPTORS.set((*_INTERCEPTORS.get(), interceptor))
    try:
        yield
    finally:
        _INTERCEPTORS.reset(token)


def _intercepted(
    interceptor: Interceptor,
    module: "Module",
    name: str,
    bound_method: Callable[P, R],
) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return interceptor(module, name, bound_method, args, kwargs)

    return call


def _add_path_note(error: Exception, module: "Module", method: str) -> None:
    # Only the innermost module: the error passes the wrappers of all modules above it as well.
    if getattr(error, "_weft_path_noted", False):
        return
    error._weft_path_noted = True  # pyright: ignore[reportAttributeAccessIssue]
    error.add_note(
        f"In {type(module).__name__}.{method} of module {module.path()!r}."
    )
    hint = current_door().hint_for_error(error)
    if hint is not None:
        error.add_note(hint)


class _Forward:
    """Descriptor of `__call__`: the method `forward`, without a call in between."""

    def __get__(self, module: "Module | None", cls: "type[Module]") -> Any:
        if module is None:
            return getattr(cls, "forward", self)
        return module.forward  # pyright: ignore[reportAttributeAccessIssue] - of the subclass


class Module(Configurable):
    """Node of a tree of modules; calling it calls its `forward`.

    A subclass declares fields in a `Config`, adds children in `__init__`, and defines methods.

    >>> class Scale(Module):
    ...     class Config(Module.Config):
    ...         factor: Required[float] = REQUIRED
    ...     def forward(self, x):
    ...         return self.config.factor * x
    >>> class Twice(Module):
    ...     class Config(Module.Config):
    ...         inner: Scale.Config = Scale.default_config()
    ...     def __init__(self, cfg, *, parent):
    ...         super().__init__(cfg, parent=parent)
    ...         self._add_child("inner", cfg.inner.set(factor=2.0))
    ...     def forward(self, x):
    ...         return self.inner(x)
    >>> twice = Twice.default_config().set(name="twice").instantiate(parent=None)
    >>> functional(twice, prng_key=None, state={}, inputs=(3.0,), is_training=False)[0]
    6.0
    """

    class Config(Configurable.Config):
        """Configures a Module."""

        name: Required[str] = REQUIRED
        """Unique among its siblings; set by `_add_child`."""
        vlog: int | None = None
        """Level up to which `vlog` logs; None inherits the parent's."""

    def __init_subclass__(cls, **kwargs: object):
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            if not inspect.isfunction(value) or name.startswith("_"):
                continue
            # `nowrap` on a base's method holds for its overrides.
            definitions = [vars(base).get(name) for base in cls.__mro__]
            if not any(
                getattr(method, "_weft_nowrap", False) for method in definitions
            ):
                setattr(cls, name, _in_own_context(value))

    def __init__(self, cfg: Config, *, parent: "Module | None"):
        super().__init__(cfg)
        place = "a root" if parent is None else f"a child of {parent.path()}"
        context_lib.check_name(cfg.name, place)
        self._name = cfg.name
        self._parent = parent
        self._children: dict[str, Module] = {}
        self._shared: dict[str, Module] = {}
        choice_of_class = type(self)._methods_to_wrap_for_auto_child_context
        if (
            choice_of_class
            is not Module._methods_to_wrap_for_auto_child_context
        ):
            self._wrap_methods(self._methods_to_wrap_for_auto_child_context())
        self._vlog_level: int | None = cfg.vlog
        if cfg.vlog is None and parent is not None:
            self._vlog_level = parent._vlog_level

    # The methods.

    def _methods_to_wrap_for_auto_child_context(
        self,
    ) -> dict[str, Callable[..., Any]]:
        """Returns the methods that open this module's context when another module calls them.

        By default all public ones. An override may leave some out, or add private ones.
        """
        methods: dict[str, Callable[..., Any]] = {}
        for name in dir(type(self)):
            wrapper = getattr(type(self), name, None)
            method = getattr(wrapper, "_weft_method", None)
            if method is not None and not name.startswith("_"):
                methods[name] = method
        return methods

    def _wrap_methods(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Lets these methods of this object open its context, and no others.

        The class has wrapped its public methods, so the object gets what differs from that.
        """
        wrapped_by_class = Module._methods_to_wrap_for_auto_child_context(self)
        for name, method in wrapped_by_class.items():
            if name not in methods:
                setattr(self, name, functools.partial(method, self))
        for name, method in methods.items():
            if name not in wrapped_by_class:
                function = getattr(method, "__func__", method)
                setattr(
                    self,
                    name,
                    functools.partial(_in_own_context(function), self),
                )

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
        return (
            self._name
            if self._parent is None
            else f"{self._parent.path()}.{self._name}"
        )

    def __getattr__(self, name: str) -> Any:
        # By `__dict__`: before `__init__` has set these two, `self._children` would come back here.
        children = self.__dict__.get("_children", {})
        if name in children:
            return children[name]
        names = [*children, *dir(type(self))]
        public_names = [name for name in names if not name.startswith("_")]
        raise AttributeError(
            f"{type(self).__name__} {self.__dict__.get('_name', '')!r} has no attribute or child "
            f"{name!r}. {errors.did_you_mean(name, public_names)}"
        )

    def _shown_size(self) -> str:
        """Returns the size of all parameters, as a comment in this module's text."""
        return ""

    def _shown_parts(self) -> dict[str, Any]:
        """Returns what texts and trees show of this module, in order."""
        defaults = dict(type(self).default_config().items())
        parts: dict[str, Any] = {}
        for name, value in self.config.items():
            is_short = isinstance(value, int | float | str | tuple)
            if name != "name" and is_short and value != defaults.get(name):
                parts[name] = value
        return parts | self._children

    def __repr__(self) -> str:
        if "_children" not in vars(self):
            return f"{type(self).__name__}(...)"
        items = [
            f"{name}={value!r}" for name, value in self._shown_parts().items()
        ]
        return display.join_lines(
            f"{type(self).__name__}({self._shown_size()}", items, ")"
        )

    _repr_mimebundle_ = display.notebook_tree

    def __treescope_repr__(
        self, path: str | None, subtree_renderer: Callable[..., object]
    ) -> object:
        """Shows settings, parameters and children in Treescope's trees."""
        return display.render_tree(
            self, self._shown_parts(), path, subtree_renderer
        )

    def _add_child(
        self, name: str, child_config: Any, **kwargs: object
    ) -> "Module":
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
        context_lib.check_name(name, f"a child of {self.path()}")
        if (
            name in self._children
            or name in self.__dict__
            or hasattr(type(self), name)
        ):
            holder = "a child" if name in self._children else "an attribute"
            raise errors.ChildNameConflictError(
                f"{self.path()} already has {holder} {name!r}; give the child another name."
            )

        def error_of_child(reason: str) -> errors.ChildConfigError:
            return errors.ChildConfigError(
                f"the child {name!r} of {self.path()} was given {child_config!r}; {reason}"
            )

        is_module_config = isinstance(child_config, Module.Config)
        # Layers of other libraries, and functions that make modules.
        config = (
            child_config
            if is_module_config
            else current_door().config_of_layer(child_config)
        )
        try:
            child = config.clone(name=name).instantiate(parent=self, **kwargs)
        except errors.UnknownLayerError as error:
            if is_module_config:  # its own error, which names its path
                raise
            raise error_of_child(
                "expected the config of a Module, such as `Linear.default_config()`, or of a "
                "function with parameters `name` and `parent` that makes a Module, or a layer of "
                "any library that `weft.interop.as_hierarchy` takes."
            ) from error
        if not isinstance(child, Module):
            raise error_of_child(
                f"it makes an object of type {type(child).__name__}, which is not a Module. "
                "Return a Module whose methods call that object."
            )
        if (child.parent, child.name) != (self, name):
            raise error_of_child(
                f"it makes the {type(child).__name__} {child.path()!r}, which has another "
                "name or parent. Pass both on: `cfg.set(name=name).instantiate(parent=parent)`."
            )
        self._children[name] = child
        return child

    def _maybe_add_child(
        self, name: str, child_config: InstantiableConfig | None, **fields: Any
    ) -> None:
        """Creates a child with these values of config fields, unless its config is None."""
        if child_config is not None:
            self._add_child(name, child_config.set(**fields))

    def _add_descendant(
        self, names: str | Sequence[str], child_config: Any, **kwargs: object
    ) -> "Module":
        """Creates a child of a descendant, by names or a path with dots; see `_add_child`.

        Raises InvalidDescendantError if a module on the path does not exist.
        """
        if isinstance(names, str):
            names = names.split(".")
        module = self
        for name in names[:-1]:
            if name not in module._children:
                raise errors.InvalidDescendantError(
                    f"{module.path()} has no child {name!r}, so "
                    f"{'.'.join(names)!r} cannot be added below {self.path()}. "
                    f"{errors.did_you_mean(name, module._children)}"
                )
            module = module._children[name]
        return module._add_child(names[-1], child_config, **kwargs)

    def find_descendant(
        self, module: context_lib.ModuleNode
    ) -> list[str] | None:
        """Returns the names from this module to `module`, or None if it is not below this one.

        Raises InvalidDescendantError for what is not a module.
        """
        names: list[str] = []
        node: Any = module
        try:
            while node is not None and node is not self:
                names.append(node._name)
                node = node._parent
        except AttributeError:
            if isinstance(module, Module):
                raise
            raise self._no_module_error(module) from None
        if module is None:
            raise self._no_module_error(module)
        return None if node is None else names[::-1]

    def _no_module_error(self, value: object) -> errors.InvalidDescendantError:
        return errors.InvalidDescendantError(
            f"{value!r} of type {type(value).__name__} is not a module; expected one of the "
            f"descendants of {self.path()}."
        )

    def path_to_descendant_module(self, module: "Module") -> list[str]:
        """Returns `find_descendant(module)`, or raises InvalidDescendantError if it is None."""
        names = self.find_descendant(module)
        if names is None:
            raise errors.InvalidDescendantError(
                f"{module.path()} is not below {self.path()}; expected one of its descendants."
            )
        return names

    # Shared modules.

    def _share_with_descendants(
        self, module: "Module", *, shared_module_name: str
    ) -> None:
        """Lets all modules below this one call `module`, which is this module or below it.

        Raises:
            ChildNameConflictError: if another module is shared here under this name.
            InvalidDescendantError: if `module` is not below this one.
        """
        self.path_to_descendant_module(module)
        if self._shared.get(shared_module_name, module) is not module:
            raise errors.ChildNameConflictError(
                f"{self.path()} already shares {self._shared[shared_module_name].path()} "
                f"as {shared_module_name!r}; share {module.path()} under another name."
            )
        self._shared[shared_module_name] = module

    def shared_modules(self) -> dict[str, "Module"]:
        """Returns the modules shared by this one and its ancestors; the nearest of a name wins."""
        if self._parent is None:
            return dict(self._shared)
        return self._parent.shared_modules() | self._shared

    def get_shared_module(
        self, shared_module_or_name: "Module | str"
    ) -> SharedModule:
        """Returns a module shared by this one or an ancestor, with its state in this invocation.

        Raises InvalidDescendantError if the module, or a module of this name, is not shared.
        """
        shared_modules = self.shared_modules()
        for name, module in shared_modules.items():
            if shared_module_or_name in (name, module):
                state = self.get_invocation_context().state_of(module)
                return SharedModule(module, state, name)
        unknown_name = shared_module_or_name
        if isinstance(unknown_name, Module):
            unknown_name = unknown_name.path()
        raise errors.InvalidDescendantError(
            f"{unknown_name!r} is not shared with {self.path()}. "
            f"{errors.did_you_mean(unknown_name, shared_modules)} Share it from a module above "
            "both with `self._share_with_descendants(module, shared_module_name=...)`."
        )

    # The invocation.

    def _child_context_of(self, caller: InvocationContext) -> InvocationContext:
        """Returns a new context for a call of this module, from the context of its caller."""
        if caller.module is None:
            return caller.add_child(self._name, module=self)
        names = caller.module.find_descendant(self)
        if names:
            context = caller
            for name in names[:-1]:
                context = context.child_view(name)
            return context.add_child(names[-1])
        # Not below the caller: the caller calls it under the name by which it is shared.
        for name, module in caller.module.shared_modules().items():
            if module is self:
                return caller.add_child(name, module=self)
        return caller.add_child(self._name, module=self)

    def _in_context(self, method: Callable[..., R]) -> Callable[..., R]:
        """Returns a method as it is called in its open context; subclasses may extend this."""
        return self._with_casts(method)

    def _with_casts(self, method: Callable[..., R]) -> Callable[..., R]:
        """Returns a method that casts its inputs and outputs, also where it is a root's."""
        return method

    def get_invocation_context(self) -> InvocationContext:
        """Returns the current context, or raises NoContextError outside of an invocation."""
        return context_lib.require_context(f"the context of {self.path()}")

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
        if key is not None and context.is_from_outer_trace():
            raise context_lib.side_effect_error(
                context,
                "the PRNG key is read",
                "every index or iteration would draw the same",
            )
        return key

    @property
    def state(self) -> Any:
        """State of the module in the current invocation."""
        return self.get_invocation_context().state

    def add_summary(self, name: str, value: PyTree) -> None:
        """Reports an array, `WeightedScalar`, `Summary` or nested dict of them for this step.

        Over the batches of an evaluation, a plain number is averaged as it is, each batch with
        equal weight: right for a mean over batches of one size, wrong for F1 or a mean over tokens.
        A `WeightedScalar` is averaged by its weight, and a metric of `weft.metrics` adds up.

        Raises OutputConflictError if the name was used before in this invocation.
        """
        for leaf in jax.tree.leaves(
            value, is_leaf=lambda v: hasattr(v, "validate")
        ):
            if hasattr(leaf, "validate"):
                leaf.validate()
        self.get_invocation_context().add_summary(name, value)

    def add_state_update(self, name: str, value: PyTree) -> None:
        """Sets a new value, an array or nested dict, for an entry of the state after the step."""
        self.get_invocation_context().add_state_update(name, value)

    def add_module_output(self, name: str, value: PyTree) -> None:
        """Adds a side output of the method, any pytree, under a name new to this invocation."""
        self.get_invocation_context().add_module_output(name, value)

    def get_module_outputs(self) -> dict[str, Any]:
        """Returns the module outputs so far, including those of children."""
        return self.get_invocation_context().get_module_outputs()

    __call__ = _Forward()

    # Logging.

    def vlog_is_on(self, level: int) -> bool:
        """Returns whether messages of this level are logged."""
        return self._vlog_level is not None and level <= self._vlog_level

    def vlog(self, level: int, msg: str, *args: object, **kwargs: Any) -> None:
        """Logs `msg % args` if the config's `vlog` is at least `level`."""
        if self.vlog_is_on(level):
            logging.getLogger(type(self).__module__).info(
                "%s: " + msg, self.path(), *args, **kwargs
            )

    def vprint(
        self, level: int, msg: str, *args: object, **kwargs: Any
    ) -> None:
        """Prints `msg.format(*args, **kwargs)`, including traced values, if `vlog` would log."""
        if self.vlog_is_on(level):
            jax.debug.print(f"{self.path()}: {msg}", *args, **kwargs)


class HasForward(Protocol[ResultT]):
    """Module whose `forward` returns a `ResultT`."""

    def forward(self, *args: Any, **kwargs: Any) -> ResultT: ...


@overload
def functional(
    module: HasForward[R],
    prng_key: Tensor | None,
    state: NestedTensor,
    inputs: Sequence[Any] | dict[str, Any],
    *,
    is_training: bool,
    drop_output_collections: Sequence[str] = ...,
    copy_args_tree: bool = ...,
) -> tuple[R, OutputCollection]: ...
@overload
def functional(
    module: Module,
    prng_key: Tensor | None,
    state: NestedTensor,
    inputs: Sequence[Any] | dict[str, Any],
    *,
    method: str = ...,
    is_training: bool,
    drop_output_collections: Sequence[str] = ...,
    copy_args_tree: bool = ...,
) -> tuple[Any, OutputCollection]: ...
def functional(  # pyright: ignore[reportInconsistentOverload]  # modules have `forward`
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
        prng_key: a PRNG key; None if the method needs none.
        state: arrays of the module and its descendants, a nested dict.
        inputs: positional arguments as a sequence, or keyword arguments as a dict.
        copy_args_tree: whether to copy the containers in `state` and `inputs`, so that the method
            cannot change the caller's.

    Returns the method's result and an `OutputCollection` of side outputs.

    Raises ArgumentValueError if `module` is none, such as a config.
    """
    if not isinstance(module, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.ArgumentValueError(
            "functional invokes a module of weft.hierarchy, and this is a "
            f"{type(module).__name__}; make a module of a config with "
            "cfg.set(name=...).instantiate(parent=None)."
        )
    # The state goes in as a field of the root's context, and outputs come out as another: the
    # methods below read and fill them by the current context, which the root's is until the end.
    if copy_args_tree:
        state, inputs = jax.tree.map(lambda x: x, (state, inputs))
    context = InvocationContext(
        module.name, None, module, state, is_training, prng_key
    )
    args, kwargs = inputs, {}
    if isinstance(inputs, dict):
        args, kwargs = (), inputs
    try:
        with context_lib.ActiveContext(context, None):
            bound_method = getattr(module, method)
            is_wrapped = hasattr(bound_method, "_weft_method")
            if is_wrapped and getattr(bound_method, "__self__", None) is module:
                # Its wrapper would find the module's context open, and leave out the casts.
                method_with_casts = module._with_casts(
                    bound_method._weft_method
                )
                bound_method = functools.partial(method_with_casts, module)
            result = bound_method(*args, **kwargs)
    except Exception as error:
        _add_path_note(error, module, method)
        tracing.hide_frames(error)
        raise
    outputs = context.output_collection
    context_lib.drop_empty(outputs.summaries)
    context_lib.drop_empty(outputs.module_outputs)
    for kind in OutputCollection._fields:
        if kind in drop_output_collections:
            outputs = outputs._replace(**{kind: {}})
    return result, outputs
