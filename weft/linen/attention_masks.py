"""Attention masks as arrays, from `weft.functional.mask_arrays`."""

from weft.functional.mask_arrays import combine_masks, make_attention_mask, make_causal_mask

__all__ = ["combine_masks", "make_attention_mask", "make_causal_mask"]
