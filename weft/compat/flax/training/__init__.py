"""Building blocks for custom training loops.

See `weft.trainer` for a trainer with input, checkpoints and evaluation. Import these modules by
name: `train_state`, `checkpoints`, `dynamic_scale`, `early_stopping`, `common_utils`,
`prefetch_iterator`.
"""
