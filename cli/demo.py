"""`edge-opt demo`: converts the bundled models, compares them and shows one block before and after."""

import tempfile
from importlib import resources
from pathlib import Path

from edge_opt.cli import output
from edge_opt.cli.conversion import show as show_conversion
from edge_opt.cli.show_comparison import show as show_comparison
from edge_opt.comparison.compare import compare as compare_models
from edge_opt.conversion import convert as convert_model
from edge_opt.conversion import default_output
from edge_opt.inspection import example_rewrite
from edge_opt.ir import load
from edge_opt.output.atomic import resolve_target, write_whole
from edge_opt.output.errors import OutputError

MODELS = {"demo_gemma3.tflite": "float32", "demo_gemma3_a16w8.tflite": "int16 activations, int8 weights"}


def run(folder: Path | None, *, overwrite: bool) -> int:
    """Both models, one after the other; 1 where one computes something else after the conversion."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="edge-opt-demo-") as scratch:
            return _run(Path(scratch), "`edge-opt demo DIR` keeps the models in DIR", force=overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"folder {folder} cannot be made: {error.strerror}, give another") from error
    return _run(folder, f"The models are in {folder}", force=overwrite)


def _run(folder: Path, where: str, *, force: bool) -> int:
    for name in MODELS:
        for path in (folder / name, default_output(folder / name)):
            resolve_target(path, overwrite=force)
    equal = True
    for name, about in MODELS.items():
        output.say(f"== {name}: a tiny Gemma3 with random weights, {about}")
        source = folder / name
        write_whole(source, (resources.files("edge_opt.testdata") / name).read_bytes(), overwrite=force)
        result = convert_model(source, overwrite=force)
        show_conversion(result, folders=False)
        report = compare_models(source, default_output(source))
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
