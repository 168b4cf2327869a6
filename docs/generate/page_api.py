"""The page of the library: signatures and docstrings of what it names, as Markdown that any renderer shows."""

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from griffe import Docstring, DocstringSectionKind

_WIDTH = 92
_MODULE_OF_A_CLASS = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Z])")
_QUOTED = re.compile(r": '([^']+)'(?= = |$)")  # an annotation that was not evaluated
_FIELD = re.compile(r"^(\w+(?:, \w+)*): ")
_TITLES = {
    DocstringSectionKind.parameters: "Arguments",
    DocstringSectionKind.raises: "Raises",
    DocstringSectionKind.attributes: "Attributes",
}


def section(path: str) -> str:
    """The section for `path`: a function, a class with its public members, or the public names of a module."""
    target = _find(path)
    if isinstance(target, ModuleType):
        own = [
            (name, entry) for name, entry in vars(target).items() if _is_public(name, entry, target)
        ]
        return "\n\n".join([_docstring(target), *(_entry(name, entry) for name, entry in own)])
    return _entry(path.rpartition(".")[2], target)


def _find(path: str) -> Any:
    """The object at a dotted path: a module, or a member of the longest module that the path begins with."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        owner, _, name = path.rpartition(".")
        return getattr(_find(owner), name)


def _is_public(name: str, entry: Any, module: ModuleType) -> bool:
    defined = getattr(entry, "__module__", None) == module.__name__
    return (
        not name.startswith("_")
        and defined
        and (inspect.isclass(entry) or inspect.isfunction(entry))
    )


def _entry(name: str, target: Any) -> str:
    kind = "class " if inspect.isclass(target) else ""
    signature = (
        "" if inspect.isclass(target) and issubclass(target, Exception) else _signature(target)
    )
    parts = [f"### `{name}`", f"```python\n{kind}{name}{signature}\n```", _docstring(target)]
    if inspect.isclass(target):
        parts += _members(target)
    return "\n\n".join(filter(None, parts))


def _members(owner: type) -> Iterator[str]:
    """Public properties and methods of a class, in the order in which they are written."""
    for name, member in vars(owner).items():
        function = getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.getdoc(member):
            continue
        if isinstance(member, property):
            yield f"- **`{name}`** {_docstring(member)}"
        elif inspect.isfunction(function):
            yield f"- **`{name}{_signature(function, indent='  ')}`** {_docstring(function, indent='  ')}"


def _signature(target: Any, *, indent: str = "") -> str:
    """The signature, one parameter a line where it does not fit into one."""
    signature = inspect.signature(target)
    parameters = [entry for entry in signature.parameters.values() if entry.name != "self"]
    shown = list(map(str, parameters))
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returns = "" if signature.return_annotation in (signature.empty, None) else _returned(signature)
    plain = [
        _QUOTED.sub(r": \1", _MODULE_OF_A_CLASS.sub("", text)).replace("'", '"') for text in shown
    ]
    line = f"({', '.join(plain)}){returns}"
    if len(line) <= _WIDTH or indent:
        return line
    return "(\n" + "".join(f"    {text},\n" for text in plain) + f"){returns}"


def _returned(signature: inspect.Signature) -> str:
    returned = inspect.formatannotation(signature.return_annotation).strip("'")
    return f" -> {_MODULE_OF_A_CLASS.sub('', returned)}"


def _docstring(target: Any, *, indent: str = "") -> str:
    """A docstring in Google's style: its text, and a list for each of its sections."""
    text = inspect.getdoc(target) or ""
    parts = []
    for part in Docstring(text).parse("google", warnings=False):
        if part.kind in _TITLES:
            rows = [_row(entry, indent) for entry in part.value]
            parts.append("\n".join([f"{indent}{_TITLES[part.kind]}:", "", *rows]))
        elif part.kind is DocstringSectionKind.returns:
            parts.append(f"{indent}Returns: {' '.join(part.value[0].description.split())}")
        elif part.kind is DocstringSectionKind.examples:
            parts += [f"```python\n{text.replace('>>> ', '')}\n```" for _, text in part.value]
        elif part.kind is DocstringSectionKind.admonition:
            rows = [_FIELD.sub(r"- `\1`: ", line) for line in part.value.contents.splitlines()]
            parts.append("\n".join([f"{indent}{part.title}:", "", *rows]))
        else:
            parts.append(str(part.value).replace("\n", f"\n{indent}"))
    return re.sub(r"(?<![`\w])<(?=\w)", "&lt;", "\n\n".join(parts))


def _row(entry: Any, indent: str) -> str:
    name = getattr(entry, "name", None) or _MODULE_OF_A_CLASS.sub("", str(entry.annotation))
    return f"{indent}- `{name}`: {' '.join(entry.description.split())}"
