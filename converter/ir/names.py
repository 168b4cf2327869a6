"""Names of tensors as people can read them."""

from __future__ import annotations

import re

_LONGEST = 70
_PACKAGES = re.compile(r"^(?:[a-z_]\w*\.)+(?=[A-Z])")


def shortened(name: str) -> str:
    """A tensor's name for people: where the layer is, not which Python module its class came from.

    Exporters write a path of modules for each operator that they fused, `a.b.Layer_0/a.c.Attention_1;;...`: the first
    path is kept, without the packages, and from its end as much as fits.
    """
    first, *fused = name.split(";")
    parts = [_PACKAGES.sub("", part) for part in first.split("/")]
    if fused and fused[0].isdigit():
        parts[-1] += f";{fused[0]}"
    whole = "/".join(parts)
    while len(parts) > 1 and len("/".join(parts)) > _LONGEST:
        del parts[0]
    kept = "/".join(parts)[-_LONGEST:]
    return kept if kept == whole else f"...{kept}"
