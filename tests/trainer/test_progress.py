from weft.trainer.progress import RunListener


def test_a_listener_that_overrides_nothing_is_told_all_the_same():
    listener = RunListener()
    assert listener.on_start(None, resumed_from=None) is None
    assert listener.on_step(1, {}, {}) is None
    assert listener.on_eval("validation", 1, {}) is None
    assert listener.on_checkpoint(1) is None
    assert listener.on_save_failed(1, None) is None
    assert listener.on_end(1, "max_step") is None
