"""Adds pages for each public package to the site: its names, from the table of `__init__.pyi`.

A package, or a module, with many names has a page for each of its topics, which
`reference_topics.txt` lists, and one that leads there; another one has a single page.

MkDocs calls the hooks before it reads the pages; mkdocstrings puts in the docstrings.
"""

import ast
import copy
import dataclasses
import json
import logging
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Modules that users import by name, next to the packages.
MODULES = (
    "weft.configurations",
    "weft.core.flat_dict",
    "weft.core.frozen_dict",
    "weft.core.meta",
    "weft.core.settings",
    "weft.cursor",
    "weft.errors",
    "weft.functional.initializers",
    "weft.io",
    "weft.jax_utils",
    "weft.linen.partitioning",
    "weft.nnx.metrics",
    "weft.recipes",
    "weft.struct",
    "weft.trainer.dynamic_scale",
    "weft.trainer.flops",
    "weft.trainer.profiling",
    "weft.training.checkpoints",
    "weft.training.common_utils",
    "weft.training.train_state",
    "weft.traverse_util",
    "weft.typing",
    "weft.utils",
)
# Packages that the search shows before others with the same names.
FIRST = {"weft.hierarchy.layers", "weft.linen", "weft.nnx", "weft.trainer"}
CONFIG = "weft.config.config.ConfigBase"
# What explains a package to those who do not know it yet: a page of docs/, or a section of one.
GUIDES = {
    "weft": ("Quick start", "index.md"),
    "weft.config": ("Configs", "config.md"),
    "weft.core": ("Scopes", "core.md"),
    "weft.core.lift": ("Scopes", "core.md#transformations"),
    "weft.debug": ("Debugging NaN", "tutorials/debugging_nan.md"),
    "weft.functional": ("Write a layer", "tutorials/write_a_layer.md"),
    "weft.generation": ("Generation", "generation.md"),
    "weft.hierarchy": ("Modules and layers", "hierarchy.md"),
    "weft.hierarchy.attention": ("Attention", "attention.md"),
    "weft.hierarchy.layers": ("Modules and layers", "hierarchy.md"),
    "weft.inference": ("Inference", "training.md#inference-on-batches"),
    "weft.input": ("Input", "input.md"),
    "weft.interop": ("Layers of other libraries", "interop.md"),
    "weft.interop.huggingface": ("Weights", "weights.md"),
    "weft.launch": ("Launching", "launching.md"),
    "weft.lifting": ("The engine of transformations", "lifting.md"),
    "weft.linen": ("Linen modules", "linen.md"),
    "weft.metrics": ("Metrics", "training.md#metrics"),
    "weft.nnx": ("NNX objects", "nnx.md"),
    "weft.nnx.bridge": ("The bridge", "interop.md#the-bridge"),
    "weft.serialization": ("Weights", "weights.md"),
    "weft.trainer": ("Training", "training.md"),
    "weft.trainer.checkpointer": ("Checkpoints", "checkpoints.md"),
    "weft.trainer.optimizers": (
        "Optimizers",
        "training.md#optimizers-that-need-more-than-gradients",
    ),
    "weft.trainer.profiling": ("Profiling", "tutorials/profiling.md"),
    "weft.trainer.summary_writer": ("Summaries", "training.md#summaries"),
}
# A longer page has topics that a reader would look for one by one.
MOST_NAMES = 40
# Classes whose subclasses are dataclasses, and whether these take the arguments of the class too.
DATACLASSES = {
    "weft.linen.module.Module": True,
    "weft.struct.PyTreeNode": False,
    CONFIG: False,
}

log = logging.getLogger("mkdocs.hooks.reference")


class Topic(NamedTuple):
    """A page of a package's reference.

    Attributes:
        title: what its names are for.
        page: its path below `reference/`, without the suffix.
        modules: the modules or packages that define its names, or single names; without "weft.".
    """

    title: str
    page: str
    modules: tuple[str, ...]


def on_config(config: MkDocsConfig) -> None:
    """Lists the pages under Reference, and drops sections that have none."""
    topics_of_package = topics()
    entries = []
    for name in sorted({*packages(), *MODULES}):
        overview = f"reference/{name}.md"
        if name not in topics_of_package:
            entries.append({name: overview})
            continue
        # The footer of the page before it names it without its section.
        pages_of_package = [{f"Overview of {name}": overview}]
        for topic in topics_of_package[name]:
            pages_of_package.append({topic.title: f"reference/{topic.page}.md"})
        entries.append({name: pages_of_package})
    for section in config.nav or []:
        if "Reference" in section:
            section["Reference"] = entries
    config.nav = [
        section for section in config.nav or [] if any(section.values())
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for name, text in pages().items():
        files.append(
            File.generated(config, f"reference/{name}.md", content=text)
        )
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Makes names that are explained elsewhere findable, each by an entry of its own."""
    path = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(path.read_text(encoding="utf-8"))
    listed = re.compile(r'<li id="(weft\.[\w.]+)">(.*?)</li>', re.DOTALL)
    for page in sorted(Path(config.site_dir, "reference").glob("weft*.html")):
        for name, text in listed.findall(page.read_text(encoding="utf-8")):
            where = f"reference/{page.name}#{name}"
            text = unescape(re.sub("<.*?>", "", text))
            index["docs"].append(
                {"location": where, "title": name, "text": text}
            )
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def topics() -> dict[str, list[Topic]]:
    """Returns the topics of `reference_topics.txt`, by package."""
    text = Path(__file__).with_name("reference_topics.txt")
    topics_of_package: dict[str, list[Topic]] = {}
    package = ""
    for line in text.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        title, is_topic, modules = line.partition(": ")
        if not is_topic:
            package = line
            topics_of_package[package] = []
            continue
        file = re.sub(r"[^a-z0-9]+", "-", title.lower())
        topic = Topic(title, f"{package}/{file}", tuple(modules.split()))
        topics_of_package[package].append(topic)
    return topics_of_package


def topic_of(original: str, of_package: list[Topic]) -> Topic:
    """Returns the topic whose modules define an original; the longest name of a module counts.

    Raises:
        LookupError: if no topic has the module.
    """
    best: Topic | None = None
    length = 0
    for topic in of_package:
        for module in topic.modules:
            is_inside = f"{original}.".startswith(f"weft.{module}.")
            if is_inside and len(module) > length:
                best, length = topic, len(module)
    if best is None:
        raise LookupError(
            f"no topic of docs/reference_topics.txt has the module of {original}."
        )
    return best


def pages() -> dict[str, str]:
    """Returns the pages' texts by path. A name is explained in the innermost that exports it.

    Raises:
        ValueError: if a page explains more than `MOST_NAMES` names, or `GUIDES` names what has no
            page.
    """
    without_page = set(GUIDES) - {*packages(), *MODULES}
    if without_page:
        raise ValueError(
            f"GUIDES names {sorted(without_page)}, without a page."
        )
    sources = griffe.load("weft", search_paths=[ROOT])
    assert isinstance(sources, griffe.Module)
    tables = {
        name: names_of(path, sources) for name, path in packages().items()
    }
    homes = homes_of(tables)
    topics_of_package = topics()
    texts = {}
    for name, table in sorted(tables.items()):
        explained = []
        others = []
        for public, original in table.items():
            is_at_home = homes.get(original) == f"{name}.{public}"
            (explained if is_at_home else others).append(public)
        explained.sort(key=str.lower)
        others.sort(key=str.lower)
        sections = [
            f"---\nsearch: {{boost: {2 if name in FIRST else 1}}}\n---\n# {name}",
            f"::: {module_at(name)}\n    options:\n      members: false\n"
            "      heading_level: 1\n      show_root_heading: false\n"
            "      show_root_toc_entry: false",
            *_guide(name, ".."),
        ]
        if name in topics_of_package:
            divided = topics_of_package[name]
            for topic, names in _by_topic(explained, table, divided).items():
                texts[topic.page] = _topic_page(name, topic, names, table)
                sections.append(_overview_of_topic(name, topic, names))
        else:
            for public in explained:
                sections.append(_explained(f"{name}.{public}", table[public]))
        sections += _list_of(name, {x: table[x] for x in others}, homes)
        texts[name] = "\n\n".join(sections)
    for name in MODULES:
        options = "    options:\n      show_root_heading: false\n"
        sections = [f"# {name}"]
        if name in topics_of_package:
            # The text of the module alone; its names are on the pages of topics.
            options += "      members: false\n"
        sections.append(f"::: {module_at(name)}\n{options}")
        if name in topics_of_package:
            table = {
                public: f"{name}.{public}"
                for public in sources[name.removeprefix("weft.")].members
                if not public.startswith("_")
            }
            public_names = sorted(table, key=str.lower)
            divided = topics_of_package[name]
            for topic, names in _by_topic(public_names, table, divided).items():
                texts[topic.page] = _topic_page(name, topic, names, table)
                sections.append(_overview_of_topic(name, topic, names))
        texts[name] = "\n\n".join(sections)
    for page, text in texts.items():
        count = text.count("\n::: ")
        if count > MOST_NAMES:
            raise ValueError(
                f"The page {page} of the reference explains {count} names; divide it in "
                f"docs/reference_topics.txt into topics of at most {MOST_NAMES}."
            )
    return texts


def _by_topic(
    names: list[str], table: dict[str, str], of_package: list[Topic]
) -> dict[Topic, list[str]]:
    """Returns the names of a package by topic, which has a page of its own.

    Raises:
        ValueError: if a topic has no names.
    """
    names_by_topic: dict[Topic, list[str]] = {topic: [] for topic in of_package}
    for public in names:
        names_by_topic[topic_of(table[public], of_package)].append(public)
    for topic, names_of_topic in names_by_topic.items():
        if not names_of_topic:
            raise ValueError(
                f"The topic {topic.page} of docs/reference_topics.txt has no names; remove its "
                "line, or name modules whose names the package explains."
            )
    return names_by_topic


def _topic_page(
    package: str, topic: Topic, names: list[str], table: dict[str, str]
) -> str:
    """Returns the text of the page that explains the names of a topic."""
    boost = 2 if package in FIRST else 1
    sections = [
        f"---\nsearch: {{boost: {boost}}}\n---\n# {topic.title}",
        f"Names of [`{package}`](../{package}.md).",
        *_guide(package, "../.."),
    ]
    for public in names:
        sections.append(_explained(f"{package}.{public}", table[public]))
    return "\n\n".join(sections)


def _guide(package: str, docs: str) -> list[str]:
    """Returns a line that leads to the guide of a package, if it has one."""
    if package not in GUIDES:
        return []
    title, page = GUIDES[package]
    return [f"The guide is [{title}]({docs}/{page})."]


def _overview_of_topic(package: str, topic: Topic, names: list[str]) -> str:
    """Returns a heading that leads to the page of a topic, and links to its names."""
    links = []
    for public in names:
        name = f"{package}.{public}"
        # A module of the same name takes the identifier; see `_explained`.
        link = f'<a href="{topic.page}.html#{name}"><code>{public}</code></a>'
        if not _is_module(name):
            link = (
                f'<autoref identifier="{name}"><code>{public}</code></autoref>'
            )
        links.append(link)
    return f"## [{topic.title}]({topic.page}.md)\n\n{', '.join(links)}"


def module_at(path: str) -> str:
    """Returns the module that a path leads to, where only a stub is there; else the path itself."""
    stub = ROOT.joinpath(*path.split("."), "__init__.pyi")
    if not stub.exists() or stub.with_suffix(".py").exists():
        return path
    line, *_ = ast.parse(stub.read_text(encoding="utf-8")).body
    assert isinstance(line, ast.ImportFrom) and line.module is not None
    return line.module


def homes_of(tables: dict[str, dict[str, str]]) -> dict[str, str]:
    """Returns the full public names, by those of the originals."""
    homes: dict[str, str] = {}
    for name in sorted(tables, key=lambda name: name.count("."), reverse=True):
        for public, original in tables[name].items():
            if original.startswith("weft.") and not _is_module(original):
                homes.setdefault(original, f"{name}.{public}")
    return homes


def _explained(name: str, original: str) -> str:
    # Of a function and a module of one name, the table means the function. At a path that leads
    # to another package, there are no objects.
    package = name.rpartition(".")[0]
    if _is_module(name) or module_at(package) != package:
        return f'<a id="{name}"></a>\n\n::: {original}\n    options:\n      heading: "{name}"'
    return f"::: {name}"


def _link_to(name: str) -> str:
    package = name.rpartition(".")[0]
    # Names at a path that leads to another package have anchors alone; see `_explained`.
    if module_at(package) != package:
        return f'<a href="{package}.html#{name}">{name}</a>'
    return f'<autoref identifier="{name}">{name}</autoref>'


def _list_of(
    package: str, names: dict[str, str], homes: dict[str, str]
) -> list[str]:
    """Returns a list of names that a package passes on, with links to where they are explained."""
    if not names:
        return []
    items = []
    for name, original in names.items():
        if original in homes:
            target = _link_to(homes[original])
        elif _is_module(original):
            page = page_of_module(original)
            target = f'<a href="{page}.html">{original}</a>'
        elif original.startswith("jax."):
            address = (
                f"https://docs.jax.dev/en/latest/_autosummary/{original}.html"
            )
            target = f'<a href="{address}">{original}</a>'
        else:
            target = f'<autoref identifier="{original}" optional>{original}</autoref>'
        items.append(
            f'<li id="{package}.{name}"><code>{name}</code>: {target}</li>'
        )
    return [
        "## Names of other modules",
        f'<ul class="names">{"".join(items)}</ul>',
    ]


def page_of_module(module: str) -> str:
    """Returns the page that explains a module, or the names that it defines.

    Raises:
        LookupError: if there is none.
    """
    if module in MODULES:
        return module
    for of_package in topics().values():
        for topic in of_package:
            if module.removeprefix("weft.") in topic.modules:
                return topic.page
    raise LookupError(
        f"the reference has no page for {module}, which a package passes on; add it to MODULES in "
        "docs/reference.py, or to a topic of docs/reference_topics.txt."
    )


class Docstrings(griffe.Extension):
    """Shows examples as code, gives dataclasses their parameters, checks what docstrings name."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Marks examples, which Markdown takes for quotations, as code."""
        if obj.docstring is not None:
            example = re.compile(r"^( *)>>> (?:.+\n?)+", re.MULTILINE)
            text = example.sub(_fenced, obj.docstring.value)
            obj.docstring.value = _ATTRIBUTES.sub(_one_name_each, text)

    def on_package(self, *, pkg: griffe.Module, **kwargs: object) -> None:
        """Changes the classes, whose bases are known once all is loaded."""
        classes = [
            thing for thing in _all_in(pkg) if isinstance(thing, griffe.Class)
        ]
        shown_bases = {cls.path: cls.bases for cls in classes}
        defined_bases = {
            cls.path: [_where_defined(base, cls) for base in cls.bases]
            for cls in classes
        }
        for cls in classes:
            cls.bases = defined_bases[cls.path]
        for cls in classes:
            _set_parameters(cls)
            _list_members_of_enum(cls)
            if any(base.path == CONFIG for base in _bases(cls)):
                _list_fields(cls)
        for cls in classes:
            _keep_private_init(cls)
        for cls in classes:
            cls.bases = shown_bases[cls.path]
        homes = homes_of(
            {name: names_of(path, pkg) for name, path in packages().items()}
        )
        _name_errors(pkg)
        for thing in _all_in(pkg):
            if thing.docstring is not None:
                thing.docstring.value = _linked(thing, homes)
            if thing.path in MODULES and thing.docstring is not None:
                guide = _guide(thing.path, "..")
                thing.docstring.value += "\n\n".join(["", *guide])
            for name in _unknown_parameters(thing):
                log.warning(
                    f"{thing.path} explains {name}, which is none of its parameters."
                )
        for thing in _all_in(pkg):
            _hide_private_names(thing)
            _show_expressions(thing)
        # Last, since what comes before follows the bases.
        public_bases = {cls.path: _public_bases(cls) for cls in classes}
        for cls in classes:
            cls.bases = public_bases[cls.path]
            _show_types_of_init_vars(cls)


def _fenced(example: re.Match[str]) -> str:
    indent, text = example[1], example[0].rstrip("\n")
    return f"{indent}```pycon\n{text}\n{indent}```\n"


# The section of attributes in a docstring, and an entry in it that explains several.
_ATTRIBUTES = re.compile(r"^ *Attributes:\n(?: .*\n?|\n)+", re.MULTILINE)
_SEVERAL_NAMES = re.compile(
    r"^( +)(\w+(?:, \w+)+):(.*(?:\n\1 +\S.*)*)", re.MULTILINE
)


def _one_name_each(section: re.Match[str]) -> str:
    """Returns a section in which each name has an entry, since griffe reads one name of a line."""

    def entries(entry: re.Match[str]) -> str:
        indent, names, text = entry.groups()
        return "\n".join(f"{indent}{name}:{text}" for name in names.split(", "))

    return _SEVERAL_NAMES.sub(entries, section[0])


def _where_defined(
    base: griffe.Expr | str, cls: griffe.Class
) -> griffe.Expr | str:
    """Returns a base such as `Layer.Config` by its path in the class that defines it.

    griffe does not find a class that `Layer` inherits.
    """
    path = base if isinstance(base, str) else base.canonical_path
    owner_path, _, name = path.rpartition(".")
    if not owner_path.startswith("weft."):
        return base
    try:
        owner = cls.modules_collection[owner_path]
        if isinstance(owner, griffe.Alias):
            owner = owner.final_target
    except (KeyError, griffe.AliasResolutionError):
        return base
    if not isinstance(owner, griffe.Class) or name in owner.members:
        return base
    for ancestor in _bases(owner):
        if name in ancestor.members:
            return f"{ancestor.path}.{name}"
    return base


def _name_errors(pkg: griffe.Module) -> None:
    """Makes the errors known to the modules whose docstrings name them, as by an import.

    Under `Raises:` are also errors that functions of other modules raise.
    """
    names = {*pkg["errors"].members}
    for thing in _all_in(pkg):
        module = thing.module
        if thing.docstring is None or module.path.startswith("weft.errors"):
            continue
        used = names & {*re.findall(r"\b[A-Z]\w+", thing.docstring.value)}
        for name in used - {*module.members}:
            module.set_member(
                name, griffe.Alias(name, f"weft.errors.{name}", parent=module)
            )
            # As any import, so that the module does not show it.
            module.imports[name] = f"weft.errors.{name}"


def _hide_private_names(thing: griffe.Object) -> None:
    """Hides private parameters, where a caller may leave them out, and private defaults and values.

    Those that a caller must give are positional, and lose the underscore.
    """
    if isinstance(thing, griffe.Attribute):
        thing.value = _without_private_names(thing.value)
        if str(thing.value) == "...":
            thing.value = None
    if not isinstance(thing, griffe.Function):
        return
    kinds = griffe.ParameterKind
    is_after_hidden = False
    shown = []
    for parameter in thing.parameters:
        parameter.default = _without_private_names(parameter.default)
        is_positional = parameter.kind is kinds.positional_or_keyword
        if _is_private(parameter.name) and parameter.kind not in _VARIADIC:
            if parameter.default is not None or not is_positional:
                is_after_hidden = True
                continue
            _rename_parameter(parameter, thing)
            for before in [*shown, parameter]:
                before.kind = kinds.positional_only
        elif is_positional and is_after_hidden:
            parameter.kind = kinds.keyword_only
        shown.append(parameter)
    thing.parameters = griffe.Parameters(*shown)


def _rename_parameter(
    parameter: griffe.Parameter, function: griffe.Function
) -> None:
    """Removes the underscore of a parameter, also where the docstrings explain it."""
    private = parameter.name
    parameter.name = private.lstrip("_")
    for thing in (function, function.parent):
        if thing is not None and thing.docstring is not None:
            thing.docstring.value = re.sub(
                rf"\b{private}\b", parameter.name, thing.docstring.value
            )


def _without_private_names(
    code: griffe.Expr | str | None,
) -> griffe.Expr | str | None:
    """Returns a default or value with `...` for the arguments that name what is private.

    A part of anything but a call may not be left out: then all of it becomes `...`.
    """
    if not isinstance(code, griffe.Expr) or not _names_private(code):
        return code
    if isinstance(code, griffe.ExprKeyword):
        value = _without_private_names(code.value)
        return dataclasses.replace(code, value=value)
    if isinstance(code, griffe.ExprCall) and not _names_private(code.function):
        arguments = [_without_private_names(x) for x in code.arguments]
        return dataclasses.replace(code, arguments=arguments)
    return "..."


def _names_private(code: griffe.Expr | str) -> bool:
    if isinstance(code, str):
        return False
    return any(
        isinstance(part, griffe.ExprName) and _is_private(part.name)
        for part in code.iterate(flat=True)
    )


def _show_expressions(thing: griffe.Object) -> None:
    """Shows the annotations, defaults, values and bases of an object as a reader expects them."""
    scope = thing.parent
    if isinstance(thing, griffe.Attribute):
        thing.annotation = _as_shown(_unquoted(thing.annotation, scope))
        thing.value = _as_shown(thing.value)
    elif isinstance(thing, griffe.Function):
        thing.returns = _as_shown(_unquoted(thing.returns, scope))
        for parameter in thing.parameters:
            annotation = _unquoted(parameter.annotation, scope)
            parameter.annotation = _as_shown(annotation)
            parameter.default = _as_shown(parameter.default)
    elif isinstance(thing, griffe.Class):
        thing.bases = _as_shown(thing.bases)


def _unquoted(annotation: Any, scope: Any) -> Any:
    """Returns an annotation that is a string as the expression in it.

    griffe leaves it where a module needs no quotes, since that has annotations from `__future__`.
    """
    if not isinstance(annotation, str) or annotation[:1] not in ("'", '"'):
        return annotation
    code = ast.parse(ast.literal_eval(annotation), mode="eval")
    return griffe.get_expression(code.body, parent=scope)


def _as_shown(expression: Any) -> Any:
    """Returns an expression without what only its module knows.

    `config.REQUIRED` becomes `REQUIRED`, a name that a module imports as private becomes public,
    and a private alias of a type becomes the type.
    """
    if isinstance(expression, list | tuple):
        return type(expression)(map(_as_shown, expression))
    if not isinstance(expression, griffe.Expr):
        return expression
    if isinstance(expression, griffe.ExprName):
        is_private = _is_private(expression.name)
        return _public_form(expression) if is_private else expression
    parts = {
        field.name: _as_shown(getattr(expression, field.name))
        for field in dataclasses.fields(expression)
        if field.name != "parent"
    }
    expression = dataclasses.replace(expression, **parts)
    if isinstance(expression, griffe.ExprAttribute):
        first, *others = expression.values
        if _is_module_of_weft(first) and others:
            expression.values = others
    if isinstance(expression, griffe.ExprCall):
        function = expression.function
        # The default of a field whose factory is a lambda.
        if isinstance(function, griffe.ExprLambda) and not function.parameters:
            return function.body
    return expression


def _is_module_of_weft(name: Any) -> bool:
    """Returns whether a name is that of a module of Weft, which its own module imports."""
    if not isinstance(name, griffe.ExprName) or not name.name.islower():
        return False
    if not name.canonical_path.startswith("weft."):
        return False
    scope = name.parent
    # griffe also finds modules next to it, whose names may be those of variables.
    return (
        isinstance(scope, griffe.Object) and name.name in scope.module.members
    )


def _public_form(name: griffe.ExprName) -> Any:
    """Returns what a private name means: an import, or an alias of a type."""
    owner, _, imported = name.canonical_path.rpartition(".")
    if not _is_private(imported):
        return griffe.ExprName(imported, parent=owner)
    if not isinstance(name.parent, griffe.Object):
        return name
    try:
        alias = name.parent.modules_collection[name.canonical_path]
    except KeyError:
        return name
    if isinstance(alias, griffe.Attribute) and "Var(" not in str(alias.value):
        return _as_shown(alias.value)
    return name


def _is_private(code: griffe.Expr | str | None) -> bool:
    return re.match("_[A-Za-z]", str(code)) is not None


def _linked(thing: griffe.Object, homes: dict[str, str]) -> str:
    """Returns the docstring of an object, with links at the public names in it."""
    own = {*getattr(thing, "members", {})}
    if isinstance(thing, griffe.Function | griffe.Class):
        own |= {parameter.name for parameter in thing.parameters}

    def link(code: re.Match[str]) -> str:
        name = code[1]
        # A plain word is more often an argument or an attribute.
        if name in own or not re.search("[A-Z_.]", name):
            return code[0]
        first, _, rest = name.partition(".")
        try:
            path = thing.resolve(first)
        except griffe.NameResolutionError:
            return code[0]
        public = _public(f"{path}.{rest}" if rest else path, homes)
        if public is None or public == _public(thing.path, homes):
            return code[0]
        shown = name.replace("_", r"\_")
        return f'<autoref identifier="{public}" optional><code>{shown}</code></autoref>'

    assert thing.docstring is not None
    parts = re.split(
        r"(^ *```.*?^ *```\n|``.*?``)", thing.docstring.value, flags=re.M | re.S
    )
    parts[::2] = [
        re.sub(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", link, part)
        for part in parts[::2]
    ]
    return "".join(parts)


def _public(path: str, homes: dict[str, str]) -> str | None:
    """Returns the name by which the reference explains an object, or a member of one."""
    if path in homes or path in homes.values():
        return homes.get(path, path)
    if path in MODULES:
        return path
    parent, _, name = path.rpartition(".")
    public = _public(parent, homes) if "." in parent else None
    return f"{public}.{name}" if public else None


def _all_in(thing: griffe.Object) -> Iterator[griffe.Object]:
    yield thing
    for member in list(thing.members.values()):
        if isinstance(member, griffe.Object):
            yield from _all_in(member)


def _set_parameters(cls: griffe.Class) -> None:
    """Gives a class an `__init__` with its fields, where a base makes it a dataclass."""
    if "__init__" in cls.members:
        return
    if any(str(base).endswith("NamedTuple") for base in cls.bases):
        _set_init(cls, [_parameter(x, keyword=False) for x in _fields_of(cls)])
        return
    mro = [cls, *_bases(cls)]
    # What has fields: subclasses of one of the roots. The root's own parameters come last.
    root = next(
        (i for i, base in enumerate(mro) if base.path in DATACLASSES), None
    )
    if root is None:
        return
    fields: dict[str, griffe.Parameter] = {}
    for base in reversed(mro[:root]):
        if mro[root] not in _bases(base):
            continue
        for member in _fields_of(base):
            if member.name != "klass":
                is_keyword = mro[root].path == CONFIG or _is_keyword(member)
                fields[member.name] = _parameter(member, keyword=is_keyword)
    if DATACLASSES[mro[root].path]:
        init = mro[root].members["__init__"]
        assert isinstance(init, griffe.Function)
        fields |= {
            parameter.name: parameter for parameter in list(init.parameters)[1:]
        }
    keyword = griffe.ParameterKind.keyword_only
    _set_init(
        cls, sorted(fields.values(), key=lambda field: field.kind is keyword)
    )


def _set_init(cls: griffe.Class, parameters: list[griffe.Parameter]) -> None:
    this = griffe.Parameter(
        "self", kind=griffe.ParameterKind.positional_or_keyword
    )
    init = griffe.Function(
        "__init__", parameters=griffe.Parameters(this, *parameters), parent=cls
    )
    cls.set_member("__init__", init)


def _keep_private_init(cls: griffe.Class) -> None:
    """Gives a class the `__init__` of a private base, which is not shown."""
    for base in [cls, *_bases(cls)]:
        init = base.members.get("__init__")
        if isinstance(init, griffe.Function):
            if base is not cls and _is_private(base.name):
                _, *parameters = init.parameters
                _set_init(cls, [copy.copy(x) for x in parameters])
            return


def _list_members_of_enum(cls: griffe.Class) -> None:
    """Lists the members of an enumeration in its docstring, except those with their own texts."""
    is_enum = any(re.search(r"(Enum|Flag)$", str(base)) for base in cls.bases)
    if not is_enum or cls.docstring is None:
        return
    lines = []
    for name, member in cls.members.items():
        is_attribute = isinstance(member, griffe.Attribute)
        if not is_attribute or _is_private(name) or member.docstring:
            continue
        if "property" not in member.labels and member.annotation is None:
            lines.append(f"- `{name}`, with the value `{member.value}`")
    if lines:
        cls.docstring.value += "\n\n".join(["", "Members:", "\n".join(lines)])


def _list_fields(cls: griffe.Class) -> None:
    """Lists the fields of a config in its docstring, instead of explaining each by itself."""
    lines = []
    for name, member in cls.members.items():
        if (
            isinstance(member, griffe.Attribute)
            and member.docstring is not None
        ):
            text = " ".join(member.docstring.value.split())
            lines.append(f"    {name}: {text}")
            member.docstring = None
    if lines and cls.docstring is not None:
        cls.docstring.value = "\n".join(
            [cls.docstring.value, "", "Attributes:", *lines]
        )


def _public_bases(cls: griffe.Class) -> list[griffe.Expr | str]:
    """Returns the bases of a class, with the bases of private ones in their place."""
    shown: dict[str, griffe.Expr | str] = {}
    for base in cls.bases:
        names = str(base).partition("[")[0].split(".")
        if isinstance(base, str) or not any(map(_is_private, names)):
            shown.setdefault(str(base), base)
            continue
        try:
            private = cls.modules_collection[base.canonical_path]
        except KeyError:
            continue
        if isinstance(private, griffe.Class):
            for base_of_private in _public_bases(private):
                shown.setdefault(str(base_of_private), base_of_private)
    return list(shown.values())


def _show_types_of_init_vars(cls: griffe.Class) -> None:
    """Replaces `InitVar[T]` by T: to a caller, it is a parameter as any other."""
    annotated: list[griffe.Parameter | griffe.Attribute] = []
    for member in cls.members.values():
        if isinstance(member, griffe.Function):
            annotated += member.parameters
        elif isinstance(member, griffe.Attribute):
            annotated.append(member)
    for thing in annotated:
        annotation = thing.annotation
        is_subscript = isinstance(annotation, griffe.ExprSubscript)
        if is_subscript and str(annotation.left).endswith("InitVar"):
            thing.annotation = annotation.slice


def _bases(cls: griffe.Class) -> list[griffe.Class]:
    try:
        return cls.mro()
    except ValueError:
        return []


def _fields_of(cls: griffe.Class) -> list[griffe.Attribute]:
    """Returns the fields that a class defines itself."""
    return [
        member
        for member in cls.members.values()
        if isinstance(member, griffe.Attribute) and _is_field(member, cls)
    ]


def _is_field(member: griffe.Attribute, cls: griffe.Class) -> bool:
    if member.annotation is None or "instance-attribute" not in member.labels:
        return False
    methods = [
        x for x in cls.members.values() if isinstance(x, griffe.Function)
    ]
    inside = any(
        f.lineno and f.lineno <= (member.lineno or 0) <= (f.endlineno or 0)
        for f in methods
    )
    return not inside and _arguments(member).get("init") != "False"


def _arguments(member: griffe.Attribute) -> dict[str, str | griffe.Expr]:
    """Returns the arguments of a `field(...)` that a field has as its value."""
    call = member.value
    if not isinstance(call, griffe.ExprCall) or not str(call.function).endswith(
        "field"
    ):
        return {}
    return {
        x.name: x.value
        for x in call.arguments
        if isinstance(x, griffe.ExprKeyword)
    }


def _is_keyword(member: griffe.Attribute) -> bool:
    return str(_arguments(member).get("kw_only")) == "True"


def _parameter(member: griffe.Attribute, *, keyword: bool) -> griffe.Parameter:
    arguments = _arguments(member)
    default = arguments.get("default", None if arguments else member.value)
    factory = arguments.get("default_factory")
    if isinstance(factory, griffe.Expr):
        default = griffe.ExprCall(function=factory, arguments=[])
    kind = griffe.ParameterKind
    return griffe.Parameter(
        member.name,
        annotation=member.annotation,
        kind=kind.keyword_only if keyword else kind.positional_or_keyword,
        default=default,
    )


def _unknown_parameters(thing: griffe.Object) -> list[str]:
    """Returns names under `Args:` that the signature lacks, where one line may explain several."""
    if thing.docstring is None or not isinstance(
        thing, griffe.Function | griffe.Class
    ):
        return []
    known = {parameter.name for parameter in thing.parameters}
    if any(parameter.kind in _VARIADIC for parameter in thing.parameters):
        return []
    section = re.search(
        r"^Args:\n((?:[ ]+.*\n?|\n)+)", thing.docstring.value, re.MULTILINE
    )
    if section is None:
        return []
    indent = len(section[1]) - len(section[1].lstrip(" "))
    heads = re.findall(
        rf"^ {{{indent}}}([\w*][\w*, ]*):(?= )", section[1], re.MULTILINE
    )
    names = [
        name.strip().lstrip("*") for head in heads for name in head.split(",")
    ]
    return [name for name in names if name not in known]


_VARIADIC = (
    griffe.ParameterKind.var_keyword,
    griffe.ParameterKind.var_positional,
)


def packages() -> dict[str, Path]:
    """Returns the tables of public names, by package."""
    tables = {}
    for stub in (ROOT / "weft").rglob("__init__.pyi"):
        name = ".".join(stub.parent.relative_to(ROOT).parts)
        table = ROOT.joinpath(*module_at(name).split("."), "__init__.pyi")
        is_package = table.exists() and table.with_suffix(".py").exists()
        if is_package and not name.startswith("weft.compat."):
            tables[name] = table
    return tables


def names_of(table: Path, sources: griffe.Module) -> dict[str, str]:
    """Returns the full names of a table's originals by public name, without subpackages."""
    package = ".".join(table.parent.relative_to(ROOT).parts)
    imports = [
        x
        for x in ast.parse(table.read_text(encoding="utf-8")).body
        if isinstance(x, ast.ImportFrom)
    ]
    names = {
        x.asname or x.name: f"{i.module}.{x.name}"
        for i in imports
        for x in i.names
    }
    return {
        public: _imported(name, sources)
        for public, name in names.items()
        if name != f"{package}.{public}"
    }


def _imported(name: str, sources: griffe.Module) -> str:
    """Returns the name that a module of Weft imports from elsewhere, or the name itself."""
    inside = name.removeprefix("weft.")
    if inside == name or _is_module(name):
        return name
    thing = sources[inside]
    foreign = isinstance(
        thing, griffe.Alias
    ) and not thing.target_path.startswith("weft.")
    return thing.target_path if foreign else name


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()
