"""Runs passes on graphs given as text, for tests: with the real verifier, a made-up one, or none."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_opt.conversion import convert
from edge_opt.ir import Constants, Model, load, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.ir.refusal import Reason, RefusedError
from edge_opt.passes import PASSES, Check, Context, Pass, Proof, Rewrite, Verdict, run_pass
from edge_opt.targets import Target, load_target
from edge_opt.verification.audit import Audit
from edge_opt.verification.examine import Verifier

TESTDATA = Path(__file__).parent.parent / "testdata"
SELECT_PAGE = (TESTDATA / "reference_select.txt").read_text()
"""The reference page's graph of three blocks that SELECT masks."""
INLINING = replace(load_target("generic"), inline_composites=True)
"""Opens every composite."""


def changed(text: str, *edits: str) -> str:
    """The text with these changes `old -> new`."""
    for edit in edits:
        old, new = edit.split(" -> ", 1)
        assert old in text
        text = text.replace(old, new)
    return text


def tiles(rows: int) -> Target:
    """A target that cuts heads into blocks of so many rows."""
    return replace(load_target("generic"), rows_per_tile=rows)


def but(*names: str) -> list[str]:
    """What to skip for these passes alone to run."""
    return [name for name in PASSES if name not in names]


class Says:
    """A verifier that runs nothing; `verdicts` are given in turn, the last one for ever."""

    def __init__(self, *verdicts: bool) -> None:
        self.verdicts = list(verdicts)
        self.asked: list[tuple[Rewrite, Check]] = []

    def verify(self, rewrite: Rewrite, check: Check) -> Proof:
        """The next verdict."""
        self.asked.append((rewrite, check))
        holds = self.verdicts[0] if len(self.verdicts) == 1 else self.verdicts.pop(0)
        return Proof(
            check, holds=holds, bitwise=holds, max_abs=0.0, reason="" if holds else "it differs"
        )


def run(
    model: Model,
    *passes: Pass | str,
    target: Target | None = None,
    verifier: Verifier | None = None,
) -> list[Verdict]:
    """Run passes over subgraph 0, as a conversion does."""
    graph, facts = model.subgraphs[0], target or load_target("generic")
    audit = Audit(model)
    context = Context(
        model, graph, model.signature_name(graph), facts, Constants(model), verifier, audit=audit
    )
    chosen = [PASSES[name] if isinstance(name, str) else name for name in passes]
    reports = [report for each in chosen for report in run_pass(each, context)]
    audit.check()
    return reports


def rewrites_of(
    name: str, model: Model, target: Target | None = None, **facts: Any
) -> list[Rewrite]:
    """What a pass would do at each of its sites, on subgraph 0; nothing is done."""
    graph = model.subgraphs[0]
    chosen = target or load_target("generic")
    context = Context(model, graph, model.signature_name(graph), chosen, Constants(model), **facts)
    return [site.build() for site in PASSES[name].sites(context) if site.build is not None]


def refusal(check: Callable[..., object], *arguments: object) -> Reason | None:
    """The reason with which a check raises RefusedError; None where it does not."""
    try:
        check(*arguments)
    except RefusedError as refused:
        return refused.reason
    return None


def convert_text(text: str, *passes: Pass | str, **settings: object) -> tuple[Model, list[Verdict]]:
    """The model that the text says, converted, and what was done."""
    model = parse(text)
    return model, run(model, *passes, **settings)  # type: ignore[arg-type]


def sites_of(text: str, **options: Any) -> list[Verdict]:
    """The sites of a conversion that verifies nothing."""
    return convert(parse(text), verify="none", **options).sites


def only(text: str, name: str, **settings: object) -> tuple[Model, Verdict]:
    """The converted model, and the report of the only site that the pass has."""
    model, (report,) = convert_text(text, name, **settings)
    return model, report


def names(model: Model) -> list[str]:
    """The operators' names in subgraph 0, in execution order."""
    return [operator.name for operator in model.subgraphs[0].operators]


def count(model: Model, name: str) -> int:
    """How many operators of that name there are."""
    return names(model).count(name)


def statuses(reports: Sequence[Verdict]) -> list[str]:
    """What became of each site."""
    return [str(report.status) for report in reports]


def reread(model: Model) -> Model:
    """The model after a way through its file."""
    return load(to_bytes(model))
