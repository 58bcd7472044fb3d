import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.config import REQUIRED, Required, config_class
from weft.core.axis_rules import logical_axis_rules
from weft.errors import (
    InvalidDescendantError,
    LogicalAxisError,
    MissingPrngKeyError,
    MissingStateError,
    ParameterInitError,
    ParameterSpecError,
)
from weft.hierarchy.base_layer import (
    BaseLayer,
    CompositeTensorStats,
    DefaultTensorStats,
    ParameterNoise,
    ParameterSpec,
    RedirectToSharedModule,
    RematSpec,
    TensorMaxAbs,
    TensorRMSNorm,
    TensorStats,
    initialize_stacked,
    no_remat,
    stacked_parameter_specs,
)
from weft.hierarchy.layers import Linear
from weft.hierarchy.layers.embedding import Embedding
from weft.hierarchy.module import functional
from weft.hierarchy.module import functional as F
from weft.hierarchy.param_init import ConstantInitializer, DefaultInitializer, GaussianInitializer


class Affine(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        dim: Required[int] = REQUIRED
        names: tuple = ("weight", "bias")

    def _create_layer_parameter_specs(self):
        dim = self.config.dim
        shapes = {"weight": (dim, dim)}
        return {
            name: ParameterSpec(
                shape=shapes.get(name, (dim,)),
                mesh_axes=self.config.param_partition_spec if name == "weight" else None,
            )
            for name in self.config.names
        }

    def forward(self, x):
        y = jnp.sin(x @ self.parameters["weight"]) + self.parameters["bias"][None]
        self._add_tensor_stats("y", y)
        return self._remat_name(y, "y")

    @no_remat
    def kept(self, x):
        return jnp.sin(x)

    def noise(self):
        return self.require_prng_key("noise")

    def missing(self):
        return self.parameters["wieght"]


class Pair(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        first: Affine.Config = Affine.default_config()
        second: Affine.Config = Affine.default_config()

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("first", cfg.first.set(dim=2))
        self._add_child("second", cfg.second.set(dim=2))

    def forward(self, x):
        return self.second(self.first(x))

    def kept(self, x):
        return self.first.kept(x)


def make(**kwargs):
    return Pair.default_config().set(name="pair", **kwargs).instantiate(parent=None)


def forward(layer, params, x, *, is_training=True, method="forward"):
    return functional(
        layer, jax.random.key(0), params, (x,), method=method, is_training=is_training
    )


def test_specs_are_complete_and_nested():
    specs = make(
        dtype=jnp.bfloat16, first=Affine.default_config().set(param_partition_spec=(None, "model"))
    ).create_parameter_specs_recursively()
    spec = specs["first"]["weight"]
    assert (spec.shape, spec.dtype) == ((2, 2), jnp.bfloat16)
    assert spec.mesh_axes == PartitionSpec(None, "model")
    assert specs["second"]["weight"].mesh_axes == PartitionSpec(None, None)
    assert spec.fans() == {"fan_in": 2, "fan_out": 2, "fan_avg": 2}
    assert spec.initializer.debug_string(name="weight", axes=spec.fan_axes) == (
        "uniform(-sqrt(3 * 1.0 / fan_avg), sqrt(3 * 1.0 / fan_avg))"
    )


def test_parameter_depends_on_its_path():
    key = jax.random.key(0)
    alone = make().initialize_parameters_recursively(key)
    reordered = make(first=Affine.default_config().set(names=("bias", "other_bias", "weight")))
    again = reordered.initialize_parameters_recursively(key)
    np.testing.assert_array_equal(alone["first"]["weight"], again["first"]["weight"])
    np.testing.assert_array_equal(alone["second"]["weight"], again["second"]["weight"])
    assert jnp.abs(alone["first"]["weight"] - alone["second"]["weight"]).min() > 0
    np.testing.assert_array_equal(alone["first"]["bias"], [0, 0])


class Dtypes(BaseLayer):
    """Layer that says in which dtypes it computes."""

    def _create_layer_parameter_specs(self):
        return {"w": ParameterSpec(()), "count": ParameterSpec((), is_state=True)}

    def forward(self, x, ids):
        w, count = self.parameters["w"], self.parameters["count"]
        self.add_module_output("seen", [v.dtype.name for v in (x, ids, w, count)])
        return x, ids


class Nest(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        plain: Dtypes.Config = Dtypes.default_config()
        own: Dtypes.Config = Dtypes.default_config()

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("plain", cfg.plain)
        self._add_child("own", cfg.own)

    def forward(self, x, ids):
        x, ids = self.plain(x, ids=ids)
        return self.own(x, ids)


@pytest.mark.parametrize("remat", [None, RematSpec()])
def test_layers_compute_in_their_compute_dtype(remat):
    half = ["bfloat16", "int32", "bfloat16", "float32"]
    full = ["float32", "int32", "float32", "float32"]

    def run(**kwargs):
        layer = Nest.default_config().set(name="nest", remat_spec=remat, **kwargs)
        params = {name: {"w": jnp.ones(()), "count": jnp.ones(())} for name in ("plain", "own")}
        (x, ids), outputs = functional(
            layer.instantiate(parent=None),
            jax.random.key(0),
            params,
            (jnp.ones(2), jnp.ones(2, jnp.int32)),
            is_training=True,
            drop_output_collections=(),
        )
        assert ids.dtype == jnp.int32
        seen = outputs.module_outputs
        return seen["plain"]["seen"], seen["own"]["seen"], x.dtype.name

    own = Dtypes.default_config().set(compute_dtype=jnp.float32)
    assert run() == (full, full, "float32")
    assert run(compute_dtype="bfloat16") == (half, half, "bfloat16")
    assert run(compute_dtype="bfloat16", output_dtype="float32") == (half, half, "float32")
    # A layer inside has the last word, and returns what the layers around it compute in.
    assert run(compute_dtype="bfloat16", own=own) == (half, full, "bfloat16")
    kept = own.clone(output_dtype=jnp.float32)
    assert run(compute_dtype="bfloat16", own=kept) == (half, full, "float32")
    assert run(own=Dtypes.default_config().set(compute_dtype="bfloat16")) == (
        full,
        half,
        "bfloat16",
    )


def test_dtype_and_init_default_to_the_parent():
    init = DefaultInitializer.default_config().set(
        init_by_param_name={".*weight": ConstantInitializer.default_config().set(value=3.0)}
    )
    layer = make(
        param_init=init,
        dtype=jnp.bfloat16,
        second=Affine.default_config().set(
            dtype=jnp.float16,
            param_init=DefaultInitializer.default_config().set(
                init_by_param_name={".*": GaussianInitializer.default_config().set(std=0.1)}
            ),
        ),
    )
    params = layer.initialize_parameters_recursively(jax.random.key(0))
    assert params["first"]["weight"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(params["first"]["weight"], np.full((2, 2), 3))
    assert params["second"]["weight"].dtype == jnp.float16
    assert jnp.abs(params["second"]["bias"]).min() > 0


def test_prebuilt_values_are_used_and_checked():
    layer, key = make(), jax.random.key(0)
    given = {"first": {"weight": jnp.eye(2), "bias": None}}
    params = layer.initialize_parameters_recursively(key, prebuilt=given)
    drawn = layer.initialize_parameters_recursively(key)
    np.testing.assert_array_equal(params["first"]["weight"], np.eye(2))
    np.testing.assert_array_equal(params["second"]["weight"], drawn["second"]["weight"])
    wrong = {"first": {"weight": jnp.eye(3)}}
    with pytest.raises(ParameterSpecError, match=r"pair.first.weight has the shape \(3, 3\); exp"):
        layer.initialize_parameters_recursively(key, prebuilt=wrong)
    with pytest.raises(ParameterSpecError, match=r"\['frist'\] for pair.*Did you mean 'first'"):
        layer.initialize_parameters_recursively(key, prebuilt={"frist": {}})


def test_remat_changes_residuals_but_not_values():
    x = jnp.ones((1, 2))
    counts = []
    for spec in (None, RematSpec(policy=jax.checkpoint_policies.nothing_saveable)):
        layer = make(first=Affine.default_config().set(remat_spec=spec))
        params = layer.initialize_parameters_recursively(jax.random.key(0))
        loss = lambda p: forward(layer, p, x)[0].sum()  # noqa: B023, E731
        grads = jax.grad(loss)(params)
        counts.append(str(jax.make_jaxpr(jax.grad(loss))(params)).count("dot_general["))
        if spec is None:
            expected = grads
    np.testing.assert_allclose(grads["first"]["weight"], expected["first"]["weight"], rtol=1e-6)
    assert counts[1] == counts[0] + 1
    assert "remat" not in str(jax.make_jaxpr(lambda x: forward(layer, params, x, method="kept"))(x))
    evaluation = jax.make_jaxpr(lambda p: forward(layer, p, x, is_training=False)[0])(params)
    assert "remat" not in str(evaluation)


class Double(ParameterNoise):
    def apply(self, prng_key, params):
        return jax.tree.map(lambda p: p + jax.random.normal(prng_key, p.shape), params)


def test_noise_is_applied_where_configured():
    layer = make(second=Affine.default_config().set(param_noise=Double.default_config()))
    params = layer.initialize_parameters_recursively(jax.random.key(0))
    noisy = layer.apply_parameter_noise_recursively(jax.random.key(1), params)
    np.testing.assert_array_equal(noisy["first"]["weight"], params["first"]["weight"])
    assert jnp.abs(noisy["second"]["weight"] - params["second"]["weight"]).min() > 0


def test_errors_name_the_missing_entry():
    layer = make()
    params = layer.initialize_parameters_recursively(jax.random.key(0))
    with pytest.raises(
        MissingStateError, match=r"has no parameter 'wieght'.*Did you mean 'weight'"
    ):
        functional(layer.first, None, params["first"], (), method="missing", is_training=False)
    with pytest.raises(MissingPrngKeyError, match=r"noise of pair\.first needs a PRNG key"):
        functional(layer.first, None, params["first"], (), method="noise", is_training=False)
    odd = make(first=Affine.default_config().set(names=("kernel",)))
    with pytest.raises(ParameterInitError, match="no initializer for a parameter named 'kernel'"):
        odd.initialize_parameters_recursively(jax.random.key(0))


def test_duplicate_logical_name_error_names_the_parameter():
    cfg = Affine.default_config().set(name="square", dim=2, param_partition_spec=("wide", "wide"))
    layer = cfg.instantiate(parent=None)
    with (
        logical_axis_rules([("wide", "data")]),
        pytest.raises(LogicalAxisError, match=r"square\.weight: the logical axis 'wide' is there"),
    ):
        layer.create_parameter_specs_recursively()


def test_parameter_and_child_name_conflict():
    class Clash(Pair):
        def _create_layer_parameter_specs(self):
            return {"first": ParameterSpec(shape=())}

    layer = Clash.default_config().set(name="clash").instantiate(parent=None)
    with pytest.raises(ParameterSpecError, match="both a parameter and a child named 'first'"):
        layer.create_parameter_specs_recursively()


@pytest.fixture(scope="module")
def layer():
    cfg = Linear.default_config().set(name="l", input_dim=2, output_dim=3)
    return cfg.instantiate(parent=None)


KEY = jax.random.PRNGKey(0)


def test_specs_stand_for_values_elsewhere(layer):
    for sizes, initialize in (
        ((), lambda f: f),
        ((2,), lambda f: f),
        ((2,), jax.jit),
        ((3, 2), jax.jit),
    ):
        specs = stacked_parameter_specs(layer, sizes)
        made = initialize(
            lambda key, n=sizes, weight=specs["weight"]: initialize_stacked(
                layer, n, key, prebuilt={"weight": weight}
            )
        )(KEY)
        assert made["weight"] is None
        assert made["bias"].shape == specs["bias"].shape
    with pytest.raises(ParameterSpecError, match="weight has the shape"):
        initialize_stacked(layer, (2,), KEY, prebuilt={"weight": ParameterSpec((2, 9, 9))})


def test_prebuilt_layer_mismatch(layer):
    with pytest.raises(ParameterSpecError, match="expected a leading axis of 3"):
        initialize_stacked(layer, (3,), KEY, prebuilt={"bias": jnp.zeros((2, 3))})


VALUE = jnp.array([3.0, -4.0])


def summaries(cfg):
    stats = cfg.set(name="stats").instantiate(parent=None)
    return functional(stats, None, {}, ("x", VALUE), method="add_stats", is_training=True)[
        1
    ].summaries


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (TensorStats, {}),
        (TensorRMSNorm, {"rms_norm": np.sqrt(12.5)}),
        (TensorMaxAbs, {"max_abs": 4.0}),
        (DefaultTensorStats, {"rms_norm": np.sqrt(12.5), "max_abs": 4.0}),
    ],
)
def test_statistics(cls, expected):
    got = summaries(cls.default_config())
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6)


def test_summaries_are_named_by_their_statistics():
    got = summaries(
        CompositeTensorStats.default_config().set(
            tensor_stats={"a": TensorMaxAbs.default_config(), "b": TensorMaxAbs.default_config()}
        )
    )
    assert set(got) == {"a", "b"}


TIED_KEY = jax.random.key(0)


class Inner(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        head: RedirectToSharedModule.Config = RedirectToSharedModule.default_config()

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("head", cfg.head)

    def forward(self, x):
        return self.head(x)


class Tied(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        inner: Inner.Config = Inner.default_config()

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("emb", Embedding.default_config().set(num_embeddings=5, dim=3))
        self._share_with_descendants(self.emb, shared_module_name="shared_emb")
        self._add_child("inner", cfg.inner)

    def forward(self, ids):
        return self.inner(self.emb(ids))

    def through(self, x):
        return self.inner.head(x)


def make_tied(shared="shared_emb", **method_map):
    cfg = Tied.default_config().set(name="tied")
    cfg.inner.head.set(shared_module=shared, method_map=method_map)
    layer = cfg.instantiate(parent=None)
    return layer, layer.initialize_parameters_recursively(TIED_KEY)


def test_output_layer_with_the_weights_of_the_embedding():
    layer, params = make_tied(forward="attend")
    assert jax.tree.map(jnp.shape, params["emb"]) == {"weight": (5, 3)}
    assert not jax.tree.leaves(params["inner"])
    ids = jnp.array([[1, 4]])
    weight = params["emb"]["weight"]
    logits = jax.jit(lambda params: F(layer, None, params, (ids,), is_training=True)[0])(params)
    np.testing.assert_allclose(logits, weight[ids] @ weight.T, rtol=1e-4, atol=1e-6)


def test_module_that_is_not_shared_is_named():
    layer, params = make_tied(shared="emb")
    with pytest.raises(InvalidDescendantError, match=r"'emb' is not shared with tied\.inner\.head"):
        F(layer, None, params, (jnp.array([1]),), is_training=True, method="through")
