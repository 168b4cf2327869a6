"""Compare random pairs of models that keep state, and judge `edge_opt.compare` by LiteRT's interpreter.

    python benchmarks/random_states.py [--count 200] [--seed 0]

Each model has one to four signatures, which read, write, move, add to or clear one to three variables. Its counterpart
differs in the constant of one statement, or in nothing. Each pair is run on one long random sequence of calls; if that
tells the two models apart, `compare` and a golden file must, too, and otherwise they must say that they are equal.
Prints the number of pairs of each kind, and each wrong pair: the exit status is 1 if there are any.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
from stateful_models import stateful

from edge_opt.comparison.compare import compare
from edge_opt.comparison.golden import check, record
from edge_opt.ir import load
from edge_opt.runtime.native import Session

_CALLS = 400


def body(draw: random.Random, variables: int) -> list[str]:
    """Statements of a signature; `FACTOR` is 1.0, but in one statement of a counterpart."""
    lines = ["%y0: float32[4] = ABS(%x)"]
    for place in range(draw.randint(1, 3)):
        one, other = draw.randrange(variables), draw.randrange(variables)
        name, factor = f"t{place}", draw.choice(["FACTOR", "0.5", "-1.0"])
        lines.append(f"%{name}r: float32[4] = READ_VARIABLE(%v{one})")
        lines.append(f"%{name}f: float32[4] = MUL(%{name}r, float32({factor}))")
        lines.append(f"%{name}x: float32[4] = MUL(%x, float32({factor}))")
        lines.append(f"%{name}a: float32[4] = TANH(%{name}f)")
        match draw.choice(["read", "write", "move", "clear", "count"]):
            case "read":
                lines.append(f"%y{place + 1}: float32[4] = ADD(%y{place}, %{name}f)")
                continue
            case "write":
                lines.append(f"ASSIGN_VARIABLE(%v{other}, %{name}x)")
            case "move":
                lines.append(f"ASSIGN_VARIABLE(%v{other}, %{name}f)")
            case "clear":
                lines.append(f"ASSIGN_VARIABLE(%v{other}, float32[4]{{splat 0.0}})")
            case "count":
                lines.append(f"%{name}n: float32[4] = ADD(%{name}a, %{name}x)")
                lines.append(f"ASSIGN_VARIABLE(%v{other}, %{name}n)")
        lines.append(f"%y{place + 1}: float32[4] = ABS(%y{place})")
    last = sum(line.startswith("%y") for line in lines) - 1
    return [*lines, f"%y: float32[4] = NEG(%y{last})"]


def pair(draw: random.Random) -> tuple[bytes, bytes]:
    """A model and its counterpart."""
    variables = draw.randint(1, 3)
    bodies = [body(draw, variables) for _ in range(draw.randint(1, 4))]
    places = [
        (at, row)
        for at, lines in enumerate(bodies)
        for row, line in enumerate(lines)
        if "FACTOR" in line
    ]
    changed = draw.choice([*places, None])
    models = []
    for odd in (None, changed):
        texts = []
        for at, lines in enumerate(bodies):
            rows = [
                line.replace("FACTOR", "3.0" if (at, row) == odd else "1.0")
                for row, line in enumerate(lines)
            ]
            texts.append("\n".join(f"  {line}" for line in rows))
        models.append(stateful(*texts, variables=variables))
    return models[0], models[1]


def differs(one: bytes, other: bytes, draw: random.Random) -> bool:
    """True if the interpreter gives different outputs somewhere in a long random sequence of calls."""
    sessions = [Session(model) for model in (one, other)]
    values = np.random.default_rng(draw.randrange(1 << 30))
    names = [signature.key for signature in load(one).signatures]
    for _ in range(_CALLS):
        name, given = draw.choice(names), values.standard_normal(4).astype(np.float32)
        first, second = (session.run(name, {"x": given})["y"] for session in sessions)
        if first.tobytes() != second.tobytes():
            return True
    return False


def main() -> int:
    """Runs the pairs and prints what became of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other models")
    options = parser.parse_args()
    told: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.count):
            draw = random.Random(f"{options.seed} {number}")  # noqa: S311
            one, other = pair(draw)
            expected = differs(one, other, draw)
            path = record(one, Path(folder, "golden.npz"), atol=0, rtol=0, overwrite=True)
            found = {
                "compare": not compare(one, other, locate=False),
                "golden": not check(other, path),
            }
            for name, is_different in found.items():
                if is_different != expected:
                    told["wrong"] += 1
                    print(
                        f"WRONG: pair {number} of seed {options.seed}, {name}: different is {is_different}"
                    )
            told["different" if expected else "equal"] += 1
    print(
        f"{options.count} pairs: {', '.join(f'{count} {kind}' for kind, count in sorted(told.items()))}"
    )
    return int(told["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
