from weft.interop.huggingface.checkpoint import (
    check_generates_text as check_generates_text, from_huggingface as from_huggingface,
    huggingface_model_config as huggingface_model_config,
    load_huggingface_params as load_huggingface_params, new_classifier as new_classifier,
    parameter_shapes as parameter_shapes, to_huggingface as to_huggingface,
)
from weft.interop.huggingface.contents import (
    folder_contents as folder_contents, FolderContents as FolderContents,
)
from weft.interop.huggingface.peft import from_peft as from_peft, to_peft as to_peft
from weft.interop.huggingface.tokenizer import (
    load_tokenizer as load_tokenizer, LoadedTokenizer as LoadedTokenizer,
)
from weft.interop.huggingface.families.table import FAMILIES as FAMILIES
