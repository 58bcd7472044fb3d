import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from weft.errors import CheckpointStateError, CheckpointStructureError, DamagedCheckpointError
from weft.serialization import untrusted
from weft.trainer.checkpointer.index import (
    CheckpointValidationType,
    build_index,
    check_state_structure,
    flatten_state,
    read_index_file,
    read_state_spec,
    write_index_file,
)


class State(NamedTuple):
    key: jax.Array
    model: dict


class Iterator:
    def get_state(self):
        return {}

    def set_state(self, state):
        pass


def make_state():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    w = jax.device_put(jnp.ones((4, 2), jnp.bfloat16), NamedSharding(mesh, PartitionSpec("model")))
    both = NamedSharding(mesh, PartitionSpec(("data", "model"), None))
    return {
        "state": State(
            key=jax.random.key(0),
            model={"w": w, "v": [jax.device_put(jnp.zeros((8, 3), jnp.int4), both), np.ones(2)]},
        ),
        "step": 7,
        "rate": 0.1,
        "name": "run",
        "done": False,
        "nothing": None,
        "input_iter": Iterator(),
    }


def test_state_becomes_paths_shapes_dtypes_and_layouts():
    assert dict(build_index(make_state())) == {
        "done": False,
        "input_iter": {"savable": "Iterator"},
        "name": "run",
        "rate": 0.1,
        "state/key": {"shape": [], "dtype": "key<fry>", "spec": None},
        "state/model/v/0": {
            "shape": [8, 3],
            "dtype": "int4",
            "spec": [["data", "model"], None],
        },
        "state/model/v/1": {"shape": [2], "dtype": "float64", "spec": None},
        "state/model/w": {"shape": [4, 2], "dtype": "bfloat16", "spec": ["model"]},
        "step": 7,
    }


def test_spec_of_a_state_is_nested_and_has_layouts(tmp_path):
    state = make_state()
    write_index_file(ckpt_dir=str(tmp_path), index=build_index(state))
    spec = read_state_spec(str(tmp_path))
    assert (spec["step"], spec["done"]) == (7, False)
    assert "input_iter" not in spec
    model = spec["state"]["model"]
    assert (model["w"].shape, model["w"].dtype) == ((4, 2), jnp.bfloat16)
    assert model["w"].partition_spec == PartitionSpec("model", None)
    assert model["v"]["0"].partition_spec == PartitionSpec(("data", "model"), None)
    assert model["v"]["1"].mesh_axes is None
    assert spec["state"]["key"].dtype == state["state"].key.dtype


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_spec_keeps_key_dtypes(tmp_path, impl):
    key = jax.random.key(0, impl=impl)
    write_index_file(ckpt_dir=str(tmp_path), index=build_index({"key": key}))
    assert read_state_spec(str(tmp_path))["key"].dtype == key.dtype


@pytest.mark.parametrize(
    "text", [None, "", "[]", '{"version": 2, "index": []}', '{"version": 1, "index": [1]}']
)
def test_invalid_index_is_damage(tmp_path, text):
    if text is not None:
        (tmp_path / "index").write_text(text, encoding="utf-8")
    with pytest.raises(DamagedCheckpointError, match="index' cannot be read as the index"):
        read_index_file(str(tmp_path))


@pytest.mark.parametrize(
    ("limit", "state", "text"),
    [
        ("MAX_JSON_BYTES", {"a": 1, "notes": "x" * 200}, r"'notes', is a text of 200 characters"),
        ("MAX_JSON_BYTES", dict.fromkeys(map(str, range(50)), 1), r"at most 100 .* 50 leaves"),
        ("MAX_JSON_VALUES", dict.fromkeys(map(str, range(50)), 1), r"more than 100 .* 50 leaves"),
    ],
)
def test_index_that_could_not_be_read_again_is_not_written(
    tmp_path, monkeypatch, limit, state, text
):
    monkeypatch.setattr(untrusted, limit, 100)
    with pytest.raises(ValueError, match=text):
        write_index_file(ckpt_dir=str(tmp_path), index=build_index(state))
    assert not list(tmp_path.iterdir())


def test_two_leaves_of_one_path_are_rejected():
    with pytest.raises(CheckpointStateError, match="two leaves with the path 'a/b'"):
        flatten_state({"a": {"b": 1}, "a/b": 2})


def test_unsupported_objects_are_named():
    with pytest.raises(CheckpointStateError, match=r"type object at 'a/0'.*get_state"):
        build_index({"a": [object()]})


# Comparing.


def entry(*shape, dtype="float32"):
    return {"shape": list(shape), "dtype": dtype, "spec": None}


BASE = {"model/weight": entry(2, 3), "model/bias": entry(3), "step": 1, "it": {"savable": "I"}}


def check(saved, wanted, validation="EXACT"):
    check_state_structure(
        list(saved.items()), list(wanted.items()), validation=CheckpointValidationType(validation)
    )


def test_values_layouts_and_the_order_of_paths_may_differ():
    laid_out = {**BASE["model/weight"], "spec": ["data", None]}
    other = {"step": 9, "it": {"savable": "J"}, "model/bias": entry(3), "model/weight": laid_out}
    check(BASE, other)
    json.dumps(other)


def test_missing_path_is_always_an_error():
    wanted = {**BASE, "model/wieght": entry(2, 3)}
    del wanted["model/weight"]
    for validation in CheckpointValidationType:
        with pytest.raises(CheckpointStructureError) as error:
            check(BASE, wanted, validation)
        text = str(error.value)
        assert "model/wieght: state float32[2, 3], not in the checkpoint" in text
        assert "Did you mean 'model/weight'?" in text
        assert "configs that it was saved with" in text


def test_extra_paths_are_an_error_unless_state_is_a_subset():
    wanted = {"step": 1}
    with pytest.raises(CheckpointStructureError) as error:
        check(BASE, wanted)
    assert "model/weight: checkpoint float32[2, 3], not in the state" in str(error.value)
    assert "set the checkpointer's validation to 'CONTAINS_STATE'." in str(error.value)
    check(BASE, wanted, "CONTAINS_STATE")
    check(BASE, wanted, "CONTAINS_STATE_UP_TO_DTYPE")


def test_dtypes():
    wanted = {**BASE, "model/weight": entry(2, 3, dtype="bfloat16")}
    for validation in ("EXACT", "CONTAINS_STATE"):
        with pytest.raises(CheckpointStructureError) as error:
            check(BASE, wanted, validation)
        line = "model/weight: checkpoint float32[2, 3], state bfloat16[2, 3]"
        assert line in str(error.value)
        assert "'EXACT_UP_TO_DTYPE'." in str(error.value)
    check(BASE, wanted, "EXACT_UP_TO_DTYPE")
    check(BASE, wanted, "CONTAINS_STATE_UP_TO_DTYPE")
    with pytest.raises(CheckpointStructureError, match=r"'CONTAINS_STATE_UP_TO_DTYPE'\."):
        check(BASE, {"model/weight": wanted["model/weight"]})


@pytest.mark.parametrize(
    ("saved", "wanted", "text"),
    [
        (entry(2, 3), entry(3, 2), "checkpoint float32[2, 3], state float32[3, 2]"),
        (entry(dtype="int32"), 1, "checkpoint int32[], state int 1"),
        (1, 1.0, "checkpoint int 1, state float 1.0"),
        (1, {"savable": "It"}, "checkpoint int 1, state an object (It)"),
        (entry(dtype="key<fry>"), entry(dtype="key<rbg>"), "checkpoint key<fry>[], state key<rbg>"),
        (entry(dtype="uint32"), entry(dtype="key<fry>"), "checkpoint uint32[], state key<fry>[]"),
    ],
)
def test_shapes_kinds_and_keys_must_always_agree(saved, wanted, text):
    for validation in CheckpointValidationType:
        with pytest.raises(CheckpointStructureError) as error:
            check({"x": saved}, {"x": wanted}, validation)
        assert f"x: {text}" in str(error.value)


def test_long_lists_are_cut():
    many = {f"layer{i}/weight": entry(2) for i in range(100)}
    with pytest.raises(CheckpointStructureError) as error:
        check(many, {})
    assert len(str(error.value).splitlines()) == 11
    assert "… 92 more" in str(error.value)


def test_validations_for_a_part_of_the_state():
    kinds = CheckpointValidationType
    assert kinds.EXACT.allowing_more is kinds.CONTAINS_STATE
    assert kinds.EXACT_UP_TO_DTYPE.allowing_more is kinds.CONTAINS_STATE_UP_TO_DTYPE
    assert kinds.CONTAINS_STATE.allowing_more is kinds.CONTAINS_STATE
