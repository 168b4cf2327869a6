"""Commands for phones: build, evaluate, profile and tune."""

from pathlib import Path
from typing import Annotated, Literal

from edge_opt.cli import options, output
from edge_opt.cli.options import argument, expert, option, read_settings


def build(
    source: Annotated[
        Path, argument("A Hugging Face or LoRA folder, or a .litertlm from litert-torch.", "IN")
    ],
    *,
    destination: Annotated[
        Path, option("The bundle for the NPU.", "<OUT.litertlm>", "-o", "--output")
    ],
    soc: options.RequiredChip,
    base: Annotated[
        Path | None,
        option("A LoRA folder's base model. Default: found by name beside it.", "<DIR>"),
    ] = None,
    prompts: Annotated[
        Path | None, option("Calibration prompts, as JSON lines.", "<FILE.jsonl>")
    ] = None,
    sdk: options.SdkOption = None,
    prefill: Annotated[
        list[int] | None, option("Prefill length; repeatable. Default: 128.", "<N>", min=1)
    ] = None,
    cache: Annotated[int | None, option("Cache length. Default: 1280.", "<N>", min=1)] = None,
    weights: Annotated[
        str, option("Bits of the weights; fewer generate faster.", "<8|4-logits|4>")
    ] = "8",
    max_perplexity_ratio: Annotated[
        float | None,
        option(
            "Fail above X times the checkpoint's perplexity. Default with --weights 4: 1.05.",
            "<X>",
            min=1,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        expert(
            "With --weights 4: the bits of each product, from an earlier build.",
            "<plan.json>",
        ),
    ] = None,
    evaluate: Annotated[
        bool,
        option("Compare perplexity with the checkpoint's.", None, "--evaluate/--no-evaluate"),
    ] = True,
    target: options.TargetOption = None,
    held_out: Annotated[
        Path | None,
        expert("Evaluation prompts. Default: every fifth of --prompts.", "<FILE.jsonl>"),
    ] = None,
    npu_tokens: Annotated[
        int,
        expert("Tokens to score in the NPU's emulator, if available; 0 for none.", "<N>", min=0),
    ] = 4,
    work: Annotated[
        Path | None, expert("Folder for intermediate results. Default: OUT.work.", "<DIR>")
    ] = None,
    settings: Annotated[
        list[str] | None,
        expert("A setting of litert-torch's pipeline; repeatable.", "<KEY=VALUE>", "--set"),
    ] = None,
    overwrite: options.ForceOption = False,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Build an NPU bundle from a checkpoint, or from an export."""
    from edge_opt.building import build
    from edge_opt.cli.show_phones import show_build, show_stage

    with output.bar(quiet=quiet) as progress:
        result = build(
            source,
            destination,
            soc=soc,
            base=base,
            prompts=prompts,
            held_out=held_out,
            sdk=sdk,
            prefill=prefill,
            cache=cache,
            weights=weights,
            max_perplexity_ratio=max_perplexity_ratio,
            plan=plan,
            work=work,
            settings=read_settings(settings),
            target=target,
            evaluate=evaluate,
            npu_tokens=npu_tokens,
            overwrite=overwrite,
            progress=progress,
            on_stage=None if quiet or as_json else show_stage,
        )
    output.answer(result, show_build, as_json=as_json, quiet=quiet)
    return 0


def evaluate(
    reference: Annotated[
        Path, argument("The checkpoint that the bundles were made from.", "REFERENCE")
    ],
    bundles: Annotated[list[Path], argument("NPU bundles that are not compiled yet.", "BUNDLE")],
    *,
    prompts: Annotated[
        Path, option("Prompts that calibration did not use, as JSON lines.", "<FILE.jsonl>")
    ],
    on: Annotated[
        Literal["cpu", "npu"], option("LiteRT-LM on CPU kernels, or Qualcomm's emulator.")
    ] = "cpu",
    tokens: Annotated[
        int | None,
        option("On the NPU: tokens to score, many seconds each. Default: 20.", "<N>", min=1),
    ] = None,
    sdk: options.SdkOption = None,
    chip: options.ChipOption = None,
    flags: options.FlagOption = None,
    max_perplexity_ratio: Annotated[
        float | None,
        option(
            "Exit 1 if a bundle's perplexity is more than X times the reference's.",
            "<X>",
            min=0,
        ),
    ] = None,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Score held-out text with a model and with bundles made from it."""
    from edge_opt.building.evaluation import TOKENS, evaluate
    from edge_opt.cli.show_phones import evaluation_lines

    with output.bar(quiet=quiet) as progress:
        if on == "cpu":
            options.check_meaning(on, tokens=tokens, sdk=sdk, soc=chip, flag=flags)
        scores = evaluate(
            reference,
            bundles,
            prompts,
            on=on,
            tokens=tokens or TOKENS,
            compiler=options.compiler_of(sdk, chip, flags),
            progress=progress,
        )
    output.answer(
        scores,
        lambda _: output.say(*evaluation_lines(scores)),
        as_json=as_json,
        quiet=quiet,
    )
    if max_perplexity_ratio is None or scores.within(max_perplexity_ratio):
        return 0
    output.complain(
        f"a bundle's perplexity is more than {max_perplexity_ratio:g} times the reference's"
    )
    return 1


def profile(
    models: Annotated[
        list[Path], argument("Models or bundles, for example before and after.", "IN")
    ],
    *,
    sdk: options.SdkOption = None,
    chip: options.ChipOption = None,
    flags: options.FlagOption = None,
    shapes: options.ShapeOption = None,
    html: Annotated[
        Path | None,
        option("Draw where a prefill's time goes, in the first and last model.", "<FILE.html>"),
    ] = None,
    overwrite: options.ForceOption = False,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Report what runs on an NPU, estimated time and memory traffic."""
    from edge_opt.base.atomic import resolve_target, write_whole
    from edge_opt.cli.show_phones import profile_page, show_profiles
    from edge_opt.npu import Profile, draw_gain, profile

    compiler = options.compiler_of(sdk, chip, flags)
    if html is not None:
        resolve_target(html, overwrite=overwrite, inputs=models)
    profiles: list[Profile] = []
    with output.bar(quiet=quiet) as progress:
        for place, path in enumerate(models):
            if progress is not None:
                progress("compiling", place, len(models))
            profiles.append(profile(path, compiler, shapes=options.read_shapes(shapes)))
        if html is not None:
            page = profile_page(profiles, draw_gain(models, compiler, progress))
            write_whole(html, page.encode(errors="backslashreplace"), overwrite=overwrite)
    output.answer(
        {"profiles": profiles},
        lambda _: show_profiles(profiles),
        as_json=as_json,
        quiet=quiet,
    )
    return 0


def tune(
    model: options.ModelArgument,
    *,
    target: options.TargetOption = "qualcomm-htp",
    destination: Annotated[
        Path | None,
        option("Write a target file with the fastest form.", "<OUT.toml>", "-o", "--output"),
    ] = None,
    signature: Annotated[
        str | None,
        option("Signature to tune for. Default: largest attention.", "<A>", "--signatures"),
    ] = None,
    overwrite: options.ForceOption = False,
    sdk: options.SdkOption = None,
    chip: options.ChipOption = None,
    jobs: Annotated[
        int | None, expert("Parallel trials. Default: one per free core.", "<N>", min=1)
    ] = None,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> int:
    """Find the fastest form of a signature for an NPU."""
    from edge_opt.base.atomic import resolve_target
    from edge_opt.cli.show_phones import show_tuning
    from edge_opt.npu import tune, tuned_target, write_target

    if destination is not None:
        # Before the work, which takes minutes.
        resolve_target(destination, overwrite=overwrite, inputs=[model])
    with output.bar(quiet=quiet) as progress:
        tuning = tune(
            model,
            target or "qualcomm-htp",
            options.compiler_of(sdk, chip),
            signature=signature,
            jobs=jobs,
            progress=progress,
        )
    if destination is not None:
        write_target(tuned_target(tuning, destination.stem), destination, overwrite=overwrite)
    found = {
        **tuning.to_dict(),
        "written": None if destination is None else str(destination),
    }
    output.answer(found, lambda _: show_tuning(tuning, destination), as_json=as_json, quiet=quiet)
    return 0
