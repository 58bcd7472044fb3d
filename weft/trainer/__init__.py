"""What trains a model: optimizers, the learner, the loop, evaluation, checkpoints, summaries."""
