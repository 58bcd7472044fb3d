import pytest

from weft.errors import HuggingFaceConfigError
from weft.hierarchy.attention.rope import (
    DynamicNTKSinusoidalPositionalEmbedding,
    Llama3SinusoidalPositionalEmbedding,
    LongRoPESinusoidalPositionalEmbedding,
    RoFormerSinusoidalPositionalEmbedding,
    YaRNSinusoidalPositionalEmbedding,
)
from weft.interop.huggingface.settings import NO_PADDING, Settings, rotary_settings

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5],
    "long_factor": [1.0, 3.0],
    "attention_factor": 1.2,
    "original_max_position_embeddings": 4096,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "attention_factor": 1.2,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "original_max_position_embeddings": 32768,
    "truncate": True,
}


@pytest.mark.parametrize(
    ("rope", "kind"),
    [
        ({"rope_type": "default", "rope_theta": 1e6}, RoFormerSinusoidalPositionalEmbedding),
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            YaRNSinusoidalPositionalEmbedding,
        ),
        (YARN, YaRNSinusoidalPositionalEmbedding),
        ({**YARN, "truncate": False}, YaRNSinusoidalPositionalEmbedding),
        (LLAMA3, Llama3SinusoidalPositionalEmbedding),
        (DYNAMIC, DynamicNTKSinusoidalPositionalEmbedding),
        (LONG, LongRoPESinusoidalPositionalEmbedding),
    ],
    ids=["default", "linear", "yarn", "exact yarn", "llama3", "dynamic", "longrope"],
)
def test_rotary_positions_round_trip(rope, kind):
    cfg = Settings({"rope_parameters": rope}).rotary()
    assert isinstance(cfg, kind.Config)
    assert rotary_settings(cfg) == rope or rotary_settings(cfg) == pytest.approx(rope)


def test_factor_of_queries_and_keys():
    """As published: by mscale and mscale_all_dim, or by how far a context was extended."""
    yarn = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}
    del yarn["attention_factor"]
    written = rotary_settings(Settings({"rope_parameters": yarn}).rotary())
    assert written["attention_factor"] == pytest.approx(1.1386294 / 1.0693147)
    long = {key: value for key, value in LONG.items() if key != "attention_factor"}
    values = {"rope_scaling": long, "max_position_embeddings": 4096**2}
    assert Settings(values).rotary().attn_factor == pytest.approx(2**0.5)


def test_part_of_a_head_that_is_rotated():
    assert Settings({}).partial_rotary_factor() is None
    assert Settings({"partial_rotary_factor": 0.5}).partial_rotary_factor() == 0.5
    rope = {"rope_parameters": {"partial_rotary_factor": 0.25}}
    assert Settings(rope).partial_rotary_factor() == 0.25
    with pytest.raises(
        HuggingFaceConfigError, match=r"partial_rotary_factor=2, .* from 1e-06 to 1"
    ):
        Settings({"partial_rotary_factor": 2}).partial_rotary_factor()


def test_older_rope_theta_location():
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")
    cfg = Settings({"rope_scaling": scaling, "rope_theta": 5e5}).rotary()
    assert rotary_settings(cfg) == LLAMA3
    assert Settings({"rope_scaling": None, "rope_theta": 5e5}).rotary().theta == 5e5
    assert Settings({}).rotary().theta == 1e4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "spiral"}},
            r"rope_type='spiral', which has no .*'yarn'",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 0]}},
            "short_factor=0, .* can be a list of positive numbers",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": 1.0}},
            "short_factor=1.0, .* can be a list of numbers",
        ),
        ({"rope_parameters": {**YARN, "truncate": 1}}, "truncate=1.* can be true or false"),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_parameters lacks 'factor', which rope_type='linear' has. Add it",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_parameters lacks 'factor', which type='linear' has. Add it",
        ),
    ],
    ids=["kind", "factor of 0", "no list", "truncate", "factor", "old name"],
)
def test_unsupported_rotary_positions(values, message):
    with pytest.raises(HuggingFaceConfigError, match=message):
        Settings(values).rotary()


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({"rope_type": "linear"}, "factor"),
        (YARN, "factor"),
        (YARN, "beta_fast"),
        (YARN, "beta_slow"),
        (LLAMA3, "factor"),
        (LLAMA3, "low_freq_factor"),
    ],
)
def test_rotary_factors_of_zero_are_rejected(rope, name):
    with pytest.raises(HuggingFaceConfigError, match=f"{name}=0, .* can be a number from 1e-06 to"):
        Settings({"rope_parameters": {**rope, name: 0}}).rotary()
    with pytest.raises(HuggingFaceConfigError, match=r"rope_theta=0, .* can be a number from 1 to"):
        Settings({"rope_parameters": {**rope, "rope_theta": 0}}).rotary()


def test_missing_or_unknown_settings():
    s = Settings({"model_type": "llama", "hidden_act": "mish", "a": 2}, "x/config.json")
    assert s.get("b", 3) == 3
    with pytest.raises(
        HuggingFaceConfigError, match=r"x/config.json lacks 'b', which model_type='llama' has. Add"
    ):
        s.get("b")
    with pytest.raises(HuggingFaceConfigError, match=r"^config.json lacks 'b'. Add it, or copy th"):
        Settings({}).get("b")
    s.require("a", 1, 2)
    with pytest.raises(
        HuggingFaceConfigError, match=r"a=2, which .* can be 1 or 3. Choose another"
    ):
        s.require("a", 1, 3)
    with pytest.raises(HuggingFaceConfigError, match=r"in Weft: a can be left out. Choose another"):
        s.require("a")
    with pytest.raises(HuggingFaceConfigError, match=r"hidden_act='mish'.*can be 'silu' or"):
        s.activation("hidden_act", "silu")
    assert s.activation("other", "gelu_new") == "nn.gelu"


def test_special_tokens():
    tokens = Settings({"eos_token_id": [7, 8], "pad_token_id": 3}).special_tokens()
    assert tokens == {"pad_token_id": 3, "eos_token_id": (7, 8)}
    tokens = Settings({"eos_token_id": [7], "pad_token_id": None}).special_tokens()
    assert tokens == {"pad_token_id": -1, "eos_token_id": 7}
    assert set(Settings({}).special_tokens().values()) == {NO_PADDING}


def test_widths_that_no_model_has_are_refused():
    """Index arrays of 10**9 elements were made for the parts of a head."""
    with pytest.raises(HuggingFaceConfigError, match=r"head_dim=1000000000, .* from 1 to 16777216"):
        Settings({"head_dim": 10**9}).size("head_dim")
