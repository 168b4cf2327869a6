"""Where a file keeps its weights and how it names its operators, for readers that know older files only.

What is computed stays as it is: the same bytes in other places, the same kinds in a second field.
"""

from edge_opt.ir.graph import OperatorCode
from edge_opt.ir.model import Model, deprecated_code
from edge_opt.schema.data import Data


def external_weights(model: Model) -> int:
    """How many weights are stored after the flatbuffer, where `Buffer.offset` says."""
    return sum(buffer.data is not None and buffer.data.external for buffer in model.buffers)


def new_codes(model: Model) -> list[OperatorCode]:
    """Kinds of operators that the deprecated field does not have."""
    return [
        code
        for code in model.operator_codes
        if code.table is not None and code.table.get("deprecated_builtin_code") != deprecated_code(code)
    ]


def take_weights_inside(model: Model) -> bool:
    """Have all weights written inside the flatbuffer, as long as it stays under 2 GB; whether any was not."""
    changed = False
    for buffer in model.buffers:
        data = buffer.data
        if data is not None and data.external and data.source is not None:
            buffer.data = Data.region(data.source, data.offset, data.length, external=False)
            buffer.table = None
            changed = True
    return changed


def fill_old_codes(model: Model) -> bool:
    """Have each operator's kind written in the deprecated field, too; whether any was not."""
    codes = new_codes(model)
    for code in codes:
        code.table = None
    return bool(codes)
