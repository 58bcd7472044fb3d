"""Functions of modules: calls without a method, shared scopes and merged options."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from weft.core.filters import Filter
from weft.core.rngs import RngKeys
from weft.errors import CallShareScopeOnUnboundModuleError, ParameterGivenTwiceError
from weft.linen.module import Module
from weft.linen.state import ALL_BUT_INTERMEDIATES, name_of

T = TypeVar("T")


def apply(
    fn: Callable[..., Any],
    module: Module,
    mutable: Filter = False,
    capture_intermediates: Any = False,
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

    def applied(variables: Mapping[str, Any], *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        options = {"mutable": mutable, "capture_intermediates": capture_intermediates}
        return module.apply(variables, *args, rngs=rngs, method=fn, **options, **kwargs)

    return applied


def init_with_output(
    fn: Callable[..., Any],
    module: Module,
    mutable: Filter = ALL_BUT_INTERMEDIATES,
    capture_intermediates: Any = False,
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Returns `initialize(rngs, *args, **kwargs)`, which creates the variables; see `apply`.

    It returns the result of `fn` and the variables.
    """

    def initialize(rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        options = {"mutable": mutable, "capture_intermediates": capture_intermediates}
        return module.init_with_output(rngs, *args, method=fn, **options, **kwargs)

    return initialize


def init(
    fn: Callable[..., Any],
    module: Module,
    mutable: Filter = ALL_BUT_INTERMEDIATES,
    capture_intermediates: bool | Callable[[Module, str], bool] = False,
) -> Callable[..., dict[str, Any]]:
    """Returns a function like that of `init_with_output`, which returns only the variables."""
    with_output = init_with_output(fn, module, mutable, capture_intermediates)

    def initialize(rngs: RngKeys, *args: object, **kwargs: object) -> dict[str, Any]:
        return with_output(rngs, *args, **kwargs)[1]

    return initialize


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
    if module.scope is None or other.scope is None:
        unbound = module if module.scope is None else other
        raise CallShareScopeOnUnboundModuleError(type(unbound).__name__)
    is_below = other.path[: len(module.path)] == module.path
    outer, inner = (module, other) if is_below else (other, module)
    if isinstance(inner.parent, Module) and inner.parent.scope is not None:
        inner.parent.scope.release(name_of(inner) or "")
    inner._rebind(outer.scope)


def merge_param(name: str, a: T | None, b: T | None) -> T:
    """Returns the one of two values that is not None: given in the constructor or in the call.

    Raises ParameterGivenTwiceError if both or neither are given; names the parameter `name`.

    >>> merge_param("deterministic", None, True)
    True
    """
    if a is None and b is None:
        raise ParameterGivenTwiceError(name, "not at all")
    if a is not None and b is not None:
        raise ParameterGivenTwiceError(name, f"twice, as {a!r} and as {b!r}")
    return a if b is None else b  # pyright: ignore[reportReturnType]
