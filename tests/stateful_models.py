"""Models whose signatures pass state to each other through variables."""

from edge_opt.ir import to_bytes
from edge_opt.ir.parse import parse


def stateful(*signatures: str, variables: int = 1) -> bytes:
    """A model with a signature s0, s1, ... for each body, all from `%x` to `%y`, float32[4].

    `{v0}`, `{v1}`, ... in a body are handles of the variables; they are 0 at first.
    """
    names = [f"v{place}" for place in range(variables)]
    handles = "".join(
        f"  %{name}: resource[] = VAR_HANDLE() {{container: '', shared_name: '{name}'}}\n"
        for name in names
    )
    graphs, keys = [], []
    for place, body in enumerate(signatures):
        keys.append(f"signature s{place} = #{place} (x=%x) -> (y=%y)\n")
        called = f"  CALL_ONCE() {{init_subgraph_index: {len(signatures)}}}\n" if variables else ""
        graphs.append(
            f"subgraph s{place} (%x: float32[4]) {{\n{called}{handles}{body}\n  return %y\n}}\n"
        )
    if not variables:
        return to_bytes(parse("".join(keys + graphs)))
    zeros = "".join(f"  ASSIGN_VARIABLE(%{name}, float32[4]{{splat 0.0}})\n" for name in names)
    graphs.append(f"subgraph init () {{\n{handles}{zeros}  return\n}}\n")
    return to_bytes(parse("".join(keys + graphs)))


def reading(variable: int, factor: float = 1.0) -> str:
    """y = factor * variable."""
    return f"  %r: float32[4] = READ_VARIABLE(%v{variable})\n  %y: float32[4] = MUL(%r, float32({factor}))"


def writing(variable: int, factor: float = 1.0) -> str:
    """variable = factor * x; y = |x|."""
    return (
        f"  %w: float32[4] = MUL(%x, float32({factor}))\n  ASSIGN_VARIABLE(%v{variable}, %w)\n"
        "  %y: float32[4] = ABS(%x)"
    )


def moving(source: int, target: int) -> str:
    """target = source; y = |x|."""
    return (
        f"  %r: float32[4] = READ_VARIABLE(%v{source})\n  ASSIGN_VARIABLE(%v{target}, %r)\n"
        "  %y: float32[4] = ABS(%x)"
    )
