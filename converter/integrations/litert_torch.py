"""litert-torch's (formerly ai-edge-torch's) export of language models, with edge-opt behind it.

What its `convert` returns, `edge_opt.convert` takes as it is, and gives back the same kind.
"""

import os
from pathlib import Path
from typing import Any

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.conversion import ConversionResult, convert, default_output

_BUNDLES = ("*.litertlm", "model*.tflite")


def export_language_model(
    model: AnyPath,
    output_dir: AnyPath,
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
            f"litert-torch cannot be imported ({error}): pip install '.[torch]' in a checkout of edge-opt"
        ) from error
    export(model=os.fspath(model), output_dir=os.fspath(output_dir), **export_options)
    results = {
        default_output(path): convert(path, overwrite=True, **(convert_options or {}))
        for pattern in _BUNDLES
        for path in sorted(Path(output_dir).glob(pattern))
        if ".opt." not in path.name
    }
    if not results:
        raise UsageError(f"the export wrote no model into {output_dir}")
    return results
