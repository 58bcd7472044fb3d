"""Errors that Weft raises on purpose.

All derive from `WeftError` and from the builtin that a caller would expect (`ValueError`,
`TypeError`, ...). A message names what was wrong, where, what was expected and how to fix it.
"""

from weft.errors._base import *
from weft.errors._base import WeftError
from weft.errors._models import *
from weft.errors._training import *

FlaxError = WeftError
"""Alias of `WeftError`, for users of Flax."""
