import numpy as np

from weft.hierarchy.lora_adapter import LoraFusedQKVAdapter, LoraLinearAdapter


def test_the_delta_is_the_product_of_both_weights_for_each_layer_of_a_stack():
    cfg = LoraLinearAdapter.default_config().set(name="a", input_dim=4, output_dim=3)
    adapter = cfg.set(rank=2, alpha=1.0).instantiate(parent=None)
    rng = np.random.default_rng(0)
    down, up = rng.normal(size=(5, 4, 2)), rng.normal(size=(5, 2, 3))
    state = {"lora_down": {"weight": down}, "lora_up": {"weight": up}}
    got = adapter.delta(state, "...ir,...ro->...io")
    for i in range(5):
        np.testing.assert_allclose(got[i], 0.5 * down[i] @ up[i], rtol=1e-5, atol=1e-6)


def test_enabled_projections_come_in_one_order():
    cfg = LoraFusedQKVAdapter.default_config().set(name="a", input_dim=4, output_dim=4, num_heads=2)
    cfg.set(rank=2, alpha=1.0, enable_lora={"value": True, "key": False, "query": True})
    assert cfg.instantiate(parent=None).enabled() == ["query", "value"]
