"""What `convert` and `demo` do around the library, and what they, `compare`, `inspect` and `explain` print."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from edge_opt.base.atomic import resolve_target, write_whole
from edge_opt.base.errors import OutputError
from edge_opt.base.words import many, shortened, size
from edge_opt.cli import output
from edge_opt.cli.options import in_options
from edge_opt.comparison.compare import compare
from edge_opt.comparison.findings import ComparisonReport, FirstDifference
from edge_opt.conversion import (
    ConversionResult,
    DifferenceFoundError,
    RequirementError,
    convert,
    default_output,
)
from edge_opt.conversion.choices import ConvertOptions
from edge_opt.conversion.result import entry_points
from edge_opt.inspection import (
    AttentionBlock,
    Explanation,
    Inspection,
    SignatureContent,
    conversion_report,
    example_rewrite,
    node_data,
)
from edge_opt.ir import load
from edge_opt.npu.comparing import NpuComparison, NpuSignature
from edge_opt.passes import Status
from edge_opt.report import check_report_path, write_report
from edge_opt.report.page import NO_PICTURE, can_draw
from edge_opt.soundness import sentences

_OPERATORS_SHOWN = 16  # at either end of a region
_OPERATORS_NAMED = 12
MODELS = {"demo_gemma3.tflite": "float32", "demo_gemma3_a16w8.tflite": "int16 activations, int8 weights"}


def run_conversion(
    source: Path,
    destination: Path | None,
    reports: Sequence[Path],
    options: ConvertOptions,
    *,
    as_json: bool,
    quiet: bool,
) -> int:
    """Convert; sites that stay as they are do not change the exit code, unless a mistake of ours is why."""
    overwrite = options["overwrite"]
    for number, path in enumerate(reports):
        check_report_path(path, overwrite=overwrite, others=(source, destination, *reports[:number]))

    def show() -> None:
        show_conversion(result)
        hint = f" ({NO_PICTURE})" if result.converted and not can_draw() else ""
        output.say(*(f"Report: {path}{hint if path.suffix == '.html' else ''}" for path in reports))

    try:
        with output.bar(wanted=not quiet) as progress:
            options["progress"] = progress
            result = convert(source, None if options["dry_run"] else destination, **options)
    except (RequirementError, DifferenceFoundError) as error:
        error.result.failure = in_options(str(error))
        _write_reports(reports, error.result, options)
        raise
    _write_reports(reports, result, options)
    output.answer(result.to_dict(), show, as_json=as_json, quiet=quiet)
    return output.EXIT_BUG if any(site.is_bug for site in result.sites) else 0


def _write_reports(reports: Sequence[Path], result: ConversionResult, options: ConvertOptions) -> None:
    if reports:
        report = conversion_report(
            result, target=options["target"], sections=options["sections"], shapes=options["shapes"]
        )
    for path in reports:
        write_report(report, path, overwrite=options["overwrite"])


def show_conversion(result: ConversionResult, *, folders: bool = True) -> None:
    """The result for people; `folders` where they want to know in which one it is."""

    def described(path: str | None) -> str:
        if path is None:
            return "nothing written (dry run)"
        shown = path if folders else Path(path).name
        return f"{shown} ({size(Path(path).stat().st_size)})"

    names = f"{described(result.input)} -> {described(result.output)}"
    output.say(f"{names}, target {result.target}, {result.seconds:.1f} s", "")
    output.say(*output.table(entry_points(result)), "")
    verdict, *others = result.summary().splitlines()
    left = any(not site.settled for site in result.sites if site not in result.converted)
    output.say(verdict, style=output.BAD if left else output.GOOD)
    output.say(*others)


def show_comparison(report: ComparisonReport) -> None:
    """The report for people: a line for each signature, then each output that differs."""
    notes = (*report.logits(), *report.caches, *report.notes())
    _show_verdict(report, output.table(report.rows(), left=2), notes)
    if report.equal and report.generation is not None:
        output.say(f"Generated: {report.generation.sentence()}.")
    if not report.equal and report.first_difference is not None:
        output.say("", *_located(report.first_difference))


def _show_verdict(report: ComparisonReport | NpuComparison, table: list[str], notes: Iterable[str]) -> None:
    """The table with its notes, and whether all is equal, or what is not."""
    output.say(*table, *(f"  {sentence}" for sentence in notes), "")
    if report.equal:
        output.say(f"Equal: {report.summary()}.", style=output.GOOD)
    else:
        output.say("Different:", style=output.BAD)
    output.say(*(f"  {sentence}" for sentence in report.differences()))


def _located(found: FirstDifference) -> list[str]:
    """Where the difference begins: both models' operators, then the long names of what they share."""
    if found.figures is None:
        return [f"Where it begins was not found: {found.reason}."]
    what = found.figures.sentence().split(": ", 1)[-1]
    lines = [f"First difference: signature '{found.signature}', tensor {found.short_name}: {what}"]
    lines += [f"  {found.reason}"] if found.reason else []
    lines += [f"  equal before it: {', '.join(found.equal_before) or 'nothing'}"]
    lines += [f"  constant with other numbers: '{shortened(name)}'" for name in found.constants]
    for side, operators in (("a", found.operators_a), ("b", found.operators_b)):
        lines.append(f"  in {side}:")
        lines += [f"    {line}" for line in _ends(operators)]
    shown = (found.short_name, *found.equal_before)
    lines += [f"  {name} is '{shortened(found.names[name])}'" for name in shown if name in found.names]
    return lines


def _ends(operators: Sequence[str]) -> list[str]:
    hidden = len(operators) - 2 * _OPERATORS_SHOWN
    if hidden < 2:
        return list(operators)
    note = f"... {hidden} more (all with --json) ..."
    return [*operators[:_OPERATORS_SHOWN], note, *operators[-_OPERATORS_SHOWN:]]


def show_on_npu(report: NpuComparison) -> None:
    """The report of a comparison in the emulator: a row for each signature."""
    flags = " ".join(report.flags) or "the compiler's own defaults"
    cut = "" if report.layers is None else f", the first {many(report.layers, 'layer')}"
    output.say(f"{report.chip}, in the emulator of its compiler{cut}; flags: {flags}", "")
    head = "signature, outputs, numbers, differ, a: lowest dB, b: lowest dB, seconds a, seconds b"
    rows = [tuple(head.split(", ")), *map(_npu_row, report.signatures)]
    _show_verdict(report, output.table(rows), report.caches)


def _npu_row(signature: NpuSignature) -> tuple[str, ...]:
    if signature.verdict:
        return (signature.name, *"-------")
    lowest = [min(getattr(found, side) for found in signature.outputs) for side in ("db_a", "db_b")]
    counts = (len(signature.outputs), signature.elements, signature.differing)
    return (signature.name, *map(str, counts), *(f"{value:.1f}" for value in (*lowest, *signature.seconds)))


def write_overlay(
    file: Path, path: Path, target: str | None, shapes: Mapping[str, Sequence[int]], *, overwrite: bool
) -> None:
    """Write what `inspect` finds as an overlay for Model Explorer.

    Raises:
        UsageError: the path exists and `overwrite` is False, or it is the model itself.
        OutputError: it cannot be written.
    """
    status = file.stat()
    resolve_target(path, overwrite=overwrite, inputs=((status.st_dev, status.st_ino),))
    data = json.dumps(node_data(file, target=target, shapes=shapes), indent=2)
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


def show_inspection(found: Inspection) -> None:
    """The model's signatures, operators and attention, its caches, and what is wrong with it."""
    weights = ", ".join(f"{dtype} {size(count)}" for dtype, count in found.weights.items())
    output.say(f"{found.file or ''}: {size(found.size)} in {many(found.subgraphs, 'subgraph')}")
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


def run_demo(folder: Path | None, *, overwrite: bool) -> int:
    """Both models, one after the other; 1 where one computes something else after the conversion."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="edge-opt-demo-") as scratch:
            return _demo(Path(scratch), "`edge-opt demo DIR` keeps the models in DIR", force=overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"folder {folder} cannot be made: {error.strerror}, give another") from error
    return _demo(folder, f"The models are in {folder}", force=overwrite)


def _demo(folder: Path, where: str, *, force: bool) -> int:
    for name in MODELS:
        for path in (folder / name, default_output(folder / name)):
            resolve_target(path, overwrite=force)
    equal = True
    for name, about in MODELS.items():
        output.say(f"== {name}: a tiny Gemma3 with random weights, {about}")
        source = folder / name
        write_whole(source, (resources.files("edge_opt.testdata") / name).read_bytes(), overwrite=force)
        result = convert(source, overwrite=force)
        show_conversion(result, folders=False)
        report = compare(source, default_output(source))
        output.say("")
        show_comparison(report)
        output.say("")
        equal = equal and report.equal
    _show_block(folder / next(iter(MODELS)))
    output.say("", f"{where}; next: edge-opt convert YOUR_MODEL.tflite")
    return 0 if equal else 1


def _show_block(source: Path) -> None:
    """One region as the pass sees it, in the entry point where splitting matters most."""
    model = load(source)
    name = next(name for name, _ in model.entry_points() if name.startswith("prefill"))
    shown = example_rewrite(model, name)
    if shown is not None:
        for title, operators in (
            (f"an attention block of {name}, before", shown.before),
            ("after: single heads, joined", shown.after),
        ):
            output.say(f"== {title}", "", *shown.lines(operators), "")
