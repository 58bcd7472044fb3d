import jax
import jax.numpy as jnp
import numpy as np
import optax

from weft.hierarchy.module import InvocationContext, set_current_context
from weft.trainer import optimizers
from weft.trainer.optimizers.base import OptParam

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(3, 4)), "b": RNG.normal(size=4)}
GRADS = [jax.tree.map(lambda p: RNG.normal(size=p.shape), PARAMS) for _ in range(4)]


def increasing(step):
    return 0.5 + 0.1 * step


def adastar(**kwargs):
    defaults = {
        "learning_rate": 0.3,
        "gradient_ema_decay": 0.9,
        "gradient_ema_debias": True,
        "gradient_square_ema_decay": 0.95,
        "gradient_square_ema_debias": True,
        "eps": 1e-6,
        "eps_square": 0.0,
        "raw_update_clipping_threshold": None,
        "update_ema_decay": None,
        "update_ema_debias": False,
        "weight_decay": 0.01,
        "update_schedule": increasing,
    }
    return optimizers.adastar_optimizer(**{**defaults, **kwargs})


def trajectory(tx):
    params, state = PARAMS, None
    for grads in GRADS:
        wrapped = jax.tree.map(lambda p: OptParam(jnp.asarray(p)), params)
        state = tx.init(wrapped) if state is None else state
        context = InvocationContext(
            "root", parent=None, module=None, state={}, is_training=True, prng_key=None
        )
        with set_current_context(context):
            updates, state = tx.update(jax.tree.map(jnp.asarray, grads), state, wrapped)
        params = optax.apply_updates(params, updates)
    return params, context.get_summaries()


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), a[0], b[0])


def test_decoupled_adamw_is_a_special_case():
    adamw = optimizers.adamw_decoupled_optimizer(
        0.3, b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.01, update_schedule=increasing
    )
    assert_same(trajectory(adastar()), trajectory(adamw))


def test_adafactor_without_factors_is_a_special_case():
    adafactor = optimizers.adafactor_optimizer(
        0.3,
        b1=0.8,
        b2=0.95,
        multiply_by_parameter_scale=False,
        clipping_threshold=1.0,
        eps=1e-3,
        factored=False,
    )
    star = adastar(
        gradient_ema_decay=None,
        gradient_square_ema_debias=False,
        eps=0.0,
        eps_square=1e-3,
        raw_update_clipping_threshold=1.0,
        update_ema_decay=0.8,
        weight_decay=0.0,
        update_schedule=1.0,
    )
    assert_same(trajectory(star), trajectory(adafactor))


def test_raw_updates_are_clipped_before_they_are_averaged():
    loose, tight = (
        trajectory(adastar(raw_update_clipping_threshold=t, update_ema_decay=0.5, weight_decay=0.0))
        for t in (1e6, 1e-3)
    )
    largest = sum(0.3 * increasing(step) * 1e-3 for step in range(len(GRADS)))
    for name, start in PARAMS.items():
        assert np.sqrt(np.mean((tight[0][name] - start) ** 2)) <= largest * 1.001
        assert np.sqrt(np.mean((loose[0][name] - start) ** 2)) > largest


def test_norms_are_reported_if_verbose():
    quiet, talkative = trajectory(adastar())[1], trajectory(adastar(verbosity=1))[1]
    np.testing.assert_allclose(quiet["schedule_scale"], 0.9, rtol=1e-6)
    np.testing.assert_allclose(quiet["learning_rate"], 0.3)
    assert set(talkative) - set(quiet) == {
        "w/raw_update_norm",
        "b/raw_update_norm",
        "w/smoothed_update_norm",
        "b/smoothed_update_norm",
    }
