import jax
import jax.numpy as jnp
import numpy as np

import weft.hierarchy.metrics
from weft.hierarchy.metrics import AudioSummary, CallbackSummary, ImageSummary, Summary
from weft.trainer import summary
from weft.trainer.summary import due_summaries


def test_trainer_and_layer_summaries_are_the_same():
    for name in summary.__all__:
        assert getattr(summary, name) is getattr(weft.hierarchy.metrics, name)


class Doubled(Summary):
    x: jax.Array

    def value(self):
        return 2 * self.x


class Several(Summary):
    x: jax.Array

    def value(self):
        return {"a": self.x, "b": None, "c": {"d": "text"}}


def show(values, step=0, every=1, by_kind=None):
    return due_summaries(step, values, every_n_steps=every, every_n_steps_by_kind=by_kind)


def test_paths_kinds_and_values():
    values = {
        "text": "hello",
        "model": {"decoder": {"loss": jnp.array(2.5, jnp.bfloat16), "count": np.int32(3)}},
        "number": 1,
        "flag": jnp.array(True),
        "weights": jnp.arange(6).reshape(2, 3),
        "nothing": None,
        "empty": {},
        "doubled": Doubled(jnp.array(4.0)),
        "several": Several(jnp.array(1.0)),
    }
    shown = show(values)
    assert [(leaf.path, leaf.kind) for leaf in shown] == [
        ("doubled", "ScalarSummary"),
        ("flag", "ScalarSummary"),
        ("model/decoder/count", "ScalarSummary"),
        ("model/decoder/loss", "ScalarSummary"),
        ("number", "ScalarSummary"),
        ("several/a", "ScalarSummary"),
        ("several/c/d", "TextSummary"),
        ("text", "TextSummary"),
        ("weights", "HistogramSummary"),
    ]
    by_path = {leaf.path: leaf.value for leaf in shown}
    np.testing.assert_array_equal(by_path.pop("weights"), [[0, 1, 2], [3, 4, 5]])
    assert by_path == {
        "doubled": 8.0,
        "flag": 1.0,
        "model/decoder/count": 3.0,
        "model/decoder/loss": 2.5,
        "number": 1.0,
        "several/a": 1.0,
        "several/c/d": "text",
        "text": "hello",
    }


def test_one_image_or_clip_becomes_a_batch_of_one():
    image, clip = show(
        {
            "image": ImageSummary(jnp.zeros((4, 5, 3))),
            "sound": AudioSummary(jnp.zeros((9, 1)), sample_rate=8000),
        }
    )
    assert (image.kind, image.value.shape) == ("ImageSummary", (1, 4, 5, 3))
    assert (clip.kind, clip.value.shape, clip.sample_rate) == ("AudioSummary", (1, 9, 1), 8000)


def test_callback_gets_host_arrays_and_may_give_any_kind():
    seen = []

    def fn(x):
        seen.append(type(x))
        return {"image": ImageSummary(np.zeros((2, 2, 1))), "note": "done", "none": None}

    shown = show({"cb": CallbackSummary(fn, (jnp.ones(2),))})
    assert [(leaf.path, leaf.kind) for leaf in shown] == [
        ("cb/image", "ImageSummary"),
        ("cb/note", "TextSummary"),
    ]
    assert seen == [np.ndarray]


def test_values_not_due_are_not_evaluated():
    def fail():
        raise AssertionError("not due")

    deleted = jnp.ones(3)
    deleted.delete()
    values = {"cb": CallbackSummary(fail), "w": deleted, "loss": 1.0}
    by_kind = {"CallbackSummary": 10, "HistogramSummary": 4}
    assert [leaf.path for leaf in show(values, step=6, every=2, by_kind=by_kind)] == ["loss"]
    assert show(values, step=7, every=2, by_kind=by_kind) == []


def test_unsupported_values_are_named_and_omitted(caplog):
    shown = show({"a": {"odd": np.array(["x", "y"])}, "b": 1.0})
    assert [leaf.path for leaf in shown] == ["b"]
    assert "a/odd holds values of <U1" in caplog.text
