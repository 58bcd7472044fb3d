"""Mixtral: as Mistral, with a mixture of experts in each layer (Jiang et al., 2024)."""

from typing import Any

from weft.interop.huggingface import family, rotary_decoder
from weft.interop.huggingface.rotary_decoder import Experts, Parts
from weft.interop.huggingface.settings import MAX_EXPERTS, MAX_SIZE, Settings


def parts(s: Settings) -> Parts:
    """Returns the parts of this family's layers."""
    s.require("router_jitter_noise", 0, 0.0)
    window = None
    if s.get("sliding_window", None) is not None:
        window = s.size("sliding_window", most=MAX_SIZE)
    count = rotary_decoder.num_layers(s)
    return Parts(
        num_kv_heads=s.size("num_key_value_heads", 8),
        windows=[window] * count,
        rotaries=[s.rotary(theta=1e6)] * count,
        default_eps=1e-5,
        experts=Experts(
            is_sparse=[True] * count,
            num_experts=s.size("num_local_experts", 8, most=MAX_EXPERTS),
            num_experts_per_token=rotary_decoder.num_choices(
                s, s.size("num_local_experts", 8), 2
            ),
            hidden_dim=s.size("intermediate_size"),
            normalize_gates=True,
            name="block_sparse_moe",
            projection_names=("w1", "w3", "w2"),
        ),
    )


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model of this family."""
    layers = family.layers_of(cfg.decoder.transformer)
    experts, _ = rotary_decoder.experts_of(layers)
    return {
        **rotary_decoder.write(cfg),
        "model_type": "mixtral",
        "sliding_window": rotary_decoder.windows_of(cfg)[0],
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.gating.num_experts_per_token,
    }


MIXTRAL = rotary_decoder.rotary_family(
    "mixtral", "MixtralForCausalLM", parts, write
)
