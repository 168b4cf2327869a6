"""What the commands for models print, and what `demo` does."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from edge_opt.base.atomic import resolve_target, write_whole
from edge_opt.base.errors import OutputError
from edge_opt.base.words import many, shortened, size
from edge_opt.cli import output
from edge_opt.comparison.compare import compare
from edge_opt.comparison.findings import ComparisonReport, FirstDifference
from edge_opt.conversion import GENERIC, ConversionResult, convert, default_output
from edge_opt.conversion.result import entry_points
from edge_opt.inspection import Explanation, Inspection, find_caches, find_example
from edge_opt.ir import Model
from edge_opt.passes import Status
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.soundness import sentences

_OPERATORS_SHOWN = 16  # at either end of a region
_OPERATORS_NAMED = 12
_SITES_NAMED = 6
MODELS = {"demo_gemma3.tflite": "float32", "demo_gemma3_a16w8.tflite": "int16 activations, int8 weights"}


def show_conversion(
    result: ConversionResult, *, target: str | None, reports: Sequence[Path] = (), folders: bool = True
) -> None:
    """The result for people; `folders` where they want to know in which one it is."""

    def described(path: str | None) -> str:
        if path is None:
            return "nothing written (dry run)"
        return f"{path if folders else Path(path).name} ({size(Path(path).stat().st_size)})"

    names = f"{described(result.input)} -> {described(result.output)}"
    output.say(f"{names}, target {result.target}, {result.seconds:.1f} s", "")
    output.say(*output.table(entry_points(result)), "")
    verdict, *others = result.summary().splitlines()
    is_left = any(not site.settled for site in result.sites if site.status is not Status.CONVERTED)
    output.say(verdict, colour=output.BAD if is_left else output.GOOD)
    output.say(*others)
    if target is None and folders and result.model is not None and _is_for_npus(result.model):
        output.say(
            "The model seems made for an NPU: it may run faster there if converted with its target, such as"
        )
        output.say("--target qualcomm-htp, or with the name of its chip.")
    output.say(*(f"Report: {path}" for path in reports))


def _is_for_npus(model: Model) -> bool:
    """Whether it has caches whose new part comes out apart, or int16 activations, as exports for NPUs do."""
    inputs = (tensor for signature in model.signatures for tensor in signature.inputs.values())
    return bool(find_caches(model).caches) or any(tensor.dtype.name == "INT16" for tensor in inputs)


def show_comparison(report: ComparisonReport) -> None:
    """The report for people: a line for each signature, its notes, and whether all is equal, or what is not."""
    output.say(*output.table(report.rows()), *(f"  {sentence}" for sentence in report.notes()), "")
    if report:
        output.say(f"Equal: {report.summary()}.", colour=output.GOOD)
    else:
        output.say("Different:", colour=output.BAD)
    output.say(*(f"  {sentence}" for sentence in report.differences()))
    if report and report.generation is not None:
        output.say(f"Generated: {report.generation.sentence()}.")
    if not report and report.first_difference is not None:
        output.say("", *_located(report.first_difference))


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
        lines += [f"  in {side}:", *(f"    {line}" for line in _ends(operators))]
    shown = (found.short_name, *found.equal_before)
    return [
        *lines,
        *(f"  {name} is '{shortened(found.names[name])}'" for name in shown if name in found.names),
    ]


def _ends(operators: Sequence[str]) -> list[str]:
    hidden = len(operators) - 2 * _OPERATORS_SHOWN
    if hidden < 2:
        return list(operators)
    note = f"... {hidden} more (all with --json) ..."
    return [*operators[:_OPERATORS_SHOWN], note, *operators[-_OPERATORS_SHOWN:]]


def write_node_data(found: Inspection, source: Path, path: Path, *, overwrite: bool) -> None:
    """Write the overlay for Model Explorer.

    Raises:
        UsageError: the path exists and `overwrite` is False, or it is the model itself.
        OutputError: it cannot be written.
    """
    status = source.stat()
    resolve_target(path, overwrite=overwrite, inputs=((status.st_dev, status.st_ino),))
    write_whole(path, f"{json.dumps(found.node_data, indent=2)}\n".encode(), overwrite=overwrite)


def show_inspection(found: Inspection) -> None:
    """The model's signatures with what would be rewritten there, its caches, and what is wrong with it."""
    weights = ", ".join(f"{dtype} {size(count)}" for dtype, count in found.weights.items())
    output.say(f"{found.file}: {size(found.size)} in {many(found.subgraphs, 'subgraph')}")
    output.say(f"constants: {weights or 'none'}", "")
    if found.compiled:
        instead = found.made_from or "the bundle that it was made from"
        output.say(f"Compiled for an NPU: nothing in it can be rewritten; see {instead}.", "")
    heads = ("signature", "operators", "inputs", "outputs", "attention")
    output.say(*output.table([heads, *_signature_rows(found)]))
    for signature in found.signatures:
        named = [f"{name} {count}" for name, count in signature.operator_counts.items()]
        rest = [f"others {sum([*signature.operator_counts.values()][_OPERATORS_NAMED:])}"]
        shown = named if len(named) <= _OPERATORS_NAMED else named[:_OPERATORS_NAMED] + rest
        output.say("", f"{signature.name}: {', '.join(shown) or 'no operators'}")
        output.say(*(f"  {one.count} x {one}" for one in signature.composites))
        output.say(*_site_lines(one for one in found.sites if one.verdict.signature == signature.name))
        if found.compiled:
            output.say(*(f"  {block}" for block in found.attention if block.signature == signature.name))
    own = {signature.name for signature in found.signatures}
    for name in dict.fromkeys(
        one.verdict.signature for one in found.sites if one.verdict.signature not in own
    ):
        output.say("", name, *_site_lines(one for one in found.sites if one.verdict.signature == name))
    if not found.compiled:
        output.say("", f"What would be converted is for target {found.target or GENERIC}.")
    if found.caches.caches:
        output.say("", *found.caches.lines())
    if found.soundness:
        output.say("", "Broken quantization:", colour=output.BAD)
        output.say(*(f"  {text}" for text in sentences(found.soundness)))
    if found.target is not None:
        output.say("", *_lint(found))
    if found.inferred is not None:
        bad = found.inferred.disagreements
        verdict = f"{many(len(bad), 'shape')} in the file differ" if bad else "all as in the file"
        output.say("", *map(str, bad))
        output.say(
            f"{found.inferred.inferred} of {many(found.inferred.tensors, 'shape')} inferred, {verdict}",
            colour=output.BAD if bad else output.GOOD,
        )


def _signature_rows(found: Inspection) -> Iterator[tuple[str, ...]]:
    for signature in found.signatures:
        forms = [block.form for block in found.attention if block.signature == signature.name]
        parts = [f"{forms.count(form)} {form}" for form in dict.fromkeys(forms)]
        parts += [f"{signature.attention_unmatched} not understood"] if signature.attention_unmatched else []
        counts = (signature.operators, len(signature.inputs), len(signature.outputs))
        yield (signature.name, *map(str, counts), ", ".join(parts) or "none")


def _site_lines(sites: Iterable[Explanation]) -> Iterator[str]:
    """A line for each layer's attention and each other site; equal ones share a line, for layers repeat."""
    groups: defaultdict[tuple[str, str], list[Explanation]] = defaultdict(list)
    for site in sites:
        is_split = site.verdict.pass_name == MhaToSha.name and site.block is not None
        groups[str(site.block) if is_split else site.verdict.pass_name, str(site)].append(site)
    for (what, verdict), group in groups.items():
        numbers = ", ".join(f"#{one.verdict.index}" for one in group[:_SITES_NAMED])
        more = f" and {len(group) - _SITES_NAMED} more" if len(group) > _SITES_NAMED else ""
        where = "" if group[0].block else f", at '{shortened(group[0].verdict.operator)}'"
        yield f"  {numbers}{more} {what}{where}: {verdict}"


def _lint(found: Inspection) -> list[str]:
    """What the target will not like; equal findings of several places on one line."""
    if not found.lint:
        return [f"{found.target}: nothing that is known to be refused or computed wrongly."]
    same = dict.fromkeys((one.severity, one.signature, one.message) for one in found.lint)
    return [
        f"{found.target}, {severity}: {f'{signature}: ' if signature else ''}{message}"
        for severity, signature, message in same
    ]


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
    equal, results = True, []
    for name, about in MODELS.items():
        output.say(f"== {name}: a tiny Gemma3 with random weights, {about}")
        source = folder / name
        write_whole(source, (resources.files("edge_opt.testdata") / name).read_bytes(), overwrite=force)
        results.append(convert(source, overwrite=force))
        show_conversion(results[-1], target=None, folders=False)
        report = compare(source, default_output(source))
        output.say("")
        show_comparison(report)
        output.say("")
        equal = equal and report.equal
    example = find_example(results[0])
    if example is not None:
        output.say(
            f"== an attention block of {example.signature}, before", "", *example.lines(example.before), ""
        )
        output.say("== after: single heads, joined", "", *example.lines(example.after), "")
    output.say("", f"{where}; next: edge-opt convert YOUR_MODEL.tflite")
    return 0 if equal else 1
