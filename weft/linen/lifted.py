"""Lifting of module classes and functions, based on functions of scopes.

A class becomes a subclass with lifted methods, inside which the class's methods run. A function, or
a method, takes a module or a tree of modules first.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from weft.errors import TransformTargetError
from weft.lifting.argnums import check_argnums
from weft.lifting.functions import shared_by_equal_functions
from weft.lifting.stages import Lowered
from weft.linen.module import Module
from weft.linen.passengers import Token, arrive, board, inside

Methods = str | Collection[str] | Mapping[str, Mapping[str, Any]] | None
Build = Callable[..., Callable[..., Any]]


def transformed(
    prefix: str, build: Build, target: Any, methods: Methods = None, **options: Any
) -> Any:
    """Returns a transformed module class or function; raises TransformTargetError for others.

    Args:
        prefix: prefix of the new class's name.
        build: `build(fn, **options)` is a function of `weft.core.lift`.
        methods: methods of a class to lift: names, or options by name; by default `__call__`.
    """
    if isinstance(target, type) and issubclass(target, Module):
        return _transformed_class(prefix, build, target, methods, options)
    if isinstance(target, Module) or not callable(target):
        raise TransformTargetError(target)
    return _transformed_function(prefix, build, target, options)


def _transformed_class(
    prefix: str, build: Build, cls: type[Module], methods: Methods, options: dict[str, Any]
) -> type[Module]:
    if methods is None:
        methods = ("__call__",)
    elif isinstance(methods, str):
        methods = (methods,)
    own = methods if isinstance(methods, Mapping) else {name: {} for name in methods}
    chosen = {name: {**options, **changed} for name, changed in own.items()}
    for name in chosen:
        if not callable(getattr(cls, name, None)):
            raise TransformTargetError(f"{cls.__name__}.{name}")

    def make() -> type[Module]:
        token = Token()
        lifted = {
            name: _transformed_function(prefix, build, getattr(cls, name), of_method, token)
            for name, of_method in chosen.items()
        }
        return subclass(cls, prefix, lifted)

    # A class that each call transforms again is one class, so that it is compiled once.
    return shared_by_equal_functions(("class", prefix, build, cls, chosen), make)


def subclass(cls: type[Module], prefix: str, methods: dict[str, Any]) -> type[Module]:
    """Returns a subclass of `cls` with other methods and the prefixed name."""
    name = prefix + cls.__name__
    about = {"__module__": cls.__module__, "__qualname__": name, "__doc__": cls.__doc__}
    return type(name, (cls,), {**about, **methods})


def _transformed_function(
    prefix: str,
    build: Build,
    fn: Callable[..., Any],
    options: dict[str, Any],
    token: Token | None = None,
) -> Callable[..., Any]:
    for what in ("static_argnums", "donate_argnums"):
        check_argnums(f"linen.{prefix.lower()}", what, fn, options.get(what, ()))
    lifted = build(inside(fn), **options)

    @functools.wraps(fn)
    def run(target: Any, *args: Any, **kwargs: Any) -> Any:
        if token is not None and token in target._state.inside:
            return fn(target, *args, **kwargs)
        return call(lifted, (target, *args), kwargs)

    def call(lifted: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, *rest = args
        boarding, carriage, rest, kwargs = board((fn,), target, tuple(rest), kwargs, token)
        result = lifted(carriage, *rest, **kwargs)
        arrive(boarding, carriage)
        return result

    if hasattr(lifted, "lower"):

        def lower(target: Any, *args: Any, **kwargs: Any) -> Lowered:
            _, carriage, args, kwargs = board((fn,), target, args, kwargs, token)
            return Lowered(lifted.lower(carriage, *args, **kwargs), call)

        run.lower = lower  # pyright: ignore[reportAttributeAccessIssue]
        run.explain_recompile = lifted.explain_recompile  # pyright: ignore[reportAttributeAccessIssue]
    return run
