"""The Hexagon compiler: its log is read right, and its absence is said.

The logs here are composed from the format, not copied; the slow tests run the real compiler where it is installed.
"""

import json
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from threading import Barrier
from typing import Any

import pytest
from cli_runs import DEMO, Captured, Patch, run
from pretend_npu import EVENTS, FIGURES, TAKEN, Compilers, compiling, without_probe

from edge_opt.base.errors import UsageError
from edge_opt.ir import load
from edge_opt.npu import (
    Compiler,
    CompilerFailedError,
    CompilerMissingError,
    Figures,
    TimeEstimate,
    profile,
)
from edge_opt.npu.compiler import CompilerKilledError, first_complaint
from edge_opt.npu.hexagon import Outcome
from edge_opt.npu.profiling import measure
from edge_opt.npu.qualcomm import Qualcomm

PARTITION = """\
  0.0ms [ ERROR ]   <E> unexpected GraphHtpSettings option 66
  0.0ms [  INFO ]  spill_bytes={}
  0.0ms [  INFO ]  fill_bytes={}
  0.0ms [  INFO ]  write_total_bytes={}
  0.0ms [  INFO ]  read_total_bytes={}
  0.0ms [  INFO ]  finalize_runlist: in_runlist={}, runlist = 1 + 2 vec
"""


def find_libraries(sdk: Path | None = None) -> Path:
    return Qualcomm().libraries(Compiler(sdk=sdk))


HEARD = "".join(
    ["finalized\tg\t0\n", *(f"event\t{kind}\t{value}\n" for kind, value in EVENTS.items())]
)


def outcome(output: str, taken: str, log: str = "") -> Outcome:
    return Outcome(
        0, output, f"INFO: [a.cc:1] Partitioned subgraph<0>, {taken} partitions.\n"
    ).with_log(log)


TWO = PARTITION.format(1, 2, 3, 40, 5) + PARTITION.format(10, 20, 30, 400, 50)
TAKEN_TWICE = "selected 7 ops, from a total of 9 ops. resulted in 2"


def test_partitions_run_one_after_the_other() -> None:
    found = outcome(TWO, TAKEN_TWICE, HEARD + HEARD)
    told = {"spill": 11, "fill": 22, "ddr_written": 33, "ddr_read": 440, "run_list": 55}
    assert found.figures() == {"taken": 7, "operators": 9, "partitions": 2, **told}
    assert found.time("SA8797") == (TimeEstimate("SA8797", 2400, 1800, 2800, 2), "")
    assert outcome(TWO, TAKEN_TWICE, HEARD).time("SA8797")[0] is None, "of one partition alone"


def test_a_lost_figure_is_an_error_and_a_refused_graph_has_no_partition() -> None:
    with pytest.raises(CompilerFailedError, match="1 figures for fill, expected 2"):
        outcome(TWO.replace("fill_bytes=20\n", ""), TAKEN_TWICE).figures()
    with pytest.raises(CompilerFailedError, match="reports nothing for the graph"):
        outcome(TWO, "of another format").figures()
    told = outcome("", "selected 0 ops, from a total of 3 ops. resulted in 0").figures()
    assert (told["taken"], told["operators"], told["ddr_read"]) == (0, 3, 0)


def test_an_option_that_the_library_ignores_is_no_complaint() -> None:
    assert first_complaint(TWO, "") == ""
    failing = TWO + "  0.0ms [ ERROR ]  prepare.cc:2::ERROR:could not create op: q::Pad\n"
    assert first_complaint(failing, "ERROR: of the tool") == "could not create op: q::Pad"
    assert first_complaint(TWO, "ERROR: of the tool") == "of the tool"


def test_places_in_the_source_are_no_complaint() -> None:
    places = "ERROR: [apply_plugin.cc:455] ERROR: [litert/compiler/compiler_plugin.cc:504]\n"
    limit = "graph requires estimated allocation of 3958532 KB, limit is 3670016 KB"
    assert first_complaint(f"{places}[1] fa_alloc.cc:2738::ERROR:{limit}\n") == limit
    assert first_complaint(places) == ""


def test_the_tool_gets_flags_libraries_and_probe(
    model: Path, tmp_path: Path, compiler: Compilers
) -> None:
    sdk = compiler(f"""
        import os, pathlib, sys
        places = os.environ["LD_LIBRARY_PATH"].split(":")
        assert any((pathlib.Path(place) / "libQnnLpai.so").is_symlink() for place in places), places
        expected = {str(tmp_path)!r}, places[1] + "/libQnnHtp.so"
        assert (places[0], os.environ["EDGE_OPT_QNN_REAL"]) == expected
        assert "--soc_model=SM9999" in sys.argv and sys.argv[-1] == "--level=O2"
        print({TAKEN!r}, file=sys.stderr)
        print("Qnn library version 2.39.1 is used.", file=sys.stderr)
        print({FIGURES!r})
    """)
    report = profile(model, Compiler("SM9999", ("--level=O2",), sdk))
    (figures,) = report.to_dict()["signatures"]
    least = 4 + 4 * 4  # the 0.5, and x
    told = {"signature": "main", "taken": 2, "ddr_read": 40, "run_list": 3, "least_read": least}
    assert told.items() <= figures.items()
    assert (report.chip, report.versions["qnn"]) == ("SM9999", "2.39.1")


def test_the_libraries_are_found_by_environment_and_without_them_the_error_says_how_to_get_them(
    tmp_path: Path, model: Path, compiler: Compilers, capsys: Captured, monkeypatch: Patch
) -> None:
    with pytest.raises(CompilerMissingError, match=r"pip download .*sdk=DIR or in EDGE_OPT_QNN"):
        find_libraries()
    with pytest.raises(CompilerMissingError, match=r"holds no libQnnHtp\.so"):
        find_libraries(tmp_path)
    with pytest.raises(
        CompilerMissingError, match=r"folder \S+missing does not exist: give the folder of"
    ):
        find_libraries(tmp_path / "missing")
    with pytest.raises(CompilerMissingError, match=r"is a file, not a folder: give the folder of"):
        find_libraries(model)
    refused = run(capsys, "profile", model)
    assert (refused.code, len(refused.err.splitlines())) == (UsageError.exit_code, 1)
    for flag in ("foo", "--", "-O2"):
        shown = run(capsys, "profile", model, f"--flag={flag}", "-q")
        assert f"'{flag}' is not a compiler flag" in shown.failed_in_one_sentence(2)
    sdk = compiler("")
    for variable in Qualcomm.variables:
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(sdk))
            assert find_libraries() == sdk / "lib" / "x86_64-linux-clang"


BEGUN = "import sys; open([one[4:] for one in sys.argv if one[:4] == '--o='][0], 'w').close()"


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        (f"{BEGUN}; sys.exit('ERROR: Unexpected SoC model: SM8751')", 2, "'SM8751', did you mean 'SM8750'?"),
        (f"{BEGUN}; import os; os.abort()", 3, "ended with code -6: killed by SIGABRT"),
        ("print(' 0.0ms [ ERROR ]   <E> no room'); raise SystemExit(6)", 3, "compiler ended with code 6: no room"),
        ("pass", 3, "reports nothing for the graph"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_is_told_in_one_sentence(
    model: Path, compiler: Compilers, capsys: Captured, program: str, code: int, words: str
) -> None:
    command = ("profile", model, "--sdk", compiler(program), "--soc", "SM8751")
    shown = run(capsys, *command, "--json")
    assert shown.code == code
    assert words in shown.json["error"]["message"]


def test_a_compiler_that_fails_leaves_others_alone(model: Path, compiler: Compilers) -> None:
    program = "import sys, time; time.sleep('SA8797' in ' '.join(sys.argv))\n"
    sdk = compiler(program + dedent(compiling({"SM8750": None, "SA8797": (1200, 40, 9)})))
    with ThreadPoolExecutor(2) as threads:
        compilers = (Compiler(chip, (), sdk) for chip in ("SA8797", "SM8750"))
        other, failing = (threads.submit(measure, load(model), "main", one) for one in compilers)
        assert failing.result().failure == "the Hexagon compiler ended with code 6: no room"
        assert other.result().figures is not None


def judged(model: Path, sdk: Path, chip: str) -> tuple[Figures, tuple[str, ...]]:
    """The figures of the one signature, and the notes."""
    report = profile(model, Compiler(chip, sdk=sdk))
    assert json.loads(json.dumps(report.to_dict()))["notes"] == [*report.notes]
    return report.signatures[0], report.notes


@pytest.mark.parametrize(
    ("chip", "judge", "words"),
    [
        ("SA8797", "SA8797", ""),
        ("SM8550", "SA8775", "SM8550 (Hexagon v73): times are for SA8775 (v73, the same version)"),
        ("SM8750", "SA8797", "SM8750 (Hexagon v79): times are for SA8797 (v81, the nearest"),
    ],
)
def test_a_phones_time_is_that_of_the_nearest(
    model: Path, compiler: Compilers, chip: str, judge: str, words: str
) -> None:
    sdk = compiler(compiling({chip: (None, 40, 9), judge: (1200, 40, 9)}))
    figures, notes = judged(model, sdk, chip)
    assert figures.time == TimeEstimate(judge, 1200, 1200, 1200, 1)
    assert words in "".join(notes)
    assert len(notes) == (1 if words else 0)


@pytest.mark.parametrize(
    ("chip", "interface", "words"),
    [
        ("SM0", (), "the compiler gives none for SM0"),
        ("SA8797", ("unknown", "3.1.0"), "QNN interface 3.1.0, edge-opt's probe supports 2.36 to 2.40"),
        ("SM8750", None, "no C compiler"),
    ],
)  # fmt: skip
def test_without_an_estimate_there_are_bytes_and_a_reason(
    model: Path, compiler: Compilers, monkeypatch: Patch, chip: str, interface: Any, words: str
) -> None:
    sdk = compiler(compiling(dict.fromkeys((chip, "SA8797"), (None, 40, 9, *(interface or ())))))
    if interface is None:
        without_probe(monkeypatch)
    figures, notes = judged(model, sdk, chip)
    assert (figures.time, figures.ddr_read) == (None, 40)
    assert notes[0].startswith("no estimate of time: ")
    assert words in notes[0]


def test_profile_prints_a_table_for_each_model(
    model: Path, tmp_path: Path, compiler: Compilers, capsys: Captured
) -> None:
    other = tmp_path / "after" / model.name
    other.parent.mkdir()
    shutil.copy(model, other)
    sdk = compiler(compiling([(1200, 36, 9), (600, 36, 9)]))
    shown = run(capsys, "profile", model, other, "--sdk", sdk, "--soc", "SA8797")
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert lines[0].startswith("SA8797, ai-edge-litert")
    assert (lines[2], lines[6]) == (str(model), str(other))
    assert lines[4].split()[:4] == ["main", "9/9", "1", "1.200"]
    assert lines[8].split()[:4] == ["main", "9/9", "1", "0.600"]
    assert (lines[4].split()[-1], lines[8].split()[-1]) == ("1.000", "0.500")
    assert max(map(len, lines[3:5])) <= 80
    assert "at least" in lines[3]


@pytest.mark.parametrize("count", [1, 2])
def test_a_compiler_that_is_killed_beside_another_gets_a_turn_alone(
    count: int, monkeypatch: Patch
) -> None:
    meeting = Barrier(count)
    running: set[str] = set()
    tried = Counter[str]()
    beside: list[int] = []

    def compiles(_: Qualcomm, __: Path, signature: str, ___: Compiler) -> Figures:
        tried[signature] += 1
        running.add(signature)
        try:
            if tried[signature] == 2:
                beside.append(len(running) - 1)
            elif signature == "decode":
                meeting.wait(20)
                raise CompilerKilledError("killed by SIGKILL")
            else:
                meeting.wait(20)
                time.sleep(0.3)
            return Figures(signature, 1, 1, 1)
        finally:
            running.discard(signature)

    monkeypatch.setattr(Qualcomm, "measure", compiles)
    model = load(DEMO)
    names = ["decode", "prefill_8"][:count]
    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(lambda name: measure(model, name, Compiler("SM8750")), names))
    if count == 1:
        assert (found[0].failure, tried["decode"]) == ("killed by SIGKILL", 1)
    else:
        assert [one.figures is not None for one in found] == [True, True]
        assert (tried, beside) == ({"decode": 2, "prefill_8": 1}, [0])
