"""The page of shape rules: the operators with one, the inferred shape, and the source."""

from inspect import getdoc

from edge_opt.ir.operators import BUILTIN_OPERATORS
from edge_opt.shapes.rules import RULES

_NOT_HELD = "rare in language models"
_WHY_NOT = {
    "CONCAT_EMBEDDINGS": "no kernel defines it",
    "CALL": "inferred from its subgraph",
    "STABLEHLO_COMPOSITE": "inferred from its decomposition",
    "CUSTOM": "a kernel from the user",
    "DELEGATE": "made by the runtime, never stored",
    "PLACEHOLDER_FOR_GREATER_OP_CODES": "a marker of the file format, not an operator",
    "STABLEHLO_CASE": _NOT_HELD,
    "STABLEHLO_CUSTOM_CALL": "a kernel from the user",
    "STABLEHLO_PAD": _NOT_HELD,
    "STABLEHLO_REDUCE_WINDOW": _NOT_HELD,
    "STABLEHLO_RNG_BIT_GENERATOR": _NOT_HELD,
}


def table() -> str:
    """Every builtin operator of the schema: those with a rule in a table, then the others with the reason."""
    derived: dict[tuple[str, str], list[str]] = {}
    missing: dict[str, list[str]] = {}
    for name in sorted(BUILTIN_OPERATORS):
        if name in RULES:
            derived.setdefault(described(name), []).append(name)
        else:
            missing.setdefault(why_not(name), []).append(name)
    lines = [f"| {', '.join(names)} | {' | '.join(words)} |" for words, names in derived.items()]
    reasons = [f"- {', '.join(names)}: {why}." for why, names in missing.items()]
    without = len(BUILTIN_OPERATORS) - len(RULES)
    counts = f"{len(BUILTIN_OPERATORS)} operators: {len(RULES)} have a rule, {without} have none."
    head = ["| operators | rule | source in TFLite's kernels |", "| --- | --- | --- |"]
    rest = "Other operators have no rule. Unless noted, their results keep the recorded shapes:"
    return "\n".join([counts, "", *head, *lines, "", rest, "", *reasons])


def described(name: str) -> tuple[str, str]:
    """What an operator's rule infers, and its source: the first and the last line of its docstring."""
    lines = str(getdoc(RULES[name])).splitlines()
    return lines[0], lines[-1].removeprefix("Source: ")


def why_not(name: str) -> str:
    """Why an operator has no rule."""
    stablehlo = name.startswith("STABLEHLO_")
    known = "the runtime has no kernel for it" if stablehlo else _NOT_HELD
    return _WHY_NOT.get(name, known)
