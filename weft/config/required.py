"""`REQUIRED`: placeholder of a field that must be set."""

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Union

from weft.errors import RequiredFieldMissingError

T = TypeVar("T")


class RequiredFieldValue:
    """Type of `REQUIRED`, its only instance.

    It is false, so that `cfg.x or fallback` treats an unset field as absent.
    """

    _only: "RequiredFieldValue | None" = None

    def __new__(cls) -> "RequiredFieldValue":
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __bool__(self) -> bool:
        return False

    def __copy__(self) -> "RequiredFieldValue":
        return self

    def __deepcopy__(self, memo: dict) -> "RequiredFieldValue":
        return self

    def __reduce__(self) -> str:
        return "REQUIRED"

    def __repr__(self) -> str:
        return "REQUIRED"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RequiredFieldMissingError(
            "A config field that is still REQUIRED was called as a function. Set the field "
            "before the config is used."
        )


REQUIRED: Any = RequiredFieldValue()
"""Default of a field without a sensible one; `instantiate` raises an error for it."""

if TYPE_CHECKING:
    # Code reads required fields after they were set, so type checkers see the plain type.
    Required = Union[T, Any]  # noqa: UP007
else:
    Required = Union[T, RequiredFieldValue]  # noqa: UP007 - `T | X` has no subscript before 3.14
"""`Required[int]`: an int, or not yet set."""
