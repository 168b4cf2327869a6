"""The commands for phones: build, evaluate, profile and tune."""

from functools import partial
from pathlib import Path
from typing import Annotated

from edge_opt.cli import options, output
from edge_opt.cli.options import NPU, argument, complete_target, flag, option, read_settings


def build(
    source: Annotated[
        Path, argument("A Hugging Face folder, or a float or quantized .litertlm of litert-torch.", "IN")
    ],
    *,
    destination: Annotated[Path, option("The bundle for the NPU.", "OUT.litertlm", "-o", "--output")],
    soc: Annotated[str, option("The phone's chip: SM8750, MT6993, Tensor_G5, ...", "C", "--soc", "--chip")],
    prompts: Annotated[
        Path | None, option("Prompts for calibration: one a line, as JSON.", "FILE.jsonl")
    ] = None,
    held_out: Annotated[
        Path | None,
        option(
            "Text for the evaluation. Default: every fifth of ten prompts or more; calibration does not use it.",
            "FILE.jsonl",
        ),
    ] = None,
    sdk: options.SdkOption = None,
    prefill: Annotated[
        list[int] | None, option("Length of the prefill, once for each. Default: 128.", "T", min=1)
    ] = None,
    cache: Annotated[int | None, option("Length of the cache. Default: 1280.", "S", min=1)] = None,
    work: Annotated[Path | None, option("Folder for the stages' results. Default: OUT.work.", "DIR")] = None,
    settings: Annotated[
        list[str] | None,
        option("Change a setting of litert-torch's pipeline; may be repeated.", "KEY=VALUE", "--set"),
    ] = None,
    target: Annotated[
        str | None,
        option(
            "A target's name, or what `edge-opt tune` wrote for this chip. Default: the vendor's.",
            "T",
            autocompletion=complete_target,
        ),
    ] = None,
    evaluate: Annotated[
        bool, flag("Compare perplexity on held-out text with that of IN.", "--evaluate/--no-evaluate")
    ] = True,
    overwrite: options.ForceOption = False,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Make a bundle for a phone's NPU from a checkpoint: export, calibrate, quantize, rewrite and prove, compile."""
    from edge_opt.build import build
    from edge_opt.cli.show_phones import show_build, stages_shown

    with stages_shown(destination, work, as_json=as_json, quiet=quiet) as (progress, on_stage):
        result = build(
            source,
            destination,
            soc=soc,
            prompts=prompts,
            held_out=held_out,
            sdk=sdk,
            prefill=prefill,
            cache=cache,
            work=work,
            settings=read_settings(settings),
            target=target,
            evaluate=evaluate,
            overwrite=overwrite,
            progress=progress,
            on_stage=on_stage,
        )
    output.answer(result.to_dict(), partial(show_build, result), as_json=as_json, quiet=quiet)
    return 0


def evaluate(
    reference: Annotated[
        Path,
        argument(
            "What the bundles were made from: a Hugging Face folder, or a float .litertlm.", "REFERENCE"
        ),
    ],
    bundles: Annotated[list[Path], argument("Bundles for an NPU, before its compiler.", "BUNDLE...")],
    *,
    prompts: Annotated[
        Path, option("Text that calibration did not use: one prompt a line, as JSON.", "HELD_OUT.jsonl")
    ],
    max_perplexity_ratio: Annotated[
        float | None,
        option("Exit 1 if a bundle's perplexity is more than R times the reference's.", "R", min=0),
    ] = None,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Score held-out text with a model and with the bundles made from it: perplexity and agreement."""
    from edge_opt.build.evaluating import evaluate
    from edge_opt.cli.show_phones import evaluation_lines

    with output.bar(wanted=not quiet) as progress:
        scores = evaluate(reference, bundles, prompts, progress=progress)
    values = scores.to_dict()
    output.answer(values, lambda: output.say(*evaluation_lines(values)), as_json=as_json, quiet=quiet)
    if max_perplexity_ratio is None or scores.within(max_perplexity_ratio):
        return 0
    output.complain(f"a bundle's perplexity is more than {max_perplexity_ratio:g} times the reference's")
    return 1


def profile(
    models: Annotated[list[Path], argument("Models or bundles, for example before and after.", "MODEL...")],
    *,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    sdk: options.SdkOption = None,
    chip: options.ChipOption = None,
    flags: options.FlagOption = None,
    seconds: options.SecondsOption = 3600.0,
) -> int:
    """Compile models for a Hexagon NPU, and report estimated time and memory traffic."""
    from edge_opt.cli.show_phones import show_profiles
    from edge_opt.npu import profile

    profiles = []
    for path in models:
        if not quiet:
            output.complain(f"compiling {path}")
        profiles.append(profile(path, sdk=sdk, chip=chip, flags=flags or (), seconds=seconds or None))
    listed = {"profiles": [entry.to_dict() for entry in profiles]}
    output.answer(listed, partial(show_profiles, profiles), as_json=as_json, quiet=quiet)
    return 0


def tune(
    model: options.ModelArgument,
    *,
    target: options.TargetOption = "qualcomm-htp",
    destination: Annotated[
        Path | None, option("Write a target file with the winner.", "OUT.toml", "-o", "--output")
    ] = None,
    signature: Annotated[
        str | None,
        option(
            "The signature to tune for. Default: the one with the largest attention.", "S", "--signatures"
        ),
    ] = None,
    overwrite: options.ForceOption = False,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    sdk: options.SdkOption = None,
    chip: options.ChipOption = None,
    layers: options.LayersOption = None,
    seconds: options.SecondsOption = 1800.0,
    jobs: Annotated[
        int | None,
        option("Number of trials at a time. Default: the number of free cores.", "N", min=1, panel=NPU),
    ] = None,
) -> int:
    """Compile a signature in every form for a Hexagon NPU, and find the fastest."""
    from edge_opt.base.atomic import resolve_target
    from edge_opt.cli.show_phones import show_tuning
    from edge_opt.npu import tune, tuned_target, write_target

    if destination is not None:
        # Looked at before the work, which takes minutes.
        resolve_target(destination, overwrite=overwrite)
    with output.bar(wanted=not quiet) as progress:
        tuning = tune(
            model,
            target,
            signature=signature,
            blocks=layers,
            sdk=sdk,
            chip=chip,
            seconds=seconds or None,
            jobs=jobs,
            progress=progress,
        )
    if destination is not None:
        write_target(tuned_target(tuning, destination.stem), destination, overwrite=overwrite)
    written = None if destination is None else str(destination)
    output.answer(
        {**tuning.to_dict(), "written": written},
        partial(show_tuning, tuning, destination),
        as_json=as_json,
        quiet=quiet,
    )
    return 0
