"""LiteRT's ahead-of-time pipeline: edge-opt in front of a vendor's compiler plugin.

from ai_edge_litert.aot.vendors.qualcomm import target
from edge_opt.integrations.aot import aot_compile

soc = target.Target(target.SocModel.SM8750)
compiled = aot_compile("gemma.tflite", "out", target=soc, edge_opt_target="qualcomm-htp")

Or, for a model that is converted already, as a component of the pipeline itself: `prepare_for_npu(...,
plugin=plugin("mine.toml"))`. The vendor's libraries come from LiteRT's SDK packages, or are found through
LD_LIBRARY_PATH.
"""

import importlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from edge_opt.conversion import convert
from edge_opt.output.errors import UsageError
from edge_opt.targets import Target, load_target


def plugin(target: str | Target, *, subgraphs_to_compile: Sequence[int] | None = None) -> Any:
    """A component that `prepare_for_npu(plugin=...)` takes: LiteRT's own, which hands a target's flags to the compiler.

    The pipeline has no other way to hand flags to every vendor's compiler.

    Args:
        target: a target's name or file, or a `Target`; one that `edge-opt tune` wrote has the flags that won.
        subgraphs_to_compile: by index; None all.

    Raises:
        UsageError: ai_edge_litert has no ahead-of-time support on this machine, or there is no such target.
    """
    facts = load_target(target)
    own = _aot("core.apply_plugin").ApplyPlugin

    class FlaggedPlugin(own):  # type: ignore[misc, valid-type]
        """LiteRT's, with flags."""

        def __call__(self, *models_and_chip: Any, **settings: Any) -> Any:
            """Compile; what the backend sets itself counts more."""
            return super().__call__(*models_and_chip, **{**facts.compiler_flags, **settings})

    subgraphs = None if subgraphs_to_compile is None else list(subgraphs_to_compile)
    return FlaggedPlugin(experimental_capture_stderr=True, subgraphs_to_compile=subgraphs)


def aot_compile(
    input_model: str | os.PathLike[str] | Any,
    output_dir: str | os.PathLike[str],
    *,
    target: Any = None,
    config: Any = None,
    quantizer: Any = None,
    keep_going: bool = True,
    subgraphs_to_compile: Sequence[int] | None = None,
    edge_opt_target: str | Target = "generic",
    convert_options: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """What `ai_edge_litert.aot.aot_compile.aot_compile` does, with edge-opt in front and its target's compiler flags.

    Args:
        input_model: a .tflite file, or LiteRT's own `Model`.
        output_dir: where LiteRT writes; the converted model stands there too, as `<stem>.edge_opt.tflite`.
        target: LiteRT's target or list of targets; None all that are registered.
        config: instead of `target`, LiteRT's compilation config or list of configs.
        quantizer: LiteRT's component, for configs with a quantization recipe.
        keep_going: go on where a target fails.
        subgraphs_to_compile: by index; None all.
        edge_opt_target: target of the conversion; the compiler gets its flags.
        convert_options: further options of `edge_opt.convert`.
        settings: go to LiteRT's backends.

    Raises:
        UsageError: ai_edge_litert has no ahead-of-time support on this machine, `target` and `config` are both given,
            or a quantizer is missing; else as `edge_opt.convert`.
    """
    pipeline, types = _aot("prepare_for_npu"), _types()
    compiler = plugin(edge_opt_target, subgraphs_to_compile=subgraphs_to_compile)
    configs = [one.to_dict() | settings for one in _configs(types, target, config)]
    if quantizer is None and any("quantize_recipe" in one for one in configs):
        raise UsageError("a config has a quantization recipe: give a quantizer too")
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    source: Any = input_model
    if isinstance(input_model, types.Model):
        source = input_model.model_bytes if input_model.in_memory else input_model.path
    stem = "model" if isinstance(source, bytes) else Path(source).stem
    converted = folder / f"{stem}.edge_opt.tflite"
    convert(source, converted, target=edge_opt_target, overwrite=True, **(convert_options or {}))
    return pipeline.prepare_for_npu_multiple_configs(
        types.Model.create_from_path(converted),
        folder,
        [(pipeline.resolve_backend(one), one) for one in configs],
        plugin=compiler,
        transforms=_aot("core.mlir_transforms").MlirTransforms(),
        quantizer=quantizer,
        keep_going=keep_going,
    )


def _configs(types: Any, target: Any, config: Any) -> list[Any]:
    """One for each target."""
    if target is not None and config is not None:
        raise UsageError("both a target and a config are given: a config names its target")
    given = target if config is None else config
    if given is None:
        given = _aot("vendors.import_vendor").AllRegisteredTarget()
    listed = [*given] if isinstance(given, list | tuple) else [given]
    return listed if config is not None else [types.CompilationConfig(target=one) for one in listed]


def _types() -> Any:
    """LiteRT's own classes; 2.1 keeps them under another name."""
    with suppress(UsageError):
        return _aot("core.aot_types")
    return _aot("core.types")


def _aot(name: str) -> Any:
    try:
        return importlib.import_module(f"ai_edge_litert.aot.{name}")
    except ImportError as error:
        raise UsageError(
            f"ai_edge_litert.aot.{name} cannot be imported ({error}): ahead-of-time compilation needs tqdm, on Linux"
        ) from error
