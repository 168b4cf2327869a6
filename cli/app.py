"""The arguments of every command. Parsing gives back what to do; nothing of the library is loaded before that."""

from pathlib import Path
from typing import Annotated, ClassVar

import typer

from edge_opt.cli import completion
from edge_opt.cli.build import Build
from edge_opt.cli.declare import (
    Action,
    Chip,
    Command,
    CompilerTarget,
    Flags,
    Force,
    Json,
    ModelArgument,
    Quiet,
    Sdk,
    command,
    given,
    listed,
    one_of,
)

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


@command(app)
class Convert(Command):
    """Rewrite a model for an NPU, prove every rewrite, and write it."""

    run: ClassVar = "convert:run"

    source: Annotated[
        Path, given("A .tflite model, or a .litertlm or .task bundle; - for standard input.", "IN")
    ]
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="Default: beside IN, as NAME.opt.tflite; - for standard output.",
        ),
    ] = None
    target: Annotated[
        str,
        typer.Option(
            metavar="T",
            autocompletion=completion.targets,
            help="A name of `edge-opt targets`, or your own .toml file.",
        ),
    ] = "generic"
    passes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B",
            callback=listed,
            autocompletion=completion.passes,
            help="Only these of `edge-opt passes`.",
        ),
    ] = None
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A", callback=listed, autocompletion=completion.passes, help="All passes but these."
        ),
    ] = None
    signatures: Annotated[
        list[str] | None,
        typer.Option(metavar="S", callback=listed, help="Rewrite only these signatures."),
    ] = None
    verify: Annotated[
        str,
        one_of(
            VERIFY,
            "Prove each rewritten region, do so on every row, compare the whole models too, or neither.",
        ),
    ] = "regions"
    proof_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="How long one run of a region may take; by default that follows from its size."
        ),
    ] = None
    sections: Annotated[
        str, one_of(SECTIONS, "Of a bundle, rewrite the prefill/decode model or all of its models.")
    ] = "prefill-decode"
    report: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE.json|.md|.html", help="Also write a report, once for each format."),
    ] = None
    as_json: Json = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything but write.")] = False
    form: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(FORMS), autocompletion=completion.one_of(FORMS), help="How heads are cut."
        ),
    ] = None
    rows_per_tile: Annotated[
        int | None,
        typer.Option(
            metavar="R", min=1, help="Cut every head further, into blocks of at most R query rows each."
        ),
    ] = None
    inline_composites: Annotated[
        bool, typer.Option("--inline-composites", help="Replace every composite by its body, each proved.")
    ] = False
    extract_signature: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Write this signature only, for readers that look at no other."),
    ] = None
    require_match: Annotated[
        bool, typer.Option("--require-match", help="Exit 4, nothing written, if no site was converted.")
    ] = False
    require_all: Annotated[
        bool, typer.Option("--require-all", help="Exit 1, nothing written, if a site was not converted.")
    ] = False
    overwrite: Force = False
    quiet: Quiet = False


@command(app)
class Inspect(Command):
    """Show signatures, sizes, dtypes, operators and attention blocks; lint for a target."""

    run: ClassVar = "inspect:run"

    file: ModelArgument
    target: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            autocompletion=completion.targets,
            help="Also say what this target refuses or gets wrong.",
        ),
    ] = None
    node_data: Annotated[
        Path | None,
        typer.Option(metavar="OUT.json", help="Write an overlay for Model Explorer."),
    ] = None
    converted: Annotated[
        Path | None,
        typer.Option(metavar="C", help="What FILE became: the overlay is for that model."),
    ] = None
    overwrite: Force = False
    as_json: Json = False

    def action(self) -> Action:
        """An overlay for a converted model is one that has to be written somewhere."""
        if self.converted is not None and self.node_data is None:
            raise typer.BadParameter("--converted needs --node-data")
        return super().action()


@command(app)
class Compare(Command):
    """Run two models on the same inputs; exit 1 if they differ."""

    run: ClassVar = "compare:run"

    a: Annotated[Path, given("The reference.", "A")]
    b: Annotated[Path, given("What is judged.", "B")]
    backend: Annotated[str, one_of(BACKENDS, "Kernels to run on.")] = "xnnpack"
    runs: Annotated[int, typer.Option(min=1, help="Sets of random inputs for each signature.")] = 1
    seed: Annotated[int, typer.Option(min=0, help="Decides the inputs.")] = 0
    atol: Annotated[float, typer.Option(min=0, help="Equal is |a-b| <= atol + rtol*|a|.")] = 0.0
    rtol: Annotated[float, typer.Option(min=0, help="See --atol.")] = 0.0
    hostile: Annotated[
        bool,
        typer.Option("--hostile", help="Also inputs with masked rows, large and denormal numbers, NaN."),
    ] = False
    generate: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Also generate N tokens, which must be equal."),
    ] = None
    embedder: Annotated[
        Path | None,
        typer.Option(metavar="E", help="For --generate. Default: embedder.tflite beside A, B."),
    ] = None
    auxiliary: Annotated[
        Path | None,
        typer.Option(metavar="X", help="The same: rotary tables, masks and cache updates."),
    ] = None
    on: Annotated[
        str,
        one_of(
            PLACES,
            "Compare on this machine's CPU, or as a Hexagon NPU computes them, in its compiler's emulator.",
        ),
    ] = "cpu"
    sdk: Sdk = None
    chip: Chip = None
    flags: Flags = None
    layers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="On the NPU: only the first N layers, cut out."),
    ] = None
    least_db: Annotated[
        float,
        typer.Option(
            "--npu-db", metavar="DB", help="On the NPU: signal to noise against the CPU that is demanded."
        ),
    ] = 20.0
    seconds: Annotated[
        float,
        typer.Option(metavar="S", min=0, help="On the NPU: give a model up after so long; 0: never."),
    ] = 3600.0
    as_json: Json = False

    ON_CPU: ClassVar = ("backend", "runs", "hostile", "generate", "embedder", "auxiliary")
    ON_NPU: ClassVar = ("sdk", "chip", "flags", "layers", "least_db", "seconds")

    def action(self) -> Action:
        """Options that say nothing where the models run are mistakes, not wishes to be ignored."""
        for name in self.ON_CPU if self.on == "npu" else self.ON_NPU:
            if getattr(self, name) != getattr(type(self), name):
                option = {"chip": "soc", "flags": "flag", "least_db": "npu-db"}.get(name, name)
                raise typer.BadParameter(
                    f"--{option} has no meaning with --on {self.on}: leave one of them out"
                )
        return super().action()


@command(app)
class Shapes(Command):
    """Derive every shape again; exit 1 if one disagrees with the file."""

    run: ClassVar = "shapes:run"

    file: Annotated[Path | None, given("A model or bundle; - for standard input.")] = None
    coverage: Annotated[bool, typer.Option("--coverage", help="List the operators that have a rule.")] = False
    as_json: Json = False

    def action(self) -> Action:
        """One of the two things that it can do."""
        if self.coverage == (self.file is not None):
            raise typer.BadParameter("give either FILE or --coverage")
        return super().action()


@command(app)
class Explain(Command):
    """Say of every site whether it would be converted, and why not."""

    run: ClassVar = "explain:run"

    file: ModelArgument
    as_json: Json = False


@command(golden_app)
class Record(Command):
    """Run a model and keep its outputs."""

    run: ClassVar = "golden:record"

    model: Annotated[Path, given("A .tflite model.", "MODEL")]
    output: Annotated[Path, typer.Option("-o", "--output", metavar="G.npz", help="Where the outputs go.")]
    overwrite: Force = False


@command(golden_app)
class Check(Command):
    """Run a model again; exit 1 if its outputs are not what was kept."""

    run: ClassVar = "golden:check"

    model: Annotated[Path, given("A .tflite model.", "MODEL")]
    golden: Annotated[Path, typer.Argument(metavar="G.npz", help="What `golden record` wrote.")]


@command(app)
class Profile(Command):
    """Compile models with a target's own compiler, and show what it makes of them."""

    run: ClassVar = "profile:run"

    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL...", help="Models or bundles, as before and after.")
    ]
    target: CompilerTarget = "qualcomm-htp"
    sdk: Sdk = None
    chip: Chip = None
    flags: Flags = None
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0, help="Give a model up after so long; 0: never.")
    ] = 3600.0
    as_json: Json = False


@command(app)
class Tune(Command):
    """Compile a signature in every form, with every usable level of the target's compiler, and find the quickest."""

    run: ClassVar = "tune:run"

    model: ModelArgument
    target: CompilerTarget = "qualcomm-htp"
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT.toml", help="Write a target file with the winner."),
    ] = None
    signature: Annotated[
        str | None,
        typer.Option(metavar="S", help="The one to tune for; default: where the attention is largest."),
    ] = None
    blocks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Only so many layers in a row, for a cheaper look."),
    ] = None
    sdk: Sdk = None
    chip: Chip = None
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0, help="Give a trial up after so long; 0: never.")
    ] = 1800.0
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="So many trials at a time. Default: as many as cores are free."
        ),
    ] = None
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Compile again what an earlier search remembers.")
    ] = False
    overwrite: Force = False
    as_json: Json = False
    quiet: Quiet = False


command(app)(Build)


@command(app)
class Passes(Command):
    """List the rewrites, in the order in which they run."""

    run: ClassVar = "listing:passes"


@command(app)
class Targets(Command):
    """List the bundled targets; with --json every fact of each, its source, and the compiler flags that go with it."""

    run: ClassVar = "listing:targets"

    as_json: Json = False


@command(app)
class Demo(Command):
    """Convert and compare a bundled tiny Gemma3; no download."""

    run: ClassVar = "demo:run"

    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Keep the models there; a temporary folder by default."),
    ] = None
    overwrite: Force = False
