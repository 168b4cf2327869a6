"""edge-opt: rewrites .tflite language models for edge NPUs and proves that nothing changed numerically.

This module only says where each public name lives: importing it loads nothing else, the first use of a name does.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_opt import build, ir, npu, passes, shapes, testing
    from edge_opt.base.errors import EdgeOptError, UsageError
    from edge_opt.build.evaluation import evaluate
    from edge_opt.comparison.compare import compare
    from edge_opt.comparison.findings import ComparisonReport
    from edge_opt.conversion import ConversionResult, convert
    from edge_opt.inspection import inspect
    from edge_opt.ir import Model, load, save
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
    "infer_shapes",
    "inspect",
    "ir",
    "load",
    "npu",
    "passes",
    "save",
    "shapes",
    "testing",
]

# Of the other names, each is a module of its own.
_HOMES = {
    "build.evaluation": ["evaluate"],
    "comparison.compare": ["compare"],
    "comparison.findings": ["ComparisonReport"],
    "conversion": ["ConversionResult", "convert"],
    "inspection": ["inspect"],
    "ir": ["Model", "load", "save"],
    "base.errors": ["EdgeOptError", "UsageError"],
    "shapes": ["infer_shapes"],
}


if not TYPE_CHECKING:  # for a type checker, a name that is not listed above does not exist

    def __getattr__(name: str) -> object:
        """Load a public name at its first use."""
        if name not in __all__:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if name == "__version__":
            value = import_module("importlib.metadata").version("edge-opt")
        elif home is None:
            value = import_module(f"{__name__}.{name}")
        else:
            value = getattr(import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
