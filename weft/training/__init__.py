"""Small parts of a training loop that one writes oneself.

For a trainer with input, checkpoints and evaluation see `weft.trainer`. These modules are imported
by name: `train_state`, `checkpoints`, `dynamic_scale`, `early_stopping`, `common_utils`,
`prefetch_iterator`.
"""
