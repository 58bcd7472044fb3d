import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import SummaryValueError
from weft.hierarchy.metrics import AudioSummary, CallbackSummary, ImageSummary, Summary
from weft.hierarchy.module import Module
from weft.hierarchy.module import functional as F


def double(x, *, plus):
    return 2 * x + plus


class Reporter(Module):
    def forward(self, x):
        self.add_summary("image", ImageSummary(x))
        self.add_summary("nested", {"double": CallbackSummary(double, (x[0, 0, 0],), {"plus": 1})})
        return x


def report(x):
    reporter = Reporter.default_config().set(name="reporter").instantiate(parent=None)
    return F(reporter, prng_key=None, state={}, inputs=(x,), is_training=False)[1].summaries


def test_summaries_are_outputs_of_a_jitted_step():
    x = np.random.default_rng(0).random((4, 4, 3)).astype(np.float32)
    summaries = jax.jit(report)(x)
    np.testing.assert_array_equal(summaries["image"].value(), x)
    np.testing.assert_allclose(summaries["nested"]["double"].value(), 2 * x[0, 0, 0] + 1)


def test_add_summary_validates_under_jit():
    with pytest.raises(SummaryValueError, match=r"shape \(4, 4, 7\).*1, 3 or 4 channels.*None"):
        jax.jit(report)(jnp.zeros((4, 4, 7)))
    with pytest.raises(SummaryValueError, match=r"int32; expected uint8.*astype"):
        report(jnp.zeros((4, 4, 1), jnp.int32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.uint8])
@pytest.mark.parametrize("shape", [(2, 2, 1), (3, 2, 2, 3), (1, 2, 2, 4)])
def test_images_of_every_usual_kind_are_valid(shape, dtype):
    ImageSummary(jnp.zeros(shape, dtype)).validate()


@pytest.mark.parametrize("value", [jnp.zeros(5), jnp.zeros((5, 1), jnp.int16)])
def test_audio_needs_floats_with_a_channel_axis(value):
    with pytest.raises(SummaryValueError, match=r"\[batch, time, channels\].*x\[..., None\]"):
        AudioSummary(value, sample_rate=8000).validate()


def test_sample_rate_belongs_to_the_structure():
    clip = AudioSummary(jnp.ones((1, 5, 1), jnp.bfloat16), sample_rate=8000)
    clip.validate()
    assert len(jax.tree.leaves(clip)) == 1
    assert jax.tree.map(lambda x: x * 2, clip).sample_rate == 8000


def test_evaler_keeps_first_of_non_additive_summaries():
    first, second = ImageSummary(jnp.zeros((1, 1, 1))), ImageSummary(jnp.ones((1, 1, 1)))
    assert first.accumulate(second) is first


def test_custom_summary():
    class Total(Summary):
        total: jax.Array

        def value(self):
            return self.total

        def accumulate(self, other):
            return self.replace(total=self.total + other.total)

    total = Total(jnp.array(1.0))
    total.validate()
    assert float(total.accumulate(Total(jnp.array(2.0))).value()) == 3.0
