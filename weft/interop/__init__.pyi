from weft.interop.hierarchy import as_hierarchy as as_hierarchy, InHierarchy as InHierarchy
from weft.interop.huggingface.tokenizer import (
    load_tokenizer as load_tokenizer, LoadedTokenizer as LoadedTokenizer,
)
from weft.interop.linen import as_linen as as_linen, InLinen as InLinen
from weft.interop.models import Model as Model, model_of as model_of
from weft.interop.nnx import as_nnx as as_nnx, InNNX as InNNX
