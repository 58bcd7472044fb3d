import jax.numpy as jnp

from weft.functional import mask_arrays
from weft.linen import attention_masks


def test_they_are_those_of_functional():
    for name in attention_masks.__all__:
        assert getattr(attention_masks, name) is getattr(mask_arrays, name)


def test_a_causal_mask_of_what_is_no_padding():
    valid = jnp.array([[1, 1, 0]])
    mask = attention_masks.combine_masks(
        attention_masks.make_causal_mask(valid), attention_masks.make_attention_mask(valid, valid)
    )
    assert mask[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
