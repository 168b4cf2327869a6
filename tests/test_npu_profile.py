"""The Hexagon compiler: its log is read right, its absence is said, and the floor counts everything once.

The logs here are composed from the format, not copied; the slow tests run the real compiler where it is installed.
"""

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from textwrap import dedent

import generation_models as models
import pytest
from bundles import bundle, model_part
from cli_runs import NO_ATTENTION, QUANTIZED, run
from pretend_npu import EVENTS, FIGURES, TAKEN, pretend
from sdk import require_qnn
from text_parser import parse

from edge_opt.base.errors import UsageError
from edge_opt.ir import load, save, to_bytes
from edge_opt.npu import CompilerFailedError, CompilerMissingError, Figures, TimeEstimate, profile
from edge_opt.npu.figures import read_floor
from edge_opt.npu.hexagon import Compiler, Outcome, ProbeLog, first_complaint, measure, read_probe_log
from edge_opt.npu.sdk import SDK_VARIABLES, find_libraries

Captured = pytest.CaptureFixture[str]
Compilers = Callable[[str], Path]


def partition(spill: int, fill: int, written: int, read: int, steps: int) -> str:
    return dedent(f"""\
          0.0ms [ ERROR ]   <E> unexpected GraphHtpSettings option 66
          0.0ms [  INFO ]  spill_bytes={spill}
          0.0ms [  INFO ]  fill_bytes={fill}
          0.0ms [  INFO ]  write_total_bytes={written}
          0.0ms [  INFO ]  read_total_bytes={read}
          0.0ms [  INFO ]  finalize_runlist: in_runlist={steps}, runlist = 1 + 2 vec
        """)


def heard(share: int = 1) -> str:
    """The probe's log of one graph, with that share of the time."""
    lines = [f"event\t{kind}\t{value // share}" for kind, value in EVENTS.items()]
    return "\n".join(["interface\tknown\t2.40.0\t5", "finalized\tg\t0", *lines, ""])


NOTHING = "interface\tknown\t2.40.0\t5\nfinalized\tg\t0\n"


def outcome(output: str, taken: str, log: str = "") -> Outcome:
    probe_log = read_probe_log(log) if log else ProbeLog()
    return Outcome(0, output, f"INFO: [a.cc:1] Partitioned subgraph<0>, {taken} partitions.\n", probe_log, "")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.tflite"
    save(parse(NO_ATTENTION), path)
    return path


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compilers:
    """Puts a program in the place of LiteRT's tool; the folder to give as --sdk."""
    return partial(pretend, tmp_path, monkeypatch)


# The log

TWO = partition(1, 2, 3, 40, 5) + partition(10, 20, 30, 400, 50)
TAKEN_TWICE = "selected 7 ops, from a total of 9 ops. resulted in 2"


def test_partitions_run_one_after_the_other() -> None:
    found = outcome(TWO, TAKEN_TWICE, heard() + heard().partition("\n")[2])
    told = {"spill": 11, "fill": 22, "ddr_written": 33, "ddr_read": 440, "run_list": 55}
    assert found.figures() == {"taken": 7, "operators": 9, "partitions": 2, **told}
    assert found.time("SA8797") == TimeEstimate("SA8797", 3000, 2000, 5000, 2400, 1800, 2800, 2)
    assert outcome(TWO, TAKEN_TWICE, heard()).time("SA8797") is None, "of one partition alone"


def test_a_lost_figure_is_an_error_and_a_refused_graph_has_no_partition() -> None:
    with pytest.raises(CompilerFailedError, match="1 figures for fill and 2 partitions"):
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


# The tool


def test_the_tool_gets_model_chip_flags_and_libraries_behind_the_probe(
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
        print({partition(0, 0, 16, 40, 3)!r})
    """)
    report = profile(model, sdk=sdk, chip="SM9999", flags=["--level=O2"])
    (figures,) = report.to_dict()["signatures"]
    told = {"signature": "main", "taken": 2, "ddr_read": 40, "run_list": 3, "floor": 4 * 4 + 2}
    assert told.items() <= figures.items()
    assert figures["read_ratio"] == pytest.approx(40 / 18)
    assert (report.chip, report.versions["qnn"]) == ("SM9999", "2.39.1")


def test_the_libraries_are_found_by_environment_and_without_them_the_error_says_how_to_get_them(
    tmp_path: Path, model: Path, compiler: Compilers, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CompilerMissingError, match=r"pip download .*sdk=DIR or in EDGE_OPT_QNN"):
        find_libraries(None)
    with pytest.raises(CompilerMissingError, match=r"holds no libQnnHtp\.so"):
        find_libraries(tmp_path)
    assert run(capsys, "profile", model).code == UsageError.exit_code
    sdk = compiler("")
    for variable in SDK_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(sdk))
            assert find_libraries(None) == sdk / "lib" / "x86_64-linux-clang"


@pytest.mark.parametrize("flag", ["foo", "--", "-O2"])
def test_what_is_no_flag_is_refused(model: Path, capsys: Captured, flag: str) -> None:
    shown = run(capsys, "profile", model, f"--flag={flag}", "-q")
    assert f"'{flag}' is not a compiler flag" in shown.failed_in_one_sentence(2)


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("import sys; sys.exit('ERROR: Unexpected SoC model: SM8751')", 2, "'SM8751', did you mean 'SM8750'?"),
        ("import time; time.sleep(60)", 3, "was not done after 0.3 seconds; give more with --seconds"),
        ("import os; os.abort()", 3, "ended with code -6: killed by SIGABRT"),
        ("print(' 0.0ms [ ERROR ]   <E> no room'); raise SystemExit(6)", 3, "compiler ended with code 6: no room"),
        ("pass", 3, "reports nothing for the graph"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_is_told_in_one_sentence(
    model: Path, compiler: Compilers, capsys: Captured, program: str, code: int, words: str
) -> None:
    seconds = 0.3 if "sleep" in program else 60
    command = ("profile", model, "--sdk", compiler(program), "--soc", "SM8751", "--seconds", seconds)
    shown = run(capsys, *command, "--json")
    assert shown.code == code
    assert words in shown.json["error"]["message"]


def test_a_compiler_that_fails_leaves_others_alone(model: Path, compiler: Compilers) -> None:
    sdk = compiler(f"""
        import sys, time
        if "--soc_model=SM8750" in sys.argv:
            raise SystemExit(6)
        time.sleep(1)
        print({TAKEN!r}, file=sys.stderr)
        print({FIGURES!r})
    """)
    loaded = load(model)
    with ThreadPoolExecutor(2) as threads:
        other, failing = (
            threads.submit(measure, loaded, "main", Compiler(chip, (), sdk)) for chip in ("SA8797", "SM8750")
        )
        assert failing.result().failure.startswith("the Hexagon compiler ended with code 6")
        assert other.result().figures is not None


# Time


def program_with_times(chips: dict[str, str]) -> str:
    """A tool that says of each chip in the table what the probe would hear, and fails for any other."""
    return f"""
        import os, sys
        chip = next(a.partition("=")[2] for a in sys.argv if a.startswith("--soc_model="))
        open(os.environ["EDGE_OPT_PROBE_LOG"], "w").write({chips!r}[chip])
        print({TAKEN!r}, file=sys.stderr)
        print({partition(0, 0, 16, 40, 3)!r})
        """


def judged(model: Path, sdk: Path, chip: str) -> tuple[Figures, tuple[str, ...]]:
    """The figures of the one signature, and the notes."""
    report = profile(model, sdk=sdk, chip=chip)
    assert json.loads(json.dumps(report.to_dict()))["notes"] == [*report.notes]
    return report.signatures[0], report.notes


@pytest.mark.parametrize(
    ("chip", "judge", "words"),
    [
        ("SA8797", "SA8797", ""),
        ("SM8550", "SA8775", "SM8550 (Hexagon v73): times are of SA8775 (v73, the same version)"),
        ("SM8750", "SA8797", "SM8750 (Hexagon v79): times are of SA8797 (v81, the nearest"),
        ("SM8850", "SA8797", "the same version"),
    ],
)
def test_a_phones_time_is_estimated_on_the_chip_of_the_nearest_version(
    model: Path, compiler: Compilers, chip: str, judge: str, words: str
) -> None:
    sdk = compiler(program_with_times({chip: NOTHING, judge: heard()}))
    figures, notes = judged(model, sdk, chip)
    assert figures.time == TimeEstimate(judge, 1500, 1000, 2500, 1200, 900, 1400, 1)
    assert words in "".join(notes)
    assert len(notes) == (1 if words else 0)


@pytest.mark.parametrize(
    ("chip", "said", "words"),
    [
        ("SM0", NOTHING, "the compiler gave none for SM0"),
        ("SA8797", NOTHING, "the compiler gave none for SA8797"),
        (
            "SA8797",
            NOTHING.replace("known\t2.40", "unknown\t3.1"),
            "QNN interface 3.1.0, and edge-opt's probe was tried with 2.36 to 2.40",
        ),
    ],
)
def test_without_an_estimate_the_bytes_are_there_and_one_sentence_says_why(
    model: Path, compiler: Compilers, chip: str, said: str, words: str
) -> None:
    figures, notes = judged(model, compiler(program_with_times({chip: said})), chip)
    assert (figures.time, figures.ddr_read) == (None, 40)
    assert notes[0].startswith("no estimate of time: ")
    assert words in notes[0]


def test_without_a_c_compiler_the_bytes_are_there_too(
    model: Path, compiler: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = compiler(program_with_times({"SM8750": "", "SA8797": ""}))

    def missing() -> Path:
        raise CompilerMissingError("there is no C compiler")

    monkeypatch.setattr("edge_opt.npu.sdk.build_probe", missing)
    assert judged(model, sdk, "SM8750")[1] == ("no estimate of time: there is no C compiler",)


# The parts of a bundle


def by_part(parts: Path) -> str:
    """A tool that estimates a time of every part; beside a file `.refuse` it refuses cache updates."""
    return f"""
    import os, sys
    if b"update" in open(sys.argv[2].partition("=")[2], "rb").read() and os.path.exists({str(parts)!r} + ".refuse"):
        print(" 0.0ms [ ERROR ]   <E> could not create op: q::Select")
        raise SystemExit(6)
    log = open(os.environ["EDGE_OPT_PROBE_LOG"], "w")
    print("interface", "known", "2.40.0", "5", sep="\\t", file=log)
    print({TAKEN!r}, file=sys.stderr)
    print({FIGURES!r})
    print("finalized", "g", 0, sep="\\t", file=log)
    for event, value in {EVENTS!r}.items():
        print("event", event, value, sep="\\t", file=log)
    """


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A bundle with an embedder and an auxiliary model."""
    texts = {"prefill_decode": models.split(), "embedder": models.embedder(), "aux": models.auxiliary()}
    path = tmp_path / "gemma.litertlm"
    path.write_bytes(bundle([model_part(kind, to_bytes(parse(text))) for kind, text in texts.items()]))
    return path


def test_a_step_is_told_by_part_with_who_runs_it(parts: Path, compiler: Compilers, capsys: Captured) -> None:
    command = ("profile", parts, "--soc", "SA8797", "--sdk", compiler(by_part(parts)))
    prefill, decode = run(capsys, *command, "--json").json["profiles"][0]["steps"]
    assert (prefill["name"], decode["name"]) == ("prefill_4", "decode")
    told = [
        (name, part["signature"], part["figures"]["time"]["us"]) for name, part in prefill["parts"].items()
    ]
    assert told == [
        ("embedder", "prefill_embedder_4", 1200),
        ("masks", "prefill_mask_4", 1200),
        ("decoder", "prefill_4", 1200),
        ("cache update", "prefill_cache_update_4", 1200),
    ]
    shown = run(capsys, *command).out
    assert re.search(r"prefill_4 +masks +LiteRT-LM itself \(before 0\.11: the model\) +2/2 +1\.200\n", shown)
    assert "use_hw_masking_for_npu" in shown


def test_a_part_that_the_compiler_refuses_costs_no_other_its_estimate(
    parts: Path, compiler: Compilers, capsys: Captured
) -> None:
    program = by_part(parts).replace('b"update"', 'b"decode_cache_update"')
    parts.with_name(f"{parts.name}.refuse").touch()
    command = ("profile", parts, "--soc", "SA8797", "--sdk", compiler(program))
    *others, update = run(capsys, *command, "--json").json["profiles"][0]["steps"][1]["parts"].values()
    assert all(part["figures"]["time"]["us"] == 1200 for part in others)
    assert update["figures"] is None
    assert update["failure"].endswith("could not create op: q::Select")
    shown = run(capsys, *command).out
    assert "decode_cache_update has no estimate: the Hexagon compiler ended with code 6: could not" in shown


# The floor


@pytest.mark.parametrize(("dtype", "constant"), [("float32", 4 * 2), ("int32", 4 * 4)])
def test_the_floor_counts_what_is_used_once_and_float_weights_as_half(dtype: str, constant: int) -> None:
    graph = parse(f"""
        signature main = #0 (x=%x, unused=%u) -> (y=%y)
        subgraph main (%x: {dtype}[1,4], %u: {dtype}[1,1000]) {{
          %a: {dtype}[1,4] = MUL(%x, {dtype}{{1, 2, 3, 4}})
          %y: {dtype}[1,4] = ADD(%a, %x)
          return %y
        }}
    """)
    assert read_floor(graph.subgraphs[0]) == 4 * 4 + constant


# The command


def test_profile_prints_a_table_for_each_model_with_the_ratio_of_time(
    model: Path, tmp_path: Path, compiler: Compilers, capsys: Captured
) -> None:
    other = tmp_path / "after" / model.name
    other.parent.mkdir()
    shutil.copy(model, other)
    seen = str(tmp_path / "seen")
    sdk = compiler(f"""
        import os, sys
        print({TAKEN!r}, file=sys.stderr)
        print({partition(1024, 2048, 16, 36, 3)!r})
        told = {heard(2)!r} if os.path.exists({seen!r}) else {heard()!r}
        open(os.environ["EDGE_OPT_PROBE_LOG"], "w").write(told)
        open({seen!r}, "w")
    """)
    shown = run(capsys, "profile", model, other, "--sdk", sdk, "--soc", "SA8797")
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert lines[0].startswith("SA8797, ai-edge-litert")
    assert (lines[2], lines[6]) == (str(model), str(other))
    cells = ["main", "2/2", "1.200", "1.00", "KiB", "2.00", "KiB"]
    assert lines[4].split()[:7] == cells
    assert (lines[4].split()[-1], lines[8].split()[-1]) == ("1.000", "0.500")
    assert max(map(len, lines[3:5])) <= 80
    told = run(capsys, "profile", model, "--sdk", sdk, "--json")
    assert told.json["profiles"][0]["signatures"][0]["fill"] == 2048


# The real one


@pytest.mark.slow
def test_the_real_hexagon_compiler_takes_the_demo_whole() -> None:
    require_qnn()
    report = profile(QUANTIZED, sdk=None)
    assert "SA8797" in report.notes[0]
    for figures in report.to_dict()["signatures"]:
        assert 0 < figures["time"]["us_low"] <= figures["time"]["us"] <= figures["time"]["us_high"]
        assert figures["taken"] == figures["operators"] > 0
        assert figures["partitions"] == 1
        assert figures["ddr_read"] >= figures["floor"] > 0
