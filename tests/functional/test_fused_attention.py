import importlib.machinery
import logging
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError
from weft.functional import (
    AttentionMask,
    alibi_slopes,
    causal_mask,
    dot_product_attention,
    fused_attention,
    left_right_window_mask,
)
from weft.functional.arrays import on_one_cpu, platform
from weft.functional.linear_cross_entropy import num_chunks

SHAPE = (1, 64, 4, 16)
X = jax.random.normal(jax.random.key(0), SHAPE)
HALF = X.astype(jnp.bfloat16)
IDS = jnp.zeros((1, 64), jnp.int32)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ArgumentValueError, match=r"'flash' of attention; expected one of 'plain'"):
        unknown: Any = "flash"
        dot_product_attention(X, X, X, implementation=unknown)


@pytest.mark.parametrize(
    ("x", "options", "reason"),
    [
        (X, {}, "computes in float16 and bfloat16, and the query is float32"),
        (HALF, {"logit_cap": 1.0}, "no caps of logits"),
        (HALF, {"logit_sink": jnp.zeros(4)}, "no logit sinks"),
        (HALF, {"alibi_slopes": alibi_slopes(4)}, "no ALiBi"),
        (HALF, {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "no dropout"),
        (HALF, {"mask": AttentionMask(query_segments=IDS)}, "no segment ids"),
        (HALF, {"mask": AttentionMask(causal_mask, IDS, IDS)}, "positions count from 0"),
        (HALF, {"mask": lambda q, k: q > k}, "masks are windows, not other functions"),
        (HALF, {"mask": left_right_window_mask(3, 3)}, "windows are causal"),
        (HALF, {"bias": jnp.zeros((1, 1, 1, 64))}, "a row per query and a column per key"),
    ],
)
def test_what_cudnn_cannot_compute_is_said(x, options, reason):
    with pytest.raises(ArgumentValueError, match=f"'cudnn' cannot compute.*{reason}.*\"plain\""):
        dot_product_attention(x, x, x, implementation="cudnn", **options)


def test_cudnn_is_called_with_the_structure_of_the_mask(monkeypatch):
    # The number of pairs, and so the choice, is that of a long sequence.
    calls = []

    def as_cudnn(query, key, value, bias, mask, *, implementation, **options):
        assert implementation == "cudnn" and bias is mask is None
        calls.append({name: x for name, x in options.items() if name != "scale"})
        return value

    monkeypatch.setattr(jax.nn, "dot_product_attention", as_cudnn)
    for mask in (None, causal_mask, left_right_window_mask(9, 0)):
        dot_product_attention(HALF, HALF, HALF, mask=mask, implementation="cudnn")
    assert calls == [
        {"is_causal": False},
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (9, 0)},
    ]


def test_the_program_for_a_gpu_has_the_fused_call(monkeypatch):
    cudnn = types.SimpleNamespace(cudnn_get_version=lambda: 91000)
    stablehlo = sys.modules[jax.nn.dot_product_attention.__module__].cudnn_dot_product_attention
    monkeypatch.setitem(
        sys.modules[stablehlo.__module__].__dict__, "cuda_versions", cudnn
    )  # what says whether cuDNN is there

    def loss(x):
        y = dot_product_attention(x, x, x, mask=causal_mask, implementation="cudnn")
        return y.astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss)).trace(HALF).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in lowered and "__cudnn$fmhaSoftmaxBackward" in lowered
    assert "64x64" not in lowered


def test_choices_follow_the_devices_of_the_mesh(monkeypatch):
    tpu = jax.sharding.AbstractDevice("TPU v5", None, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=tpu)
    used = []
    monkeypatch.setitem(fused_attention._KERNELS, "tokamax", lambda call: used.append(1) or X)
    monkeypatch.setattr(fused_attention, "_MANY_PAIRS", 64)
    with jax.sharding.use_abstract_mesh(mesh):
        assert (platform(), on_one_cpu()) == ("tpu", False)
        jax.eval_shape(lambda x: dot_product_attention(x, x, x, mask=causal_mask), X)
        tpu_chunks = num_chunks(2**12, 32_000)
    assert used == [1]
    assert (platform(), on_one_cpu()) == ("cpu", True)
    assert tpu_chunks != num_chunks(2**12, 32_000)


def test_what_a_kernel_cannot_compute_is_done_in_blocks_and_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(fused_attention, "_MANY_PAIRS", 64)
    monkeypatch.setitem(sys.modules, "tokamax", None)
    fused_attention._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger=fused_attention.__name__):
        for _ in range(2):
            y = dot_product_attention(X, X, X, mask=causal_mask)
    plain = dot_product_attention(X, X, X, mask=causal_mask, implementation="plain")
    np.testing.assert_allclose(y, plain, atol=1e-5)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "cudnn cannot compute this attention",
        "tokamax cannot compute this attention",
    ]


def test_tokamax_is_asked_for_its_kernels(monkeypatch):
    asked = {}

    def attend(query, key, value, bias, mask, **options):
        asked.update(options)
        return value

    module = types.ModuleType("tokamax")
    module.__spec__ = importlib.machinery.ModuleSpec("tokamax", None)
    monkeypatch.setattr(module, "dot_product_attention", attend, raising=False)
    monkeypatch.setitem(sys.modules, "tokamax", module)
    mask = left_right_window_mask(5, None)
    options = {"mask": mask, "logit_cap": 2.0, "implementation": "tokamax"}
    dot_product_attention(X, X, X, **options)
    assert asked["local_window_size"] == (5, 64) and not asked["is_causal"]
    assert asked["logits_soft_cap"] == 2.0 and asked["implementation"] == ("mosaic", "triton")
    with pytest.raises(ArgumentValueError, match="caps the sum of logits and bias"):
        dot_product_attention(X, X, X, bias=jnp.zeros((1, 1, 64, 64)), **options)


def test_tokamax_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(
        ArgumentValueError, match=r"not installed \(pip install 'weft-jax\[kernels\]'"
    ):
        dot_product_attention(X, X, X, implementation="tokamax")


@pytest.mark.parametrize("options", [{}, {"mask": causal_mask, "logit_cap": 2.0}])
def test_tokamax_computes_the_same(monkeypatch, options):
    pytest.importorskip("tokamax", reason="the extra `kernels`")
    # Its kernels run on GPUs and TPUs; this form of it on any device, by the same arguments.
    monkeypatch.setattr(fused_attention, "_TOKAMAX_KERNELS", ("xla_chunked",))
    y = dot_product_attention(X, X, X, implementation="tokamax", **options)
    plain = dot_product_attention(X, X, X, implementation="plain", **options)
    np.testing.assert_allclose(y, plain, atol=1e-5)
