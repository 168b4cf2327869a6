"""`edge-opt inspect` and `explain`: print what the library finds in a model, and what it would convert."""

import json
from collections import Counter
from itertools import chain
from pathlib import Path

from edge_opt.cli import output, streams
from edge_opt.cli.app import Explain, Inspect
from edge_opt.inspection import AttentionBlock, Explanation, Inspection, SignatureContent, inspect
from edge_opt.inspection import explain as explain_model
from edge_opt.inspection.overlay import node_data
from edge_opt.output.atomic import resolve_target, write_whole
from edge_opt.output.words import many, shortened, size
from edge_opt.passes import Status
from edge_opt.soundness import sentences

_OPERATORS_NAMED = 12


def run(asked: Inspect) -> int:
    """Look at one model; findings of the lint do not change the exit code."""
    found = inspect(asked.file, target=asked.target)
    if asked.node_data is not None:
        _write_overlay(asked, asked.node_data)
    if asked.as_json:
        output.say_json(found.to_dict())
    else:
        _show(found)
    return 0


def explain(asked: Explain) -> int:
    """Explain one model; nothing is run or written."""
    found = explain_model(asked.file)
    if asked.as_json:
        output.say_json({"file": str(asked.file), "sites": [explanation.to_dict() for explanation in found]})
        return 0
    if not found:
        output.say("No site: the model holds nothing that a pass could apply to.")
    output.say(*chain.from_iterable(map(_verdict, found)))
    return 0


def _write_overlay(asked: Inspect, path: Path) -> None:
    status = asked.file.stat()
    resolve_target(path, overwrite=asked.overwrite, inputs=((status.st_dev, status.st_ino),))
    data = json.dumps(node_data(asked.file, target=asked.target), indent=2)
    write_whole(path, f"{data}\n".encode(), overwrite=asked.overwrite)


def _show(found: Inspection) -> None:
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
        listed = (f"  {count} x {text}" for text, count in blocks.items())
        output.say("", f"{signature.name}: {_operators(signature)}", *listed)
    if found.caches.caches:
        output.say("", *found.caches.lines())
    if found.soundness:
        output.say("", "Not sound:", *(f"  {text}" for text in sentences(found.soundness)))
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


def _verdict(explanation: Explanation) -> list[str]:
    site = explanation.verdict
    if site.status is Status.CONVERTED:
        verdict = "would be converted"
    else:
        verdict = f"{'nothing to do' if site.settled else site.status}: {site.reason}"
    where = f"{site.signature}#{site.index} {site.pass_name}: {verdict}"
    form = [] if explanation.block is None else [f"    {_describe(explanation.block)}"]
    return [where, *form, f"    at '{shortened(site.operator)}'"]
