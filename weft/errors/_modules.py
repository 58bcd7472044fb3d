import reprlib

from weft.errors._base import WeftError


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

    def __init__(self, method: str = "a compact method", module: str = "the module"):
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

    def __init__(self, module: str = "the module", name: str = "", methods: object = ()):
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
            f"{attr_name} = {reprlib.repr(attr_val)} was set on a bound {module_cls} outside "
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
