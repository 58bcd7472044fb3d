from weft.hierarchy.causal_lm import Model
from weft.input.fake import FakeLmInput
from weft.recipes.training import trainer_config


def test_steps_evaluations_and_saves_are_as_asked_for():
    train, held_out = (
        FakeLmInput.default_config().set(is_training=is_training, global_batch_size=2)
        for is_training in (True, False)
    )
    cfg = trainer_config(
        "runs/a",
        model=Model.default_config(),
        train_input=train,
        held_out_input=held_out,
        max_step=40,
        peak_lr=0.5,
        eval_every=10,
        save_every=20,
    )
    assert (cfg.dir, cfg.max_step, cfg.input) == ("runs/a", 40, train)
    evaler = cfg.evalers["held_out"]
    assert evaler.input == held_out
    policy = evaler.eval_policy.instantiate()
    assert [s for s in range(1, 41) if policy(step=s, train_summaries={})] == [10, 20, 30, 40]
    save = cfg.checkpointer.save_policy.instantiate()
    assert [s for s in range(1, 41) if save(step=s, evaler_summaries={})] == [20, 40]
    rate = cfg.learner.optimizer.inner.learning_rate.instantiate()
    assert float(rate(2)) == 0.5
