"""edge-opt: rewrites .tflite language models for edge NPUs and proves that nothing changed numerically.

This module only says where each public name lives: importing it loads nothing else, the first use of a name does.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_opt import build, ir, npu, passes, shapes, testing
    from edge_opt.build.evaluating import evaluate
    from edge_opt.comparison.compare import compare
    from edge_opt.comparison.findings import ComparisonReport
    from edge_opt.conversion import ConversionResult, convert
    from edge_opt.inspection import explain, inspect
    from edge_opt.ir import Model, load
    from edge_opt.output.errors import EdgeOptError, UsageError
    from edge_opt.shapes import infer_shapes

    __version__: str

__all__ = [
    "ComparisonReport",
    "ConversionResult",
    "EdgeOptError",
    "Model",
    "UsageError",
    "__version__",
    "build",
    "compare",
    "convert",
    "evaluate",
    "explain",
    "infer_shapes",
    "inspect",
    "ir",
    "load",
    "npu",
    "passes",
    "shapes",
    "testing",
]

_HOMES = {
    "ComparisonReport": "edge_opt.comparison.findings",
    "ConversionResult": "edge_opt.conversion",
    "EdgeOptError": "edge_opt.output.errors",
    "Model": "edge_opt.ir",
    "UsageError": "edge_opt.output.errors",
    "compare": "edge_opt.comparison.compare",
    "convert": "edge_opt.conversion",
    "evaluate": "edge_opt.build.evaluating",
    "explain": "edge_opt.inspection",
    "infer_shapes": "edge_opt.shapes",
    "inspect": "edge_opt.inspection",
    "load": "edge_opt.ir",
}
_MODULES = ("build", "ir", "npu", "passes", "shapes", "testing")


if not TYPE_CHECKING:  # for a type checker, a name that is not listed above does not exist

    def __getattr__(name: str) -> object:
        """Load a public name at its first use."""
        value = _find(name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _find(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("edge-opt")
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
