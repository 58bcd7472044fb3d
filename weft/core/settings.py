"""Settings of the process: a program changes them at its start, before functions are compiled."""


class Settings:
    """Values of the settings, as attributes.

    Attributes:
        filter_frames: whether tracebacks of errors hide Weft's internal frames.
        profile: whether operations are named after their modules in profiles.
        preserve_adopted_names: whether a module that is passed to another one keeps its name.
        return_frozendict: whether `init` and `apply` return variables as a FrozenDict.
        fix_rng_separator: whether keys depend on names joined by a separator: with it, streams of
            "ab" in "c" and of "a" in "bc" differ.
        always_shard_variable: whether a new variable of NNX is laid out on the mesh at once.
        graph_mode: the default of `nnx.set_graph_mode`.
        graph_updates: the default of `nnx.set_graph_updates`.
    """

    def __init__(self) -> None:
        self.filter_frames = True
        self.profile = True
        self.preserve_adopted_names = False
        self.return_frozendict = False
        self.fix_rng_separator = False
        self.always_shard_variable = True
        self.graph_mode = True
        self.graph_updates = True


settings = Settings()
