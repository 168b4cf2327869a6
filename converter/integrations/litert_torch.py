"""litert-torch (formerly ai-edge-torch): what its `convert` returns in, the same kind out; and its export of LLMs.

import litert_torch
from edge_opt.integrations.litert_torch import optimize

edge_model = optimize(litert_torch.convert(module, sample_inputs), target="generic")
edge_model.export("model.tflite")

On PyPI, ai-edge-torch is today an empty package that requires litert-torch (0.7.2). Models of its earlier versions are
taken too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from edge_opt.conversion import ConversionResult, convert, default_output
from edge_opt.conversion.exported import Exported, model_content, remade
from edge_opt.schema.errors import UsageError

_BUNDLES = ("*.litertlm", "model*.tflite")


def optimize(model: Exported, **options: Any) -> Exported:
    """Rewrite a model that litert-torch has just made; the result is of the same class, the argument stays as it is.

    Args:
        model: what `litert_torch.convert` (or `ai_edge_torch.convert`) returned.
        options: those of `edge_opt.convert`, except source and output.

    Raises:
        UsageError: it is no such model; else as `edge_opt.convert`.
    """
    return optimize_with_report(model, **options)[0]


def optimize_with_report(model: Exported, **options: Any) -> tuple[Exported, ConversionResult]:
    """As `optimize`, and what was done: every site with its verdict."""
    result = convert(model_content(model), **options)
    assert result.model is not None
    return remade(model, result.model), result


def export_language_model(
    model: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    convert_options: dict[str, Any] | None = None,
    **export_options: Any,
) -> dict[Path, ConversionResult]:
    """Run `litert_torch.generative.export_hf.export`, then edge-opt on what it wrote.

    Args:
        model: the Hugging Face checkpoint, as litert-torch's export takes it.
        output_dir: where the export writes; converted files stand beside the exported ones, as `<stem>.opt<suffix>`.
        convert_options: options of `edge_opt.convert`.
        export_options: options of litert-torch's export, e.g. `split_cache=True, bundle_litert_lm=True`.

    Returns:
        The result of each conversion, by the file that it wrote.

    Raises:
        UsageError: litert-torch is not installed, or the export wrote no model.
    """
    try:
        from litert_torch.generative.export_hf.export import export  # noqa: PLC0415  an optional package
    except ImportError as error:
        raise UsageError(
            f"litert-torch cannot be imported ({error}): pip install 'edge-opt[torch]'"
        ) from error
    export(model=os.fspath(model), output_dir=os.fspath(output_dir), **export_options)
    found = [path for pattern in _BUNDLES for path in sorted(Path(output_dir).glob(pattern))]
    results: dict[Path, ConversionResult] = {}
    for path in found:
        if ".opt." not in path.name:
            results[default_output(path)] = convert(path, overwrite=True, **(convert_options or {}))
    if not results:
        raise UsageError(f"the export wrote no model into {output_dir}")
    return results
