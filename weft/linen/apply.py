"""Functions of modules: calls without a method, shared scopes and merged options."""

import functools
from collections.abc import Callable
from typing import Any

from weft.core.filters import Filter
from weft.errors import (
    CallShareScopeOnUnboundModuleError,
    ParameterGivenTwiceError,
)
from weft.linen.module import Capture, Module
from weft.linen.state import ALL_BUT_INTERMEDIATES, name_of
from weft.typing import T


def apply(
    fn: Callable[..., T],
    module: Module,
    mutable: Filter = False,
    capture_intermediates: Capture = False,
) -> Callable[..., Any]:
    """Returns a pure function for a function of a module.

    Args:
        fn: `fn(module, *args, **kwargs)`, called with a bound copy of `module`.
        mutable, capture_intermediates: see `Module.apply`.

    Returns `applied(variables, *args, rngs=None, **kwargs)`.

    >>> twice = nn.apply(lambda dense, x: dense(dense(x)), nn.Dense(1, use_bias=False))
    >>> twice({"params": {"kernel": jax.numpy.full((1, 1), 3.0)}}, jax.numpy.ones(1)).tolist()
    [9.0]
    """
    return functools.partial(
        module.apply,
        method=fn,
        mutable=mutable,
        capture_intermediates=capture_intermediates,
    )


def init_with_output(
    fn: Callable[..., T],
    module: Module,
    mutable: Filter = ALL_BUT_INTERMEDIATES,
    capture_intermediates: Capture = False,
) -> Callable[..., tuple[T, dict[str, Any]]]:
    """Returns `initialize(rngs, *args, **kwargs)`, which creates the variables; see `apply`.

    It returns the result of `fn` and the variables.
    """
    return functools.partial(
        module.init_with_output,
        method=fn,
        mutable=mutable,
        capture_intermediates=capture_intermediates,
    )


def init(
    fn: Callable[..., T],
    module: Module,
    mutable: Filter = ALL_BUT_INTERMEDIATES,
    capture_intermediates: Capture = False,
) -> Callable[..., dict[str, Any]]:
    """Returns a function like that of `init_with_output`, which returns only the variables."""
    return functools.partial(
        module.init,
        method=fn,
        mutable=mutable,
        capture_intermediates=capture_intermediates,
    )


def share_scope(module: Module, other: Module) -> None:
    """Stores the variables of two bound modules in one scope, so that a wrapper adds no tree level.

    The shared scope is that of `other`, unless `other` is below `module`.

    >>> class Logged(nn.Module):
    ...     inner: nn.Module
    ...     def setup(self):
    ...         nn.share_scope(self, self.inner)
    ...     def __call__(self, x):
    ...         return self.inner(x)
    >>> sorted(Logged(nn.Dense(2)).init(jax.random.key(0), jax.numpy.ones(3))["params"])
    ['bias', 'kernel']
    """
    for one_module in (module, other):
        if one_module.scope is None:
            raise CallShareScopeOnUnboundModuleError(type(one_module).__name__)
    outer, inner = other, module
    if other.path[: len(module.path)] == module.path:
        outer, inner = module, other
    if isinstance(inner.parent, Module) and inner.parent.scope is not None:
        # Its own name is free again.
        inner.parent.scope.release(name_of(inner) or "")
    inner._rebind(outer.scope)


def merge_param(name: str, a: T | None, b: T | None) -> T:
    """Returns the one of two values that is not None: given in the constructor or in the call.

    Raises ParameterGivenTwiceError if both or neither are given; names the parameter `name`.

    >>> merge_param("deterministic", None, True)
    True
    """
    if a is not None and b is not None:
        raise ParameterGivenTwiceError(name, f"twice, as {a!r} and as {b!r}")
    value = a if b is None else b
    if value is None:
        raise ParameterGivenTwiceError(name, "not at all")
    return value
