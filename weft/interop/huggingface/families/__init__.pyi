from weft.interop.huggingface.families.table import FAMILIES as FAMILIES
