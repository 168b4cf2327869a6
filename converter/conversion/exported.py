"""Models as litert-torch (formerly ai-edge-torch) holds them, recognised without importing it."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from edge_opt.ir import Model, to_bytes
from edge_opt.schema.errors import UsageError


class ExportedModel(Protocol):
    """What `litert_torch.convert` returns: a model that can be called, and written with `export`."""

    def export(self, path: str) -> None:
        """Write the .tflite file."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""


Exported = TypeVar("Exported", bound=ExportedModel)


def model_content(model: object) -> bytes:
    """The .tflite bytes of a model.

    Raises:
        UsageError: it is no model of litert-torch or ai-edge-torch.
    """
    # litert-torch has `model_content`, ai-edge-torch had `tflite_model`.
    for name in ("model_content", "tflite_model"):
        reader = getattr(model, name, None)
        if callable(reader):
            return bytes(reader())
    raise UsageError(
        f"a {type(model).__module__}.{type(model).__qualname__} is no exported model: give what litert_torch.convert "
        "returns, a .tflite file, or its bytes"
    )


def remade(exported: Exported, model: Model) -> Exported:
    """A model of the same class that holds `model`; the given one stays as it is."""
    made: Callable[[bytes], Exported] = type(exported)
    return made(to_bytes(model))
