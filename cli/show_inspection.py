"""Prints what `inspect` finds in a model, and what `explain` says of its sites."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from edge_opt.cli import output, streams
from edge_opt.inspection import AttentionBlock, Explanation, Inspection, SignatureContent
from edge_opt.inspection.reporting import node_data
from edge_opt.output.atomic import resolve_target, write_whole
from edge_opt.output.words import many, shortened, size
from edge_opt.passes import Status
from edge_opt.soundness import sentences

_OPERATORS_NAMED = 12


def write_overlay(file: Path, path: Path, target: str | None, *, overwrite: bool) -> None:
    """Write what `inspect` finds as an overlay for Model Explorer.

    Raises:
        UsageError: the path exists and `overwrite` is False, or it is the model itself.
        OutputError: it cannot be written.
    """
    status = file.stat()
    resolve_target(path, overwrite=overwrite, inputs=((status.st_dev, status.st_ino),))
    data = json.dumps(node_data(file, target=target), indent=2)
    write_whole(path, f"{data}\n".encode(), overwrite=overwrite)


def show_sites(sites: Sequence[Explanation]) -> None:
    """Each site with what `convert` would do, and why not."""
    if not sites:
        output.say("No site: the model holds nothing that a pass could apply to.")
    for explanation in sites:
        site = explanation.verdict
        if site.status is Status.CONVERTED:
            verdict, style = "would be converted", output.GOOD
        else:
            verdict = f"{'nothing to do' if site.settled else site.status}: {site.reason}"
            style = "" if site.settled else output.BAD
        output.say(f"{site.signature}#{site.index} {site.pass_name}: {verdict}", style=style)
        form = [] if explanation.block is None else [f"    {_describe(explanation.block)}"]
        output.say(*form, f"    at '{shortened(site.operator)}'")


def show(found: Inspection) -> None:
    """The model's signatures, operators and attention, its caches, and what is wrong with it."""
    weights = ", ".join(f"{dtype} {size(count)}" for dtype, count in found.weights.items())
    output.say(f"{streams.name(found.file or '')}: {size(found.size)} in {many(found.subgraphs, 'subgraph')}")
    output.say(f"constants: {weights or 'none'}", "")
    if found.compiled:
        instead = found.made_from or "the bundle that it was made from"
        output.say(f"Compiled for an NPU: nothing in it can be rewritten; see {instead}.", "")
    rows: list[tuple[str, ...]] = [("signature", "operators", "inputs", "outputs", "attention")]
    rows += [_row(signature, found.attention) for signature in found.signatures]
    output.say(*output.table(rows))
    for signature in found.signatures:
        # Equal blocks on one line: layers repeat.
        blocks = Counter(_describe(block) for block in found.attention if block.signature == signature.name)
        listed = [f"  {count} x {text}" for text, count in blocks.items()]
        listed += [f"  {composite.count} x {composite}" for composite in signature.composites]
        output.say("", f"{signature.name}: {_operators(signature)}", *listed)
    if found.caches.caches:
        output.say("", *found.caches.lines())
    if found.soundness:
        output.say("", "Not sound:", style=output.BAD)
        output.say(*(f"  {text}" for text in sentences(found.soundness)))
    if found.target is not None:
        output.say("", *_lint(found))


def _lint(found: Inspection) -> list[str]:
    """What the target will not like; equal findings of several places on one line."""
    if not found.lint:
        return [f"{found.target}: nothing that is known to be refused or computed wrongly."]
    same = Counter((finding.severity, finding.signature, finding.message) for finding in found.lint)
    return [
        f"{found.target}, {severity}: {f'{signature}: ' if signature else ''}{message}"
        for severity, signature, message in same
    ]


def _row(signature: SignatureContent, attention: list[AttentionBlock]) -> tuple[str, ...]:
    forms = Counter(block.form for block in attention if block.signature == signature.name)
    parts = [f"{count} {form}" for form, count in forms.items()]
    parts += [f"{signature.unmatched} not understood"] if signature.unmatched else []
    operators = sum(signature.operators.values())
    counts = (operators, len(signature.inputs), len(signature.outputs))
    return (signature.name, *map(str, counts), ", ".join(parts) or "none")


def _operators(signature: SignatureContent) -> str:
    named = list(signature.operators.items())
    text = ", ".join(f"{name} {count}" for name, count in named[:_OPERATORS_NAMED])
    rest = sum(count for _, count in named[_OPERATORS_NAMED:])
    return f"{text}, others {rest}" if rest else text or "no operators"


def _describe(block: AttentionBlock) -> str:
    """One attention in the words of the field."""
    rows, *lengths = ("?" if size < 0 else str(size) for size in (block.query_length, *block.key_lengths))
    keys = " + ".join(lengths)
    mask = f", mask {shortened(block.mask)}" if block.mask else ", no mask"
    return f"{block.form}: N={block.heads} K={block.kv_heads} H={block.head_size} T={rows}, {keys} keys{mask}"
