"""What an input of a signature is, by its names, type and quantization; must not load the runtime."""

import re
from typing import Literal

import numpy as np

from edge_opt.proof.tensors import TensorInfo

Role = Literal["mask", "position", "token", "index", "cache", "rotary", "embedding", "data"]

# The first match decides: "pos_emb_cos" is a rotary table, not a position; "position_ids" is no token.
_ROLES: tuple[tuple[Role, str, str], ...] = (
    ("mask", r"mask", "fiub"),
    ("rotary", r"pos_emb|rope|rotary|(^|_)(cos|sin)($|_)", "fiu"),
    ("position", r"(^|_)pos($|_)|position|time_step|(^|_)step($|_)", "i"),
    ("token", r"token(?!_type)|input_ids|(?<!type)(?<!segment)(^|_)ids?$", "i"),
    ("cache", r"cache|kv_slice|past_key|past_value", "fiu"),
    ("embedding", r"embed", "fiu"),
)


def role_of(info: TensorInfo) -> Role:
    """What an input is, by the signature's name for it, then the tensor's own name."""
    kind = np.dtype(info.dtype).kind
    for name in (info.name, info.tensor.rsplit("/", 1)[-1]):
        for role, pattern, kinds in _ROLES:
            if re.search(pattern, name.lower()) and kind in kinds and _fits(role, info):
                return role
    return "data"


def _fits(role: Role, info: TensorInfo) -> bool:
    unquantized_integer = np.dtype(info.dtype).kind in "iu" and not info.quantized
    if role in {"position", "token"}:
        return unquantized_integer
    return role == "mask" or not unquantized_integer
