from weft.errors._base import WeftError


class ScopeError(WeftError):
    """Base of the errors of scopes and their variables."""


class InvalidFilterError(ScopeError, TypeError):
    """A filter for collections or PRNG streams has an invalid type."""

    def __init__(self, filter_like: object, why: str = ""):
        super().__init__(
            f"{filter_like!r} cannot be used as a filter here"
            + (f": {why}" if why else "")
            + "; expected True, False, a name, a collection of names or a DenyList."
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
        of_modules = " or ".join(f"`nn.{name}`" for name in lifted if name not in _OF_SCOPES)
        of_scopes = " or ".join(f"`lift.{name}`" for name in lifted)
        fix = f"{of_scopes or 'the transformation of the same name'} of weft.core.lift"
        if of_modules:
            fix = f"{of_modules} of weft.linen in its place (for scopes {fix})"
        else:
            fix += " in its place, or transform the whole `init` or `apply`"
        super().__init__(
            f"{what} in {where!r} inside of {of_jax or 'a JAX transformation'}, which the scope "
            f"does not cross, so {why or 'a tracer would leak into it'}; use {fix}."
        )


class InvalidRngError(ScopeError, ValueError):
    """A PRNG stream is missing, or a key is not a PRNG key."""

    def __init__(self, msg: str):
        super().__init__(msg)


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

    def __init__(self, col_name: str, var_name: str, scope_path: str, hint: str = ""):
        super().__init__(
            f"the scope {scope_path!r} has no {var_name!r}: the collection {col_name!r} is "
            "empty; "
            + (hint or "pass it to `apply`, or make the collection mutable and pass an init_fn.")
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
            f"no variable {name!r} of the collection {col!r} in the scope "
            f"{scope_path!r}{hint}; pass it to `apply`, or make the collection mutable and "
            "pass an init_fn."
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

    def __init__(self, param_name: str, scope_path: str, value_shape: object, init_shape: object):
        super().__init__(
            f"the parameter {param_name!r} in the scope {scope_path!r} has shape "
            f"{value_shape}, but its initializer returns {init_shape}; the parameters belong "
            "to another model, or the input has another size than at `init`."
        )


class ModifyScopeVariableError(ScopeError, TypeError):
    """A variable of an immutable collection was written to."""

    def __init__(self, col: str, variable_name: str, scope_path: str, hint: str = ""):
        super().__init__(
            f"{variable_name!r} in the scope {scope_path!r} was written to, but its collection "
            f"{col!r} is not mutable; " + (hint or f"call apply(..., mutable=[{col!r}]).")
        )


class ApplyScopeInvalidVariablesTypeError(ScopeError, TypeError):
    """The variables passed to `apply` are not a dict of collections."""

    def __init__(self, variables: object = None, col: str | None = None):
        what = "the variables are" if col is None else f"the collection {col!r} is"
        super().__init__(
            f"{what} a {type(variables).__name__}; expected a dict of collections, such as "
            '{"params": {...}}.'
        )


class ApplyScopeInvalidVariablesStructureError(ScopeError, ValueError):
    """The variables passed to `apply` have an extra outer level."""

    def __init__(self, variables: object):
        names = sorted(variables) if isinstance(variables, dict) else variables
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
