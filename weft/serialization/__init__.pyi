from weft.serialization.msgpack import (
    from_bytes as from_bytes, MAX_CHUNK_SIZE as MAX_CHUNK_SIZE, msgpack_restore as msgpack_restore,
    msgpack_serialize as msgpack_serialize, to_bytes as to_bytes,
)
from weft.serialization.safetensors import (
    load_safetensors as load_safetensors, save_safetensors as save_safetensors,
    TensorFiles as TensorFiles,
)
from weft.serialization.state_dicts import (
    current_path as current_path, from_state_dict as from_state_dict,
    is_serializable as is_serializable,
    register_serialization_state as register_serialization_state, to_state_dict as to_state_dict,
)
