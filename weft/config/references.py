"""Functions and classes that config texts may name.

Texts are untrusted: neither reading nor instantiating one may run code of its choice. A dotted name
is therefore valid in three cases only:

- it is listed here, and used as the list permits;
- it is a configurable class, or a config class, of Weft or of an imported module. A class with
  effects outside of the run lists in `_needs_allow` the fields that a text may not set;
- the reader allows it: `allow=("my_package",)` trusts everything that the package or module
  defines, or the one named function or class.

A text imports no modules, except listed ones, public modules of Weft, and allowed ones. Names
resolve through modules to their own definitions, not to modules that they import.

Each listed function was reviewed: `tests/config/test_effects.py` calls it with all kinds of
arguments that a text can contain, and checks that it writes no files, starts no processes, opens no
connections and reads no pickles. Not listed are whole modules, and functions that apply an argument
to others (`map`, `jit`, `partial_eval`, `inject_hyperparams`) or load code. The tables are `VALUES`
(harmless with any arguments, also in `functools.partial` and as targets of configs), `TARGETS`
(only to be configured, since they read files that the text names, as data), `RECORDS` (classes
whose fields a text fills without a constructor, and number types), and `ENUMS`.
"""

import enum
import importlib
import sys
import types
from collections.abc import Sequence
from typing import Any, Literal

from weft._lazy import defining_name, public_name
from weft.config.configurable import Configurable, needs_allow
from weft.config.values import ConfigNode
from weft.errors import ConfigReferenceError, did_you_mean


def _names(table: dict[str, str]) -> frozenset[str]:
    return frozenset(
        f"{module}.{name}" for module, names in table.items() for name in names.split()
    )


BUILTINS: types.MappingProxyType[str, type] = types.MappingProxyType(
    {
        cls.__name__: cls
        for cls in (
            *(bool, int, float, complex, str, bytes),
            *(list, tuple, dict, set, frozenset, object),
        )
    }
)

VALUES = _names(
    {
        "jax.checkpoint_policies": "checkpoint_dots checkpoint_dots_with_no_batch_dims "
        "dots_saveable dots_with_no_batch_dims_saveable everything_saveable nothing_saveable "
        "offload_dot_with_no_batch_dims save_and_offload_only_these_names "
        "save_any_names_but_these save_anything_except_these_names save_only_these_names",
        "jax.lax": "approx_max_k approx_min_k conv_general_dilated dot dot_general erf logistic "
        "rsqrt stop_gradient top_k",
        "jax.nn": "celu dot_product_attention elu gelu glu hard_sigmoid hard_silu hard_swish "
        "hard_tanh identity leaky_relu log_sigmoid log_softmax logsumexp mish one_hot relu relu6 "
        "selu sigmoid silu soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus "
        "standardize swish tanh",
        "jax.nn.initializers": "constant delta_orthogonal glorot_normal glorot_uniform he_normal "
        "he_uniform kaiming_normal kaiming_uniform lecun_normal lecun_uniform normal ones "
        "orthogonal truncated_normal uniform variance_scaling xavier_normal xavier_uniform zeros",
        "jax.numpy": "abs absolute add arctan ceil clip cos cosh divide dot exp exp2 expm1 floor "
        "log log10 log1p log2 logaddexp matmul max maximum mean min minimum mod multiply negative "
        "ones ones_like power prod reciprocal round sign sin sinh sqrt square std subtract sum "
        "tan tanh var where zeros zeros_like bfloat16 bool bool_ complex64 complex128 float16 "
        "float32 float64 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
        "float8_e5m2fnuz int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64",
        "numpy": "bool bool_ complex64 complex128 float16 float32 float64 int8 int16 int32 int64 "
        "uint8 uint16 uint32 uint64",
        "optax": "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan "
        "adaptive_grad_clip add_decayed_weights add_noise amsgrad apply_every apply_if_finite "
        "centralize chain clip clip_by_block_rms clip_by_global_norm constant_schedule "
        "cosine_decay_schedule cosine_onecycle_schedule ema exponential_decay fromage identity "
        "join_schedules keep_params_nonnegative lamb lars linear_onecycle_schedule "
        "linear_schedule lion nadam nadamw noisy_sgd normalize_by_update_norm novograd "
        "optimistic_adam optimistic_gradient_descent piecewise_constant_schedule "
        "piecewise_interpolate_schedule polynomial_schedule radam rmsprop rprop scale "
        "scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad "
        "scale_by_belief scale_by_factored_rms scale_by_learning_rate scale_by_lion "
        "scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm "
        "scale_by_param_block_rms scale_by_radam scale_by_rms scale_by_rprop scale_by_rss "
        "scale_by_schedule scale_by_sign scale_by_sm3 scale_by_stddev scale_by_trust_ratio "
        "scale_by_yogi set_to_zero sgd sgdr_schedule sign_sgd signum sm3 trace "
        "warmup_constant_schedule warmup_cosine_decay_schedule warmup_exponential_decay_schedule "
        "yogi zero_nans",
        "weft.functional.activation": "exact_gelu linear quick_gelu squared_relu",
        "weft.functional.attention_mask": "causal_mask left_right_window_mask "
        "sliding_window_causal_mask",
        "weft.functional.attention": "sigmoid_attention_probs",
        "weft.functional.initializers": "ones_init zeros_init",
        "weft.functional.sampling": "scale_by top_k_logits top_p_logits",
        "weft.hierarchy.attention.bias": "BoolAttentionBias BoolTensorAttentionBias "
        "CausalAttentionBias CompositeAttentionBias LeftRightWindowAttentionBias "
        "MaskFnAttentionBias SegmentIdAttentionBias SlidingWindowAttentionBias "
        "TensorAttentionBias ZeroAttentionBias",
        "weft.hierarchy.base_layer": "no_remat",
        "weft.hierarchy.attention.feed_forward": "scale_dim",
        "weft.hierarchy.mixture_of_experts.gating": "approx_max_k sigmoid",
        "weft.hierarchy.metrics": "MaxSummary MetricSummary MinSummary SumSummary WeightedSummary",
        "weft.hierarchy.mixture_of_experts.feed_forward": "get_outer_batch_from_mesh",
        "weft.hierarchy.attention.multihead_attention": "compute_gqa_context compute_gqa_logits "
        "sigmoid_with_biases softmax_with_biases",
        "weft.hierarchy.param_init": "constant_initializer gaussian_initializer truncated_normal "
        "uniform",
        "weft.hierarchy.pipeline": "transpose_from_pipeline_stage_outputs "
        "transpose_to_pipeline_stage_inputs",
        "weft.hierarchy.attention.stack": "save_and_offload_these_names_regex "
        "update_data_with_skip_connection",
        "weft.hierarchy.repeat": "drop_by_regex",
        "weft.hierarchy.attention.scale_qk": "constant_scale_fn pow_scale_fn",
        "weft.input.base": "partition_by_path_rank",
        "weft.input.tokenizers": "ByteTokenizer",
        "weft.linen.attention": "MultiHeadAttention MultiHeadDotProductAttention SelfAttention",
        "weft.linen.normalization": "BatchNorm GroupNorm InstanceNorm LayerNorm RMSNorm "
        "SpectralNorm WeightNorm",
        "weft.linen.recurrent": "GRUCell MGUCell SimpleCell ConvLSTMCell LSTMCell "
        "OptimizedLSTMCell Bidirectional RNN",
        "weft.linen.layers": "Dropout PReLU Sequential",
        "weft.linen.conv": "Conv ConvLocal ConvTranspose",
        "weft.linen.linear": "Embed Dense DenseGeneral Einsum",
        "weft.nnx.containers": "Dict List Sequential",
        "weft.nnx.nn.attention": "MultiHeadAttention",
        "weft.nnx.nn.normalization": "BatchNorm GroupNorm InstanceNorm LayerNorm RMSNorm "
        "SpectralNorm WeightNorm",
        "weft.nnx.nn.recurrent": "GRUCell SimpleCell LSTMCell OptimizedLSTMCell Bidirectional RNN",
        "weft.nnx.nn.conv": "Conv ConvTranspose",
        "weft.nnx.nn.linear": "Einsum Embed Linear LinearGeneral",
        "weft.nnx.nn.lora": "LoRA LoRALinear",
        "weft.nnx.nn.elementwise": "Dropout PReLU",
        "weft.nnx.rngs": "Rngs",
        "weft.recipes.digits": "Classifier",
        "weft.recipes.lm_nnx": "Block LanguageModel",
        "weft.trainer.checkpointer.policy": "every_n_steps_and_last_policy every_n_steps_policy",
        "weft.trainer.checkpointer.checkpointer": "drop_learner_optimizer",
        "weft.trainer.evaler": "every_n_steps_policy",
        "weft.trainer.gradients": "with_minibatch_steps",
        "weft.cli.lr_find": "exponential_sweep",
        "weft.trainer.mesh": "over_slices",
        "weft.trainer.optimizers.algorithms": "adastar_optimizer offload_optimizer "
        "adafactor_optimizer adam_optimizer adamw_decoupled_optimizer adamw_optimizer "
        "lion_optimizer scale_by_lion sgd_optimizer",
        "weft.trainer.optimizers.base": "chain identity named_chain",
        "weft.trainer.optimizers.clipping": "clip_by_block_rms clip_by_global_norm "
        "drop_norm_by_grad_norm_ema drop_norm_by_grad_norm_stddev skip_and_clip_by_global_norm",
        "weft.trainer.optimizers.transformations": "ema param_ema scale_by_factored_rms "
        "add_decayed_weights decoupled_scale_and_decay l2_regularizer per_param_scale_by_path "
        "per_param_scale_by_rms scale scale_by_param_block_rms scale_by_schedule "
        "scale_by_trust_ratio scale_from_learning_rate scale_update_per_param",
        "weft.trainer.schedule": "adafactor adafactor_decay_rate constant_with_linear_warmup "
        "cosine_with_linear_warmup decay_bias_correction ema_schedule exponential inverse_sqrt "
        "linear_schedule_with_warmup polynomial segment_wise stepwise warmup_stable_decay",
        "weft.trainer.model": "per_param_train_dtype_by_path",
    }
)

TARGETS = _names(
    {
        "grain": "ReadOptions",
        "weft.input.corpus": "folder_corpus stdlib_corpus",
        "weft.input.fake": "fake_classification_source fake_classification_source_instruct_lm "
        "fake_glue_source fake_grain_source fake_serialized_json_source fake_source "
        "fake_speech_source fake_text2text_source fake_text_source",
        "weft.input.datasets": "json_lines_dataset parquet_dataset text_dataset",
        "weft.input.text": "lm_documents_source lm_text_source",
        "weft.input.tokenizers": "HuggingFaceTokenizer SentencePieceTokenizer",
        "weft.recipes.digits": "digits_source",
    }
)

RECORDS = _names(
    {
        # Numbers, `ml_dtypes.bfloat16(1.5)`. Some strings make them crash the process, so they are
        # not values. The dtype is numpy.dtype('bfloat16') or jax.numpy.bfloat16.
        "ml_dtypes": "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn "
        "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int2 int4 uint2 uint4",
        "weft.hierarchy.base_layer": "RematSpec",
        "weft.hierarchy.layers.embedding": "ModalityVocabInfo",
        "weft.hierarchy.param_init": "FanAxes",
        "weft.hierarchy.parameter_spec": "FactorizationSpec ParameterSpec TensorSpec",
        "weft.input.base": "PathAndRank",
        "weft.trainer.mesh": "HybridMeshShape",
    }
)

ENUMS = _names(
    {
        "jax.lax": "DotAlgorithmPreset Precision",
        "jax.sharding": "AxisType",
        "weft.core.logical": "RulesFallback",
        "weft.hierarchy.layers.embedding": "Embedding.Scale",
        "weft.hierarchy.mixture_of_experts.gating": "GateNoise",
        "weft.hierarchy.mixture_of_experts.drop_free": "GMMBackend",
        "weft.hierarchy.attention.multihead_attention": "ForwardMode "
        "MultiheadAttentionXL.ScalePosition",
        "weft.hierarchy.layers.normalization": "NormType",
        "weft.hierarchy.attention.stack": "RematRegexSavePatterns",
        "weft.hierarchy.attention.feed_forward": "NormPosition",
        "weft.linen.module": "CurrentModule",
        "weft.trainer.state_builder": "Builder.StateType MergeStateSelection",
        "weft.trainer.checkpointer.index": "CheckpointValidationType",
        "weft.trainer.inference": "DataPartitionType",
        "weft.trainer.learner": "UpdateType",
    }
)


Use = Literal["value", "target", "partial", "record"]
"""Use of a name by a text: as a value or config class, configured with `config_for_function` or
`config_for_class`, with bound arguments, or as a record.
"""

_LISTED = {"value": VALUES, "target": VALUES | TARGETS, "partial": VALUES, "record": RECORDS}
_MODULES = frozenset(
    module
    for name in VALUES | TARGETS | RECORDS | ENUMS
    for module in [name[:i] for i, char in enumerate(name) if char == "."]
)
# Their modules start processes or run commands.
_NOT_IMPORTABLE = ("weft.cli", "weft.launch")


def reference_to(obj: object) -> str | None:
    """Returns the public dotted name of a class or function, or None.

    >>> reference_to(int), reference_to(lambda: 1)
    ('int', None)
    """
    module = getattr(obj, "__module__", None)
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    if not callable(obj) or not isinstance(module, str):
        return None
    if isinstance(name, str):
        if "<" in name:
            return None
        if BUILTINS.get(name) is obj:
            return name
        if not _is_private(module) and _lookup_in_module(module, name.split(".")) is obj:
            return public_name(module, name)
    # Many libraries export definitions of private modules from public ones.
    package = module.partition(".")[0]
    loaded = [n for n in list(sys.modules) if _is_in_packages(n, (package,)) and not _is_private(n)]
    for public in sorted(loaded, key=lambda n: (n.count("."), n)):
        for namespace in _namespaces(public):
            # Other objects have no name of their own.
            members = vars(_lookup_in_module(public, namespace))
            candidates = [name] if name else [n for n, x in members.items() if x is obj]
            for candidate in candidates:
                if _lookup_in_module(public, [*namespace, candidate]) is obj:
                    return ".".join([public, *namespace, candidate])
    return None


def _namespaces(module: str) -> list[list[str]]:
    members = getattr(sys.modules.get(module), "__dict__", {})
    nested = [name for name, x in members.items() if isinstance(x, types.SimpleNamespace)]
    return [[], *([name] for name in nested)]


def _is_private(module: str) -> bool:
    return any(part.startswith("_") for part in module.split(".")) and module != "__main__"


def _is_in_packages(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


_ABSENT = object()


def _lookup_in_module(module: str, names: Sequence[str]) -> Any:
    """Looks up names in a loaded module without running properties or `__getattr__`."""
    found: Any = sys.modules.get(module, _ABSENT)
    for name in names:
        if isinstance(found, enum.EnumMeta) and name in found.__members__:
            found = found.__members__[name]
        elif isinstance(found, type):
            found = next((vars(c)[name] for c in found.__mro__ if name in vars(c)), _ABSENT)
            found = found.__func__ if isinstance(found, staticmethod) else found
        elif isinstance(found, types.ModuleType | types.SimpleNamespace):
            found = vars(found).get(name, _ABSENT)
        else:
            return _ABSENT
    return found


def resolve_reference(name: str, *, allow: Sequence[str] = (), use: Use = "value") -> Any:
    """Returns the class, function or enum member of a dotted name.

    Raises ConfigReferenceError if the name does not exist, or the text may not use it so.
    """
    if name in BUILTINS:
        return BUILTINS[name]
    module, rest = _split_reference(defining_name(name), allow)
    found = _lookup_in_module(module, rest) if module else _ABSENT
    if found is not _ABSENT:
        names = {name, f"{module}.{'.'.join(rest)}", public_name(module, ".".join(rest))}
        if any(_is_permitted(found, n, allow, use) for n in sorted(names)):
            return found
    raise ConfigReferenceError(_refusal(found, name, module, allow, use))


def is_record(name: str) -> bool:
    """Returns whether a dotted name is that of a listed record."""
    return name in RECORDS or defining_name(name) in RECORDS


def is_allowed(cls: type, allow: Sequence[str]) -> bool:
    """Returns whether the reader of a text trusts a class or its module."""
    return _is_in_packages(f"{cls.__module__}.{cls.__qualname__}", allow)


def _is_permitted(found: Any, name: str, allow: Sequence[str], use: Use) -> bool:
    if name in _LISTED[use] or (
        _is_in_packages(name, allow) and _is_defined_in_package(found, name)
    ):
        return True
    if use == "value" and isinstance(found, enum.Enum):
        return name.rpartition(".")[0] in ENUMS
    # Calling such a class would bypass the checks of its config fields.
    return use == "value" and _is_configurable(found) and not _has_outside_effects(found, allow)


def _refusal(found: Any, name: str, module: str, allow: Sequence[str], use: Use) -> str:
    if found is not _ABSENT and _has_outside_effects(found, allow):
        return (
            f"a text may not name {name!r}: {found.__qualname__} has effects outside of the "
            f"run, such as connections or commands. {_allow_hint(name)}"
        )
    if found is not _ABSENT and _is_in_packages(name, allow):
        return f"a text may not name {name!r}: {name.rpartition('.')[0]} only imports it."
    if name in TARGETS:
        return (
            f"a text may not name {name!r} here, because it reads files. Write it as "
            f"config_for_function({name})(…), or set this value in a program."
        )
    known = sorted(VALUES | TARGETS | RECORDS)
    home, _, last = name.rpartition(".")
    near = [entry for entry in known if entry.rpartition(".")[0] == home]
    if module and _is_in_packages(name, ("weft", *allow)):
        members = vars(sys.modules[module]).items()
        near += [f"{module}.{n}" for n, x in members if n[0] != "_" and _is_configurable(x)]
    elsewhere = [entry for entry in known if entry.rpartition(".")[2] == last]
    fix = (
        f" Did you mean {elsewhere[0]!r}?"
        if elsewhere and name not in elsewhere
        else f" {did_you_mean(name, near)}"
        if found is _ABSENT and near
        else ""
    )
    return (
        f"a text may not name {name!r}{_AS[use]}: it is neither listed in weft.config.references "
        f"nor a configurable class of an imported module.{fix} {_allow_hint(name)}"
    )


_AS = {
    "value": "",
    "target": " as a target of a config",
    "partial": " as a target of functools.partial",
    "record": " as a record",
}


def _allow_hint(name: str) -> str:
    return (
        f"If you trust it, allow it: from_text(…, allow=({name!r},)), or --allow {name} on the "
        "command line."
    )


def _split_reference(name: str, allow: Sequence[str]) -> tuple[str, list[str]]:
    """Splits a dotted name into the module, imported if it is listed, and the rest."""
    names = name.split(".")
    if any(part.startswith("__") for part in names[1:]):
        return "", names
    for end in range(len(names) - 1, 0, -1):
        module = ".".join(names[:end])
        if _is_private(module) and not _is_in_packages(module, allow):
            continue
        if module in sys.modules or _import_if_listed(module, allow):
            return module, names[end:]
    return "", names


def _import_if_listed(module: str, allow: Sequence[str]) -> bool:
    of_weft = _is_in_packages(module, ("weft",)) and not _is_in_packages(module, _NOT_IMPORTABLE)
    if not (module in _MODULES or of_weft or _is_in_packages(module, allow)) or _is_private(module):
        return False
    try:
        importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and _is_in_packages(module, (error.name,)):
            return False  # no such module
        raise ConfigReferenceError(f"{module} cannot be imported: {error}.") from None
    return True


def _is_configurable(found: object) -> bool:
    # A Configurable or a config class is intended to be configured.
    return isinstance(found, type) and issubclass(found, ConfigNode | Configurable)


def _has_outside_effects(cls: type, allow: Sequence[str]) -> bool:
    return isinstance(cls, type) and needs_allow(cls) is True and not is_allowed(cls, allow)


def _is_defined_in_package(found: object, name: str) -> bool:
    """Returns whether an object is defined in the package that it was found in."""
    if isinstance(found, types.ModuleType | types.SimpleNamespace):
        return False
    owner = found if hasattr(found, "__module__") else type(found)
    home = str(getattr(owner, "__module__", "")).partition(".")[0]
    package = name.partition(".")[0]
    return home.removesuffix("lib") == package.removesuffix("lib")
