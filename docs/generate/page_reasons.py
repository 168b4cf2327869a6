"""The kinds of reasons for skipping something, from the code."""

import ast
from inspect import getsource
from itertools import pairwise

from edge_opt.ir.refusal import Why


def meanings() -> dict[str, list[str]]:
    """What each kind means, and what to do, by the kind's name: the text below it in the code."""
    found: dict[str, list[str]] = {}
    (kinds,) = ast.parse(getsource(Why)).body
    assert isinstance(kinds, ast.ClassDef)
    for kind, below in pairwise(kinds.body):
        if isinstance(kind, ast.Assign) and isinstance(below, ast.Expr):
            found[ast.unparse(kind.targets[0])] = ast.literal_eval(below.value).split("; ")
    return found


def table() -> str:
    """Every kind, what it means, and what to do."""
    rows = [f"| `{Why[name]}` | {' | '.join(texts)} |" for name, texts in meanings().items()]
    return "\n".join(["| why | meaning | what to do |", "|---|---|---|", *rows])
