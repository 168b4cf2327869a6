"""The arguments of every command. Parsing gives back what to do; nothing of the library is loaded before that."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
import typer.core

from edge_opt.cli.declare import (
    REQUIRED,
    Command,
    argument,
    command,
    file_argument,
    flag,
    names_option,
    one_of,
    option,
    option_name,
    pass_names,
    several,
    shape_option,
    starting,
    target_names,
)

VERIFY = ("regions", "exhaustive", "full", "none")
SECTIONS = ("prefill-decode", "all")
FORMS = ("as-found", "split", "unpack", "split-above")
BACKENDS = ("xnnpack", "reference", "both", "tensorflow")
PLACES = ("cpu", "npu")

GROUPS = {
    "Models": ("convert", "inspect", "explain", "compare", "shapes"),
    "Phones": ("build", "evaluate", "profile", "tune"),
    "In your CI": ("golden",),
    "What there is": ("demo", "passes", "targets"),
}


class GroupedCommands(typer.core.TyperGroup):
    """Lists the commands by what they are for, each with the first part of its help and without cutting it."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                helps = ((name, self.commands[name].help or "") for name in names)
                formatter.write_dl([(name, re.split(r"[:;]", text)[0].rstrip(".")) for name, text in helps])


app = typer.Typer(
    cls=GroupedCommands,
    help="Rewrites the attention of .tflite language models for edge NPUs, and proves that nothing changed.",
    epilog="Exit codes: 0 done; 1 a difference was found, or --require-all and a site was not converted; 2 usage; "
    "3 the model cannot be read; 4 nothing matched under --require-match; 5 the output could not be written.",
    # Plain text: help is often piped, and a panel of boxes takes longer to load than all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
golden_app = typer.Typer(
    help="Keep a model's outputs in a small file, and check them in CI.", no_args_is_help=False
)
app.add_typer(golden_app, name="golden")


model_argument = partial(file_argument, "A .tflite model; - for standard input.")
json_flag = partial(flag, "Print one JSON object.", "--json")
quiet_flag = partial(flag, "Print errors only.", "-q", "--quiet")
force_flag = partial(flag, "Replace files that exist.", "--force")
target_option = partial(
    option,
    "qualcomm-htp or ethos-u85, or a target file of yours.",
    "T",
    default="qualcomm-htp",
    autocompletion=target_names,
)
sdk_option = partial(option, "Qualcomm's libraries. Default: EDGE_OPT_QNN or QNN_SDK_ROOT.", "DIR")
chip_option = partial(
    option, "The chip, as the compiler calls it: SM8750, ethos-u85-256, ...", "C", "--soc", "--chip"
)
flags_option = partial(
    several, "For the compiler, once for each; default: those of the target.", "F", "--flag"
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"edge-opt {version('edge-opt')}")
        raise typer.Exit


@app.callback()
def edge_opt(
    *,
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Rewrites the attention of .tflite language models for edge NPUs, and proves that nothing changed."""


@command(app, "convert:run")
class Convert(Command):
    """Rewrite a model for an NPU, prove every rewrite, and write it."""

    source: Path = file_argument(
        "A .tflite model, or a .litertlm or .task bundle; - for standard input.", "IN"
    )
    output: Path | None = option(
        "Default: beside IN, as NAME.opt.tflite; - for standard output.", "OUT", "-o", "--output"
    )
    target: str = option(
        "A name of `edge-opt targets`, or your own .toml file.",
        "T",
        default="generic",
        autocompletion=target_names,
    )
    passes: list[str] | None = names_option(
        "Only these of `edge-opt passes`.", "A,B", autocompletion=pass_names
    )
    skip: list[str] | None = names_option("All passes but these.", "A", autocompletion=pass_names)
    signatures: list[str] | None = names_option("Rewrite only these signatures.", "S")
    shape: list[str] | None = shape_option("Static sizes for an input of open lengths, once for each input.")
    verify: str = one_of(
        VERIFY, "Prove each rewritten region, do so on every row, compare the whole models too, or neither."
    )
    proof_seconds: float | None = option(
        "How long one run of a region may take; by default that follows from its size.", "S"
    )
    sections: str = one_of(SECTIONS, "Of a bundle, rewrite the prefill/decode model or all of its models.")
    report: list[Path] | None = several("Also write a report, once for each format.", "FILE.json|.md|.html")
    as_json: bool = json_flag()
    dry_run: bool = flag("Do everything but write.", "--dry-run")
    form: str | None = option("How heads are cut.", "|".join(FORMS), autocompletion=starting(FORMS))
    rows_per_tile: int | None = option(
        "Cut every head further, into blocks of at most R query rows each.", "R", min=1
    )
    inline_composites: bool = flag("Replace every composite by its body, each proved.", "--inline-composites")
    extract_signature: str | None = option(
        "Write this signature only, for readers that look at no other.", "NAME"
    )
    require_match: bool = flag("Exit 4, nothing written, if no site was converted.", "--require-match")
    require_all: bool = flag("Exit 1, nothing written, if a site was not converted.", "--require-all")
    require_sound: bool = flag("Exit 1, nothing written, if the model was ruined before.", "--require-sound")
    overwrite: bool = force_flag()
    quiet: bool = quiet_flag()


@command(app, "inspect:run")
class Inspect(Command):
    """Show signatures, sizes, dtypes, operators and attention blocks; lint for a target."""

    file: Path = model_argument()
    target: str | None = option(
        "Also say what this target refuses or gets wrong.", "T", autocompletion=target_names
    )
    node_data: Path | None = option("Write an overlay for Model Explorer.", "OUT.json")
    overwrite: bool = force_flag()
    as_json: bool = json_flag()


@command(app, "compare:run")
class Compare(Command):
    """Run two models on the same inputs; exit 1 if they differ."""

    a: Path = file_argument("The reference.", "A")
    b: Path = file_argument("What is judged.", "B")
    backend: str = one_of(BACKENDS, "Kernels to run on.")
    runs: int = option("Sets of random inputs for each signature.", default=1, min=1)
    seed: int = option("Decides the inputs.", default=0, min=0)
    atol: float = option("Equal is |a-b| <= atol + rtol*|a|.", default=0.0, min=0)
    rtol: float = option("See --atol.", default=0.0, min=0)
    shape: list[str] | None = shape_option("Sizes for an input whose lengths are open in both; 1 by default.")
    hostile: bool = flag("Also inputs with masked rows, large and denormal numbers, NaN.", "--hostile")
    generate: int | None = option("Also generate N tokens, which must be equal.", "N", min=1)
    embedder: Path | None = option("For --generate. Default: embedder.tflite beside A, B.", "E")
    auxiliary: Path | None = option("The same: rotary tables, masks and cache updates.", "X")
    on: str = one_of(
        PLACES,
        "Compare on this machine's CPU, or as a Hexagon NPU computes them, in its compiler's emulator.",
    )
    sdk: Path | None = sdk_option()
    chip: str | None = chip_option()
    flags: list[str] | None = flags_option()
    layers: int | None = option("On the NPU: only the first N layers, cut out.", "N", min=1)
    least_db: float = option(
        "On the NPU: signal to noise against the CPU that is demanded.", "DB", "--npu-db", default=20.0
    )
    seconds: float = option(
        "On the NPU: give a model up after so long; 0: never.", "S", default=3600.0, min=0
    )
    as_json: bool = json_flag()

    ON_CPU: ClassVar = ("backend", "runs", "shape", "hostile", "generate", "embedder", "auxiliary")
    ON_NPU: ClassVar = ("sdk", "chip", "flags", "layers", "least_db", "seconds")

    def check(self) -> None:
        """Options that say nothing where the models run are mistakes, not wishes to be ignored."""
        for name in self.ON_CPU if self.on == "npu" else self.ON_NPU:
            if getattr(self, name) != getattr(type(self), name):
                raise typer.BadParameter(
                    f"{option_name(name)} has no meaning with --on {self.on}: leave one of them out"
                )


@command(app, "shapes:run")
class Shapes(Command):
    """Derive every shape again; exit 1 if one disagrees with the file."""

    file: Path = file_argument("A model or bundle; - for standard input.")
    as_json: bool = json_flag()


@command(app, "inspect:explain")
class Explain(Command):
    """Say of every site whether it would be converted, and why not."""

    file: Path = model_argument()
    as_json: bool = json_flag()


@command(golden_app, "compare:record")
class Record(Command):
    """Run a model and keep its outputs."""

    model: Path = file_argument("A .tflite model.", "MODEL")
    output: Path = option("Where the outputs go.", "G.npz", "-o", "--output", default=REQUIRED)
    overwrite: bool = force_flag()


@command(golden_app, "compare:check")
class Check(Command):
    """Run a model again; exit 1 if its outputs are not what was kept."""

    model: Path = file_argument("A .tflite model.", "MODEL")
    golden: Path = argument("What `golden record` wrote.", "G.npz")


@command(app, "profile:run")
class Profile(Command):
    """Compile models with a target's own compiler, and show what it makes of them."""

    models: list[Path] = argument("Models or bundles, as before and after.", "MODEL...")
    target: str = target_option()
    sdk: Path | None = sdk_option()
    chip: str | None = chip_option()
    flags: list[str] | None = flags_option()
    seconds: float = option("Give a model up after so long; 0: never.", "S", default=3600.0, min=0)
    as_json: bool = json_flag()


@command(app, "tune:run")
class Tune(Command):
    """Compile a signature in every form with the target's compiler, and find the quickest."""

    model: Path = model_argument()
    target: str = target_option()
    output: Path | None = option("Write a target file with the winner.", "OUT.toml", "-o", "--output")
    signature: str | None = option("The one to tune for; default: where the attention is largest.", "S")
    blocks: int | None = option("Only so many layers in a row, for a cheaper look.", "N", min=1)
    sdk: Path | None = sdk_option()
    chip: str | None = chip_option()
    seconds: float = option("Give a trial up after so long; 0: never.", "S", default=1800.0, min=0)
    jobs: int | None = option("So many trials at a time. Default: as many as cores are free.", "N", min=1)
    fresh: bool = flag("Compile again what an earlier search remembers.", "--fresh")
    overwrite: bool = force_flag()
    as_json: bool = json_flag()
    quiet: bool = quiet_flag()


@command(app, "build:run")
class Build(Command):
    """Make a bundle for a phone's NPU from a checkpoint: export, calibrate, quantize, rewrite and prove, compile."""

    source: Path = argument("A Hugging Face folder, or a float or quantized .litertlm of litert-torch.", "IN")
    output: Path = option("The bundle for the NPU.", "OUT.litertlm", "-o", "--output", default=REQUIRED)
    soc: str = option(
        "The phone's chip: SM8750, MT6993, Tensor_G5, ...", "C", "--soc", "--chip", default=REQUIRED
    )
    prompts: Path | None = option("What to calibrate with: one prompt a line, as JSON.", "FILE.jsonl")
    held_out: Path | None = option(
        "Evaluate on this. Default: every fifth of ten prompts or more, which calibration then does not see.",
        "FILE.jsonl",
    )
    sdk: Path | None = option(
        "The vendor's libraries. Default for Qualcomm: EDGE_OPT_QNN or QNN_SDK_ROOT.", "DIR"
    )
    prefill: list[int] | None = several("Length of the prefill, once for each. Default: 128.", "T", min=1)
    cache: int | None = option("Length of the cache. Default: 1280.", "S", min=1)
    whole_caches: bool = flag(
        "Keep whole caches for layers that see a window of positions only, where rings would do."
    )
    work: Path | None = option("Where the stages leave their results. Default: OUT.work.", "DIR")
    settings: list[str] | None = several("Another setting of litert-torch's pipeline.", "KEY=VALUE", "--set")
    config: Path | None = option("Such settings, as litert-torch writes them.", "FILE.json")
    target: str | None = option(
        "What `edge-opt tune` wrote for this chip, or a target's name. Default: the vendor's.",
        "FILE.toml",
        autocompletion=target_names,
    )
    report: list[Path] | None = several(
        "Also write a report of the conversion, once for each format.", "FILE.json|.md|.html"
    )
    sections: str = one_of(SECTIONS, "Rewrite the prefill/decode model or all models of the bundle.")
    verify: str = one_of(
        VERIFY[:3], "Prove each rewritten region, do so on every row, or compare the whole models too."
    )
    evaluate: bool = option(
        "Compare perplexity on held-out text with that of IN.", None, "--evaluate/--no-evaluate", default=True
    )
    overwrite: bool = force_flag()
    as_json: bool = json_flag()
    quiet: bool = quiet_flag()

    def check(self) -> None:
        """A setting has a name and a value."""
        for value in self.settings or ():
            name, equals, _ = value.partition("=")
            if not name.strip() or not equals:
                raise typer.BadParameter(f"--set '{value}' is no setting, write key=value")


@command(app, "evaluate:run")
class Evaluate(Command):
    """Score held-out text with a model and with the bundles made from it: perplexity and agreement."""

    reference: Path = argument(
        "What the bundles were made from: a Hugging Face folder, or a float .litertlm.", "REFERENCE"
    )
    bundles: list[Path] = argument("Bundles for an NPU, before its compiler.", "BUNDLE...")
    prompts: Path = option(
        "Text that no bundle was calibrated on: one prompt a line, as JSON.",
        "HELD_OUT.jsonl",
        default=REQUIRED,
    )
    max_perplexity_ratio: float | None = option(
        "Exit 1 if a bundle's perplexity is more than R times the reference's.", "R", min=0
    )
    as_json: bool = json_flag()
    quiet: bool = quiet_flag()


@command(app, "listing:passes")
class Passes(Command):
    """List the rewrites, in the order in which they run."""


@command(app, "listing:targets")
class Targets(Command):
    """List the bundled targets; with --json every fact of each, its source, and the compiler flags that go with it."""

    as_json: bool = json_flag()


@command(app, "demo:run")
class Demo(Command):
    """Convert and compare a bundled tiny Gemma3; no download."""

    folder: Path | None = argument(
        "Keep the models there; a temporary folder by default.", "DIR", default=None
    )
    overwrite: bool = force_flag()
