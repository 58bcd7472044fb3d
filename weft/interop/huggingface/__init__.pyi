from weft.interop.huggingface.checkpoint import (
    FAMILIES as FAMILIES, from_huggingface as from_huggingface,
    huggingface_model_config as huggingface_model_config,
    load_huggingface_params as load_huggingface_params, to_huggingface as to_huggingface,
)
