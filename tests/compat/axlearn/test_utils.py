"""Helpers under the names of AXLearn's utils, against values worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft import utils
from weft.errors import ArgumentValueError, MeshError, MissingStateError, TreeMergeError
from weft.utils import DataPartitionType, HybridMeshShape, TensorSpec, VDict

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
        (lambda: utils.validate_contains_paths(TREE, ["b/w", "b/x"]), MissingStateError, "no 'b/x"),
        (
            lambda: utils.non_empty_leaf_merge_fn("x", [1]),
            TreeMergeError,
            r"'x' and \[1\]; give one of them None",
        ),
        (lambda: utils.validate_float_dtype(jnp.int32), ArgumentValueError, "int32 is not a float"),
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
    specs = utils.cast_floats({"w": TensorSpec((2,), jnp.float32)}, to_dtype=jnp.bfloat16)
    assert specs["w"] == TensorSpec((2,), jnp.bfloat16)
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
        for partition, entries in (
            (DataPartitionType.FULL, (("d",), None)),
            (DataPartitionType.REPLICATED, (None, None)),
            (PartitionSpec(None, "d"), (None, "d")),
        ):
            rows = utils.host_to_global_array(np.zeros((8, 8)), partition=partition)
            assert rows.sharding.is_equivalent_to(
                jax.sharding.NamedSharding(mesh, PartitionSpec(*entries)), 2
            )
        laid_out = jax.jit(lambda x: utils.maybe_shard(x, PartitionSpec("d")))(x)
        specs = {"a": PartitionSpec("d"), "b": None}
        tree = {"a": {"x": x}, "b": x}
        of_tree = jax.jit(lambda tree: utils.with_sharding_constraint(tree, specs))(tree)
    assert laid_out.sharding.spec == of_tree["a"]["x"].sharding.spec == PartitionSpec("d")
    assert of_tree["b"].sharding.is_fully_replicated
    local = utils.replicate_to_local_data({"x": laid_out})["x"]
    assert isinstance(local, np.ndarray) and local.tolist() == x.tolist()
    spec = PartitionSpec("d")
    full = utils.complete_partition_spec_tree(jax.tree.structure(TREE), {"b": spec, "a": None})
    assert full == {"b": {"w": spec, "n": spec}, "a": [None, None]}


def test_empty_leaves_are_replaced():
    merge = utils.non_empty_leaf_merge_fn
    assert [merge(None, 1), merge(0, None), merge({}, "x"), merge([1], "")] == [1, 0, "x", [1]]
    assert utils.get_or_none({"a": 1}, "b") is None
    assert utils.safe_not(jnp.array([True, False])).tolist() == [False, True]


def test_keys_split_one_by_one():
    key, expected = jax.random.key(0), []
    for _ in range(3):
        key, child = jax.random.split(key)
        expected.append(child)
    keys = utils.split_prng_key(jax.random.key(0), 3)
    np.testing.assert_array_equal(
        jax.random.key_data(keys.keys), [jax.random.key_data(k) for k in expected]
    )
    assert utils.split_prng_key(keys, 7) is keys
    nested = utils.split_prng_key(jax.random.key(0), (3, 2)).keys
    inner = utils.split_prng_key(expected[1], 2).keys
    np.testing.assert_array_equal(jax.random.key_data(nested)[1], jax.random.key_data(inner))


def test_dtypes_of_parameters():
    utils.validate_float_dtype(jnp.bfloat16)
    rules = [("b/.*", None)]
    dtypes = utils.per_param_dtype_by_path(jnp.float16, update_rules=rules)
    assert dtypes({"a": 1, "b": {"c": 2}}) == {"a": jnp.float16, "b": {"c": None}}
    assert utils.canonicalize_per_param_dtype(dtypes) is dtypes
    for dtype in (jnp.bfloat16, "bfloat16", np.dtype("float32"), None):
        of_all = utils.canonicalize_per_param_dtype(dtype).instantiate()
        assert of_all({"a": 1}) == {"a": dtype}


def test_settings_of_parameters_are_logged(caplog):
    settings = {"a": {"w": 0.5}, "b": 1.0}
    with caplog.at_level("INFO", "weft.utils"):
        assert (
            utils.register_per_param_settings(settings, description="decay", path="l") is settings
        )
    assert caplog.messages == ["l decay: a/w = 0.5", "l decay: b = 1.0"]


def test_numeric_checks_are_off_by_default():
    x = jnp.array([1.0, jnp.nan])
    assert utils.check_numerics(x) is x
    with (
        utils.numeric_checks(),
        pytest.raises(ArgumentValueError, match=r"loss 3 is not finite: .*nan"),
    ):
        utils.check_numerics(x, "loss {step}", step=3)


def test_data_directories_nest_if_they_agree(monkeypatch):
    monkeypatch.delenv("DATA_DIR", raising=False)
    with utils.set_data_dir("/a"), utils.set_data_dir("/a"):
        assert utils.get_data_dir() == "/a"
        with pytest.raises(ArgumentValueError, match=r"'/b'.* contradicts '/a'"):
            utils.set_data_dir("/b").__enter__()
    assert utils.get_data_dir() is None
    monkeypatch.setenv("DATA_DIR", "/c")
    assert utils.get_data_dir() == "/c"


def test_stacks_of_threads():
    traces = utils.thread_stack_traces()
    assert any("test_stacks_of_threads" in line for lines in traces for line in lines)
    assert all(" (" in lines[0] for lines in traces)
