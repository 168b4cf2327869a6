"""Prints the results of the commands for models; runs `demo`."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from edge_opt.base.atomic import resolve_target, scratch_folder, write_whole
from edge_opt.base.errors import OutputError
from edge_opt.base.words import listed, many, shortened, size
from edge_opt.cli import output
from edge_opt.comparison.compare import compare
from edge_opt.comparison.findings import ComparisonReport, FirstDifference
from edge_opt.conversion import ConversionResult, convert
from edge_opt.conversion.result import entry_point_table
from edge_opt.conversion.run import default_output
from edge_opt.inspection import Inspection, find_example
from edge_opt.inspection.caches import find_caches, made_for_cpus
from edge_opt.inspection.model import SignatureContent
from edge_opt.ir import DType, Model
from edge_opt.ir.opening import Opened
from edge_opt.passes import Status, Verdict
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.shapes.inference import ShapeReport
from edge_opt.soundness import sentences
from edge_opt.targets import GENERIC, Finding, Target, lint, load_target
from edge_opt.targets.lint import DECISIVE
from edge_opt.targets.placement import facts_about, placed_by_facts, placement_lines

_OPERATORS_SHOWN = 4
MODELS = {
    "demo_gemma3.tflite": "float32",
    "demo_gemma3_a16w8.tflite": "int16 activations, int8 weights",
}


def show_conversion(
    result: ConversionResult,
    reports: Sequence[Path] = (),
    target: str | None = None,
    *,
    demo: bool = False,
) -> None:
    """Print a conversion's result; in the `demo`, without folders and advice."""
    before = _name_and_size(result.input, demo=demo)
    after = _name_and_size(result.output, demo=demo)
    output.say(f"{before} -> {after}, target {result.target}, {result.seconds:.1f} s", "")
    output.say(*output.table(entry_point_table(result)), "")
    verdict, *others = result.summary().splitlines()
    output.say(verdict, colour=output.BAD if result.skipped else output.GOOD)
    output.say(*others)
    if result.model is not None and result.given is not None:
        if not demo:
            output.say(*_advice_for_npus(result, result.model))
        facts = load_target(target)
        for_cpus = made_for_cpus(Opened(result.given), result.model)
        if for_cpus:
            output.say(for_cpus)
        output.say(*placement_lines(placed_by_facts(result.model, facts), facts_about(facts)))
        output.say(*_finding_lines(lint(result.model, facts), facts.name, decisive=True))
    output.say(*(f"Report: {path}" for path in reports))


def _name_and_size(path: str | None, *, demo: bool) -> str:
    if path is None:
        return "nothing written (dry run)"
    file = Path(path)
    return f"{file.name if demo else path} ({size(file.stat().st_size)})"


def _advice_for_npus(result: ConversionResult, model: Model) -> list[str]:
    """How to convert again for a chip; empty if the model was converted for one, or is not for an NPU."""
    is_split_for_any = result.target == GENERIC and result.converted
    if not is_split_for_any or not _looks_exported_for_an_npu(model):
        return []
    command = ["edge-opt", "convert", str(result.input), "--target", "SM8750"]
    if result.output is not None:
        command += ["-o", str(result.output), "--force"]
    return [
        "This looks like an export for an NPU. Without a chip, decode is split, too, and may get slower. With one:",
        f"  {shlex.join(command)}",
    ]


def _finding_lines(
    findings: Sequence[Finding], target: str | None, *, decisive: bool
) -> Iterable[str]:
    """Findings as lines: those that decide if the model runs, or the others."""
    chosen = [one for one in findings if (one.rule in DECISIVE) is decisive]
    return dict.fromkeys(f"{target}, {one.severity}: {one}" for one in chosen)


def _looks_exported_for_an_npu(model: Model) -> bool:
    """True if it has int16 activations, or caches with a separate output for the new part."""
    if find_caches(model).caches:
        return True
    for signature in model.signatures:
        if any(tensor.dtype is DType.INT16 for tensor in signature.inputs.values()):
            return True
    return False


def show_comparison(report: ComparisonReport) -> None:
    """Print a comparison: a line per signature, notes, the verdict, and the differences."""
    output.say(*output.table(report.rows()), *(f"  {sentence}" for sentence in report.notes()), "")
    if report:
        output.say(f"Equal: {report.summary()}.", colour=output.GOOD)
        if report.generation is not None:
            output.say(f"Generated: {report.generation.sentence()}.")
        return
    output.say("Different:", colour=output.BAD)
    output.say(*(f"  {sentence}" for sentence in report.differences()))
    if report.first_difference is not None:
        output.say("", *_located(report.first_difference))


def _located(found: FirstDifference) -> Iterator[str]:
    """Lines about the first difference, and the operators there in both models."""
    if found.figures is None:
        yield f"The first difference was not found: {found.reason}."
        return
    what = found.figures.sentence().split(": ", 1)[-1]
    yield f"First difference: signature '{found.signature}', tensor {found.short_name}: {what}"
    if found.reason:
        yield f"  {found.reason}"
    yield f"  equal before it: {', '.join(found.equal_before) or 'nothing'}"
    for name in found.constants:
        yield f"  constant with different values: '{shortened(name)}'"
    for side, operators in (("a", found.operators_a), ("b", found.operators_b)):
        yield f"  in {side}:"
        yield from (f"    {line}" for line in operators[-_OPERATORS_SHOWN:])
        if len(operators) > _OPERATORS_SHOWN:
            yield f"    the last of {len(operators)} operators (all with --json)"
    for name in (found.short_name, *found.equal_before):
        if name in found.names:
            yield f"  {name} is '{shortened(found.names[name])}'"


def show_inspection(found: Inspection, facts: Target | None = None) -> None:
    """Print what runs where, the model's signatures with the sites of a conversion, its caches, and its faults.

    `facts`: the target that it was inspected for.
    """
    output.say(f"{found.file}: {size(found.size)} in {many(found.subgraphs, 'subgraph')}")
    if found.for_cpus:
        output.say(found.for_cpus)
    output.say(*placement_lines(found.placement, found.placed_by), *_unplaced(found, facts))
    output.say(*_finding_lines(found.lint, found.target, decisive=True))
    weights = [f"{dtype} {size(count)}" for dtype, count in found.weights.items()]
    output.say(f"constants: {', '.join(weights) or 'none'}", "")
    for name, count in found.weights_outside.items():
        output.say(f"Weights outside the model: {size(count)} in '{name}', which is not read.", "")
    if found.compiled:
        instead = found.made_from or "the bundle that it was made from"
        output.say(f"Compiled for an NPU, so it cannot be rewritten: inspect {instead}.", "")
    _show_signatures(found)
    if found.notes:
        output.say("", *(f"Note: {text}" for text in found.notes))
    if not found.compiled:
        output.say("", f"Target of the conversion: {found.target or GENERIC}.")
    if found.caches.caches:
        output.say("", *found.caches.lines())
    _show_faults(found)
    if found.inferred is not None:
        _show_shapes(found.inferred)


def _show_signatures(found: Inspection) -> None:
    """Print a table of signatures, then what is in each; of those in other models of a bundle, the sites alone."""
    heads = ("signature", "operators", "inputs", "outputs", "attention")
    rows = [_signature_row(found, one) for one in found.signatures]
    output.say(*output.table([heads, *rows]))
    contents = {one.name: one for one in found.signatures}
    with_sites = dict.fromkeys(site.signature for site in found.sites)
    for name in {**contents, **with_sites}:
        output.say("", *_signature_lines(name, contents.get(name)), *_site_lines(found, name))


def _show_faults(found: Inspection) -> None:
    """Print what is broken, and the target's problems with the model, except those that are decisive."""
    if found.soundness:
        output.say("", "Broken quantization:", colour=output.BAD)
        output.say(*(f"  {text}" for text in sentences(found.soundness)))
    if found.target is None or found.compiled:
        return
    if found.lint:
        output.say("", *_finding_lines(found.lint, found.target, decisive=False))
    else:
        output.say("", f"{found.target}: no known problems.")


def _show_shapes(found: ShapeReport) -> None:
    """Print the shapes that differ from those inferred, and how many were inferred."""
    wrong = found.disagreements
    verdict = f"{many(len(wrong), 'shape')} in the file differ" if wrong else "all match the file"
    output.say("", *map(str, wrong))
    output.say(
        f"{found.inferred} of {many(found.tensors, 'shape')} inferred, {verdict}",
        colour=output.BAD if wrong else output.GOOD,
    )


def _unplaced(found: Inspection, facts: Target | None) -> list[str]:
    """Why the rest of the placement is unknown, and how to find it; empty if it is known or there is no NPU."""
    is_known = any(one.calls is not None or one.failure for one in found.placement)
    if is_known or facts is None or facts.name == GENERIC:
        return []
    unknown = f"What {'else ' if found.placement else ''}runs where on {facts.name} is not known"
    if facts.compiler is None:
        return [f"{unknown}: edge-opt cannot run its compiler."]
    chip = facts.chip or "CHIP"
    ask = f"edge-opt inspect {found.file} --target {chip} --sdk DIR"
    return [f"{unknown} without the vendor's libraries: {ask}"]


def _signature_row(found: Inspection, signature: SignatureContent) -> tuple[str, ...]:
    forms = Counter[str]()
    for block in found.attention:
        if block.signature == signature.name:
            forms[block.form] += 1
    forms["not understood"] += signature.attention_unmatched
    attention = [f"{count} {form}" for form, count in forms.items() if count]
    counts = (signature.operators, len(signature.inputs), len(signature.outputs))
    return (signature.name, *map(str, counts), ", ".join(attention) or "none")


def _signature_lines(name: str, content: SignatureContent | None) -> list[str]:
    """A signature's operators and composites; just the name of one in another model of the bundle."""
    if content is None:
        return [name]
    counts = [f"{operator} {count}" for operator, count in content.operator_counts.items()]
    composites = [f"  {one.count} x {one}" for one in content.composites]
    return [f"{name}: {', '.join(counts) or 'no operators'}", *composites]


def _site_lines(found: Inspection, signature: str) -> Iterator[str]:
    """The sites of a signature; equal sites share a line, since layers repeat."""
    blocks = {block.softmax: block for block in found.attention if block.signature == signature}
    groups: defaultdict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for site in found.sites:
        if site.signature == signature:
            block = blocks.get(site.operator) if site.pass_name == MhaToSha.name else None
            groups[str(block or site.pass_name), _expected(site)].append(site)
    for (what, verdict), group in groups.items():
        numbers = listed(f"#{one.index}" for one in group)
        where = "" if group[0].operator in blocks else f", at '{shortened(group[0].operator)}'"
        yield f"  {numbers} {what}{where}: {verdict}"


def _expected(site: Verdict) -> str:
    """What a conversion would do with a site, and why."""
    verdict = site.status if site.status is Status.SETTLED else f"would be {site.status}"
    if site.note:
        return f"{verdict} ({site.note})"
    return f"{verdict}: {site.reason}" if site.reason else verdict


def run_demo(folder: Path | None, *, overwrite: bool) -> int:
    """Convert both models and compare the outputs; return 1 if they differ."""
    if folder is None:
        with scratch_folder() as scratch:
            return _demo_in(scratch, "`edge-opt demo DIR` keeps the models in DIR", overwrite=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"folder {folder} cannot be created: {error.strerror}, give another"
        ) from error
    for name in MODELS:
        source = folder / name
        resolve_target(source, overwrite=overwrite)
        resolve_target(default_output(source), overwrite=overwrite)
    return _demo_in(folder, f"The models are in {folder}", overwrite=overwrite)


def _demo_in(folder: Path, where: str, *, overwrite: bool) -> int:
    results: list[ConversionResult] = []
    reports: list[ComparisonReport] = []
    for name, about in MODELS.items():
        output.say(f"== {name}: a tiny Gemma3 with random weights, {about}")
        source = folder / name
        content = (resources.files("edge_opt.testdata") / name).read_bytes()
        write_whole(source, content, overwrite=overwrite)
        result = convert(source, overwrite=overwrite)
        show_conversion(result, demo=True)
        report = compare(source, default_output(source))
        output.say("")
        show_comparison(report)
        output.say("")
        results.append(result)
        reports.append(report)
    example = find_example(results[0])
    if example is not None:
        output.say(f"== an attention block of {example.signature}, before", "")
        output.say(*example.lines(example.before), "", "== after: single heads, joined", "")
        output.say(*example.lines(example.after), "")
    output.say(f"{where}; next: edge-opt convert YOUR_MODEL.tflite")
    return 0 if all(reports) else 1
