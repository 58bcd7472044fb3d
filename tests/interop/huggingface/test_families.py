"""Tiny random models of each family: the same logits and tokens there and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interop.huggingface import test_checkpoint as checkpoints
from tests.interop.huggingface import test_encoders as encoders
from weft.functional import top_k_logits
from weft.interop.huggingface import FAMILIES, from_huggingface, to_huggingface
from weft.interop.huggingface.settings import Settings

transformers = checkpoints.transformers
IDS = checkpoints.IDS
GROUPED = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROPE_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [1.0, 3.0],
    "original_max_position_embeddings": 8,
}
ROPE_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
ROPE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.5,
    "original_max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SLIDING, FULL = "sliding_attention", "full_attention"

# Class of transformers and settings of each model.
MODELS = {
    "gpt2-untied": ("GPT2LMHeadModel", {**checkpoints.GPT2, "tie_word_embeddings": False}),
    "llama-dynamic": (
        "LlamaForCausalLM",
        {**GROUPED, "max_position_embeddings": 8, "rope_parameters": ROPE_DYNAMIC},
    ),
    "qwen2-windows": (
        "Qwen2ForCausalLM",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3-yarn-windows": (
        "Qwen3ForCausalLM",
        {
            **GROUPED,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "rope_parameters": ROPE_YARN,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": [FULL, SLIDING] * 2,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {**GROUPED, "sliding_window": 6}),
    "phi3-longrope-partial": (
        "Phi3ForCausalLM",
        {
            **GROUPED,
            "hidden_size": 32,
            "original_max_position_embeddings": 8,
            "rope_parameters": {**ROPE_LONG, "partial_rotary_factor": 0.5},
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            **GROUPED,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {**GROUPED, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**GROUPED, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 4},
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            **GROUPED,
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": [SLIDING, FULL],
        },
    ),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4, "sliding_window": 5}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {
            **GROUPED,
            **EXPERTS,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**GROUPED, **EXPERTS, "head_dim": 8}),
}
NEOX = {name: value for name, value in GROUPED.items() if name != "num_key_value_heads"}
MODELS |= {
    # Half of the eight dimensions of a head are rotated.
    "gpt_neox-parallel": ("GPTNeoXForCausalLM", {**NEOX, "hidden_size": 32, "rotary_pct": 0.5}),
    "gpt_neox-sequential": (
        "GPTNeoXForCausalLM",
        {
            **NEOX,
            "use_parallel_residual": False,
            "rotary_pct": 1.0,
            "hidden_act": "gelu_fast",
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
}
MODELS["qwen3_moe"][1]["norm_topk_prob"] = True


@pytest.fixture(scope="module")
def references(transformers, tmp_path_factory):
    """Makes the reference of one of `MODELS` by name."""
    import torch

    @functools.cache
    def make(name):
        class_name, settings = MODELS[name]
        cls = getattr(transformers, class_name)
        torch.manual_seed(0)
        # Their attention of "sdpa" ignores bounds of logits.
        model = cls(cls.config_class(**settings, attn_implementation="eager")).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        logits = checkpoints.logits_of(model, IDS)  # first: it remembers the longest sequence
        greedy = checkpoints.greedy_of(model, IDS[:, :5])
        if name == "llama-dynamic":
            # Keys in their cache keep the frequencies of earlier steps.
            greedy = model.generate(
                torch.tensor(IDS[:, :5]), max_new_tokens=8, do_sample=False
            ).numpy()
        return checkpoints.Reference(folder, logits, greedy)

    return make


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_match_there_and_back(references, transformers, name, tmp_path):
    reference = references(name)
    cfg, params = from_huggingface(reference.folder)
    np.testing.assert_allclose(checkpoints.logits(cfg, params), reference.logits, atol=1e-4)

    outputs = checkpoints.run(
        cfg.clone(),
        params,
        "sample_decode",
        input_batch={
            "prefix": jnp.asarray(IDS[:, :5], jnp.int32),
            "prefix_len": jnp.asarray([5, 5]),
        },
        max_sequence_length=reference.greedy.shape[1] - 1,
        logits_modifier=top_k_logits(1, break_ties="smallest_index"),
    )
    sequences = np.asarray(outputs.sequences[:, 0])
    for sequence, greedy in zip(sequences, reference.greedy[:, 1:], strict=True):
        ends = np.flatnonzero(greedy[4:] == 2)
        length = len(greedy) if not len(ends) else 4 + ends[0]
        np.testing.assert_array_equal(sequence[:length], greedy[:length])

    to_huggingface(tmp_path, cfg, params, base=reference.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(model).__name__ == MODELS[name][0]
    np.testing.assert_array_equal(checkpoints.logits_of(model.eval(), IDS), reference.logits)
    # A model without a base is written as the first family that computes the same.
    again = tmp_path / "again"
    to_huggingface(again, cfg, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(again, attn_implementation="eager")
    np.testing.assert_allclose(
        checkpoints.logits_of(model.eval(), IDS), reference.logits, atol=1e-4
    )


def test_numbers_that_are_not_finite_are_named(tmp_path, caplog):
    settings = {**GROUPED, "model_type": "llama", "num_hidden_layers": 1}
    cfg = FAMILIES["llama"].read(Settings(settings))
    model = checkpoints.instantiate(cfg)
    params = model.initialize_parameters_recursively(jax.random.key(0))
    table = params["decoder"]["emb"]["token_emb"]
    table["weight"] = table["weight"].at[3, :2].set(jnp.array([jnp.nan, jnp.inf]))
    to_huggingface(tmp_path, cfg, params)
    from_huggingface(tmp_path)
    (message,) = [record.getMessage() for record in caplog.records if "NaN" in record.msg]
    assert message.startswith("2 of the 640 numbers of 'model.embed_tokens.weight' in ")
    assert message.endswith(" are NaN or infinite.")


def test_every_family_has_a_model():
    models = [*MODELS, *checkpoints.MODELS, *encoders.MODELS]
    names = {name.split("-")[0] for name in models}
    # Sequence-to-sequence models have a test of their own.
    assert names | {"t5"} == FAMILIES.keys()
