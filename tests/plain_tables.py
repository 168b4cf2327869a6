"""Tables, and objects of the generated bindings, as plain values that can be compared."""

from typing import Any

import numpy as np

from edge_opt.schema import Data, Table


def values(item: Any) -> Any:
    """A table as plain values: which fields are present, and what they hold."""
    if isinstance(item, Table):
        return (item.name, {name: values(value) for name, value in sorted(item.fields.items())})
    if isinstance(item, list):
        return [values(part) for part in item]
    if isinstance(item, Data):
        return (item.external, bytes(item.view()))
    return (item.dtype.str, item.tolist()) if isinstance(item, np.ndarray) else item


def plain(item: Any) -> Any:
    """An object of the generated bindings as plain values."""
    if hasattr(item, "Pack"):
        return (type(item).__name__, {name: plain(value) for name, value in vars(item).items()})
    if isinstance(item, list):
        return [plain(part) for part in item]
    return item.tolist() if isinstance(item, np.ndarray) else item
