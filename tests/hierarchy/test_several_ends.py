"""Decoding with several ids that end a text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hierarchy.test_causal_lm import build, call, decoder_config
from weft.errors import ArgumentValueError
from weft.hierarchy.decoding import StopOnSubsequence, beam_search_decode, sample_decode

ENDS = (1, 4)


def test_sampling_stops_at_each_end():
    # The token after `t` is `t + 1`.
    def successor(ids, cache):
        return jnp.log(jax.nn.one_hot((ids[:, 0] + 1) % 10, 10)), cache

    stop = StopOnSubsequence([[i] for i in ENDS])
    kwargs = {"cache": {}, "tokens_to_scores": successor, "num_decodes": 1}
    found = sample_decode(
        inputs=jnp.array([[2, 0, 0, 0, 0, 0], [8, 0, 0, 0, 0, 0]]),
        time_step=jnp.array([0, 0]),
        stop_decoding_condition=stop,
        prng_key=jax.random.key(0),
        **kwargs,
    )
    assert found.sequences[:, 0].tolist() == [[3, 4, 0, 0, 0, 0], [9, 0, 1, 0, 0, 0]]


def test_model_with_several_ends_stops_at_each():
    model = build(decoder_config().set(pad_token_id=0, eos_token_id=ENDS))
    key = {"method": "sample_decode", "static": {"num_decodes": 64, "max_sequence_length": 5}}
    found, _ = call(*model, input_batch={"prefix": jnp.array([[5, 6]])}, **key)
    ended_by = set()
    for sequence in found.sequences[0].tolist():
        places = [i for i, token in enumerate(sequence) if token in ENDS]
        if places:
            ended_by.add(sequence[places[0]])
            assert set(sequence[places[0] + 1 :]) <= {0}
    assert ended_by == set(ENDS)


def test_beams_end_with_any_of_several_ends():
    # From token 1, end 2 has probability 0.3 and end 3 has 0.5; token 0 has the rest.
    log_probs = jnp.log(jnp.array([[0.1, 0.1, 0.4, 0.4], [0.2, 0.0, 0.3, 0.5]]))
    kwargs = {
        "inputs": jnp.array([[1, 9, 9]]),
        "time_step": jnp.array([0]),
        "cache": {},
        "tokens_to_scores": lambda ids, cache: (log_probs[ids[:, 0]], cache),
        "num_decodes": 3,
    }
    found = beam_search_decode(eos_id=[2, 3], pad_id=9, **kwargs)
    # By hand: 3 (.5), 2 (.3), then 0 and one of the ends (.2 × .4).
    assert found.sequences[0, :2].tolist() == [[3, 9, 9], [2, 9, 9]]
    np.testing.assert_allclose(np.exp(found.scores[0]), [0.5, 0.3, 0.08], rtol=1e-5)
    one = beam_search_decode(eos_id=2, pad_id=9, **kwargs)
    same = beam_search_decode(eos_id=(2,), pad_id=9, **kwargs)
    np.testing.assert_array_equal(one.sequences, same.sequences)
    with pytest.raises(ArgumentValueError, match="eos_id=7 is not in the vocabulary of 4 tokens"):
        beam_search_decode(eos_id=(2, 7), **kwargs)
    with pytest.raises(ArgumentValueError, match=r"eos_id=\(\) has no id; expected one"):
        beam_search_decode(eos_id=(), **kwargs)
