"""The table of families by the model type of `config.json`."""

from weft.interop.huggingface.families.bert import BERT
from weft.interop.huggingface.families.gemma2 import GEMMA2
from weft.interop.huggingface.families.gemma3_text import GEMMA3_TEXT
from weft.interop.huggingface.families.gpt2 import GPT2
from weft.interop.huggingface.families.gpt_neox import GPT_NEOX
from weft.interop.huggingface.families.granite import GRANITE
from weft.interop.huggingface.families.llama import LLAMA
from weft.interop.huggingface.families.mistral import MISTRAL
from weft.interop.huggingface.families.mixtral import MIXTRAL
from weft.interop.huggingface.families.olmo2 import OLMO2
from weft.interop.huggingface.families.phi3 import PHI3
from weft.interop.huggingface.families.qwen2 import QWEN2
from weft.interop.huggingface.families.qwen2_moe import QWEN2_MOE
from weft.interop.huggingface.families.qwen3 import QWEN3
from weft.interop.huggingface.families.qwen3_moe import QWEN3_MOE
from weft.interop.huggingface.families.smollm3 import SMOLLM3
from weft.interop.huggingface.families.t5 import T5
from weft.interop.huggingface.families.vit import VIT
from weft.interop.huggingface.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        GPT2,
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        PHI3,
        GRANITE,
        OLMO2,
        SMOLLM3,
        GEMMA2,
        GEMMA3_TEXT,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        GPT_NEOX,
        T5,
        BERT,
        VIT,
    )
}
"""The families of models. If several have the same model, it is written as the first of them."""
