"""compare --on npu: both models run as the NPU computes them; a compiler or emulator that fails is a verdict."""

import json
import math
import shutil
import time
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from cli_runs import DEMO, NO_ATTENTION, QUANTIZED, Captured, Patch, run
from pretend_npu import Compilers, emulator, require_qnn, say, without_probe
from text_parser import parse

from edge_opt.comparison.findings import ComparisonReport
from edge_opt.conversion import convert
from edge_opt.ir import Constants, DType, Model, load, save, to_bytes
from edge_opt.npu import Compiler, CompilerMissingError, compare_on_npu
from edge_opt.npu.compiler import cut_entry_point
from edge_opt.npu.qualcomm import Qualcomm
from edge_opt.testing import assert_equivalent

FINALIZED = ("interface\tknown\t2.40.0\t5.51.0", "finalized\tg\t0")
RUNNING = "running\tg"


@pytest.fixture
def other(model: Path) -> Path:
    return shutil.copy(model, model.with_name("after.tflite"))


def warnings(report: ComparisonReport) -> list[str]:
    return [text for text in report.remarks if text.startswith("warning: ")]


def test_equal_models_are_as_exact_as_the_cpu(
    model: Path, other: Path, compiler: Compilers
) -> None:
    found = compare_on_npu(model, other, Compiler(sdk=compiler(emulator())))
    assert found.equal
    (output,) = found.signatures[0].outputs
    assert output.db == (math.inf, math.inf)
    assert warnings(found) == []
    json.dumps(found.to_dict(), allow_nan=False)


def test_models_without_signatures_are_compared_by_their_tensors(
    tmp_path: Path, compiler: Compilers
) -> None:
    for name in ("one", "other"):
        graph = parse(NO_ATTENTION.replace("subgraph main", "subgraph graph"))
        graph.signatures.clear()
        save(graph, tmp_path / name)
    found = compare_on_npu(tmp_path / "one", tmp_path / "other", Compiler(sdk=compiler(emulator())))
    assert [(signature.name, signature.bitwise) for signature in found.signatures] == [
        ("main", True)
    ]


def test_a_differing_number_is_found(
    model: Path, other: Path, compiler: Compilers, capsys: Captured
) -> None:
    sdk = compiler(emulator("array.flat[0] += 2.0 ** -20 * is_second"))
    command = ("compare", model, other, "--on", "npu", "--sdk", sdk, "--json")
    shown = run(capsys, *command)
    assert (shown.code, shown.json["on"]) == (1, "npu")
    assert shown.json["signatures"][0]["outputs"][0]["differing"] == 1
    assert "1 of 4 elements differ" in shown.json["differences"][0]
    assert run(capsys, *command, "--atol", 2.0**-19).code == 0


def test_models_far_from_the_cpu_are_warned_of(
    model: Path, other: Path, compiler: Compilers, capsys: Captured
) -> None:
    sdk = compiler(emulator("array *= 0.5"))
    for b in (model, other):
        found = compare_on_npu(model, b, Compiler(sdk=sdk))
        assert found.equal
        assert found.bitwise
        (warning,) = warnings(found)
        assert "output 'y': a is 6.0 dB and b 6.0 dB from the CPU's kernels" in warning
    shown = run(capsys, "compare", model, model, "--on", "npu", "--sdk", sdk)
    assert shown.code == 0
    assert "warning: signature 'main', output 'y': a is 6.0 dB" in shown.out
    found = compare_on_npu(
        model, other, Compiler(sdk=compiler(emulator("array *= 1 - 0.5 * is_second"))), atol=1e9
    )
    (warning,) = warnings(found)
    assert found.equal
    assert "a is inf dB and b 6.0 dB" in warning


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        (f"{say(*FINALIZED, RUNNING)}; __import__('os').abort()", "the emulator crashes .*SIGABRT"),
        (f"{say(*FINALIZED)}; __import__('os').abort()", r"the compiler ends \(killed by SIGABRT"),
        (
            say("interface\tknown\t2.40.0\t5", "finalized\tg\t1002"),
            "the compiler refuses the graph",
        ),
        (say("interface\tunknown\t3.1.0\t5"), "does not support QNN interface 3.1.0"),
        (
            say(*FINALIZED, "missing\t0", "running\tg", "ran\tg\t0"),
            "expects input '0' in another type or",
        ),
        (say(*FINALIZED, RUNNING, "ran\tg\t6031\t1"), "error 6031"),
        (emulator(taken=8), "takes 8 of 9 operators"),
        (emulator("array = array[..., :1]"), "gives no output '.*' of its type and size"),
    ],
)
def test_what_goes_wrong_in_compiler_or_emulator_is_a_verdict_in_one_sentence(
    model: Path, other: Path, compiler: Compilers, program: str, verdict: str
) -> None:
    with pytest.raises(AssertionError, match=verdict):
        assert_equivalent(model, other, on="npu", compiler=Compiler(sdk=compiler(program)))


def test_a_graph_that_is_given_up_while_it_is_compiled_holds_nobody(
    model: Path, compiler: Compilers
) -> None:
    started, slow = time.monotonic(), "import time; time.sleep(1)\n" + dedent(emulator())
    with (
        pytest.raises(KeyError),
        Qualcomm().emulating(load(model), "main", Compiler(sdk=compiler(slow))),
    ):
        raise KeyError
    assert time.monotonic() - started < 30, "it waited for folders that nobody names any more"


def test_without_a_probe_nothing_starts(
    model: Path, compiler: Compilers, monkeypatch: Patch
) -> None:
    sdk = compiler("raise SystemExit(6)")
    without_probe(monkeypatch)
    with pytest.raises(CompilerMissingError, match="no C compiler"):
        compare_on_npu(model, model, Compiler(sdk=sdk))


def test_an_entry_point_keeps_the_names_of_what_it_reads_and_computes() -> None:
    (signature,) = cut_entry_point(load(DEMO), "decode").signatures
    original = load(DEMO).signatures["decode"]
    assert signature.inputs.keys() == original.inputs.keys()
    assert signature.outputs.keys() == original.outputs.keys()
    text = (
        "subgraph main (%x: float32[4], %u: float32[4]) { %y: float32[4] = ABS(%x) return %y, %u }"
    )
    (signature,) = cut_entry_point(parse(text), "main").signatures
    assert ([*signature.inputs], [*signature.outputs]) == (["x"], ["y"])
    same = parse(
        "subgraph main (%a: float32[4], %b: float32[4]) { %y: float32[4] = ADD(%a, %b) return %y }"
    )
    for tensor in same.subgraphs[0].inputs:
        tensor.name = "x"
    assert [*cut_entry_point(same, "main").signatures[0].inputs] == ["x#0", "x#1"]


def ending_in(end: str, number: float = 0) -> Model:
    """A model whose second output is its input `x`, the computed `y`, or a constant of this number."""
    model = parse(
        f"""subgraph main (%x: float32[4]) {{
          %z: float32[4] = ABS(%x)
          %y: float32[4] = EXP(%x)
          return %z, %{"y" if end == "y" else "x"} }}"""
    )
    if end == "constant":
        constant = Constants(model).make("c", np.full(4, number, np.float32), DType.FLOAT32)
        model.subgraphs[0].outputs[1] = model.subgraphs[0].add_tensor(constant)
    return model


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        (ending_in("x"), ending_in("x"), ""),
        (
            ending_in("constant", 1),
            ending_in("constant", 3),
            "4 of 4 elements differ, by at most 2 ",
        ),
        (ending_in("x"), ending_in("y"), "4 of 4 elements differ"),
    ],
    ids=["input", "other constant", "input or computed"],
)
def test_outputs_that_no_operator_computes_are_compared_too(
    compiler: Compilers, a: Model, b: Model, difference: str
) -> None:
    found = compare_on_npu(to_bytes(a), to_bytes(b), Compiler(sdk=compiler(emulator())))
    assert len(found.signatures[0].measured) == 2
    assert len(found.differences()) == bool(difference)
    assert difference in "".join(found.differences())


def test_the_command_has_a_row_per_signature(
    tmp_path: Path, compiler: Compilers, capsys: Captured
) -> None:
    after = tmp_path / "after.tflite"
    convert(QUANTIZED, after, verify="none")
    options = ("--on", "npu", "--sdk", compiler(emulator()), "--soc", "SM8650")
    shown = run(capsys, "compare", QUANTIZED, after, *options)
    assert shown.code == 0, shown
    assert "compiled for SM8650" in shown.out
    assert [line.split()[:2] for line in shown.out.splitlines()[1:3]] == [
        ["prefill_8", "6"],
        ["decode", "7"],
    ]


@pytest.mark.slow
def test_the_real_emulator_gives_the_same_bits_before_and_after(tmp_path: Path) -> None:
    require_qnn()
    after = tmp_path / "after.tflite"
    convert(QUANTIZED, after)
    found = assert_equivalent(
        QUANTIZED, after, on="npu", compiler=Compiler(flags=("--qualcomm_optimization_level=O3",))
    )
    outputs = [output for signature in found.signatures for output in signature.outputs]
    assert all(min(output.db or ()) > 30 for output in outputs)
    # A model whose numbers are others is told apart by the same judge.
    with pytest.raises(AssertionError, match="elements differ"):
        assert_equivalent(QUANTIZED, DEMO, on="npu", signatures="decode")
