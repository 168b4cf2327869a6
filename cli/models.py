"""The commands for models (convert, inspect, explain, compare, shapes, golden), and those that show what there is."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from edge_opt.cli import options, output
from edge_opt.cli.options import (
    NPU,
    argument,
    complete_pass,
    complete_target,
    flag,
    option,
    read_shapes,
    split_names,
)

CPU = "The CPU and its kernels"
ShapeOption = Annotated[
    list[str] | None,
    option("Static sizes for an input of open lengths, once for each input.", "NAME=1,128,640"),
]
golden = typer.Typer(help="Record a model's outputs in a small file, and check them in CI.")


def convert(
    source: options.ModelArgument,
    *,
    output: Annotated[
        Path | None,
        option("Default: beside FILE, as NAME.opt.tflite; - for standard output.", "OUT", "-o", "--output"),
    ] = None,
    target: options.TargetOption = "generic",
    passes: Annotated[
        list[str] | None,
        option("Only these of `edge-opt passes`.", "A,B", callback=split_names, autocompletion=complete_pass),
    ] = None,
    skip: Annotated[
        list[str] | None,
        option("All passes but these.", "A", callback=split_names, autocompletion=complete_pass),
    ] = None,
    signatures: options.SignaturesOption = None,
    shape: ShapeOption = None,
    verify: options.VerifyOption = "regions",
    proof_seconds: Annotated[
        float | None, option("Time limit for one run of a region. Default: from its size.", "S")
    ] = None,
    sections: options.SectionsOption = "prefill-decode",
    report: options.ReportOption = None,
    as_json: options.JsonOption = False,
    dry_run: Annotated[bool, flag("Do everything but write.", "--dry-run")] = False,
    form: Annotated[options.Form | None, option("Where heads are cut. Default: the target's.")] = None,
    rows_per_tile: Annotated[
        int | None,
        option("Cut every head into blocks of at most R query rows. Default: the target's.", "R", min=1),
    ] = None,
    inline_composites: Annotated[
        bool, flag("Replace every composite by its body, each proved.", "--inline-composites")
    ] = False,
    extract_signature: Annotated[
        str | None, option("Write this signature only, for readers that read no other.", "NAME")
    ] = None,
    require_match: Annotated[
        bool, flag("Exit 4, nothing written, if no site was converted.", "--require-match")
    ] = False,
    require_all: Annotated[
        bool, flag("Exit 1, nothing written, if a site was not converted.", "--require-all")
    ] = False,
    require_sound: Annotated[
        bool, flag("Exit 1, nothing written, if earlier stages ruined the model.", "--require-sound")
    ] = False,
    overwrite: options.ForceOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Rewrite a model for an NPU, prove every rewrite, and write it."""
    from edge_opt.cli.show_models import run_conversion
    from edge_opt.conversion.choices import ConvertOptions

    chosen = ConvertOptions(
        target=target,
        passes=passes,
        skip=skip,
        signatures=signatures,
        shapes=read_shapes(shape),
        verify=verify,
        proof_seconds=proof_seconds,
        sections=sections,
        dry_run=dry_run,
        form=form,
        rows_per_tile=rows_per_tile,
        inline_composites=inline_composites,
        extract_signature=extract_signature,
        require_match=require_match,
        require_all=require_all,
        require_sound=require_sound,
        overwrite=overwrite,
    )
    return run_conversion(source, output, report or [], chosen, as_json=as_json, quiet=quiet)


def inspect(
    file: options.ModelArgument,
    *,
    target: Annotated[
        str | None,
        option(
            "Also list what this target refuses or computes wrongly.", "T", autocompletion=complete_target
        ),
    ] = None,
    shape: ShapeOption = None,
    node_data: Annotated[Path | None, option("Write an overlay for Model Explorer.", "OUT.json")] = None,
    overwrite: options.ForceOption = False,
    as_json: options.JsonOption = False,
) -> int:
    """Show signatures, sizes, dtypes, operators and attention blocks; lint for a target."""
    from edge_opt.cli.show_models import show_inspection, write_overlay
    from edge_opt.inspection import inspect

    shapes = read_shapes(shape)
    inspection = inspect(file, target=target, shapes=shapes)
    if node_data is not None:
        write_overlay(file, node_data, target, shapes, overwrite=overwrite)
    output.answer(inspection.to_dict(), partial(show_inspection, inspection), as_json=as_json)
    return 0


def explain(
    file: options.ModelArgument,
    *,
    target: options.TargetOption = "generic",
    shape: ShapeOption = None,
    as_json: options.JsonOption = False,
) -> int:
    """Show for every site whether `convert` would rewrite it, and why not."""
    from edge_opt.cli.show_models import show_sites
    from edge_opt.inspection import explain

    sites = explain(file, target=target, shapes=read_shapes(shape))
    listed = {"file": str(file), "target": target, "sites": [site.to_dict() for site in sites]}
    output.answer(listed, partial(show_sites, sites), as_json=as_json)
    return 0


def compare(
    context: typer.Context,
    a: Annotated[Path, argument("The reference.", "A")],
    b: Annotated[Path, argument("The model to compare with it.", "B")],
    *,
    on: Annotated[
        options.Place,
        option("Compare on this machine's CPU, or in the emulator of a Hexagon NPU's compiler."),
    ] = "cpu",
    signatures: options.SignaturesOption = None,
    seed: Annotated[int, option("Seed of the inputs.", min=0)] = 0,
    atol: Annotated[float, option("Equal is |a-b| <= atol + rtol*|a|.", min=0)] = 0.0,
    rtol: Annotated[float, option("See --atol.", min=0)] = 0.0,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    backend: Annotated[options.Backend, option("Kernels to run on.", panel=CPU)] = "xnnpack",
    runs: Annotated[int, option("Sets of random inputs for each signature.", min=1, panel=CPU)] = 1,
    shape: Annotated[
        list[str] | None,
        option(
            "Sizes for an input whose lengths are open in both; 1 by default.", "NAME=1,128,640", panel=CPU
        ),
    ] = None,
    hostile: Annotated[
        bool, flag("Also inputs with masked rows, large and denormal numbers, NaN.", "--hostile", panel=CPU)
    ] = False,
    generate: Annotated[
        int | None, option("Also generate N tokens, which must be equal.", "N", min=1, panel=CPU)
    ] = None,
    embedder: Annotated[
        Path | None, option("For --generate. Default: embedder.tflite beside A, B.", "E", panel=CPU)
    ] = None,
    auxiliary: Annotated[
        Path | None, option("As --embedder, for rotary tables, masks and cache updates.", "X", panel=CPU)
    ] = None,
    sdk: options.SdkOption = None,
    chip: options.ChipOption = None,
    flags: options.FlagOption = None,
    layers: options.LayersOption = None,
    least_db: Annotated[
        float, option("Least signal-to-noise ratio against the CPU.", "DB", "--npu-db", panel=NPU)
    ] = 20.0,
    seconds: options.SecondsOption = 3600.0,
) -> int:
    """Run two models on the same inputs; exit 1 if they differ."""
    from edge_opt.cli.show_models import show_comparison, show_on_npu
    from edge_opt.comparison.compare import compare
    from edge_opt.npu.comparing import compare_on_npu

    _refuse_options_of(context, CPU if on == "npu" else NPU, on)
    with output.bar(wanted=not quiet) as progress:
        if on == "npu":
            on_npu = compare_on_npu(
                a,
                b,
                sdk=sdk,
                chip=chip,
                flags=flags or (),
                signatures=signatures,
                layers=layers,
                seed=seed,
                atol=atol,
                rtol=rtol,
                least_db=least_db,
                seconds=seconds or None,
                progress=progress,
            )
        else:
            on_cpu = compare(
                a,
                b,
                signatures=signatures,
                backend=backend,
                runs=runs,
                seed=seed,
                atol=atol,
                rtol=rtol,
                hostile=hostile,
                shapes=read_shapes(shape),
                generate=generate,
                embedder=embedder,
                auxiliary=auxiliary,
                progress=progress,
            )
    if on == "npu":
        output.answer(on_npu.to_dict(), partial(show_on_npu, on_npu), as_json=as_json, quiet=quiet)
        return 0 if on_npu.equal else 1
    output.answer(on_cpu.to_dict(), partial(show_comparison, on_cpu), as_json=as_json, quiet=quiet)
    return 0 if on_cpu.equal else 1


def _refuse_options_of(context: typer.Context, group: str, on: options.Place) -> None:
    """Options that say nothing where the models run are mistakes, not wishes to be ignored."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        given = source is not None and source.name == "COMMANDLINE"
        if given and getattr(parameter, "rich_help_panel", None) == group:
            name = parameter.opts[0]
            raise typer.BadParameter(f"{name} has no meaning with --on {on}: leave one of them out")


def shapes(
    file: options.ModelArgument, *, as_json: options.JsonOption = False, quiet: options.QuietOption = False
) -> int:
    """Derive every shape again, in a bundle of its prefill/decode model; exit 1 if one disagrees with the file."""
    from edge_opt.base.words import many
    from edge_opt.ir.opening import Opened
    from edge_opt.shapes import derive

    report = derive(Opened(file).main(compiled=True).model)
    count = len(report.disagreements)

    def show() -> None:
        verdict = many(count, "disagreement") if count else "all as the file says"
        output.say(*map(str, report.disagreements))
        derived = f"{report.derived} of {many(report.tensors, 'tensor')} derived"
        output.say(f"{derived}, {verdict}", style=output.BAD if count else output.GOOD)

    output.answer({"file": str(file), **report.to_dict()}, show, as_json=as_json, quiet=quiet)
    return 1 if count else 0


@golden.command()
def record(
    model: options.ModelArgument,
    *,
    destination: Annotated[Path, option("The file of recorded outputs.", "G.npz", "-o", "--output")],
    signatures: options.SignaturesOption = None,
    overwrite: options.ForceOption = False,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Run a model and record its outputs."""
    from edge_opt.base.words import size
    from edge_opt.comparison.golden import record

    written = record(model, destination, signatures=signatures, overwrite=overwrite)
    count = written.stat().st_size

    def show() -> None:
        output.say(f"{written}: {size(count)}, check with `edge-opt golden check`")

    output.answer({"written": str(written), "bytes": count}, show, as_json=as_json, quiet=quiet)
    return 0


@golden.command()
def check(
    model: options.ModelArgument,
    golden: Annotated[Path, argument("What `golden record` wrote.", "G.npz")],
    *,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Run a model again; exit 1 if its outputs changed."""
    from edge_opt.cli.show_models import show_comparison
    from edge_opt.comparison.golden import check

    report = check(model, golden)
    output.answer(report.to_dict(), partial(show_comparison, report), as_json=as_json, quiet=quiet)
    return 0 if report.equal else 1


def demo(
    folder: Annotated[
        Path | None, argument("Keep the models there; a temporary folder by default.", "DIR")
    ] = None,
    *,
    overwrite: options.ForceOption = False,
) -> int:
    """Convert and compare a bundled tiny Gemma3; no download."""
    from edge_opt.cli.show_models import run_demo

    return run_demo(folder, overwrite=overwrite)


def passes(
    name: Annotated[
        str | None, argument("A pass; shows its identity and demand.", "NAME", autocompletion=complete_pass)
    ] = None,
    *,
    as_json: options.JsonOption = False,
) -> int:
    """List the rewrites in the order in which they run, or describe one."""
    from inspect import getdoc

    from edge_opt.base.errors import unknown
    from edge_opt.passes import PASSES

    if name is not None and name not in PASSES:
        raise unknown("pass", name, PASSES)
    chosen = list(PASSES.values()) if name is None else [PASSES[name]]
    records = [
        {
            "name": one.name,
            "demand": str(one.demand),
            "summary": one.summary,
            "identity": getdoc(type(one)),
            "sites": getdoc(type(one).sites),
        }
        for one in chosen
    ]

    def show() -> None:
        if name is None:
            rows = [("pass", "proved to be", "what it does")]
            rows += [(one.name, str(one.demand), one.summary) for one in chosen]
            output.say(*output.table(rows, left=3))
            return
        (one,) = records
        output.say(f"{one['name']} {one['summary']}.", "", *str(one["identity"]).splitlines(), "")
        output.say(f"Proved to be {one['demand']}.", "", f"Sites: {one['sites']}")

    output.answer({"passes": records}, show, as_json=as_json)
    return 0


def targets(
    name: Annotated[
        str | None,
        argument("A target; prints its facts as a target file.", "NAME", autocompletion=complete_target),
    ] = None,
    *,
    as_json: options.JsonOption = False,
) -> int:
    """List the bundled targets, or print one as a target file with the source of every fact."""
    from edge_opt.targets import load_target, target_names
    from edge_opt.targets.target import to_toml

    chosen = [load_target(one) for one in (target_names() if name is None else [name])]

    def show() -> None:
        rows = [("target", "form", "what it is")]
        rows += [(target.name, target.form, target.summary) for target in chosen]
        table = output.table(rows, left=3)
        output.say(*(table if name is None else to_toml(chosen[0]).splitlines()))

    output.answer({"targets": [target.to_dict() for target in chosen]}, show, as_json=as_json)
    return 0
