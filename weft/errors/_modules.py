"""The errors about Linen modules."""

import reprlib

from weft.errors._base import WeftError


class ModuleError(WeftError):
    """Base of the errors about Linen modules."""


class UnboundModuleError(ModuleError, ValueError):
    """A module was asked for what it has only inside of `init`, `apply` or after `bind`."""

    def __init__(self, what: str, module: str = "the module"):
        super().__init__(
            f"{what}, but {module} is not bound to variables; do it inside of `init` or `apply`, "
            "or on `module.bind(variables)`."
        )


class PerturbationNotFoundError(ModuleError, LookupError, ValueError):
    """`perturb` found the collection of perturbations, but no entry of its own in it."""

    def __init__(self, name: str, collection: str, scope_path: str):
        super().__init__(
            f"the collection {collection!r} was given without {name!r} in the scope "
            f"{scope_path!r}, so that its gradient would be lost; give all that `init` makes in "
            "the collection, or leave the whole collection out."
        )


class CallCompactUnboundModuleError(UnboundModuleError):
    """A compact method of a module without variables was called."""

    def __init__(self, method: str = "a compact method", module: str = "the module"):
        super().__init__(f"{method} was called", module)


class CallSetupUnboundModuleError(UnboundModuleError):
    """`setup` of a module without variables was called."""

    def __init__(self, module: str = "the module"):
        super().__init__("`setup` was called by hand", module)


class CallUnbindOnUnboundModuleError(UnboundModuleError):
    """`unbind` of a module without variables was called."""

    def __init__(self, module: str = "the module"):
        super().__init__("`unbind` was called", module)


class CallShareScopeOnUnboundModuleError(UnboundModuleError):
    """`share_scope` was given a module without variables."""

    def __init__(self, module: str = "the module"):
        super().__init__("`share_scope` was called", module)


class ModuleAttributeError(ModuleError, AttributeError):
    """A module has no attribute of that name, or not yet."""

    def __init__(self, module: str, name: str, near: str = ""):
        super().__init__(
            f"{module} has no attribute {name!r}{near}. What `setup` makes is there inside of "
            "`init` and `apply`, and after `bind`."
        )


class DescriptorAttributeError(ModuleError, AttributeError):
    """A property of a module asks for an attribute that is not there."""

    def __init__(self, module: str = "a module", name: str = ""):
        super().__init__(
            f"the property {name!r} of {module} asks for an attribute that does not exist; what it "
            "reads must be a field, or made in `setup`."
        )


class AssignSubModuleError(ModuleError, ValueError):
    """A submodule was made where it cannot have a name."""

    def __init__(self, cls: str, parent: str = "the module"):
        super().__init__(
            f"the submodule {cls} was made in a method of {parent} that is neither `setup` nor "
            "compact, so it would have no name; make it in `setup`, put @compact on the method, or "
            "give it parent=None."
        )


class InvalidParentModuleError(ModuleError, ValueError):
    """What was given as a module's parent can have no submodules."""

    def __init__(self, cls: str, parent: object):
        super().__init__(
            f"{cls} was given parent={parent!r}; expected a module, or None for a module that "
            "stands alone."
        )


class CompactMethodError(ModuleError, ValueError):
    """A variable was made where it cannot have an owner."""

    def __init__(self, what: str, module: str):
        super().__init__(
            f"{what} was asked for in a method of {module} that is neither `setup` nor compact; do "
            "it in `setup`, or put @compact on the method."
        )


class MultipleMethodsCompactError(ModuleError, ValueError):
    """Two compact methods give one name to different submodules."""

    def __init__(self, module: str = "the module", name: str = "", methods: object = ()):
        super().__init__(
            f"the compact methods {methods} of {module} give the name {name!r} to different "
            "submodules; make them in `setup`, give them names, or use @compact_name_scope."
        )


class ReservedModuleAttributeError(ModuleError, TypeError):
    """A module class declares a field that every module has."""

    def __init__(self, annotations: object):
        super().__init__(
            f"a module class declares {annotations}; `parent` and `name` are fields of every "
            "module and cannot be declared anew."
        )


class SetAttributeFrozenModuleError(ModuleError, AttributeError):
    """An attribute of a module was set outside of `setup`."""

    def __init__(self, module_cls: str, attr_name: str, attr_val: object):
        super().__init__(
            f"{attr_name} = {reprlib.repr(attr_val)} was set on a bound {module_cls} outside of "
            "`setup`, where it would be lost after the call; set it in `setup`, or keep it in a "
            f"variable: self.variable('state', {attr_name!r}, init_fn)."
        )


class SetAttributeInModuleSetupError(ModuleError, AttributeError):
    """A field of a module was set in `setup`."""

    def __init__(self, module_cls: str = "the module", attr_name: str = ""):
        super().__init__(
            f"`setup` of {module_cls} sets the field {attr_name!r}, which is given when the module "
            "is made; give the attribute another name."
        )


class IncorrectPostInitOverrideError(ModuleError, TypeError):
    """A module class overrides `__post_init__` and does not call the one above."""

    def __init__(self, module_cls: str = "The module"):
        super().__init__(
            f"`__post_init__` of {module_cls} does not call super().__post_init__(); add the call."
        )


class InvalidInstanceModuleError(ModuleError, TypeError):
    """A module class was used where an instance is needed."""

    def __init__(self, module_cls: str = "Module", method: str = "init"):
        super().__init__(
            f"{module_cls}.{method} was called on the class; make a module first: "
            f"{module_cls}(...).{method}(...)."
        )


class ApplyModuleInvalidMethodError(ModuleError, TypeError):
    """What was given as `method` is no method."""

    def __init__(self, method: object):
        super().__init__(
            f"method={method!r} cannot be called; expected a method of the module, its name, or a "
            "function that takes the module first."
        )


class TransformTargetError(ModuleError, TypeError):
    """A transformation was given neither a module class nor a function."""

    def __init__(self, target: object):
        super().__init__(
            f"{target!r} cannot be transformed; expected a module class, or a function or method "
            "that takes a module first. Of a module that exists, transform the class: "
            "nn.remat(Dense)(...)."
        )


class TransformedMethodReturnValueError(ModuleError, TypeError):
    """A transformed method returns a module or a variable."""

    def __init__(self, name: str):
        super().__init__(
            f"{name} returns a module, a scope or a variable, which end with the transformation; "
            "return arrays."
        )


class ParameterGivenTwiceError(ModuleError, ValueError):
    """What can be given when a module is made or when it is called was given twice, or never."""

    def __init__(self, name: str, times: str):
        super().__init__(
            f"{name!r} was given {times}; give it once: when the module is made, or when it is "
            "called."
        )
