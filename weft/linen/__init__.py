"""Linen: dataclass modules on scopes."""

from weft.linen.calls import apply, init, init_with_output, merge_param, share_scope
from weft.linen.methods import compact, compact_name_scope, nowrap
from weft.linen.module import Module
from weft.linen.running import (
    disable_named_call,
    enable_named_call,
    intercept_methods,
    override_named_call,
)
