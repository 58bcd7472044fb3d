"""Errors of scopes, modules, objects and layers."""

import reprlib as _reprlib
from collections.abc import Sequence as _Sequence

from weft.errors._base import ConfigError, WeftError

# The shape of an array, or those of the arrays of a pytree.
_Shapes = _Sequence[int] | _Sequence[_Sequence[int]]


class ScopeError(WeftError):
    """Base of the errors of scopes and their variables."""


class InvalidFilterError(ScopeError, TypeError):
    """A filter for collections or PRNG streams has an invalid type."""

    def __init__(self, filter_like: object, why: str = ""):
        reason = f": {why}" if why else ""
        super().__init__(
            f"{filter_like!r} cannot be used as a filter here{reason}; expected True, False, a "
            "name, a collection of names or a DenyList."
        )


class InvalidScopeError(ScopeError, RuntimeError):
    """A scope was used after its end."""

    def __init__(self, scope_name: str):
        super().__init__(
            f"the scope {scope_name!r} is used after its end; a scope is valid only during its "
            "call: call `init` or `apply` again, and keep variables instead of scopes."
        )


# Transformations of scopes that modules do not have.
_OF_SCOPES = ("checkify", "eval_shape")


class JaxTransformError(ScopeError, RuntimeError):
    """A scope was changed inside a JAX transformation that it does not cross."""

    def __init__(
        self,
        what: str = "A scope is used",
        where: str = "/",
        of_jax: str = "",
        lifted: tuple[str, ...] = (),
        why: str = "",
    ):
        scope_names = [f"`lift.{name}`" for name in lifted]
        module_transforms = [name for name in lifted if name not in _OF_SCOPES]
        module_names = [f"`nn.{name}`" for name in module_transforms]
        scope_transform = " or ".join(scope_names)
        if not scope_names:
            scope_transform = "the transformation of the same name"
        fix = f"{scope_transform} of weft.core.lift"
        if module_names:
            module_transform = " or ".join(module_names)
            fix = f"{module_transform} of weft.linen in its place (for scopes {fix})"
        else:
            fix += " in its place, or transform the whole `init` or `apply`"
        transform = of_jax or "a JAX transformation"
        reason = why or "a tracer would leak into it"
        super().__init__(
            f"{what} in {where!r} inside of {transform}, which the scope does not cross, so "
            f"{reason}; use {fix}."
        )


class InvalidRngError(ScopeError, ValueError):
    """A PRNG stream is missing, or a key is not a PRNG key."""


class NameInUseError(ScopeError, ValueError):
    """A name in a scope or module is used twice."""

    def __init__(self, key_type: str, value: str, module_name: str):
        super().__init__(
            f"the name {value!r} is used twice in {module_name!r}, the second time for "
            f"{key_type!r}; choose another name, or to share it, reuse the existing object (a "
            "module can be called twice, a scope pushed with reuse=True)."
        )


class ScopeCollectionNotFound(ScopeError, LookupError):
    """A variable was requested from a collection that is empty or missing."""

    def __init__(
        self, col_name: str, var_name: str, scope_path: str, hint: str = ""
    ):
        advice = hint or (
            "pass it to `apply`, or make the collection mutable and pass an init_fn."
        )
        super().__init__(
            f"the scope {scope_path!r} has no {var_name!r}: the collection {col_name!r} is empty; "
            f"{advice}"
        )


class ScopeParamNotFoundError(ScopeError, LookupError):
    """A parameter is missing in a scope that has others."""

    def __init__(self, param_name: str, scope_path: str, hint: str = ""):
        super().__init__(
            f"no parameter {param_name!r} in the scope {scope_path!r}{hint}; pass it to "
            "`apply`, or run `init` again if the model has changed."
        )


class ScopeVariableNotFoundError(ScopeError, LookupError):
    """A variable is missing in a collection that has others."""

    def __init__(self, name: str, col: str, scope_path: str, hint: str = ""):
        super().__init__(
            f"no variable {name!r} of the collection {col!r} in the scope {scope_path!r}{hint}; "
            "pass it to `apply`, or make the collection mutable and pass an init_fn."
        )


class ScopeFlagNotFoundError(ScopeError, LookupError, ValueError):
    """A requested flag was not given."""

    def __init__(self, key: str, scope_path: str, flags: object = ()):
        super().__init__(
            f"no flag {key!r} in the scope {scope_path!r}; the flags are {flags}. Pass it to "
            f"`init` or `apply`: flags={{{key!r}: ...}}."
        )


class ScopeNameError(ScopeError, TypeError):
    """The name of a scope or variable is not a string."""

    def __init__(self, name: object, scope_path: str):
        super().__init__(
            f"the name {name!r} in the scope {scope_path!r} is a {type(name).__name__}; expected a "
            "string."
        )


class ScopeParentError(ScopeError, TypeError):
    """The parent of a scope is not a scope."""

    def __init__(self, type_name: str):
        super().__init__(
            f"Scope(parent=...) is a {type_name}; expected a Scope, or None for a root."
        )


class ScopeTreeError(ScopeError, TypeError):
    """A value was found where a scope needs a dict of its variables."""

    def __init__(self, col: str, scope_path: str, value: object):
        super().__init__(
            f"the collection {col!r} has a {type(value).__name__} at {scope_path!r}, where a "
            "scope needs a dict of its variables; the variables belong to another model, or a "
            "variable and a scope share a name."
        )


class ReturnedScopeError(ScopeError, TypeError):
    """A transformed function returns its scope."""

    def __init__(self, transformation: str, scope_path: str):
        super().__init__(
            f"{transformation}: the function returns the scope {scope_path!r}; a scope is "
            "valid only during its call, so return arrays."
        )


class ScopeParamShapeError(ScopeError, ValueError):
    """A parameter's shape differs from the one that its initializer returns."""

    def __init__(
        self,
        param_name: str,
        scope_path: str,
        value_shape: _Shapes,
        init_shape: _Shapes,
    ):
        super().__init__(
            f"the parameter {param_name!r} in the scope {scope_path!r} has shape "
            f"{value_shape}, but its initializer returns {init_shape}; the parameters belong "
            "to another model, or the input has another size than at `init`."
        )


class ModifyScopeVariableError(ScopeError, TypeError):
    """A variable of an immutable collection was written to."""

    def __init__(
        self, col: str, variable_name: str, scope_path: str, hint: str = ""
    ):
        advice = hint or f"call apply(..., mutable=[{col!r}])."
        super().__init__(
            f"{variable_name!r} in the scope {scope_path!r} was written to, but its collection "
            f"{col!r} is not mutable; {advice}"
        )


class ApplyScopeInvalidVariablesTypeError(ScopeError, TypeError):
    """The variables passed to `apply` are not a dict of collections."""

    def __init__(self, variables: object = None, col: str | None = None):
        subject = "the variables are"
        if col is not None:
            subject = f"the collection {col!r} is"
        super().__init__(
            f"{subject} a {type(variables).__name__}; expected a dict of collections, such as "
            '{"params": {...}}.'
        )


class ApplyScopeInvalidVariablesStructureError(ScopeError, ValueError):
    """The variables passed to `apply` have an extra outer level."""

    def __init__(self, variables: object):
        names = variables
        if isinstance(variables, dict):
            names = sorted(variables)
        super().__init__(
            'the variables have "params" inside of "params"; the outer dict is one of '
            'collections: pass variables["params"] instead of the dict with the collections '
            f"{names}."
        )


class LazyInitError(ScopeError, ValueError):
    """A variable's initial value depends on an input that is only a shape."""

    def __init__(self, partial_val: object):
        super().__init__(
            f"lazy_init cannot compute {partial_val}: its initial value depends on the value "
            "of an input that was given only as shape and dtype; pass that input as an array, "
            "or make the initializer independent of it."
        )


class ModuleError(WeftError):
    """Base of the errors of Linen modules."""


class UnboundModuleError(ModuleError, ValueError):
    """An operation needs a bound module: one inside `init` or `apply`, or after `bind`."""

    def __init__(self, what: str, module: str = "the module"):
        super().__init__(
            f"{what}, but {module} is not bound to variables; do it inside of `init` or `apply`, "
            "or on `module.bind(variables)`."
        )


class PerturbationNotFoundError(ModuleError, LookupError, ValueError):
    """The given collection of perturbations lacks the entry that `perturb` looks up."""

    def __init__(self, name: str, collection: str, scope_path: str):
        super().__init__(
            f"the collection {collection!r} was given without {name!r} in the scope "
            f"{scope_path!r}, so its gradient would be lost; pass all entries that `init` "
            "creates in the collection, or omit the whole collection."
        )


class CallCompactUnboundModuleError(UnboundModuleError):
    """A compact method of an unbound module was called."""

    def __init__(
        self, method: str = "a compact method", module: str = "the module"
    ):
        super().__init__(f"{method} was called", module)


class CallSetupUnboundModuleError(UnboundModuleError):
    """`setup` of an unbound module was called."""

    def __init__(self, module: str = "the module"):
        super().__init__("`setup` was called by hand", module)


class CallUnbindOnUnboundModuleError(UnboundModuleError):
    """`unbind` of an unbound module was called."""

    def __init__(self, module: str = "the module"):
        super().__init__("`unbind` was called", module)


class CallShareScopeOnUnboundModuleError(UnboundModuleError):
    """`share_scope` was called with an unbound module."""

    def __init__(self, module: str = "the module"):
        super().__init__("`share_scope` was called", module)


class ModuleAttributeError(ModuleError, AttributeError):
    """A module does not have that attribute, or does not have it yet."""

    def __init__(self, module: str, name: str, near: str = ""):
        super().__init__(
            f"{module} has no attribute {name!r}{near}. Attributes from `setup` exist inside "
            "of `init` and `apply`, and after `bind`."
        )


class DescriptorAttributeError(ModuleError, AttributeError):
    """A property of a module reads an attribute that does not exist."""

    def __init__(self, module: str = "a module", name: str = ""):
        super().__init__(
            f"the property {name!r} of {module} reads an attribute that does not exist; define "
            "it as a field or in `setup`."
        )


class AssignSubModuleError(ModuleError, ValueError):
    """A submodule was created where it cannot have a name."""

    def __init__(self, cls: str, parent: str = "the module"):
        super().__init__(
            f"the submodule {cls} was created in a method of {parent} that is neither `setup` "
            "nor compact, so it would have no name; create it in `setup`, decorate the method "
            "with @compact, or pass parent=None."
        )


class InvalidParentModuleError(ModuleError, ValueError):
    """The given parent cannot have submodules."""

    def __init__(self, cls: str, parent: object):
        super().__init__(
            f"{cls} was given parent={parent!r}; expected a module, or None for a module "
            "without a parent."
        )


class CompactMethodError(ModuleError, ValueError):
    """A variable was created where it cannot have an owner."""

    def __init__(self, what: str, module: str):
        super().__init__(
            f"{what} was requested in a method of {module} that is neither `setup` nor "
            "compact; move it to `setup`, or decorate the method with @compact."
        )


class MultipleMethodsCompactError(ModuleError, ValueError):
    """Two compact methods use one name for different submodules."""

    def __init__(
        self,
        module: str = "the module",
        name: str = "",
        methods: str | _Sequence[str] = (),
    ):
        super().__init__(
            f"the compact methods {methods} of {module} use the name {name!r} for different "
            "submodules; create them in `setup`, name them, or use @compact_name_scope."
        )


class ReservedModuleAttributeError(ModuleError, TypeError):
    """A module class redeclares a field that every module has."""

    def __init__(self, annotations: object):
        super().__init__(
            f"a module class declares {annotations}; `parent` and `name` are fields of every "
            "module and cannot be redeclared."
        )


class SetAttributeFrozenModuleError(ModuleError, AttributeError):
    """An attribute of a module was set outside of `setup`."""

    def __init__(self, module_cls: str, attr_name: str, attr_val: object):
        super().__init__(
            f"{attr_name} = {_reprlib.repr(attr_val)} was set on a bound {module_cls} outside "
            "of `setup`, where it would be lost after the call; set it in `setup`, or store "
            f"it in a variable: self.variable('state', {attr_name!r}, init_fn)."
        )


class SetAttributeInModuleSetupError(ModuleError, AttributeError):
    """A field of a module was set in `setup`."""

    def __init__(self, module_cls: str = "the module", attr_name: str = ""):
        super().__init__(
            f"`setup` of {module_cls} sets the field {attr_name!r}, which is an argument of "
            "the constructor; rename the attribute."
        )


class IncorrectPostInitOverrideError(ModuleError, TypeError):
    """A module class overrides `__post_init__` without calling the inherited one."""

    def __init__(self, module_cls: str = "The module"):
        super().__init__(
            f"`__post_init__` of {module_cls} does not call super().__post_init__(); add the call."
        )


class InvalidInstanceModuleError(ModuleError, TypeError):
    """A method that needs an instance was called on the module class."""

    def __init__(self, module_cls: str = "Module", method: str = "init"):
        super().__init__(
            f"{module_cls}.{method} was called on the class; create a module first: "
            f"{module_cls}(...).{method}(...)."
        )


class ApplyModuleInvalidMethodError(ModuleError, TypeError):
    """The argument `method` is not a method."""

    def __init__(self, method: object):
        super().__init__(
            f"method={method!r} cannot be called; expected a method of the module, its name, or a "
            "function that takes the module first."
        )


class TransformTargetError(ModuleError, TypeError):
    """A transformation was given neither a module class nor a function."""

    def __init__(self, target: object):
        super().__init__(
            f"{target!r} cannot be transformed; expected a module class, or a function or "
            "method that takes a module first. To transform an existing module, transform its "
            "class: nn.remat(Dense)(...)."
        )


class TransformedMethodReturnValueError(ModuleError, TypeError):
    """A transformed method returns a module or a variable."""

    def __init__(self, name: str):
        super().__init__(
            f"{name} returns a module, a scope or a variable, which is not valid after the "
            "transformation; return arrays."
        )


class ParameterGivenTwiceError(ModuleError, ValueError):
    """An argument of either the constructor or the call was given to both or neither."""

    def __init__(self, name: str, times: str):
        super().__init__(
            f"{name!r} was given {times}; pass it once, to the constructor or to the call."
        )


class MissingModeError(WeftError, ValueError):
    """A layer was called without its mode."""

    def __init__(self, layer: str, name: str):
        super().__init__(
            f"{layer} was called with {name}=None, and has {name}=None itself; set it when the "
            f"layer is called or created, as {name}=True or False, or for all layers of a "
            f"model by model.train(), model.eval() or nnx.view(model, {name}=True)."
        )


class MissingCacheError(WeftError, ValueError):
    """A layer was called with `decode=True` and has no cache."""

    def __init__(self, layer: str, in_features: int):
        super().__init__(
            f"{layer} was called with decode=True and has no cache; create one for all "
            f"positions first: layer.init_cache((batch, length, {in_features})), or for all "
            "layers of a model nnx.view(model, decode=True, batch_size=batch, "
            "max_length=length)."
        )


class RngArgumentError(InvalidRngError, TypeError):
    """The argument `rngs` is not a set of PRNG streams."""


class CellDefinitionError(WeftError, NotImplementedError):
    """A recurrent cell does not define a required method."""


class ObjectError(WeftError):
    """Base of the errors of objects that transformations take."""


class TraceContextError(ObjectError, RuntimeError):
    """An object was changed inside a transformation that it is not an argument of."""

    def __init__(
        self,
        what: str,
        transformation: str = "a JAX transformation",
        known: str = "",
    ):
        fact = f" It {known}." if known else ""
        super().__init__(
            f"a {what} is changed inside of {transformation}, but was created outside of it, "
            "so a tracer would leak; pass it to the transformed function as an argument, and "
            f"return what has changed.{fact}"
        )


class ImmutableVariableError(ObjectError, RuntimeError):
    """An immutable variable was written to."""

    def __init__(self, message: str):
        super().__init__(
            f"a {message} is written to, but it has the metadata mutable=False; keep its "
            "value, or call variable.set_metadata(mutable=True) first."
        )


class VariableOperationError(ObjectError, NotImplementedError):
    """A variable does not support that operation."""


class VariableAttributeError(ObjectError, AttributeError):
    """A variable's value has no such attribute, or an attribute of a variable cannot be set."""


class VariableMetadataError(ObjectError, KeyError):
    """A variable has no such metadata."""


class VariableArgumentError(ObjectError, TypeError):
    """A method of a variable got an invalid argument."""


class VariableTypeError(ObjectError, ValueError):
    """A variable's class is not the required one, or has no registered name."""


class VariableShapeError(ObjectError, ValueError):
    """A value does not have the shape of its variable."""


class ObjectArgumentError(ObjectError, TypeError):
    """A function of objects got an invalid argument."""


class AttributeMarkError(ObjectError, ValueError):
    """An attribute's value contradicts its annotation as data or static."""


class StateFilterError(ObjectError, ValueError):
    """Filters do not assign every part of a state to a group."""


class StatePathError(ObjectError, KeyError, ValueError):
    """A state has no value at a path."""


class GraphStructureError(ObjectError, ValueError):
    """A graph of objects does not match a state or a graph definition."""


class ModuleAttributeNotFoundError(ObjectError, ValueError):
    """An attribute to be set exists in no module."""


class LayerCallError(ObjectError, TypeError):
    """An element of a Sequential is not callable."""


class RngStreamNotFoundError(ObjectError, AttributeError, KeyError):
    """A PRNG stream was not found, and no default stream exists."""


class InconsistentAliasError(ObjectError, ValueError):
    """An object occurs twice in a call, with different annotations."""


class SharedObjectError(ObjectError, ValueError):
    """An object occurs twice in a call that takes objects as plain pytrees."""


class CapturedObjectError(ObjectError, ValueError):
    """A transformed function returns an object from outside of it."""


class LoopStructureError(ObjectError, ValueError):
    """The body of a loop changed more of an object than the values of its variables."""


class CompiledCallError(ObjectError, TypeError):
    """A function compiled ahead of time was called with other objects or arguments."""


class BranchObjectsError(ObjectError, TypeError):
    """Branches change references or static attributes of an object differently."""


class OptimizerCallError(ObjectError, TypeError):
    """An optimizer was created or called without a required argument."""


class GradientStructureError(ObjectError, ValueError):
    """Gradients do not match the parameters of an optimizer."""


class OptimizerStateError(ObjectError, ValueError):
    """Optimizer state does not match the parameters, or its transformation's state."""


class SharedStateWarning(ObjectError, UserWarning):
    """A loop drops changes of state that all of its iterations share."""


class OptimizerWarning(ObjectError, UserWarning):
    """An optimizer has no parameters to update."""


class AverageLeafError(ObjectError, TypeError):
    """Something that is not a variable cannot be averaged."""


class AverageStructureError(ObjectError, ValueError):
    """Values do not match the structure of their averages."""


class MetricArgumentError(ObjectError, TypeError):
    """A metric was created or updated with invalid arguments."""


class MetricValueError(ObjectError, ValueError):
    """The arrays given to a metric do not fit together."""


class MetricMethodError(ObjectError, NotImplementedError):
    """A metric class does not define how it is created, updated, reset or computed."""


class ChildNameConflictError(WeftError, ValueError):
    """A module already has a child, attribute or shared module of that name."""


class ModuleNameError(WeftError, ValueError):
    """The name of a module or context cannot be part of a path."""


class ContextTransformError(WeftError, RuntimeError):
    """An output was added, or a key drawn, inside a JAX transformation that does not return it."""


class LoopOutputError(WeftError, ValueError):
    """A module adds an output in a loop that does not stack outputs over its iterations."""


class OutputConflictError(WeftError, ValueError):
    """A summary, state update, module output or child context was added twice under one name."""


class InvalidDescendantError(WeftError, ValueError):
    """A module was reached from a context that is neither above it nor shares it."""


class NoContextError(WeftError, RuntimeError):
    """Something that exists only during an invocation was used outside of one."""


class ContextStackError(WeftError, ValueError):
    """The thread's stack of contexts is in an invalid state for the operation."""


class MissingStateError(WeftError, KeyError):
    """A module's state has no entry of that name."""


class TreeMergeError(WeftError, ValueError):
    """Two trees to be merged have different structures."""


class MissingPrngKeyError(WeftError, ValueError):
    """A random operation ran in an invocation without a PRNG key."""


class ChildConfigError(WeftError, TypeError):
    """A child was not given as the config of a module."""


class LayerConfigError(ConfigError, ValueError):
    """Fields of a layer's config are valid individually, but not together."""


class ParameterSpecError(WeftError, ValueError):
    """A parameter's spec, partitioning and value contradict each other."""


class ParameterInitError(WeftError, ValueError):
    """No initializer fits a parameter, or its initializer cannot draw it."""


class MetricsError(WeftError, ValueError):
    """A model's losses and metrics do not fit together, or have nothing to measure."""


class InteropError(WeftError):
    """Base of the errors of layers of other libraries."""


class UnknownLayerError(InteropError, TypeError):
    """An object is not a layer of any known library."""


class MissingLibraryError(InteropError, ImportError):
    """The library of a layer is not installed."""


class LayerVariablesError(InteropError, ValueError):
    """Variables do not fit their layer."""


class LayerInputsError(InteropError, TypeError):
    """A layer's parameters depend on inputs that were not given."""


class LayerMethodError(InteropError, AttributeError):
    """A layer has no method of that name."""


class BridgeContextError(InteropError, ValueError):
    """Something that exists only while a module of the bridge runs was used outside of it."""
