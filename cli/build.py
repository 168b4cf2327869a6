"""The arguments of `edge-opt build`."""

from pathlib import Path
from typing import Annotated, ClassVar

import typer

from edge_opt.cli.declare import Command, Force, Json, Quiet, one_of


def _settings(values: list[str] | None) -> list[str]:
    """`--set key=value`; a word without `=` is a mistake."""
    for value in values or ():
        name, equals, _ = value.partition("=")
        if not name.strip() or not equals:
            raise typer.BadParameter(f"'{value}' is no setting, write key=value")
    return values or []


class Build(Command):
    """Make a bundle for a phone's NPU from a checkpoint: export, calibrate, quantize, rewrite and prove, compile."""

    run: ClassVar = "building:run"

    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="A Hugging Face folder, or a float or quantized .litertlm of litert-torch."
        ),
    ]
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT.litertlm", help="The bundle for the NPU.")
    ]
    soc: Annotated[
        str,
        typer.Option("--soc", "--chip", metavar="C", help="The phone's chip: SM8750, MT6993, Tensor_G5, ..."),
    ]
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="What to calibrate with: one prompt a line, as JSON."),
    ] = None
    sdk: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The vendor's libraries. Default for Qualcomm: EDGE_OPT_QNN or QNN_SDK_ROOT."
        ),
    ] = None
    prefill: Annotated[
        list[int] | None,
        typer.Option(metavar="T", min=1, help="Length of the prefill, once for each. Default: 128."),
    ] = None
    cache: Annotated[
        int | None, typer.Option(metavar="S", min=1, help="Length of the cache. Default: 1280.")
    ] = None
    work: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the stages leave their results. Default: OUT.work."),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            callback=_settings,
            help="Another setting of litert-torch's pipeline.",
        ),
    ] = None
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Such settings, as litert-torch writes them.")
    ] = None
    sections: Annotated[
        str,
        one_of(("prefill-decode", "all"), "Rewrite the prefill/decode model or all models of the bundle."),
    ] = "prefill-decode"
    verify: Annotated[
        str,
        one_of(
            ("regions", "exhaustive", "full"),
            "Prove each rewritten region, do so on every row, or compare the whole models too.",
        ),
    ] = "regions"
    overwrite: Force = False
    as_json: Json = False
    quiet: Quiet = False
