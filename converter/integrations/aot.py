"""LiteRT's ahead-of-time pipeline: edge-opt in front of a vendor's compiler plugin.

from ai_edge_litert.aot.vendors.qualcomm import target
from edge_opt.integrations.aot import aot_compile

soc = target.Target(target.SocModel.SM8750)
compiled = aot_compile("gemma.tflite", "out", target=soc, edge_opt_target="qualcomm-htp")

Or as a component of the pipeline itself: `prepare_for_npu(..., transforms=transforms(target="qualcomm-htp"))`.
The vendor's libraries come from LiteRT's SDK packages, or are found through LD_LIBRARY_PATH. LiteRT hands no flags to
the compiler on this way: what `ConversionResult.compiler_flags` advises is for its `apply_plugin_main`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_opt.conversion import ConversionResult, convert
from edge_opt.schema.errors import UsageError

if TYPE_CHECKING:
    import os

_NAME = "edge_opt"


def transforms(**options: Any) -> Any:
    """A component that `prepare_for_npu(transforms=...)` takes: it runs edge-opt on the model.

    Its `results` hold what was done, one for each backend. `options` are those of `edge_opt.convert`.

    Raises:
        UsageError: ai_edge_litert has no ahead-of-time support on this machine.
    """
    components = _aot("core.components")

    class EdgeOptTransforms(components.MlirTransformsT):  # type: ignore[misc, name-defined]
        """Implements LiteRT's transforms component."""

        def __init__(self) -> None:
            self.results: list[ConversionResult] = []

        @property
        def component_name(self) -> str:
            """Part of the intermediate files' names."""
            return _NAME

        def __call__(self, input_model: Any, output_model: Any, *_: object, **__: object) -> None:
            """Convert the input model into the output model's file."""
            source = input_model.model_bytes if input_model.in_memory else input_model.path
            if output_model.in_memory:
                raise UsageError("the pipeline must give the output model a path")
            self.results.append(convert(source, output_model.path, overwrite=True, **options))

    return EdgeOptTransforms()


def aot_compile(
    input_model: str | os.PathLike[str] | Any,
    output_dir: str | os.PathLike[str],
    *,
    edge_opt_target: str = "generic",
    convert_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """What `ai_edge_litert.aot.aot_compile.aot_compile` does, with edge-opt before everything else.

    Args:
        input_model: a .tflite file, or LiteRT's own `Model`.
        output_dir: where LiteRT writes; the converted model stands there too, as `<stem>.edge_opt.tflite`.
        edge_opt_target: target of the conversion.
        convert_options: further options of `edge_opt.convert`.
        options: passed on: `target` or `config`, `quantizer`, `keep_going`, ...

    Raises:
        UsageError: ai_edge_litert has no ahead-of-time support on this machine; else as `edge_opt.convert`.
    """
    compiler, types = _aot("aot_compile"), _aot("core.aot_types")
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(input_model, types.Model):
        source: Any = input_model.model_bytes if input_model.in_memory else input_model.path
    else:
        source = Path(input_model)
    stem = source.stem if isinstance(source, Path) else "model"
    converted = folder / f"{stem}.{_NAME}.tflite"
    convert(source, converted, target=edge_opt_target, overwrite=True, **(convert_options or {}))
    return compiler.aot_compile(types.Model.create_from_path(converted), str(folder), **options)


def _aot(name: str) -> Any:
    import importlib  # noqa: PLC0415

    try:
        return importlib.import_module(f"ai_edge_litert.aot.{name}")
    except ImportError as error:
        raise UsageError(
            f"ai_edge_litert.aot.{name} cannot be imported ({error}): ahead-of-time compilation needs tqdm, on Linux"
        ) from error
