"""Trees of state as dicts of plain values, and as bytes in Flax's format.

`to_bytes` and `from_bytes` combine both steps. `save_safetensors` and `load_safetensors` exchange
arrays with other programs.
"""

from typing import TYPE_CHECKING

from weft._on_demand import on_demand

if TYPE_CHECKING:
    from weft.serialization.packing import (
        from_bytes,
        msgpack_restore,
        msgpack_serialize,
        to_bytes,
    )
    from weft.serialization.safetensors_files import (
        TensorFiles,
        load_safetensors,
        save_safetensors,
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
    # Arrays to safetensors files and back.
    "save_safetensors",
    "load_safetensors",
    "TensorFiles",
]

__getattr__, __dir__ = on_demand(
    __name__,
    {
        "packing": ("from_bytes", "msgpack_restore", "msgpack_serialize", "to_bytes"),
        "safetensors_files": ("TensorFiles", "load_safetensors", "save_safetensors"),
        "state_dicts": (
            *("current_path", "from_state_dict", "is_serializable"),
            *("register_serialization_state", "to_state_dict"),
        ),
    },
)
