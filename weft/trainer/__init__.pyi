from weft.debug.anomalies import AnomalyPolicy as AnomalyPolicy
from weft.trainer.aot_compilation import (
    compile_inference_programs as compile_inference_programs,
    compile_trainer_programs as compile_trainer_programs,
    SystemCharacteristics as SystemCharacteristics,
)
from weft.trainer.checkpointer.checkpointer import (
    BaseCheckpointer as BaseCheckpointer, Checkpointer as Checkpointer,
)
from weft.trainer.checkpointer.index import CheckpointValidationType as CheckpointValidationType
from weft.trainer.checkpointer.policy import (
    CheckpointPolicy as CheckpointPolicy, EvalMetric as EvalMetric,
    save_every_n_steps_policy as save_every_n_steps_policy,
)
from weft.inference.decoding_evaler import (
    DecodingEvaler as DecodingEvaler, SampleDecoding as SampleDecoding,
)
from weft.trainer.evaler import (
    AtEndPolicy as AtEndPolicy, BestMetricEvalPolicy as BestMetricEvalPolicy,
    EarlyStopping as EarlyStopping, EvalPolicy as EvalPolicy,
    eval_every_n_steps_policy as eval_every_n_steps_policy, SpmdEvaler as SpmdEvaler,
)
from weft.trainer.fit_result import (
    FitResult as FitResult, History as History,
)
from weft.trainer.gradients import with_minibatch_steps as with_minibatch_steps
from weft.trainer.one_forward_one_backward import (
    with_one_forward_one_backward as with_one_forward_one_backward,
)
from weft.inference.runner import (
    DataPartitionType as DataPartitionType, InferenceRunner as InferenceRunner,
    MethodRunner as MethodRunner,
)
from weft.inference.output import (
    BaseOutputWriter as BaseOutputWriter, BaseRecordSink as BaseRecordSink,
    JsonlExampleRecordSink as JsonlExampleRecordSink, OutputRecordWriter as OutputRecordWriter,
)
from weft.inference.pipeline import (
    InferencePipeline as InferencePipeline,
    merge_with_string_tensors as merge_with_string_tensors,
    pop_string_tensors as pop_string_tensors,
)
from weft.trainer.hooks import (
    EndRun as EndRun, has_ended as has_ended, Hook as Hook, RunListener as RunListener,
)
from weft.trainer.learner import (
    BaseLearner as BaseLearner, CompositeLearner as CompositeLearner,
    DynamicLossScale as DynamicLossScale, Learner as Learner,
    UpdateType as UpdateType,
)
from weft.trainer.mesh import (
    build_mesh as build_mesh, HybridMeshShape as HybridMeshShape, RulesByKind as RulesByKind,
    select_mesh_config as select_mesh_config,
)
from weft.trainer.metric_calculator import (
    BaseMetricCalculator as BaseMetricCalculator,
    CompositeMetricCalculator as CompositeMetricCalculator,
    GlobalMetricCalculator as GlobalMetricCalculator,
    ModelSummaryAccumulator as ModelSummaryAccumulator,
)
from weft.trainer.model import (
    LibraryModel as LibraryModel, per_param_train_dtype_by_path as per_param_train_dtype_by_path,
)
from weft.trainer.optimizers.algorithms import (
    adam_optimizer as adam_optimizer, adamw_optimizer as adamw_optimizer,
    sgd_optimizer as sgd_optimizer,
)
from weft.trainer.optimizers.transformations import param_ema as param_ema
from weft.trainer.parallelism import (
    mesh_shape_from_axes as mesh_shape_from_axes, ParallelismModifier as ParallelismModifier,
)
from weft.trainer.precision import Precision as Precision
from weft.trainer.saved_params import read_params as read_params, SavedParams as SavedParams
from weft.trainer.schedule import cosine_with_linear_warmup as cosine_with_linear_warmup
from weft.trainer.frozen_base import FrozenBaseBuilder as FrozenBaseBuilder
from weft.trainer.state_builder import (
    Builder as Builder, ChainBuilder as ChainBuilder, import_weights as import_weights,
    ImportedWeightsBuilder as ImportedWeightsBuilder,
    RestoreAndConvertBuilder as RestoreAndConvertBuilder,
    TensorStoreStateStorageBuilder as TensorStoreStateStorageBuilder,
)
from weft.trainer.summary_writer.base import (
    BaseWriter as BaseWriter, CompositeWriter as CompositeWriter, NoOpWriter as NoOpWriter,
)
from weft.trainer.summary_writer.files import (
    JsonLinesWriter as JsonLinesWriter, SummaryWriter as SummaryWriter,
)
from weft.trainer.summary_writer.trackers import (
    MLflowWriter as MLflowWriter, WandBWriter as WandBWriter,
)
from weft.trainer.supervised import Supervised as Supervised
from weft.trainer.throughput import Throughput as Throughput
from weft.trainer.train_step import TrainerState as TrainerState
from weft.trainer.train_config import train_and_evaluate as train_and_evaluate
from weft.trainer.trained_model import TrainedModel as TrainedModel
from weft.trainer.trainer import SpmdTrainer as SpmdTrainer
from weft.trainer.trainer_config_modifier import (
    ChainConfigModifier as ChainConfigModifier,
    GradientAccumulationModifier as GradientAccumulationModifier,
    MeshShapeModifier as MeshShapeModifier, ModuleConfigModifier as ModuleConfigModifier,
    PartitionSpecModifier as PartitionSpecModifier, RematSpecModifier as RematSpecModifier,
    ReplaceLayerConfigModifier as ReplaceLayerConfigModifier,
)
from weft.trainer.update_transformation import (
    ConditionalUpdateTransformation as ConditionalUpdateTransformation,
    GradientMonitorTransformation as GradientMonitorTransformation,
    OverrideInplaceUpdateTransformation as OverrideInplaceUpdateTransformation,
    UpdateTransformation as UpdateTransformation,
)
