"""Access of a module's methods to variables, PRNG keys, and options of `apply`."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from weft.core.filters import DenyList
from weft.core.scope import Scope
from weft.core.variable import Variable
from weft.errors import CompactMethodError, PerturbationNotFoundError, UnboundModuleError
from weft.linen.running import place_is_read
from weft.linen.state import State

T = TypeVar("T")
BUT_INTERMEDIATES = DenyList("intermediates")
"""The default of `mutable` in `init`."""


def _append(xs: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
    return (*xs, x)


class ModuleVariables:
    """Part of `Module` for access to variables; `scope` is None if not bound."""

    scope: Scope | None
    _state: State

    @property
    def _shown(self) -> str:
        """The module's class and path, for messages."""
        if self.scope is None:
            return type(self).__name__
        return f"{type(self).__name__} {'/'.join(self.scope.path) or '(the outermost module)'}"

    def _bound(self, what: str) -> Scope:
        if self.scope is None:
            raise UnboundModuleError(what, type(self).__name__)
        return self.scope

    def _owner(self, what: str) -> Scope:
        """Returns the scope in which a variable can be created."""
        if self.scope is None:
            raise UnboundModuleError(f"{what} was requested", type(self).__name__)
        if not (self._state.in_compact or self._state.in_setup):
            raise CompactMethodError(what, self._shown)
        return self.scope

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of this module and its submodules, by collection."""
        return self._bound("the variables were requested").variables()

    @property
    def path(self) -> tuple[str, ...]:
        """The names of the modules from the root to this one."""
        scope = self._bound("the path was requested")
        place_is_read(self)  # pyright: ignore[reportArgumentType]
        return scope.path

    def param(
        self,
        name: str,
        init_fn: Callable[..., T],
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> T:
        """Returns a parameter, which `init` creates.

        Args:
            init_fn: computes the first value from a key and `init_args`.
            unbox: whether to return the value without its axis metadata.

        Raises:
            CompactMethodError: if called in a method that is neither `setup` nor compact.
            NameInUseError: if the name is taken in the module.
            ScopeParamShapeError: if the given parameter has another shape.

        Example:
            >>> import jax
            >>> from weft import linen as nn
            >>> class Bias(nn.Module):
            ...     @nn.compact
            ...     def __call__(self, x):
            ...         return x + self.param("bias", nn.initializers.ones, x.shape[-1:])[None]
            >>> Bias().init(jax.random.key(0), jax.numpy.zeros((4, 2)))
            {'params': {'bias': Array([1., 1.], dtype=float32)}}
        """
        scope = self._owner(f"the parameter {name!r}")
        value = scope.param(name, init_fn, *init_args, unbox=unbox, **init_kwargs)
        self._state.note(name, "params")
        return value

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., T] | None = None,
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> Variable[T]:
        """Returns a reference to a variable, whose `value` can be read, and set if mutable.

        Args:
            init_fn: computes the first value from `init_args`.
            unbox: whether the value is shown without its axis metadata.

        Raises:
            CompactMethodError: if called in a method that is neither `setup` nor compact.
            NameInUseError: if the name is taken in the module.
            ScopeVariableNotFoundError: if the variable does not exist and cannot be created.

        Example:
            >>> import jax
            >>> from weft import linen as nn
            >>> class Counter(nn.Module):
            ...     @nn.compact
            ...     def __call__(self):
            ...         calls = self.variable("state", "calls", lambda: 0)
            ...         calls.value += 1
            ...         return calls.value
            >>> Counter().apply({"state": {"calls": 4}}, mutable=["state"])
            (5, {'state': {'calls': 5}})
        """
        scope = self._owner(f"the variable {name!r} of {col!r}")
        ref = scope.variable(col, name, init_fn, *init_args, unbox=unbox, **init_kwargs)
        self._state.note(name, col)
        return ref

    def has_variable(self, col: str, name: str) -> bool:
        """Returns whether this module has a variable."""
        return self._bound(f"the variable {name!r} was requested").has_variable(col, name)

    def get_variable(self, col: str, name: str, default: Any = None, *, unbox: bool = False) -> Any:
        """Returns a variable's value, or `default`; with `unbox`, without its axis metadata."""
        scope = self._bound(f"the variable {name!r} was requested")
        return scope.get_variable(col, name, default, unbox=unbox)

    def put_variable(self, col: str, name: str, value: Any) -> None:
        """Sets a new or existing variable of this module, in a mutable collection."""
        self._bound(f"the variable {name!r} was set").put_variable(col, name, value)

    def make_rng(self, name: str = "params") -> jax.Array:
        """Returns a new PRNG key of a stream; `params` replaces a missing one.

        Raises:
            InvalidRngError: if there is no stream.
        """
        return self._bound(f"a key of the PRNG stream {name!r} was requested").make_rng(name)

    def has_rng(self, name: str) -> bool:
        """Returns whether `init` or `apply` was given a PRNG stream."""
        return self._bound(f"the PRNG stream {name!r} was requested").has_rng(name)

    def is_initializing(self) -> bool:
        """Returns whether the call is by `init`, not `apply`."""
        return self._bound("`is_initializing` was called").get_flag("initializing", False)

    def is_mutable_collection(self, col: str) -> bool:
        """Returns whether the variables of a collection can be changed."""
        return self._bound(f"the collection {col!r} was requested").is_mutable_collection(col)

    def sow(
        self,
        col: str,
        name: str,
        value: Any,
        reduce_fn: Callable[[Any, Any], Any] = _append,
        init_fn: Callable[[], Any] = tuple,
    ) -> bool:
        """Stores a value in a collection, for use outside of the module.

        Args:
            col: the collection; if it is not mutable, nothing is stored.
            reduce_fn: combines the previously stored value and the new one.
            init_fn: returns the initial stored value.

        Returns:
            Whether the collection is mutable.

        Example:
            >>> from weft import linen as nn
            >>> class Twice(nn.Module):
            ...     def __call__(self, x):
            ...         self.sow("intermediates", "input", x)
            ...         return 2 * x
            >>> Twice().apply({}, 3, mutable=["intermediates"])
            (6, {'intermediates': {'input': (3,)}})
        """
        scope = self._bound(f"{name!r} was sown")
        if not scope.is_mutable_collection(col):
            return False
        if not scope.has_variable(col, name):
            if not scope.name_reserved(name, col):
                scope.reserve(name, col)
                self._state.note(name, col)
            # A branch or a loop that sows then begins with the previous value.
            scope.put_variable(col, name, init_fn())
        before = scope.get_variable(col, name)
        scope.put_variable(col, name, reduce_fn(before, value))
        return True

    def perturb(self, name: str, value: T, collection: str = "perturbations") -> T:
        """Adds a variable of zeros to a value, so that the variable's gradient is the value's.

        Args:
            value: an array; use the result in its place.
            collection: collection of the zeros, created by `init`. If it is not given to `apply`,
                the value is returned unchanged.

        Raises:
            PerturbationNotFoundError: if the given collection lacks this variable, whose gradient
                would be zero.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from weft import linen as nn
            >>> class Square(nn.Module):
            ...     def __call__(self, x):
            ...         return jnp.sum(self.perturb("x", x) ** 2)
            >>> x = jnp.array([1.0, 3.0])
            >>> variables = Square().init(jax.random.key(0), x)
            >>> jax.grad(lambda v: Square().apply(v, x))(variables)
            {'perturbations': {'x': Array([2., 6.], dtype=float32)}}
        """
        scope = self._bound(f"{name!r} was perturbed")
        if scope.is_mutable_collection(collection) and not scope.has_variable(collection, name):
            scope.variable(collection, name, lambda: jax.tree.map(jnp.zeros_like, value))
            self._state.note(name, collection)
        if not scope.has_collection(collection):
            return value
        if not scope.has_variable(collection, name):
            raise PerturbationNotFoundError(name, collection, scope.path_text)
        return jax.tree.map(jnp.add, value, scope.get_variable(collection, name))
