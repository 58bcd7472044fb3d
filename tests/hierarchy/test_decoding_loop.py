import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.hierarchy import decoding_loop as loops
from weft.vdict import VDict


def test_the_initial_time_step_is_the_position_of_the_last_token():
    prefix = jnp.array([[0, 0, 0], [4, 0, 0], [4, 5, 0], [4, 0, 6], [4, 5, 6]])
    assert loops.infer_initial_time_step(prefix, pad_id=0).tolist() == [0, 0, 1, 2, 2]
    assert loops.infer_initial_time_step(jnp.array([[0, 7, 9, 9]]), pad_id=9).tolist() == [1]


def test_the_decoding_axis_comes_and_goes():
    x = jnp.arange(6).reshape(2, 3)
    expanded = loops.add_decoding_dim(x, 4)
    assert expanded.shape == (2, 4, 3)
    np.testing.assert_array_equal(expanded[:, 2], x)
    flat = loops.flatten_decoding_dim(expanded)
    np.testing.assert_array_equal(flat, np.repeat(x, 4, axis=0))
    np.testing.assert_array_equal(loops.unflatten_decoding_dim(flat, 2, 4), expanded)


def test_scalars_have_no_decoding_axis():
    x = jnp.array(3)
    assert loops.add_decoding_dim(x, 4).shape == ()
    assert loops.flatten_decoding_dim(x).shape == ()
    assert loops.unflatten_decoding_dim(x, 2, 4).shape == ()


def test_caches_follow_the_hypotheses_also_where_layers_are_stacked():
    of_prompts = jnp.array([[10.0], [20.0]])
    cache = {
        "key": of_prompts,
        "step": jnp.array(5),
        "layers": VDict(key=jnp.stack([of_prompts, of_prompts + 1])),
    }
    expanded = loops.expand_cache(cache, 2)
    assert expanded["key"][:, 0].tolist() == [10, 10, 20, 20]
    assert expanded["layers"]["key"][1, :, 0].tolist() == [11, 11, 21, 21]
    assert expanded["step"] == 5
    marked = {
        "key": jnp.arange(4),
        "step": expanded["step"],
        "layers": VDict(key=jnp.stack([jnp.arange(4), jnp.arange(4) + 100])),
    }
    gathered = loops.gather_cache(marked, jnp.array([[1, 1], [1, 0]]))
    assert gathered["key"].tolist() == [1, 1, 3, 2]
    assert gathered["layers"]["key"].tolist() == [[1, 1, 3, 2], [101, 101, 103, 102]]
    assert gathered["step"] == 5


def test_tokens_are_read_and_written_at_each_prompts_position():
    sequences = jnp.arange(12).reshape(2, 2, 3)
    index = jnp.array([0, 2])
    assert loops.tokens_at(sequences, index).tolist() == [[0, 3], [8, 11]]
    new = loops.put_at(sequences, index, jnp.array([[-1, -2], [-3, -4]]))
    assert new.tolist() == [[[-1, 1, 2], [-2, 4, 5]], [[6, 7, -3], [9, 10, -4]]]


def test_positions_beyond_the_end_change_nothing():
    sequences = jnp.arange(12).reshape(2, 2, 3)
    new = loops.put_at(sequences, jnp.array([3, 7]), jnp.ones((2, 2)))
    np.testing.assert_array_equal(new, sequences)
    assert loops.tokens_at(sequences, jnp.array([3, 7])).tolist() == [[2, 5], [8, 11]]


def test_initial_sequences_hide_what_follows_the_prompt():
    sequences = loops.initial_sequences(
        jnp.array([[1, 5, 6]]), jnp.array([1]), num_decodes=2, max_decode_len=4, pad_id=9
    )
    assert sequences.tolist() == [[[1, 5, 9, 9, 9]] * 2]


def test_a_prompt_longer_than_the_result_is_refused():
    with pytest.raises(ArgumentShapeError, match=r"\(1, 6\).*max_decode_len=4.*to 5 or more"):
        loops.initial_sequences(
            jnp.ones((1, 6), int), jnp.array([1]), num_decodes=2, max_decode_len=4, pad_id=0
        )


def test_no_hypotheses_at_all_are_refused():
    with pytest.raises(ArgumentValueError, match="num_decodes=0; expected at least 1"):
        loops.initial_sequences(
            jnp.ones((1, 6), int), jnp.array([1]), num_decodes=0, max_decode_len=6, pad_id=0
        )


def test_both_loops_do_the_same():
    for kind in ("lax", "python"):
        assert loops.run_loop(kind, lambda x: x < 100, lambda x: x * 2, jnp.array(3)) == 192


def test_an_unknown_loop_is_refused():
    with pytest.raises(ArgumentValueError, match="loop='scan'; expected 'lax' or 'python'"):
        loops.run_loop("scan", lambda x: x < 1, lambda x: x, jnp.array(0))
