"""A few thousand mutants of small models: each is accepted whole, or refused with one error that names a place.

`benchmarks/fuzz.py` is the long run of the same.
"""

import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import fuzz
import pytest
from fuzz_seeds import handmade

from edge_opt.base.errors import ModelFormatError

SEEDS = handmade()
COUNT = 2400
PARTS = 8


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, PARTS))]
)
def test_every_mutant_is_accepted_or_refused_with_one_error_in_time(part: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[str] = Counter()
    for number in range(part, COUNT, PARTS):
        name, content = fuzz.mutant(SEEDS, number)
        assert (name, content) == fuzz.mutant(SEEDS, number), "a mutant is the same every time"
        try:
            with fuzz.time_limit():
                outcomes[fuzz.examine(content)] += 1
        except Exception as error:
            error.add_note(f"mutant {number} of '{name}'")
            raise
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    assert set(outcomes) >= {"refused by the reader", "refused as a graph", "accepted", "converted"}


def test_seeds_are_accepted_and_mutants_of_bundles_examined_as_bundles() -> None:
    bundles = [seed for seed in SEEDS if seed.root is None]
    outcomes = Counter(fuzz.examine(fuzz.mutant(bundles, number)[1]) for number in range(40))
    assert min(outcomes["refused by the reader"], outcomes["a bundle converted"]) > 5
    outcomes = Counter(fuzz.examine(seed.content) for seed in SEEDS)
    assert outcomes["refused by the reader"] == 0
    assert outcomes["refused as a graph"] == 3, "tables with a bit of everything"
    assert (outcomes["converted"] >= 5, outcomes["a bundle converted"]) == (True, 1)


def test_the_examination_notices_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter((SEEDS[0].content, b""))
    monkeypatch.setattr(fuzz, "model_bytes", lambda _: next(made))
    monkeypatch.setattr(fuzz, "_COPIED_ONE_IN", 1)
    with pytest.raises(fuzz.WrongError, match="does not read and write the same"):
        fuzz.examine(SEEDS[0].content)

    def refuse(_: bytes) -> None:
        raise ModelFormatError("something is wrong")

    monkeypatch.setattr(fuzz, "read_model", refuse)
    with pytest.raises(fuzz.WrongError, match="names no place"):
        fuzz.examine(b"")
    monkeypatch.setattr(fuzz, "read_model", lambda _: all(True for _ in range(1 << 40)))
    with pytest.raises(fuzz.TooSlowError), fuzz.time_limit(0.05):
        fuzz.examine(b"")


def test_the_long_run_takes_models_from_a_folder_also_those_that_cannot_be_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "broken.tflite").write_bytes(b"\0\0\0\0TFL3")
    (tmp_path / "good.tflite").write_bytes(SEEDS[0].content)
    script = Path(__file__).parent.parent / "benchmarks" / "fuzz.py"
    command = [
        sys.executable,
        script,
        "--count",
        "3",
        "--convert-one-in",
        "1",
        "--models",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"3 mutants of {len(SEEDS) + 1} models")
    assert "left out: " in done.stderr
