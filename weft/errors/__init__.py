"""Errors that Weft raises on purpose.

All derive from `WeftError` and from the builtin that a caller would expect (`ValueError`,
`TypeError`, ...). A message names what was wrong, where, what was expected and how to fix it.
"""

from weft.errors._base import WeftError as WeftError
from weft.errors._cells import *
from weft.errors._checkpoints import *
from weft.errors._configs import *
from weft.errors._features import *
from weft.errors._functional import *
from weft.errors._hierarchy import *
from weft.errors._interop import *
from weft.errors._launching import *
from weft.errors._layers import *
from weft.errors._layouts import *
from weft.errors._learning import *
from weft.errors._lifting import *
from weft.errors._modules import *
from weft.errors._objects import *
from weft.errors._scopes import *
from weft.errors._training import *
from weft.errors._trees import *
from weft.errors._weights import *

FlaxError = WeftError
"""Alias of `WeftError`, for users of Flax."""
