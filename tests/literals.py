"""Constants in the text form."""

from typing import Any

import numpy as np

from edge_opt.ir.text import number_text


def literal(values: Any) -> str:
    """A constant of these numbers, all of them."""
    array = np.asarray(values)
    shape = ",".join(map(str, array.shape))
    numbers = ", ".join(map(number_text, array.ravel()))
    return f"{array.dtype}[{shape}]{{{numbers}}}"
