"""Adds a page for each public package to the site: its names, from the table of `__init__.pyi`.

MkDocs calls the hooks before it reads the pages; mkdocstrings puts in the docstrings.
"""

import ast
import json
import logging
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

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
# Classes whose subclasses are dataclasses, and whether these take the arguments of the class too.
DATACLASSES = {"weft.linen.module.Module": True, "weft.struct.PyTreeNode": False, CONFIG: False}

log = logging.getLogger("mkdocs.hooks.reference")


def on_config(config: MkDocsConfig) -> None:
    """Lists the pages under Reference, and drops sections that have none."""
    names = sorted({*packages(), *MODULES})
    for section in config.nav or []:
        if "Reference" in section:
            section["Reference"] = [{name: f"reference/{name}.md"} for name in names]
    config.nav = [section for section in config.nav or [] if any(section.values())]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
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
            index["docs"].append({"location": where, "title": name, "text": text})
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def pages() -> dict[str, str]:
    """Returns the pages' texts by package. A name is explained in the innermost that exports it."""
    sources = griffe.load("weft", search_paths=[ROOT])
    tables = {name: names_of(path, sources) for name, path in packages().items()}
    homes = homes_of(tables)
    texts = {}
    for name, table in sorted(tables.items()):
        own = [x for x, original in table.items() if homes.get(original) == f"{name}.{x}"]
        others = sorted({*table} - {*own}, key=str.lower)
        texts[name] = "\n\n".join(
            [
                f"---\nsearch: {{boost: {2 if name in FIRST else 1}}}\n---\n# {name}",
                f"::: {module_at(name)}\n    options:\n      members: false\n"
                "      heading_level: 1\n      show_root_heading: false\n"
                "      show_root_toc_entry: false",
                *(_explained(f"{name}.{x}", table[x]) for x in sorted(own, key=str.lower)),
                *_list_of(name, {x: table[x] for x in others}, homes),
            ]
        )
    for name in MODULES:
        options = "    options:\n      show_root_heading: false\n"
        texts[name] = f"# {name}\n\n::: {module_at(name)}\n{options}"
    return texts


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


def _list_of(package: str, names: dict[str, str], homes: dict[str, str]) -> list[str]:
    """Returns a list of names that a package passes on, with links to where they are explained."""
    if not names:
        return []
    items = []
    for name, original in names.items():
        if original in homes:
            full = homes[original]
            target = f'<autoref identifier="{full}">{full}</autoref>'
        elif original.startswith("jax."):
            address = f"https://docs.jax.dev/en/latest/_autosummary/{original}.html"
            target = f'<a href="{address}">{original}</a>'
        else:
            target = f'<autoref identifier="{original}" optional>{original}</autoref>'
        items.append(f'<li id="{package}.{name}"><code>{name}</code>: {target}</li>')
    return ["## Names of other modules", f'<ul class="names">{"".join(items)}</ul>']


class Docstrings(griffe.Extension):
    """Shows examples as code, gives dataclasses their parameters, checks what docstrings name."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Marks examples, which Markdown takes for quotations, as code."""
        if obj.docstring is not None:
            example = re.compile(r"^( *)>>> (?:.+\n?)+", re.MULTILINE)
            obj.docstring.value = example.sub(_fenced, obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **kwargs: object) -> None:
        """Changes the classes, whose bases are known once all is loaded."""
        for thing in _all_in(pkg):
            if isinstance(thing, griffe.Class):
                _set_parameters(thing)
                if any(base.path == CONFIG for base in _bases(thing)):
                    _list_fields(thing)
        homes = homes_of({name: names_of(path, pkg) for name, path in packages().items()})
        for thing in _all_in(pkg):
            if thing.docstring is not None:
                thing.docstring.value = _linked(thing, homes)
            for name in _unknown_parameters(thing):
                log.warning(f"{thing.path} explains {name}, which is none of its parameters.")


def _fenced(example: re.Match[str]) -> str:
    indent, text = example[1], example[0].rstrip("\n")
    return f"{indent}```pycon\n{text}\n{indent}```\n"


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
        return f'<autoref identifier="{public}" optional><code>{name}</code></autoref>'

    assert thing.docstring is not None
    parts = re.split(r"(^ *```.*?^ *```\n|``.*?``)", thing.docstring.value, flags=re.M | re.S)
    parts[::2] = [re.sub(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", link, part) for part in parts[::2]]
    return "".join(parts)


def _public(path: str, homes: dict[str, str]) -> str | None:
    """Returns the name by which the reference explains an object, or a member of one."""
    if path in homes or path in homes.values():
        return homes.get(path, path)
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
    mro = [cls, *_bases(cls)]
    # What has fields: subclasses of one of the roots. The root's own parameters come last.
    root = next((i for i, base in enumerate(mro) if base.path in DATACLASSES), None)
    if root is None:
        return
    fields: dict[str, griffe.Parameter] = {}
    for base in reversed(mro[:root]):
        if mro[root] not in _bases(base):
            continue
        for name, member in base.members.items():
            if isinstance(member, griffe.Attribute) and _is_field(member, base) and name != "klass":
                is_keyword = mro[root].path == CONFIG or _is_keyword(member)
                fields[name] = _parameter(member, keyword=is_keyword)
    if DATACLASSES[mro[root].path]:
        init = mro[root].members["__init__"]
        fields |= {parameter.name: parameter for parameter in list(init.parameters)[1:]}
    keyword = griffe.ParameterKind.keyword_only
    this = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    ordered = [this, *sorted(fields.values(), key=lambda field: field.kind is keyword)]
    init = griffe.Function("__init__", parameters=griffe.Parameters(*ordered), parent=cls)
    cls.set_member("__init__", init)


def _list_fields(cls: griffe.Class) -> None:
    """Lists the fields of a config in its docstring, instead of explaining each by itself."""
    lines = []
    for name, member in cls.members.items():
        if isinstance(member, griffe.Attribute) and member.docstring is not None:
            text = " ".join(member.docstring.value.split())
            lines.append(f"    {name}: {text}")
            member.docstring = None
    if lines and cls.docstring is not None:
        cls.docstring.value = "\n".join([cls.docstring.value, "", "Attributes:", *lines])


def _bases(cls: griffe.Class) -> list[griffe.Class]:
    try:
        return cls.mro()
    except ValueError:
        return []


def _is_field(member: griffe.Attribute, cls: griffe.Class) -> bool:
    if member.annotation is None or "instance-attribute" not in member.labels:
        return False
    methods = [x for x in cls.members.values() if isinstance(x, griffe.Function)]
    inside = any(
        f.lineno and f.lineno <= (member.lineno or 0) <= (f.endlineno or 0) for f in methods
    )
    return not inside and _arguments(member).get("init") != "False"


def _arguments(member: griffe.Attribute) -> dict[str, str | griffe.Expr]:
    """Returns the arguments of a `field(...)` that a field has as its value."""
    call = member.value
    if not isinstance(call, griffe.ExprCall) or not str(call.function).endswith("field"):
        return {}
    return {x.name: x.value for x in call.arguments if isinstance(x, griffe.ExprKeyword)}


def _is_keyword(member: griffe.Attribute) -> bool:
    return str(_arguments(member).get("kw_only")) == "True"


def _parameter(member: griffe.Attribute, *, keyword: bool) -> griffe.Parameter:
    arguments = _arguments(member)
    default = arguments.get("default", None if arguments else member.value)
    if "default_factory" in arguments:
        default = griffe.ExprCall(function=arguments["default_factory"], arguments=[])
    kind = griffe.ParameterKind
    return griffe.Parameter(
        member.name,
        annotation=member.annotation,
        kind=kind.keyword_only if keyword else kind.positional_or_keyword,
        default=default,
    )


def _unknown_parameters(thing: griffe.Object) -> list[str]:
    """Returns names under `Args:` that the signature lacks, where one line may explain several."""
    if thing.docstring is None or not isinstance(thing, griffe.Function | griffe.Class):
        return []
    known = {parameter.name for parameter in thing.parameters}
    if any(parameter.kind in _VARIADIC for parameter in thing.parameters):
        return []
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", thing.docstring.value, re.MULTILINE)
    if section is None:
        return []
    indent = len(section[1]) - len(section[1].lstrip(" "))
    heads = re.findall(rf"^ {{{indent}}}([\w*][\w*, ]*):(?= )", section[1], re.MULTILINE)
    names = [name.strip().lstrip("*") for head in heads for name in head.split(",")]
    return [name for name in names if name not in known]


_VARIADIC = (griffe.ParameterKind.var_keyword, griffe.ParameterKind.var_positional)


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
    names = {x.asname or x.name: f"{i.module}.{x.name}" for i in imports for x in i.names}
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
    foreign = isinstance(thing, griffe.Alias) and not thing.target_path.startswith("weft.")
    return thing.target_path if foreign else name


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()
