"""What runs where: told by a compiled file, the compiler, or a target's facts, in the first lines of `inspect`."""

import re
from pathlib import Path

import pytest
from bundles import bundle, model_part
from cli_runs import DEMO, Captured, run, written
from generation_models import split, unsplit
from pretend_npu import FIGURES, Compilers, require_qnn

from edge_opt.ir import to_bytes
from edge_opt.ir.parse import parse
from edge_opt.npu.hexagon import Outcome
from edge_opt.targets import load_target

MIXED = """
signature main = #0 (x=%x) -> (y=%y)
subgraph main (%x: float32[1,4,8]) {
  %rest: float32[1,4,8] = FLOOR_MOD(%x, float32(3.0))
  %more: float32[1,5,8] = PAD(%rest, int32[3,2]{0, 0, 1, 0, 0, 0})
  %y: float32[1,5,8] = MUL(%more, float32(3.0))
  return %y
}
"""
COMPILED = """
signature main = #0 (x=%x) -> (y=%y)
subgraph main (%x: float32[1,4,8]) {
  %a: float32[1,4,8] = CUSTOM 'DISPATCH_OP' (%x)
  %b: float32[1,4,8] = EXP(%a)
  %c: float32[1,4,8] = EXP(%b)
  %y: float32[1,4,8] = CUSTOM 'DISPATCH_OP' (%c)
  return %y
}
"""
OPEN = """
signature main = #0 (x=%x) -> (y=%y)
subgraph main (%x: float32[1,?,8]) {
  %y: float32[1,?,8] = EXP(%x)
  return %y
}
"""
# In what the compiler gets, names are numbers.
LEFT_BY_COMPILER = """
signature main = #0 (x=%0) -> (y=%5)
subgraph main (%0: float32[1,4,8]) {
  %2: float32[1,4,8] = FLOOR_MOD(%0, float32(3.0))
  %5: float32[1,5,8] = CUSTOM 'DISPATCH_OP' (%2)
  return %5
}
"""
TOOL_SAYS = """\
INFO: [compiler_plugin.cc:948] Applying plugin with SDK version: v2.51.0.260929181845
WARNING: [qnn_manager.cc:272] Qnn library version 2.40.0 is used. The version LiteRT using is 2.39.0.
ERROR: [qnn_manager.cc:480]
QNN op validation failed: 'ElementWiseBinary_0' (type=ElementWiseBinary, operation=Mod)
  Inputs:
    [0] name="0" dtype=QNN_DATATYPE_FLOAT_32 dims=[1,4,8] (no quantization)
  QNN error=3110. See the QNN validator log lines above for the specific reason.
ERROR: [qnn_compiler_plugin.cc:538]
LiteRT Op #0 'FloorMod' (code=95) is not supported in Qualcomm Compiler.
INFO: [compiler_plugin.cc:742] Partitioned subgraph<0>, selected 2 ops, from a total of 3 ops. resulted in 1 partitions.
"""
LIBRARY_SAYS = """\
  0.0ms [ ERROR ]   <E> Unsupported input/output datatypes requested for the HTP Op 'ElementWiseBinary' in the node 'x'.
  0.0ms [ ERROR ]   <E> QnnBackend_validateOpConfig failed 3110
  0.0ms [ ERROR ]   <E> Failed to validate op ElementWiseBinary_0 with error 0xc26
"""


def first_lines(capsys: Captured, path: Path, *options: object) -> list[str]:
    """The first ten lines of `inspect`, without indents."""
    shown = run(capsys, "inspect", path, *options)
    assert shown.code == 0, shown.err
    return [line.strip() for line in shown.out.splitlines()[:10]]


def test_a_file_that_is_compiled_in_part_names_what_the_cpu_runs(
    tmp_path: Path, capsys: Captured
) -> None:
    lines = first_lines(capsys, written(tmp_path, COMPILED))
    assert lines[1:4] == [
        "What runs where, by the compiled file:",
        "main: 2 calls to the NPU, 2 operators on the CPU",
        "main, 2 EXP, #1 'b', #2 'c'",
    ]


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("ethos-u85", "main, 1 FLOOR_MOD, #0 'rest': ethos-u85 does not take this kind"),
        ("MT6993", "main, 1 FLOOR_MOD, #0 'rest': mediatek does not take this kind"),
        ("MT6993", r"What else runs where on mediatek .*: edge-opt inspect \S+ --target MT6993 --sdk DIR"),
        ("SM8750", r"What runs where on qualcomm-htp is not known .* --target SM8750 --sdk DIR"),
        ("LNL", "What runs where on intel-npu is not known: edge-opt cannot run its compiler."),
    ],
)  # fmt: skip
def test_without_the_compiler_facts_tell_or_the_command_that_would(
    tmp_path: Path, capsys: Captured, target: str, told: str
) -> None:
    lines = first_lines(capsys, written(tmp_path, MIXED), "--target", target)
    assert any(re.fullmatch(told, line) for line in lines), lines


def test_the_compiler_says_what_it_leaves_and_why(
    tmp_path: Path, capsys: Captured, compiler: Compilers
) -> None:
    left = written(tmp_path, LEFT_BY_COMPILER, "left.tflite")
    sdk = compiler(f"""
        import shutil, sys
        (written,) = [word[4:] for word in sys.argv if word.startswith("--o=")]
        shutil.copy({str(left)!r}, written)
        print({TOOL_SAYS!r}, file=sys.stderr)
        print({LIBRARY_SAYS + FIGURES!r})
    """)
    model = written(tmp_path, MIXED)
    told = [
        "main: 1 call to the NPU, 1 operator on the CPU",
        "main, 1 FLOOR_MOD, #0 'rest': Unsupported input/output datatypes (FLOAT_32)",
    ]
    lines = first_lines(capsys, model, "--target", "SM8750", "--sdk", sdk)
    assert lines[1:4] == ["What runs where, by the compiler for SM8750:", *told]
    shown = run(capsys, "profile", model, "--sdk", sdk).out
    assert "QAIRT 2.51.0, QNN interface 2.40.0" in shown
    assert [line.strip() for line in shown.splitlines() if line.strip() in told] == told
    refused = run(capsys, "inspect", model, "--sdk", sdk)
    assert "--target SM8750" in refused.failed_in_one_sentence(2)


def test_a_library_that_logs_nothing_leaves_only_the_types() -> None:
    """As with the compiler's flag for its log level."""
    refused = TOOL_SAYS[TOOL_SAYS.index("ERROR") : TOOL_SAYS.rindex("INFO")]
    told = Outcome(errors=refused + refused.replace("#0", "#1")).refusals()
    assert told == dict.fromkeys((0, 1), "refused (FLOAT_32)")


def test_operators_of_called_subgraphs_are_not_those_of_the_model() -> None:
    inside = TOOL_SAYS.replace("#0", "#7")
    assert Outcome(errors=TOOL_SAYS + inside, output=2 * LIBRARY_SAYS).refusals().keys() == {0}


def test_a_bundle_for_cpus_is_called_that(tmp_path: Path, capsys: Captured) -> None:
    for text, is_for_cpus in ((unsplit(), True), (split(), False)):
        path = tmp_path / "model.litertlm"
        path.write_bytes(bundle([model_part("prefill_decode", to_bytes(parse(text)))]))
        told = "Made for CPUs, not exported for an NPU"
        assert any(line.startswith(told) for line in first_lines(capsys, path)) is is_for_cpus
        assert (told in run(capsys, "convert", path, "--dry-run").out) is is_for_cpus


def test_open_lengths_are_told_by_inspect_profile_and_compare(
    tmp_path: Path, capsys: Captured, compiler: Compilers
) -> None:
    model = written(tmp_path, OPEN)
    lines = first_lines(capsys, model, "--target", "SM8750")
    assert any("open lengths are compiled as 1" in line for line in lines)
    sdk = compiler(f"import sys; print({TOOL_SAYS!r}, file=sys.stderr); print({FIGURES!r})")
    note = "open lengths were compiled as 1: --shape x=1,?,8 gives others"
    for shape, is_told in (((), True), (("--shape", "x=1,4,8"), False)):
        assert (note in run(capsys, "profile", model, "--sdk", sdk, *shape).out) is is_told
    refused = run(capsys, "compare", model, model, "--on", "npu", "--sdk", sdk)
    assert "give --shape x=1,?,8" in refused.failed_in_one_sentence(2)


def test_more_operators_than_the_compiler_takes_are_told_before_and_after(
    tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "few.toml"
    target.write_text('name = "few"\nsummary = "takes few"\nmost_operators = 150\n')
    lines = first_lines(capsys, DEMO, "--target", target)
    limit = "the compiler fails on more than about 150"
    told = [line for line in lines if line.startswith("few, error")]
    assert told == [
        f"few, error: prefill_8: 122 operators, 186 after a conversion: {limit}",
        f"few, error: decode: 145 operators, 248 after a conversion: {limit}",
    ]
    shown = run(capsys, "convert", DEMO, "--target", target, "--dry-run").out
    assert f"few, error: prefill_8: 186 operators: {limit}" in shown


@pytest.mark.parametrize(
    ("chip", "cache", "told"),
    [
        ("Tensor_G4", "1,2,16,8", "language models are known to run on Tensor_G5 only"),
        ("Tensor_G5", "1,2,16,8", ""),
        ("MT6878", "1,16,2,8", "the compiler crashes on caches that are not transposed"),
        ("MT6878", "1,2,16,8", ""),
        ("MT6993", "1,16,2,8", ""),
    ],
)
def test_faults_of_single_chips_are_told_where_they_apply(
    tmp_path: Path, capsys: Captured, chip: str, cache: str, told: str
) -> None:
    text = f"""
signature decode = #0 (kv_cache_k_0=%k, mask=%m) -> (kv_cache_k_0=%y, m=%z)
subgraph decode (%k: float32[{cache}], %m: float32[1,1,1,16]) {{
  %y: float32[{cache}] = ABS(%k)
  %z: float32[1,1,1,16] = ABS(%m)
  return %y, %z
}}
"""
    assert load_target(chip).chip == chip
    lines = first_lines(capsys, written(tmp_path, text), "--target", chip)
    assert any(", error: " in line for line in lines) is bool(told)
    assert told in "".join(lines)


@pytest.mark.slow
def test_qualcomm_s_compiler_leaves_what_it_names(tmp_path: Path, capsys: Captured) -> None:
    require_qnn()
    (shown,) = run(capsys, "profile", written(tmp_path, MIXED), "--json").json["profiles"]
    (signature,) = shown["signatures"]
    assert (signature["taken"], signature["operators"]) == (2, 3)
    (left,) = signature["on_cpu"]
    assert (left["operator"], left["index"], left["result"]) == ("FLOOR_MOD", 0, "rest")
    assert "FLOAT_32" in left["reason"]
    assert shown["versions"].keys() >= {"qairt", "qnn"}
