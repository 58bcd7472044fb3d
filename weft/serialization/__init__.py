"""Trees of state as dicts of plain values, and those as bytes that Flax reads and writes as well.

`to_bytes` and `from_bytes` do both steps at once.
"""

from weft.serialization.packing import (
    from_bytes,
    msgpack_restore,
    msgpack_serialize,
    to_bytes,
)
from weft.serialization.state_dicts import (
    current_path,
    from_state_dict,
    is_serializable,
    register_serialization_state,
    to_state_dict,
)

__all__ = [
    # Whole trees to bytes and back.
    "to_bytes",
    "from_bytes",
    # Trees to state dicts and back.
    "to_state_dict",
    "from_state_dict",
    "register_serialization_state",
    "is_serializable",
    "current_path",
    # State dicts to bytes and back.
    "msgpack_serialize",
    "msgpack_restore",
]
