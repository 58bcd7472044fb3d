"""Trainer, learner, optimizers, evaluation, checkpoints and summaries."""
