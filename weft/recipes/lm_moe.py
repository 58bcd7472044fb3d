"""Default recipe with a mixture of experts in each layer.

Each token goes to two of eight experts with half the hidden dimensions of the dense layer: the same
arithmetic per token with four times the parameters. The router losses are part of the loss.
"""

from typing import Any

from weft.config import InstantiableConfig
from weft.hierarchy.attention import scaled_hidden_dim
from weft.hierarchy.causal_lm import metrics_config
from weft.hierarchy.layers import RMSNorm
from weft.hierarchy.mixture_of_experts import Top2Gating, TransformerFeedForwardMoE
from weft.hierarchy.param_init import DefaultInitializer
from weft.recipes.lm import _init, _model, _trainer

_NUM_LAYERS = 3


def lm_moe(data_dir: str | None = None) -> InstantiableConfig:
    """Returns a mixture-of-experts language model that trains in minutes on two cores."""
    cfg = _trainer(
        "runs/lm-moe",
        data_dir,
        model=_moe_model(),
        sequence_length=128,
        batch_size=16,
        max_step=400,
        peak_lr=6e-3,
        eval_every=200,
        save_every=200,
    )
    return cfg.set(mesh_shape=(-1, 1, 1), mesh_axis_names=("data", "expert", "model"))


def _moe_model() -> Any:
    model = _model(dim=96, num_layers=_NUM_LAYERS, num_heads=4, context=128)
    transformer = model.decoder.transformer
    transformer.layer.feed_forward = TransformerFeedForwardMoE.default_config().set(
        norm=RMSNorm.default_config(),
        hidden_dim=scaled_hidden_dim(4 / 3),
        activation=("nn.silu", "linear"),
        num_experts=8,
        # Each sequence of a batch is a group.
        num_groups=16,
        gating=Top2Gating.default_config().set(train_capacity_factor=2.5, eval_capacity_factor=4.0),
        load_balance_loss_weight=0.01,
        router_z_loss_weight=0.001,
        param_init=_moe_init(),
    )
    # By default a loop drops side outputs of its layers.
    transformer.repeat.drop_output.rules = [r"module_outputs(?!.*/aux_loss$).*"]
    return model.set(metrics=metrics_config(aux_loss_regex="decoder/transformer/.*/aux_loss"))


def _moe_init() -> Any:
    """Returns initializers: experts like dense layers, routers close to uniform."""
    by_name: dict[str, Any] = {}
    variances = {"gate_weight": 0.01, "wo_weight": 1 / (2 * _NUM_LAYERS)}
    for name, variance in variances.items():
        (initializer,) = _init(variance=variance).init_by_param_name.values()
        by_name[f".*{name}$"] = initializer
    return DefaultInitializer.default_config().set(
        init_by_param_name={**by_name, **_init(variance=1.0).init_by_param_name}
    )
