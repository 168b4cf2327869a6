"""Commands for models: convert, inspect, compare, golden, demo, passes and targets."""

import json
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from edge_opt.base.errors import EdgeOptError, OutputError, UsageError, unknown
from edge_opt.cli import options, output
from edge_opt.cli.options import argument, expert, option, read_shapes

if TYPE_CHECKING:
    from edge_opt.npu import Compiler


def convert(
    source: options.ModelArgument,
    out: Annotated[str | None, argument("Output file, same as -o.", "OUT")] = None,
    *,
    destination: Annotated[
        str | None,  # a path would lose the / that marks a folder
        option(
            "Output file or folder. Default: NAME.opt.tflite beside IN.", "<OUT>", "-o", "--output"
        ),
    ] = None,
    target: options.TargetOption = None,
    reports: Annotated[
        list[Path] | None,
        option("Write a report: .json, .md or .html; repeatable.", "<FILE>", "--report"),
    ] = None,
    profile: Annotated[
        bool, option("In reports, draw NPU estimates before and after.", None, "--profile")
    ] = False,
    verify: Annotated[
        options.Verify,
        option("regions: every rewrite; full: also the whole models; none: nothing."),
    ] = "regions",
    dry_run: Annotated[bool, option("Do everything except write.", None, "--dry-run")] = False,
    require_all: Annotated[
        bool,
        option("If a site is skipped, write nothing and exit 1.", None, "--require-all"),
    ] = False,
    skip: Annotated[
        list[str] | None,
        expert(
            "Skip these passes.",
            "<PASS>",
            callback=options.split_names,
            autocompletion=options.pass_names,
        ),
    ] = None,
    signatures: options.SignaturesOption = None,
    shapes: options.ShapeOption = None,
    all_models: Annotated[
        bool, expert("In a bundle, rewrite every model.", None, "--all-models")
    ] = False,
    dump: Annotated[
        Path | None, expert("Write texts before and after each pass.", "<FOLDER>", "--dump")
    ] = None,
    overwrite: options.ForceOption = False,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Rewrite a model for an NPU, verify every rewrite, and write it."""
    from edge_opt.cli.show_models import show_conversion
    from edge_opt.conversion import DifferenceFoundError, SitesSkippedError, convert
    from edge_opt.inspection import check_report_path, conversion_report

    if out is not None and destination is not None:
        raise UsageError("the output is given twice: leave out OUT or -o")
    destination = destination or out
    reports = reports or []
    for number, path in enumerate(reports):
        check_report_path(
            path, overwrite=overwrite, others=(source, destination, *reports[:number])
        )
    compiler = _profiling_compiler(target, reports, dry_run=dry_run) if profile else None
    gain = None
    failure: EdgeOptError | None = None
    try:
        with output.bar(quiet=quiet) as progress:
            result = convert(
                source,
                destination,
                target=target,
                skip=skip,
                signatures=signatures,
                shapes=read_shapes(shapes),
                verify=verify,
                dry_run=dry_run,
                require_all=require_all,
                sections="all" if all_models else "prefill-decode",
                dump=dump,
                overwrite=overwrite,
                progress=progress,
            )
            if compiler is not None:
                from edge_opt.npu import draw_gain

                gain = draw_gain([source, str(result.output)], compiler, progress)
    except (SitesSkippedError, DifferenceFoundError) as error:
        result = error.result
        failure = error
    for path in reports:
        try:
            conversion_report(result, target=target, gain=gain).write(path, overwrite=overwrite)
        except OutputError as error:
            error.args = (f"{error}; the model is complete: {result.output or 'not written'}",)
            error.result = result
            raise
    if failure is not None:
        raise failure
    output.answer(
        result,
        lambda found: show_conversion(found, reports, target),
        as_json=as_json,
        quiet=quiet,
    )
    return output.EXIT_BUG if any(site.is_bug for site in result.sites) else 0


def _profiling_compiler(target: str | None, reports: list[Path], *, dry_run: bool) -> "Compiler":
    """The compiler for the target's chip; UsageError if there will be no report or no output, or it is missing."""
    from edge_opt.npu.vendors import backend_of
    from edge_opt.targets.chips import find_chip

    if dry_run or not reports:
        raise UsageError("--profile draws in a --report, of a model that is written: change these")
    listed = find_chip(target or "")
    compiler = options.compiler_of(None, None if listed is None else listed.chip)
    backend_of(compiler.chip).check_installed(compiler)
    return compiler


def inspect(
    source: options.ModelArgument,
    *,
    target: options.TargetOption = None,
    shapes: options.ShapeOption = None,
    infer: Annotated[
        bool, option("Also infer all shapes; exit 1 if any differs.", None, "--shapes")
    ] = False,
    node_data: Annotated[
        Path | None,
        option("Write the sites for Model Explorer's --node_data_paths.", "<FILE.json>"),
    ] = None,
    as_text: Annotated[
        bool, option("Print the whole model as text instead.", None, "--text")
    ] = False,
    sdk: options.SdkOption = None,
    overwrite: options.ForceOption = False,
    as_json: options.JsonOption = False,
) -> int:
    """Show what is in a model, what runs where, and what would change."""
    if as_text:
        if any((shapes, infer, target, node_data, sdk, as_json)):
            raise UsageError("--text prints the model as it is: leave out the other options")
        _show_text(source)
        return 0
    from edge_opt.base.atomic import resolve_target, write_whole
    from edge_opt.cli.show_models import show_inspection
    from edge_opt.inspection import inspect
    from edge_opt.npu import Compiler
    from edge_opt.npu.profiling import measure_all
    from edge_opt.targets import load_target

    sizes = read_shapes(shapes)
    facts = None if target is None else load_target(target)
    chip = None if facts is None else facts.chip
    if sdk is not None and chip is None:
        raise UsageError("--sdk asks the compiler, which needs a chip: give one, --target SM8750")
    found = inspect(source, target=facts, shapes=sizes, infer=infer)
    if sdk is not None and chip is not None and not found.compiled:
        measured, _ = measure_all(source, Compiler(chip, sdk=sdk), sizes)
        found.placement = [one.placement for one in measured]
        found.placed_by = f"the compiler for {chip}"
    if node_data is not None:
        resolve_target(node_data, overwrite=overwrite, inputs=[found.file])
        write_whole(
            node_data,
            f"{json.dumps(found.node_data, indent=2)}\n".encode(),
            overwrite=overwrite,
        )
    output.answer(found, lambda _: show_inspection(found, facts), as_json=as_json)
    return 1 if found.inferred is not None and found.inferred.disagreements else 0


def _show_text(source: Path) -> None:
    """Print a model in the text form; of a bundle, the prefill/decode model or the one that is named."""
    from edge_opt.ir import to_text
    from edge_opt.ir.opening import Opened

    model = Opened(source).main(may_be_compiled=True).model
    output.say(*to_text(model).splitlines())


def compare(
    a: Annotated[Path, argument("The reference.", "A")],
    b: Annotated[Path, argument("The model to compare with it.", "B")],
    *,
    on: Annotated[
        options.Place,
        option("LiteRT's default or reference kernels, or Qualcomm's emulator."),
    ] = "cpu",
    atol: Annotated[float, option("Equal means |a-b| <= atol + rtol*|a|.", "<X>", min=0)] = 0.0,
    rtol: Annotated[float, option("See --atol.", "<X>", min=0)] = 0.0,
    generate: Annotated[
        int | None, option("Also generate and compare tokens.", "<N>", min=1)
    ] = None,
    seed: Annotated[int, expert("Seed of the inputs.", "<N>", min=0)] = 0,
    signatures: options.SignaturesOption = None,
    shapes: options.ShapeOption = None,
    sdk: options.SdkOption = None,
    chip: options.ChipOption = None,
    flags: options.FlagOption = None,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Run two models on the same inputs; exit 1 if they differ."""
    from edge_opt.cli.show_models import show_comparison
    from edge_opt.comparison.compare import compare
    from edge_opt.npu.comparing import compare_on_npu

    with output.bar(quiet=quiet) as progress:
        arguments: dict[str, Any] = {
            "signatures": signatures,
            "shapes": read_shapes(shapes),
            "seed": seed,
            "atol": atol,
            "rtol": rtol,
            "progress": progress,
        }
        if on == "npu":
            options.check_meaning(on, generate=generate)
            compiler = options.compiler_of(sdk, chip, flags)
            report = compare_on_npu(a, b, compiler, **arguments)
        else:
            options.check_meaning(on, sdk=sdk, soc=chip, flag=flags)
            report = compare(a, b, on=on, generate=generate, **arguments)
    output.answer(report, show_comparison, as_json=as_json, quiet=quiet)
    return 0 if report else 1


def record(
    model: options.ModelArgument,
    *,
    destination: Annotated[
        str | None,
        option(
            "Output file. Default: NAME.golden.npz beside IN.",
            "<FILE.npz>",
            "-o",
            "--output",
        ),
    ] = None,
    signatures: options.SignaturesOption = None,
    overwrite: options.ForceOption = False,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Run a model and record its outputs."""
    from edge_opt.base.words import size
    from edge_opt.comparison.golden import record

    written = record(model, destination, signatures=signatures, overwrite=overwrite)
    bytes_written = written.stat().st_size
    found = {"written": str(written), "bytes": bytes_written}
    text = (
        f"{written} ({size(bytes_written)}): check a model with `edge-opt golden check MODEL "
        f"{quote(str(written))}`"
    )
    output.answer(found, lambda _: output.say(text), as_json=as_json, quiet=quiet)


def check(
    model: options.ModelArgument,
    golden: Annotated[Path, argument("The output of `golden record`.", "FILE.npz")],
    *,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Run a model again; exit 1 if its outputs changed."""
    from edge_opt.cli.show_models import show_comparison
    from edge_opt.comparison.golden import check

    if model.suffix == ".npz" != golden.suffix:
        raise UsageError(
            f"{model} holds recorded outputs: give the model first, then the recorded outputs"
        )
    report = check(model, golden)
    output.answer(report, show_comparison, as_json=as_json, quiet=quiet)
    return 0 if report else 1


def demo(
    folder: Annotated[Path | None, argument("Keep the models in this folder.", "DIR")] = None,
    *,
    overwrite: options.ForceOption = False,
) -> int:
    """Convert and compare a bundled tiny Gemma3; no download."""
    from edge_opt.cli.show_models import run_demo

    return run_demo(folder, overwrite=overwrite)


def passes(
    name: Annotated[
        str | None, argument("A pass to describe.", "NAME", autocompletion=options.pass_names)
    ] = None,
    *,
    as_json: options.JsonOption = False,
) -> None:
    """List the passes in the order they run, or describe one."""
    from inspect import getdoc

    from edge_opt.passes import PASSES

    if name is not None and name not in PASSES:
        raise unknown("pass", name, PASSES)
    chosen = list(PASSES.values()) if name is None else [PASSES[name]]
    described = [
        {
            "name": one.name,
            "check": one.check.words,
            "summary": one.summary,
            "identity": str(getdoc(type(one))),
        }
        for one in chosen
    ]
    if name is None:
        rows = [(one["name"], one["check"], one["summary"]) for one in described]
        lines = output.table([("pass", "results", "what it does"), *rows], left=3)
    else:
        (only,) = described
        lines = [f"{name} {only['summary']}.", "", *only["identity"].splitlines()]
        lines += ["", f"Results must be {only['check']}."]
    output.answer({"passes": described}, lambda _: output.say(*lines), as_json=as_json)


def targets(
    name: Annotated[
        str | None, argument("A target to print.", "NAME", autocompletion=options.target_names)
    ] = None,
    *,
    as_json: options.JsonOption = False,
) -> None:
    """List the bundled targets, or print one as a target file."""
    from edge_opt.targets import load_target, target_names
    from edge_opt.targets.target import to_toml

    names = target_names() if name is None else [name]
    chosen = [load_target(one) for one in names]
    if name is None:
        rows = [(one.name, one.form, one.summary) for one in chosen]
        lines = output.table([("target", "form", "what it is"), *rows], left=3)
    else:
        lines = to_toml(chosen[0]).splitlines()
    output.answer({"targets": chosen}, lambda _: output.say(*lines), as_json=as_json)
