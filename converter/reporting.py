"""A conversion's report, made of its result and of the original model; draws one block as it was and as it became."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from edge_opt.container import open_container
from edge_opt.inspection import example_rewrite
from edge_opt.report import Report
from edge_opt.targets import Target, load_target

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from edge_opt.container import Part, Sections
    from edge_opt.conversion import ConversionResult
    from edge_opt.report import Example


def conversion_report(
    result: ConversionResult,
    original: str | os.PathLike[str] | bytes | None = None,
    *,
    target: str | Target = "generic",
    sections: Sections = "prefill-decode",
    lint: Sequence[tuple[str, str]] = (),
) -> Report:
    """What `edge_opt.report.write_report` takes.

    Args:
        result: of `edge_opt.convert`.
        original: the model as it was, for the picture of one block; without it, the file that `result` names, if any.
        target: as given to `convert`.
        sections: as given to `convert`.
        lint: (severity, sentence) about the result.

    Raises:
        ModelFormatError: the original cannot be read again.
        UsageError: there is no such target.
    """
    source = result.input if original is None else original
    example = None
    if source is not None and result.converted:
        facts = target if isinstance(target, Target) else load_target(target)
        parts = open_container(source, sections).parts
        example = next((found for part in parts if (found := _example(result, part, facts))), None)
    return Report(result, version("edge-opt"), example, lint)


def _example(result: ConversionResult, part: Part, target: Target) -> Example | None:
    """Of the first converted block with several heads, else of whatever else was converted."""
    names = {part.signature(name): name for name, _ in part.model.entry_points()}
    sites = sorted(result.converted, key=lambda site: (site.heads or 0) < 2)
    for signature, chosen in dict.fromkeys((site.signature, site.pass_name) for site in sites):
        if signature in names:
            example = example_rewrite(part.model, names[signature], chosen, target)
            if example is not None:
                return example
    return None
