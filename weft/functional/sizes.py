"""Checks of sizes that users pass: of features, tables, windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.errors import ArgumentValueError


def check_sizes(layer: str, **sizes: Any) -> None:
    """Raises unless each size is a positive integer, a sequence of these, or None.

    Args:
        layer: the layer's name, for errors.
        **sizes: by the names that users know.

    Raises:
        ArgumentValueError: naming the layer and the size.

    >>> check_sizes("Dense", features=3, kernel_size=(2, 2), num_groups=None)
    """
    for name, value in sizes.items():
        for size in value if isinstance(value, tuple | list) else (value,):
            if type(size) is int and size > 0:
                continue
            is_integer = isinstance(size, int | np.integer) and not isinstance(size, bool)
            if (is_integer and size <= 0) or isinstance(size, bool | float | complex | str):
                raise ArgumentValueError(
                    f"{layer} was given {name}={value!r}; expected "
                    + ("positive integers." if value is not size else "a positive integer.")
                )
