"""Vendors' compilers: their logs are read right, their absence is said, and the floor counts everything once.

The logs here are composed from the format, not copied; the slow tests run the real compilers where they are installed.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import dedent

import generation_models as models
import pytest
from bundles import TFLITE_MODEL, bundle, model_part
from cli_runs import DEMO, NO_ATTENTION, QUANTIZED, run
from pretend_npu import EVENTS, FIGURES, TAKEN, executable, pretend
from sdk import require_qnn
from text_parser import parse

from edge_opt.base.errors import UsageError
from edge_opt.ir import save, to_bytes
from edge_opt.npu import (
    CompilerFailedError,
    CompilerMissingError,
    SpillFigures,
    TimeEstimate,
    profile,
)
from edge_opt.npu.ethos import find_vela, read_counts, read_refusals, read_summary
from edge_opt.npu.figures import read_floor
from edge_opt.npu.hexagon import first_complaint, library_version, read_log
from edge_opt.npu.sdk import SDK_VARIABLES, find_libraries

Captured = pytest.CaptureFixture[str]
Compilers = Callable[[str], Path]

TWO_ERRORS = """\
INFO: [a.cc:1] Partitioned subgraph<0>, selected 7 ops, from a total of 9 ops. resulted in 2 partitions.
WARNING: [b.cc:2] Qnn library version 2.40.0 is used. The version LiteRT using is 2.39.0.
INFO: [a.cc:1] Partitioned subgraph<1>, selected 4 ops, from a total of 4 ops. resulted in 1 partitions.
"""


def partition(spill: int, fill: int, written: int, read: int, steps: int) -> str:
    return dedent(f"""\
          0.0ms [ ERROR ]   <E> unexpected GraphHtpSettings option 66
          0.0ms [  INFO ]  spill_bytes={spill}
          0.0ms [  INFO ]  fill_bytes={fill}
          0.0ms [  INFO ]  write_total_bytes={written}
          0.0ms [  INFO ]  read_total_bytes={read}
          0.0ms [  INFO ]  finalize_runlist: in_runlist={steps}, runlist = 1 + 2 vec
        """)


THREE_PARTITIONS = partition(1, 2, 3, 40, 5) + partition(10, 20, 30, 400, 50) + partition(0, 0, 7, 8, 9)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.tflite"
    save(parse(NO_ATTENTION), path)
    return path


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compilers:
    """Puts a program in the place of LiteRT's tool; the folder to give as --sdk."""
    return partial(pretend, tmp_path, monkeypatch)


# The parts of a bundle

BY_PART = f"""
    import os, sys
    model = next(a.partition("=")[2] for a in sys.argv if a.startswith("--model="))
    if "decode_cache_update" in model:
        print(" 0.0ms [ ERROR ]   <E> could not create op: q::Select")
        raise SystemExit(6)
    log = open(os.environ["EDGE_OPT_PROBE_LOG"], "w")
    print("interface", "known", "2.40.0", "5", sep="\\t", file=log)
    for place in range(2 if "gemma" in model else 1):
        print({TAKEN!r}.replace("<0>", f"<{{place}}>"), file=sys.stderr)
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
    command = ("profile", parts, "--soc", "SA8797", "--sdk", compiler(BY_PART))
    prefill, decode = run(capsys, *command, "--json").json["profiles"][0]["steps"]
    assert (prefill["name"], decode["name"]) == ("prefill_4", "decode")
    told = [(part["name"], part["signature"], part["figures"]["time"]["us"]) for part in prefill["parts"]]
    assert told == [
        ("embedder", "prefill_embedder_4", 1200),
        ("masks", "prefill_mask_4", 1200),
        ("decoder", "prefill_4", 1200),
        ("cache update", "prefill_cache_update_4", 1200),
    ]
    assert [part["runs"].partition(" ")[0] for part in prefill["parts"]] == [
        "CPU",
        "LiteRT-LM",
        "NPU",
        "LiteRT-LM",
    ]
    shown = run(capsys, *command).out
    assert re.search(r"prefill_4 +masks +LiteRT-LM itself \(before 0\.11: the model\) +2/2 +1\.200\n", shown)
    assert "use_hw_masking_for_npu" in shown


def test_a_part_that_the_compiler_refuses_costs_no_other_its_estimate(
    parts: Path, compiler: Compilers, capsys: Captured
) -> None:
    command = ("profile", parts, "--soc", "SA8797", "--sdk", compiler(BY_PART))
    *others, update = run(capsys, *command, "--json").json["profiles"][0]["steps"][1]["parts"]
    assert all(part["figures"]["time"]["us"] == 1200 for part in others)
    assert update["figures"] is None
    assert update["failure"].endswith("could not create op: q::Select")
    shown = run(capsys, *command).out
    assert "decode_cache_update has no estimate: the Hexagon compiler ended with code 6: could not" in shown


def test_a_model_without_others_has_no_steps(model: Path, compiler: Compilers) -> None:
    assert profile(model, sdk=compiler(BY_PART), chip="SA8797").steps == ()


# The Hexagon compiler


def test_partitions_are_summed_for_the_subgraph_they_come_from() -> None:
    first, second = read_log(THREE_PARTITIONS, TWO_ERRORS)
    assert (first.subgraph, first.taken, first.operators, first.partitions) == (0, 7, 9, 2)
    assert first.figures == {"spill": 11, "fill": 22, "ddr_written": 33, "ddr_read": 440, "run_list": 55}
    assert second.figures == {"spill": 0, "fill": 0, "ddr_written": 7, "ddr_read": 8, "run_list": 9}


def test_a_lost_figure_is_an_error_and_not_somebody_elses() -> None:
    with pytest.raises(ValueError, match="3 partitions were compiled and 2 have a figure for fill"):
        read_log(THREE_PARTITIONS.replace("fill_bytes=20\n", ""), TWO_ERRORS)


def test_a_subgraph_that_the_plugin_refuses_has_no_partition() -> None:
    refused = "Partitioned subgraph<0>, selected 0 ops, from a total of 3 ops. resulted in 0 partitions."
    (entry,) = read_log("", refused)
    assert (entry.taken, entry.operators, entry.figures["ddr_read"]) == (0, 3, 0)


def test_an_option_that_the_library_ignores_is_no_complaint() -> None:
    assert first_complaint(THREE_PARTITIONS, TWO_ERRORS) is None
    failing = THREE_PARTITIONS + "  0.0ms [ ERROR ]  prepare.cc:2::ERROR:could not create op: q::Pad\n"
    assert first_complaint(failing, TWO_ERRORS) == "could not create op: q::Pad"


def test_the_librarys_version_is_read_where_it_is_named() -> None:
    assert library_version(TWO_ERRORS) == "2.40.0"
    assert library_version("") is None


def test_the_tool_gets_model_chip_flags_and_libraries(model: Path, compiler: Compilers) -> None:
    sdk = compiler(f"""
        import os, pathlib, sys
        places = os.environ["LD_LIBRARY_PATH"].split(":")
        assert any((pathlib.Path(place) / "libQnnLpai.so").is_symlink() for place in places), places
        assert {str(model)!r} in sys.argv[2] and "--soc_model=SM9999" in sys.argv and sys.argv[-1] == "--level=O2"
        print({TAKEN!r}, file=sys.stderr)
        print({partition(0, 0, 16, 40, 3)!r})
    """)
    report = profile(model, sdk=sdk, chip="SM9999", flags=["--level=O2"])
    (figures,) = report.to_dict()["signatures"]
    told = {"signature": "main", "taken": 2, "ddr_read": 40, "run_list": 3, "floor": 4 * 4 + 2}
    assert told.items() <= figures.items()
    assert figures["read_ratio"] == pytest.approx(40 / 18)
    assert report.chip == "SM9999"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            "print(' 0.0ms [ ERROR ]   <E> no room'); raise SystemExit(6)",
            r"model\.tflite: .* code 6: no room",
        ),
        ("pass", "says nothing of signature 'main'"),
    ],
)
def test_a_compiler_that_fails_says_why(model: Path, compiler: Compilers, program: str, words: str) -> None:
    with pytest.raises(CompilerFailedError, match=words):
        profile(model, sdk=compiler(program))


def test_without_the_libraries_the_error_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(
        CompilerMissingError, match=r"pip download --no-deps onnxruntime-qnn==.*sdk=DIR or in EDGE_OPT_QNN"
    ):
        find_libraries(None)
    with pytest.raises(CompilerMissingError, match=r"holds no libQnnHtp\.so"):
        find_libraries(tmp_path)


@pytest.mark.parametrize("variable", SDK_VARIABLES)
def test_the_libraries_are_found_by_environment(
    compiler: Compilers, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    sdk = compiler("")
    monkeypatch.setenv(variable, str(sdk))
    assert find_libraries(None) == sdk / "lib" / "x86_64-linux-clang"


def test_a_target_without_a_compiler_is_a_usage_error(model: Path) -> None:
    with pytest.raises(
        UsageError, match="'generic' has no compiler that can be run here; there are: qualcomm-htp"
    ):
        profile(model, "generic")


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


def heard(**events: int) -> str:
    lines = [f"event\t{kind}\t{value}" for kind, value in {**EVENTS, **events}.items()]
    return "\n".join(["interface\tknown\t2.40.0\t5", "finalized\tg\t0", *lines, ""])


NOTHING = "interface\tknown\t2.40.0\t5\nfinalized\tg\t0\n"


def judged(model: Path, sdk: Path, chip: str) -> tuple[SpillFigures, tuple[str, ...]]:
    """The figures of the one signature, and the notes."""
    report = profile(model, sdk=sdk, chip=chip)
    (figures,) = report.signatures
    assert isinstance(figures, SpillFigures)
    assert json.loads(json.dumps(report.to_dict()))["notes"] == [*report.notes]
    return figures, report.notes


def test_partitions_run_one_after_the_other() -> None:
    first, second = (
        TimeEstimate("SA8797", 1, 2, 3, 4, 5, 6, 7),
        TimeEstimate("SA8797", 10, 20, 30, 40, 50, 60, 70),
    )
    assert first + second == TimeEstimate("SA8797", 11, 22, 33, 44, 55, 66, 77)


def test_a_chip_with_an_estimate_of_its_own_is_compiled_once(model: Path, compiler: Compilers) -> None:
    figures, notes = judged(model, compiler(program_with_times({"SA8797": heard()})), "SA8797")
    assert figures.time == TimeEstimate("SA8797", 1500, 1000, 2500, 1200, 900, 1400, 1)
    assert figures.to_dict()["time"]["us"] == 1200
    assert notes == ()


@pytest.mark.parametrize(
    ("chip", "judge", "words"),
    [
        ("SM8550", "SA8775", r"SM8550 \(Hexagon v73\): times are of SA8775 \(v73, the same version\)"),
        ("SM8750", "SA8797", r"SM8750 \(Hexagon v79\): times are of SA8797 \(v81, the nearest"),
        ("SM8850", "SA8797", "the same version"),
    ],
)
def test_a_phones_time_is_estimated_on_the_chip_of_the_nearest_version(
    model: Path, compiler: Compilers, chip: str, judge: str, words: str
) -> None:
    sdk = compiler(program_with_times({chip: NOTHING, judge: heard()}))
    figures, notes = judged(model, sdk, chip)
    assert figures.time is not None
    assert figures.time.chip == judge
    assert re.search(words, notes[0])


@pytest.mark.parametrize(
    ("chip", "said", "words"),
    [
        ("SM0", NOTHING, "the Hexagon version of SM0 is not known here; known chips are QCS8275"),
        ("SA8797", NOTHING, "the compiler gave none for SA8797"),
        (
            "SA8797",
            NOTHING.replace("known\t2.40", "unknown\t3.1"),
            "QNN interface 3.1.0, and edge-opt's probe was tried with 2.36 to 2.40",
        ),
        ("SM8650", NOTHING, "the Hexagon compiler ended with code 1"),
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
    sdk = compiler(program_with_times({"SM8750": ""}))

    def missing() -> Path:
        raise CompilerMissingError("there is no C compiler")

    monkeypatch.setattr("edge_opt.npu.sdk.build_probe", missing)
    assert judged(model, sdk, "SM8750")[1] == ("no estimate of time: there is no C compiler",)


def test_the_probe_stands_in_front_of_the_real_library(
    model: Path, tmp_path: Path, compiler: Compilers
) -> None:
    program = f"""
        import os
        first, second = os.environ["LD_LIBRARY_PATH"].split(":")[:2]
        expected = {str(tmp_path)!r}, second + "/libQnnHtp.so"
        raise SystemExit(9 if (first, os.environ["EDGE_OPT_QNN_REAL"]) == expected else 8)
    """
    with pytest.raises(CompilerFailedError, match="code 9"):
        profile(model, sdk=compiler(program))


def test_a_bundle_is_profiled_by_its_prefill_and_decode_model(tmp_path: Path, compiler: Compilers) -> None:
    path = tmp_path / "gemma.litertlm"
    path.write_bytes(bundle([(TFLITE_MODEL, {"model_type": "tf_lite_prefill_decode"}, DEMO.read_bytes())]))
    with pytest.raises(CompilerFailedError, match=r"gemma\.tflite: .*code 6"):
        profile(path, sdk=compiler("raise SystemExit(6)"))


# What goes wrong


@pytest.mark.parametrize(
    ("chip", "program", "code", "words"),
    [
        (
            "SM8751",
            "import sys; sys.exit('ERROR: [a.cc:1] Unexpected SoC model: SM8751')",
            UsageError.exit_code,
            "knows no chip 'SM8751', did you mean 'SM8750'?",
        ),
        (
            "SA8797",
            "import time; time.sleep(60)",
            CompilerFailedError.exit_code,
            "was not done after 0.3 seconds; give more with --seconds",
        ),
        (
            "SA8797",
            "import os; os.abort()",
            CompilerFailedError.exit_code,
            "ended with code -6: killed by SIGABRT",
        ),
    ],
)
def test_a_compiler_that_refuses_the_chip_hangs_or_crashes_is_told_in_one_sentence(
    model: Path, compiler: Compilers, capsys: Captured, chip: str, program: str, code: int, words: str
) -> None:
    seconds = 0.3 if "sleep" in program else 60
    command = ("profile", model, "--sdk", compiler(program), "--soc", chip, "--seconds", seconds)
    shown = run(capsys, *command, "--json")
    assert shown.code == code
    assert words in shown.json["error"]["message"]


# The floor


@pytest.mark.parametrize(
    ("dtype", "constant"),
    [("float32", 4 * 2), ("int32", 4 * 4)],
)
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


# Vela

VELA = """\
Warning (supported operators) operator: MUL, ofm: 'a/b'
Reason: Operation has tensor with unsupported DataType Float32 (a/b)
Warning (supported operators) operator: MUL, ofm: 'c'
Reason: Operation has tensor with unsupported DataType Float32 (c)
Warning (supported operators) operator: None, ofm: 'd'
Reason: Unsupported opType

CPU operators = 3 (30.0%)
NPU operators = 7 (70.0%)
"""
SUMMARY = """\
experiment,sram_memory_used,dram_memory_used,sram_total_bytes,dram_total_bytes,cycles_npu,cycles_total
default,1.5,2,300,400,50,60
"""


def test_velas_counts_and_reasons_are_read() -> None:
    assert read_counts(VELA) == (7, 10)
    assert read_refusals(VELA) == {
        "MUL: Operation has tensor with unsupported DataType Float32": 2,
        "operator unknown to Vela: Unsupported opType": 1,
    }


def test_velas_memory_is_in_kibibytes() -> None:
    summary = read_summary(SUMMARY)
    assert (summary["sram"], summary["dram"], summary["cycles"]) == (1536, 2048, 60)


def test_a_summary_of_another_format_is_an_error() -> None:
    with pytest.raises(ValueError, match="no column cycles_total"):
        read_summary("experiment,cycles\ndefault,1\n")


def test_vela_gets_one_signature_at_a_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(
        tmp_path / "vela",
        f"""
        import pathlib, sys
        if sys.argv[1] == "--version":
            print("9.9")
        else:
            folder = pathlib.Path(sys.argv[3].split("=")[1])
            assert pathlib.Path(sys.argv[1]).stat().st_size and sys.argv[2] == "--accelerator-config=ethos-u85-512"
            (folder / "signature_summary_x.csv").write_text({SUMMARY!r})
            print({VELA!r})
        """,
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("edge_opt.npu.ethos.find_spec", lambda _: None)
    report = profile(model, "ethos-u85")
    (figures,) = report.to_dict()["signatures"]
    assert (figures["taken"], figures["operators"], figures["cycles"], figures["sram"]) == (7, 10, 60, 1536)
    assert report.versions == {"ethos-u-vela": "9.9"}


@pytest.mark.parametrize(
    ("said", "words"), [("print('bad configuration')", "bad configuration"), ("", "it does not say why")]
)
def test_where_vela_fails_the_error_has_its_last_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, words: str
) -> None:
    executable(tmp_path / "vela", f"{said}\nraise SystemExit(3)")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("edge_opt.npu.ethos.find_spec", lambda _: None)
    with pytest.raises(CompilerFailedError, match=f"Vela ended with code 3 on signature '.*': {words}; see"):
        profile(model, "ethos-u85")


def test_without_vela_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr("edge_opt.npu.ethos.find_spec", lambda _: None)
    with pytest.raises(CompilerMissingError, match=r"pip install '\.\[vela\]'"):
        find_vela()


# The command


def test_profile_prints_one_table_of_all_models(
    model: Path, tmp_path: Path, compiler: Compilers, capsys: Captured
) -> None:
    sdk = compiler(f"""
        import sys
        print({TAKEN!r}, file=sys.stderr)
        print({partition(1024, 2048, 16, 36, 3)!r})
    """)
    other = tmp_path / "after.tflite"
    shutil.copy(model, other)
    shown = run(capsys, "profile", model, other, "--sdk", sdk)
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert lines[0].startswith("qualcomm-htp: SM8750")
    assert "spill" in lines[2]
    assert lines[3].split()[:4] == ["model.tflite", "main", "-", "2/2"]
    assert lines[4].split()[:4] == ["after.tflite", "main", "-", "2/2"]
    assert "  x floor: DDR read over what has to be read at least" in shown.out
    assert "SRAM:" not in shown.out
    assert "2.000" in lines[3]
    assert "1.00 KiB" in lines[3]
    told = run(capsys, "profile", model, "--sdk", sdk, "--json")
    assert told.json["profiles"][0]["signatures"][0]["fill"] == 2048


def test_profile_tells_rows_apart_and_gives_the_ratio_of_time(
    parts: Path, tmp_path: Path, compiler: Compilers, capsys: Captured
) -> None:
    other = tmp_path / "after" / parts.name
    other.parent.mkdir()
    shutil.copy(parts, other)
    faster_again = f"""
        first = not os.path.exists({str(tmp_path / "seen")!r})
        if "gemma" in model:
            open({str(tmp_path / "seen")!r}, "w")
    """
    program = dedent(BY_PART).replace("log = open", f"{dedent(faster_again)}log = open")
    sdk = compiler(program.replace("event, value,", "event, value if first else value // 2,"))
    shown = run(capsys, "profile", parts, other, "--soc", "SA8797", "--sdk", sdk)
    before, after = f"{tmp_path.name}/{parts.name}", f"after/{parts.name}"
    ratios = re.findall(r"^(\S+) +(prefill_4|decode) +([\d.]+) ", shown.out, re.MULTILINE)
    assert [ratio[:2] for ratio in ratios] == [
        (name, entry) for name in (before, after) for entry in ("prefill_4", "decode")
    ]
    assert [ratio[2] for ratio in ratios] == ["1.000", "1.000", "0.500", "0.500"]
    assert f"{before}, by step:" in shown.out
    assert f"{after}, by step:" in shown.out


def test_profile_without_the_libraries_is_a_usage_error(model: Path, capsys: Captured) -> None:
    assert run(capsys, "profile", model).code == UsageError.exit_code


# The real ones


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


@pytest.mark.slow
def test_the_real_vela_reports_cycles() -> None:
    try:
        find_vela()
    except CompilerMissingError as error:
        pytest.skip(str(error))
    for figures in profile(QUANTIZED, "ethos-u85").to_dict()["signatures"]:
        assert figures["cycles"] > 0
        assert 0 < figures["taken"] < figures["operators"]
