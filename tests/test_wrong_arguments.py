"""What a message says of an argument of the wrong kind, where making it is the difficult part."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

import weft
from weft import cursor, errors, hierarchy, nnx, serialization, utils
from weft import linen as nn
from weft.errors import did_you_mean


def with_scalar(layer, name):
    setattr(layer, name, nnx.Param(jnp.ones(())))
    return layer


LINEAR = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
LAYER = hierarchy.Dropout.default_config().set(name="x").instantiate(parent=None)
CONTEXT = hierarchy.InvocationContext(
    name="x", parent=None, module=LAYER, state={}, is_training=True, prng_key=None
)
CASES = {
    "a parent of a cursor": (
        lambda: cursor.Cursor({}, jnp.ones(1)),
        errors.CursorTypeError,
        "is not where a cursor is; call weft.cursor.cursor(obj)",
    ),
    "sizes in place of a config": (
        lambda: hierarchy.Linear(3, parent=None),
        errors.ConfigTypeError,
        "Linear is created from a config, but got 3 of type int. Set the fields of "
        "Linear.default_config(), and call its instantiate().",
    ),
    "a property to wrap": (
        lambda: hierarchy.nowrap(property(len)),
        errors.ArgumentValueError,
        "of type property; write it next to the function, below other decorators.",
    ),
    "a property to compute again": (
        lambda: hierarchy.no_remat(property(len)),
        errors.ArgumentValueError,
        "no_remat marks a method",
    ),
    "a function outside of a module": (
        lambda: nn.compact_name_scope(lambda x: x)(3),
        errors.TransformArgumentError,
        "its first argument is 3 of type int; define it in a module",
    ),
    "an array in place of a layer": (
        lambda: LAYER.path_to_descendant_module(2.5),
        errors.InvalidDescendantError,
        "2.5 of type float is not a module; expected one of the descendants of x.",
    ),
    "queries of an embedding without its parameters": (
        lambda: nn.Embed(3, 2).attend(jnp.ones(5)),
        errors.ArgumentShapeError,
        "Embed (not bound to variables) has vectors of size 2; expected queries of shape (..., 2)",
    ),
    "no biases": (
        lambda: hierarchy.TensorAttentionBias.from_sequence([]),
        errors.ArgumentValueError,
        "TensorAttentionBias.from_sequence got 0 biases, and none has a value",
    ),
    "keys of several kinds": (
        lambda: hierarchy.new_output_collection()._replace(summaries={1: 0, "a": 0}).add_child("a"),
        errors.OutputConflictError,
        "'a' is already among the summaries, which has ['1', 'a']; use another name.",
    ),
    "other outputs": (
        lambda: CONTEXT.add_outputs({"summaries": {}}),
        errors.ArgumentValueError,
        "of type dict; expected the OutputCollection that `functional` returns",
    ),
    "numbers in a path to read": (
        lambda: utils.get_recursively({0: {"a": 1}}, (0, 5)),
        errors.MissingStateError,
        "there is no '0/5': 0 has 'a'.",
    ),
    "numbers in a path to set": (
        lambda: utils.set_recursively({0: 1}, value=2, path=(0, 5)),
        errors.TreeMergeError,
        "'0' is a int, so nothing can be set at '0/5'",
    ),
    "a kernel without axes": (
        lambda: with_scalar(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "kernel")(jnp.ones(3)),
        errors.ArgumentShapeError,
        "expected (..., 3). Its kernel has shape ().",
    ),
    "an array in place of a variable": (
        lambda: LINEAR.kernel.update_from_state(jnp.ones(3)),
        errors.VariableTypeError,
        "give a variable, as nnx.state has them, or set the value",
    ),
    "a parent of a context": (
        lambda: dataclasses.replace(CONTEXT, parent=2.5),
        errors.ArgumentValueError,
        "parent=2.5 is of type float; expected the InvocationContext of the caller, or None.",
    ),
    "bytes as a name": (
        lambda: serialization.from_state_dict({"a": 1}, {}, b"x"),
        errors.StateDictMismatchError,
        "b'x'",
    ),
    "an array as a directory": (
        lambda: weft.trainer.Throughput.default_config().instantiate().start(jnp.ones(1), 0),
        TypeError,
        "expected str, bytes or os.PathLike object, not ArrayImpl",
    ),
    "an array as the source of a text": (
        lambda: weft.config.from_text("1 +", source=jnp.ones(2)),
        errors.ConfigTextError,
        "[1. 1.]:1: this is not a config text",
    ),
    "no bytes": (
        lambda: serialization.msgpack_restore(dict),
        TypeError,
        "a bytes-like object is required, not 'type'",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_message_says_what_is_wrong(name):
    call, error, message = CASES[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_names_of_several_kinds_are_compared():
    assert did_you_mean("labels", [1, "label", None]) == "Did you mean 'label'?"
    assert did_you_mean(None, [2, "a"]) == "There are: 2, a."


def test_largest_of_summaries_of_other_classes():
    total = hierarchy.MaxSummary(1.0).accumulate(hierarchy.MinSummary(4.0))
    assert float(total.value()) == 4.0


def test_throughput_before_its_start_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weft.trainer.Throughput.default_config().instantiate().on_checkpoint(1)
    assert not [*tmp_path.iterdir()]
