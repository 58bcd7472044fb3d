"""Base class of all errors."""

from typing import Any


class WeftError(Exception):
    """Base of the errors that Weft raises on purpose.

    Errors keep their message and attributes when pickled or copied, whatever their constructors
    take.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would call the constructor with `args`, which holds the finished message.
        return _rebuild, (type(self), self.args), self.__dict__.copy()


def _rebuild(cls: type[WeftError], args: tuple[Any, ...]) -> WeftError:
    """Creates an error without calling Weft's constructors; only the builtin's is called."""
    error = cls.__new__(cls, *args)
    builtin = next(c for c in cls.__mro__ if not issubclass(c, WeftError))
    builtin.__init__(error, *args)
    return error
