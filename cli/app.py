"""The arguments of every command. Parsing gives back what to do; nothing of the library is loaded before that."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from edge_opt.cli import completion, streams

Action = Callable[[], int]

VERIFY = ("regions", "exhaustive", "full", "none")
SECTIONS = ("prefill-decode", "all")
FORMS = ("as-found", "split", "unpack", "split-above")
BACKENDS = ("xnnpack", "reference", "both", "tensorflow")
PLACES = ("cpu", "npu")

_EPILOG = (
    "Exit codes: 0 done; 1 a difference was found, or --require-all and a site was not converted; 2 usage; "
    "3 the model cannot be read; 4 nothing matched under --require-match; 5 the output could not be written."
)

app = typer.Typer(
    help="Rewrites the attention of .tflite language models for edge NPUs, and proves that nothing changed.",
    epilog=_EPILOG,
    # Plain text: help is often piped, and a panel of boxes takes longer to load than all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
golden_app = typer.Typer(
    help="Keep a model's outputs in a small file, and check them in CI.", no_args_is_help=False
)
app.add_typer(golden_app, name="golden")


def _one_of(allowed: Iterable[str]) -> Callable[[str], str]:
    known = tuple(allowed)

    def check(value: str) -> str:
        if value not in known:
            from difflib import get_close_matches

            close = get_close_matches(value, known, 1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are: {', '.join(known)}"
            raise typer.BadParameter(f"'{value}' does not exist, {hint}")
        return value

    return check


def _listed(values: list[str] | None) -> list[str]:
    """`--passes a,b --passes c` -> [a, b, c]; empty where the option was not given."""
    names = [name.strip() for value in values or () for name in value.split(",") if name.strip()]
    if values and not names:
        raise typer.BadParameter("it names nothing, leave the option out or give a name")
    return names


ModelArgument = Annotated[
    Path,
    typer.Argument(metavar="FILE", callback=streams.given, help="A .tflite model; - for standard input."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Sdk = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Qualcomm's libraries. Default: EDGE_OPT_QNN or QNN_SDK_ROOT."),
]
Soc = Annotated[
    str | None,
    typer.Option(
        "--soc", "--chip", metavar="C", help="The chip, as the compiler calls it: SM8750, ethos-u85-256, ..."
    ),
]
Flag = Annotated[
    list[str] | None,
    typer.Option(metavar="F", help="For the compiler, once for each; default: those of the target."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]


def _version(*, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"edge-opt {version('edge-opt')}")
        raise typer.Exit


@app.callback()
def edge_opt(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda value: _version(wanted=value),
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Rewrites the attention of .tflite language models for edge NPUs, and proves that nothing changed."""


@app.command()
def convert(
    *,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            callback=streams.given,
            help="A .tflite model, or a .litertlm or .task bundle; - for standard input.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="Default: beside IN, as NAME.opt.tflite; - for standard output.",
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="T",
            autocompletion=completion.targets,
            help="A name of `edge-opt targets`, or your own .toml file.",
        ),
    ] = "generic",
    passes: Annotated[
        list[str] | None,
        typer.Option(
            "--passes",
            metavar="A,B",
            callback=_listed,
            autocompletion=completion.passes,
            help="Only these of `edge-opt passes`.",
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            "--skip",
            metavar="A",
            callback=_listed,
            autocompletion=completion.passes,
            help="All passes but these.",
        ),
    ] = None,
    signatures: Annotated[
        list[str] | None,
        typer.Option("--signatures", metavar="S", callback=_listed, help="Rewrite only these signatures."),
    ] = None,
    verify: Annotated[
        str,
        typer.Option(
            "--verify",
            metavar="|".join(VERIFY),
            callback=_one_of(VERIFY),
            autocompletion=completion.one_of(VERIFY),
            help="Prove each rewritten region, do so on every row, compare the whole models too, or neither.",
        ),
    ] = "regions",
    proof_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="How long one run of a region may take; by default that follows from its size."
        ),
    ] = None,
    sections: Annotated[
        str,
        typer.Option(
            "--sections",
            metavar="|".join(SECTIONS),
            callback=_one_of(SECTIONS),
            autocompletion=completion.one_of(SECTIONS),
            help="Of a bundle, rewrite the prefill/decode model or all of its models.",
        ),
    ] = "prefill-decode",
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.json|.md|.html", help="Also write a report to be read."),
    ] = None,
    as_json: Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything but write.")] = False,
    form: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(FORMS), autocompletion=completion.one_of(FORMS), help="How heads are cut."
        ),
    ] = None,
    rows_per_tile: Annotated[
        int | None,
        typer.Option(
            metavar="R", min=1, help="Cut every head further, into blocks of at most R query rows each."
        ),
    ] = None,
    inline_composites: Annotated[
        bool, typer.Option("--inline-composites", help="Replace every composite by its body, each proved.")
    ] = False,
    extract_signature: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Write this signature only, for readers that look at no other."),
    ] = None,
    require_match: Annotated[
        bool, typer.Option("--require-match", help="Exit 4, nothing written, if no site was converted.")
    ] = False,
    require_all: Annotated[
        bool, typer.Option("--require-all", help="Exit 1, nothing written, if a site was not converted.")
    ] = False,
    force: Force = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")] = False,
) -> Action:
    """Rewrite a model for an NPU, prove every rewrite, and write it."""
    from edge_opt.cli.convert import Request, run

    request = Request(
        source=source,
        output=output,
        target=target,
        passes=passes or None,
        skip=skip or [],
        signatures=signatures or None,
        verify=verify,
        proof_seconds=proof_seconds,
        sections=sections,
        report=report,
        dry_run=dry_run,
        form=form,
        rows_per_tile=rows_per_tile,
        inline_composites=inline_composites,
        extract_signature=extract_signature,
        require_match=require_match,
        require_all=require_all,
        force=force,
    )
    return partial(run, request, as_json=as_json, quiet=quiet)


@app.command()
def inspect(
    *,
    file: ModelArgument,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            autocompletion=completion.targets,
            help="Also say what this target refuses or gets wrong.",
        ),
    ] = None,
    node_data: Annotated[
        Path | None,
        typer.Option("--node-data", metavar="OUT.json", help="Write an overlay for Model Explorer."),
    ] = None,
    converted: Annotated[
        Path | None,
        typer.Option("--converted", metavar="C", help="What FILE became: the overlay is for that model."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> Action:
    """Show signatures, sizes, dtypes, operators and attention blocks; lint for a target."""
    from edge_opt.cli.inspect import NodeData, run

    if converted is not None and node_data is None:
        raise typer.BadParameter("--converted needs --node-data")
    overlay = None if node_data is None else NodeData(node_data, converted, force)
    return partial(run, file, target, overlay, as_json=as_json)


@app.command()
def compare(
    *,
    a: Annotated[Path, typer.Argument(metavar="A", callback=streams.given, help="The reference.")],
    b: Annotated[Path, typer.Argument(metavar="B", callback=streams.given, help="What is judged.")],
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            metavar="|".join(BACKENDS),
            callback=_one_of(BACKENDS),
            autocompletion=completion.one_of(BACKENDS),
            help="Kernels to run on.",
        ),
    ] = "xnnpack",
    runs: Annotated[int, typer.Option("--runs", min=1, help="Sets of random inputs for each signature.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Decides the inputs.")] = 0,
    atol: Annotated[float, typer.Option("--atol", min=0, help="Equal is |a-b| <= atol + rtol*|a|.")] = 0.0,
    rtol: Annotated[float, typer.Option("--rtol", min=0, help="See --atol.")] = 0.0,
    hostile: Annotated[
        bool,
        typer.Option("--hostile", help="Also inputs with masked rows, large and denormal numbers, NaN."),
    ] = False,
    generate: Annotated[
        int | None,
        typer.Option("--generate", metavar="N", min=1, help="Also generate N tokens, which must be equal."),
    ] = None,
    embedder: Annotated[
        Path | None,
        typer.Option("--embedder", metavar="E", help="For --generate. Default: embedder.tflite beside A, B."),
    ] = None,
    auxiliary: Annotated[
        Path | None,
        typer.Option("--auxiliary", metavar="X", help="The same: rotary tables, masks and cache updates."),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            "--on",
            metavar="|".join(PLACES),
            callback=_one_of(PLACES),
            autocompletion=completion.one_of(PLACES),
            help="Compare on this machine's CPU, or as a Hexagon NPU computes them, in its compiler's emulator.",
        ),
    ] = "cpu",
    sdk: Sdk = None,
    soc: Soc = None,
    flag: Flag = None,
    layers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="On the NPU: only the first N layers, cut out."),
    ] = None,
    npu_db: Annotated[
        float | None,
        typer.Option(
            metavar="DB", help="On the NPU: signal to noise against the CPU that is demanded. Default: 20."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S", min=0, help="On the NPU: give a model up after so long. Default: 3600; 0: never."
        ),
    ] = None,
    as_json: Json = False,
) -> Action:
    """Run two models on the same inputs; exit 1 if they differ."""
    from edge_opt.cli.compare import Request, run

    given = {
        "--sdk": sdk,
        "--soc": soc,
        "--flag": flag,
        "--layers": layers,
        "--npu-db": npu_db,
        "--seconds": seconds,
    }
    if on == "npu":
        others = {
            "--backend": backend != "xnnpack",
            "--runs": runs != 1,
            "--hostile": hostile,
            "--generate": generate,
        }
        _refuse_together("--on npu", others)
        from edge_opt.cli.compare_npu import run as run_on_npu

        return partial(
            run_on_npu,
            a,
            b,
            sdk=sdk,
            soc=soc,
            flags=flag or None,
            layers=layers,
            seed=seed,
            atol=atol,
            rtol=rtol,
            least_db=npu_db,
            seconds=seconds,
            as_json=as_json,
        )
    _refuse_together("--on cpu", given)

    request = Request(
        a=a,
        b=b,
        backend=backend,
        runs=runs,
        seed=seed,
        atol=atol,
        rtol=rtol,
        hostile=hostile,
        generate=generate,
        embedder=embedder,
        auxiliary=auxiliary,
    )
    return partial(run, request, as_json=as_json)


@app.command()
def shapes(
    *,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", callback=streams.given, help="A model or bundle; - for standard input."
        ),
    ] = None,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="List the operators that have a rule.")
    ] = False,
    as_json: Json = False,
) -> Action:
    """Derive every shape again; exit 1 if one disagrees with the file."""
    from edge_opt.cli.shapes import run, run_coverage

    if coverage == (file is not None):
        raise typer.BadParameter("give either FILE or --coverage")
    return partial(run_coverage, as_json=as_json) if file is None else partial(run, file, as_json=as_json)


@app.command()
def explain(*, file: ModelArgument, as_json: Json = False) -> Action:
    """Say of every site whether it would be converted, and why not."""
    from edge_opt.cli.explain import run

    return partial(run, file, as_json=as_json)


@golden_app.command("record")
def golden_record(
    *,
    model: Annotated[Path, typer.Argument(metavar="MODEL", callback=streams.given, help="A .tflite model.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="G.npz", help="Where the outputs go.")],
    force: Force = False,
) -> Action:
    """Run a model and keep its outputs."""
    from edge_opt.cli.golden import record

    return partial(record, model, output, force=force)


@golden_app.command("check")
def golden_check(
    *,
    model: Annotated[Path, typer.Argument(metavar="MODEL", callback=streams.given, help="A .tflite model.")],
    golden: Annotated[Path, typer.Argument(metavar="G.npz", help="What `golden record` wrote.")],
) -> Action:
    """Run a model again; exit 1 if its outputs are not what was kept."""
    from edge_opt.cli.golden import check

    return partial(check, model, golden)


def _refuse_together(place: str, options: Mapping[str, object]) -> None:
    """Options that say nothing there are mistakes, not wishes to be ignored."""
    for name, value in options.items():
        if value:
            raise typer.BadParameter(f"{name} has no meaning with {place}: leave one of them out")


@app.command()
def profile(
    *,
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL...", help="Models or bundles, as before and after.")
    ],
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="T",
            autocompletion=completion.targets,
            help="qualcomm-htp or ethos-u85, or a target file of yours.",
        ),
    ] = "qualcomm-htp",
    sdk: Sdk = None,
    soc: Soc = None,
    flag: Flag = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0, help="Give a model up after so long; 0: never.")
    ] = 3600.0,
    as_json: Json = False,
) -> Action:
    """Compile models with a target's own compiler, and show what it makes of them."""
    from edge_opt.cli.profile import run

    return partial(
        run, models, target, sdk=sdk, chip=soc, flags=flag or None, seconds=seconds or None, as_json=as_json
    )


@app.command()
def tune(
    *,
    model: ModelArgument,
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="T",
            autocompletion=completion.targets,
            help="qualcomm-htp or ethos-u85, or a target file of yours.",
        ),
    ] = "qualcomm-htp",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT.toml", help="Write a target file with the winner."),
    ] = None,
    signature: Annotated[
        str | None,
        typer.Option(metavar="S", help="The one to tune for; default: where the attention is largest."),
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Only so many layers in a row, for a cheaper look."),
    ] = None,
    sdk: Sdk = None,
    soc: Soc = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0, help="Give a trial up after so long; 0: never.")
    ] = 1800.0,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="So many trials at a time. Default: as many as cores are free."
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Compile again what an earlier search remembers.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")] = False,
) -> Action:
    """Compile a signature in every form, with every usable level of the target's compiler, and find the quickest."""
    from edge_opt.cli.tune import run

    return partial(
        run,
        model,
        target,
        output,
        signature=signature,
        blocks=blocks,
        sdk=sdk,
        chip=soc,
        seconds=seconds,
        jobs=jobs,
        fresh=fresh,
        force=force,
        as_json=as_json,
        quiet=quiet,
    )


@app.command()
def passes() -> Action:
    """List the rewrites, in the order in which they run."""
    from edge_opt.cli.listing import passes as run

    return run


@app.command()
def targets(*, as_json: Json = False) -> Action:
    """List the bundled targets; with --json every fact of each, its source, and the compiler flags that go with it."""
    from edge_opt.cli.listing import targets as run

    return partial(run, as_json=as_json)


@app.command()
def demo(
    *,
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Keep the models there; a temporary folder by default."),
    ] = None,
    force: Force = False,
) -> Action:
    """Convert and compare a bundled tiny Gemma3; no download."""
    from edge_opt.cli.demo import run

    return partial(run, folder, force=force)
