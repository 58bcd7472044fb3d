from weft.trainer.checkpointer.checkpointer import (
    BaseCheckpointer as BaseCheckpointer, Checkpointer as Checkpointer,
    DamagedCheckpoint as DamagedCheckpoint,
    drop_learner_optimizer_cfg as drop_learner_optimizer_cfg,
    RestoreStateFilter as RestoreStateFilter,
)
from weft.trainer.checkpointer.dirs import (
    build_step_dir as build_step_dir, parse_step_from_dir as parse_step_from_dir,
    STEP_NUM_DIGITS as STEP_NUM_DIGITS, STEP_PREFIX as STEP_PREFIX,
)
from weft.trainer.checkpointer.host_state import (
    maybe_restore_python_savables as maybe_restore_python_savables,
    maybe_save_python_savables as maybe_save_python_savables, PythonSavable as PythonSavable,
)
from weft.trainer.checkpointer.index import (
    check_state_structure as check_state_structure,
    CheckpointValidationType as CheckpointValidationType, IndexFileWriter as IndexFileWriter,
    read_index_file as read_index_file, read_state_spec as read_state_spec,
    write_index_file as write_index_file,
)
from weft.trainer.checkpointer.policy import (
    AnyPolicy as AnyPolicy, BestMetricPolicy as BestMetricPolicy,
    CheckpointPolicy as CheckpointPolicy, EvalMetric as EvalMetric,
    every_n_steps_and_last_policy as every_n_steps_and_last_policy,
    every_n_steps_policy as every_n_steps_policy, EverySecondsPolicy as EverySecondsPolicy,
    KeepBest as KeepBest,
)
from weft.trainer.checkpointer.storage import (
    OrbaxStateStorage as OrbaxStateStorage, StateStorage as StateStorage,
    StateStorageCommitCallback as StateStorageCommitCallback,
)
