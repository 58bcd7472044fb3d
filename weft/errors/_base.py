"""The base of all errors."""

from typing import Any


class WeftError(Exception):
    """Base of every error that Weft raises on purpose.

    Errors can be pickled and copied, whatever their constructors take: a worker process hands them
    on, with message and attributes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would call the constructor with `args`, which here is the message it has written.
        return _rebuild, (type(self), self.args), self.__dict__.copy()


def _rebuild(cls: type[WeftError], args: tuple[Any, ...]) -> WeftError:
    """Makes an error past the constructors of Weft; only that of the builtin class is called."""
    error = cls.__new__(cls, *args)
    builtin = next(c for c in cls.__mro__ if not issubclass(c, WeftError))
    builtin.__init__(error, *args)
    return error
