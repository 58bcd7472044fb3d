"""Helpers under the names of AXLearn's utils, against values worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft import utils
from weft.errors import MeshError, MissingStateError, TreeMergeError
from weft.utils import HybridMeshShape, VDict

TREE = {"b": {"w": jnp.ones((2, 3)), "n": jnp.arange(2)}, "a": [jnp.zeros(4), None]}


def test_items_have_the_paths_of_leaves():
    assert [path for path, _ in utils.flatten_items(TREE)] == ["a/0", "b/n", "b/w"]
    by_dot = utils.flatten_items(TREE, separator=".", is_leaf=lambda x: isinstance(x, list))
    assert by_dot[0] == ("a", TREE["a"])
    assert utils.tree_paths({"x": {"y": 1}}, separator=":") == {"x": {"y": "x:y"}}
    assert utils.count_model_params(TREE) == 12
    assert utils.shapes({"a": jnp.ones((2, 1)), "b": "text"}) == {"a": (2, 1), "b": None}


@pytest.mark.parametrize("path", ["b/w", ["b", "w"], ("b", "w")])
def test_paths_are_text_or_sequences(path):
    assert utils.get_recursively(TREE, path) is TREE["b"]["w"]
    assert utils.get_recursively(TREE, "") is TREE and utils.get_recursively(TREE, ()) is TREE
    copied = utils.copy_recursively(TREE, target=None, path=path)
    assert list(copied) == ["b"] and copied["b"]["w"] is TREE["b"]["w"]
    utils.set_recursively(copied, value=1, path=path)
    assert copied == {"b": {"w": 1}} and TREE["b"]["w"].shape == (2, 3)
    whole = utils.copy_recursively(TREE, target=None, path="")
    assert whole is not TREE and whole["b"]["n"] is TREE["b"]["n"]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: utils.get_recursively({"a": {"b": 1}}, "a/c"), MissingStateError, "a has 'b'"),
        (lambda: utils.get_recursively({"a": 1}, "a.c", "."), MissingStateError, "a has a int"),
        (lambda: utils.get_recursively({}, "a"), MissingStateError, "the root has no entries"),
        (lambda: utils.set_recursively({}, value=1, path=""), TreeMergeError, "path is empty"),
        (
            lambda: utils.set_recursively({"a": 1}, value=1, path="a/b"),
            TreeMergeError,
            "'a' is a i",
        ),
        (
            lambda: utils.tree_merge({"a": 1}, secondary={"a": {}}, leaf_merge_fn=max),
            TreeMergeError,
            "a dict meets a leaf",
        ),
        (lambda: utils.infer_mesh_shape((3, -1), num_devices=8), MeshError, "multiple of 3"),
    ],
)
def test_errors_say_what_is_there(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_pruned_and_merged_trees():
    tree = {"a": {"b": 1, "c": {"d": {}}}, "e": 2}
    assert utils.prune_empty(tree) == {"a": {"b": 1}, "e": 2}
    seen = []
    utils.prune_tree(tree, lambda path, x: seen.append(path), prefix="p", separator=".")
    assert seen == ["p.a.b", "p.a.c.d", "p.a.c", "p.a", "p.e"]
    merged = utils.tree_merge(
        tree, secondary={"a": {"b": 5}, "f": 3}, leaf_merge_fn=lambda first, second: second
    )
    assert merged == {"a": {"b": 5, "c": {"d": {}}}, "e": 2, "f": 3} and tree["a"]["b"] == 1


def test_first_matching_rule_applies_to_the_whole_name():
    rules = [("a.*", 1), (".*b", 2)]
    found = [utils.match_regex_rules(x, rules=rules, default_value=0) for x in ("ab", "cb", "bc")]
    assert found == [1, 2, 0] and utils.match_regex_rules("x", rules=rules) is None


def test_layers_of_vdicts():
    tree = {"stack": VDict(w=jnp.arange(6.0).reshape(2, 3)), "x": 1}
    first, second = utils.expand_vdicts(tree)["stack"]
    assert first["w"].tolist() == [0, 1, 2] and second["w"].tolist() == [3, 4, 5]
    assert utils.vectorized_tree_map(jnp.max, {"s": tree["stack"]})["s"]["w"].tolist() == [2, 5]


def test_casts_and_shapes_of_parameters():
    cast = utils.cast_floats_per_param(TREE["b"], {"w": jnp.bfloat16, "n": jnp.bfloat16})
    assert (cast["w"].dtype, cast["n"].dtype) == (jnp.bfloat16, jnp.int32)
    assert utils.cast_floats_per_param(TREE["b"], {"w": None, "n": None})["w"].dtype == jnp.float32
    assert utils.check_param_shape_alignment(TREE, TREE) is None
    other = {"b": {**TREE["b"], "w": jnp.ones(5)}, "a": TREE["a"]}
    message = utils.check_param_shape_alignment(TREE, other)
    assert message == "(b/w): source: (2, 3), target: (5,)"
    assert isinstance(utils.as_tensor({"a": [1, 2]})["a"][0], jax.Array)
    assert isinstance(utils.as_numpy_array(TREE)["b"]["w"], np.ndarray)


def test_meshes_and_layouts():
    assert utils.create_device_mesh((2, -1)).shape == (2, 4)
    hybrid = HybridMeshShape(ici_mesh_shape=(1, -1), dcn_mesh_shape=(2, 1))
    assert utils.infer_mesh_shape(hybrid, num_devices=8) == HybridMeshShape((1, 4), (2, 1))
    assert utils.create_device_mesh(hybrid).shape == (2, 4)
    x = jnp.ones((8, 2))
    assert utils.maybe_shard(x, None) is x and utils.maybe_shard(x, PartitionSpec("d")) is x
    mesh = jax.sharding.Mesh(utils.create_device_mesh((8,)), ("d",))
    with jax.set_mesh(mesh):
        laid_out = jax.jit(lambda x: utils.maybe_shard(x, PartitionSpec("d")))(x)
    assert laid_out.sharding.spec == PartitionSpec("d")
    local = utils.replicate_to_local_data({"x": laid_out})["x"]
    assert isinstance(local, np.ndarray) and local.tolist() == x.tolist()
    spec = PartitionSpec("d")
    full = utils.complete_partition_spec_tree(jax.tree.structure(TREE), {"b": spec, "a": None})
    assert full == {"b": {"w": spec, "n": spec}, "a": [None, None]}
