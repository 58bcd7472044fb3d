"""Phi-3: as Llama, with fused projections (Abdin et al., 2024)."""

from typing import Any

from weft.interop.huggingface import family, rotary_decoder
from weft.interop.huggingface.rotary_decoder import Parts
from weft.interop.huggingface.settings import MAX_SIZE, Settings


def parts(s: Settings) -> Parts:
    """Returns the parts of this family's layers."""
    window = None
    if s.get("sliding_window", None) is not None:
        window = s.size("sliding_window", most=MAX_SIZE)
    return Parts(
        num_kv_heads=s.size(
            "num_key_value_heads", s.size("num_attention_heads")
        ),
        windows=[window] * rotary_decoder.num_layers(s),
        partial_rope_factor=s.partial_rotary_factor(),
        is_fused=True,
        default_eps=1e-5,
        residual_dropout="resid_pdrop",
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    layer = family.layers_of(cfg.decoder.transformer)[0]
    dropout = layer.self_attention.dropout
    values = {
        **rotary_decoder.write(cfg),
        "model_type": "phi3",
        "sliding_window": rotary_decoder.windows_of(cfg)[0],
        "resid_pdrop": family.dropout_rate(cfg.decoder, dropout),
    }
    # Theirs reads it there.
    rope = values["rope_parameters"]
    length = rope.get("original_max_position_embeddings")
    if length is not None:
        values["original_max_position_embeddings"] = length
    return values


PHI3 = rotary_decoder.rotary_family("phi3", "Phi3ForCausalLM", parts, write)
