"""Models from litert-torch come in and go out as what they are; LiteRT's ahead-of-time pipeline takes a component."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import DEMO, QUANTIZED
from pretend_npu import executable
from sdk import require_qnn

import edge_opt
from edge_opt.integrations import aot
from edge_opt.ir import load
from edge_opt.npu.sdk import find_libraries, search_path
from edge_opt.output.errors import UsageError
from edge_opt.targets import load_target


class Exported:
    """As litert-torch's model: made of bytes, gives them back."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __call__(self, *args: object, **kwargs: object) -> object:
        return args, kwargs

    def export(self, path: str) -> None:
        Path(path).write_bytes(self.content)

    def model_content(self) -> bytes:
        return self.content


class OlderExported(Exported):
    """As ai-edge-torch's, whose bytes had another name."""

    model_content = None  # type: ignore[assignment]

    def tflite_model(self) -> bytes:
        return self.content


@pytest.mark.parametrize("kind", [Exported, OlderExported])
def test_convert_gives_back_the_kind_it_was_given(kind: type[Exported]) -> None:
    given = kind(DEMO.read_bytes())
    results: list[edge_opt.ConversionResult] = []
    made = edge_opt.convert(given, verify="none", on_result=results.append)
    assert type(made) is kind
    assert [len(result.converted) for result in results] == [5]
    assert given.content == DEMO.read_bytes(), "the given model stays as it is"
    assert edge_opt.compare(DEMO.read_bytes(), made.content).bitwise
    assert made.content != given.content


def test_anything_else_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"builtins\.dict is no exported model: give what litert_torch\.convert"
    ):
        edge_opt.convert({})  # type: ignore[call-overload]


@pytest.fixture
def qualcomm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """LiteRT's Qualcomm target, its plugin finding the libraries that EDGE_OPT_QNN names."""
    require_qnn()
    targets = pytest.importorskip("ai_edge_litert.aot.vendors.qualcomm.target", reason="needs tqdm, on Linux")
    monkeypatch.setenv("LD_LIBRARY_PATH", search_path(find_libraries(None), scratch=tmp_path))
    return targets.Target(targets.SocModel.SM8750)


def compiled(result: Any) -> list[tuple[int, int, int]]:
    """(operators taken, in all, partitions) of each subgraph, and that nothing but the NPU's own operator is left."""
    ((_, model),) = result.models_with_backend
    assert not result.failed_backends
    for _, graph in load(model.path).entry_points():
        assert [operator.name for operator in graph.operators] == ["CUSTOM"]
    return [
        (stats.num_ops_offloaded, stats.num_total_ops, stats.num_partitions_offloaded)
        for stats in model.partition_stats.subgraph_stats
    ]


@pytest.mark.slow
def test_one_call_does_what_aot_compile_does_with_edge_opt_in_front(tmp_path: Path, qualcomm: Any) -> None:
    result = aot.aot_compile(
        QUANTIZED, tmp_path, target=qualcomm, edge_opt_target="qualcomm-htp", keep_going=False
    )
    converted = tmp_path / "demo_gemma3_a16w8.edge_opt.tflite"
    assert len(load(converted).subgraphs[0]) > len(load(QUANTIZED).subgraphs[0])
    for taken, operators, partitions in compiled(result):
        assert taken == operators > 100
        assert partitions == 1


FLAGGED = replace(load_target("qualcomm-htp"), compiler_flags={"qualcomm_optimization_level": "O1"})


def called_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of LiteRT's compiler for a conversion with `FLAGGED`; a stand-in takes the compiler's place."""
    common = pytest.importorskip("ai_edge_litert.aot.core.common", reason="needs tqdm, on Linux")
    targets = importlib.import_module("ai_edge_litert.aot.vendors.qualcomm.target")
    program = f"""
        import pathlib, sys
        given = dict(one.partition('=')[::2] for one in sys.argv[1:])
        pathlib.Path(given['--o']).write_bytes(pathlib.Path(given['--model']).read_bytes())
        pathlib.Path({str(folder / "called")!r}).write_text(chr(10).join(sys.argv[1:]))
    """
    tool = executable(folder / "tool", program)
    monkeypatch.setattr(common, "get_resource", lambda _: tool)
    soc = targets.Target(targets.SocModel.SM8750)
    aot.aot_compile(
        QUANTIZED,
        folder / "out",
        target=soc,
        edge_opt_target=FLAGGED,
        convert_options={"verify": "none"},
        subgraphs_to_compile=[0],
        keep_going=False,
    )
    return (folder / "called").read_text().splitlines()


def test_the_targets_flags_arrive_at_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = called_with(tmp_path, monkeypatch)
    assert "--qualcomm_optimization_level=O1" in called
    assert {"--soc_manufacturer=Qualcomm", "--soc_model=SM8750", "--subgraphs=0"} <= {*called}


@pytest.mark.slow
def test_the_qualcomm_compiler_minds_the_flags(tmp_path: Path, qualcomm: Any) -> None:
    sizes = []
    for name, target in (("default", "qualcomm-htp"), ("flagged", FLAGGED)):
        result = aot.aot_compile(
            QUANTIZED, tmp_path / name, target=qualcomm, edge_opt_target=target, keep_going=False
        )
        compiled(result)
        sizes.append(result.models[0].path.stat().st_size)
    assert sizes[0] != sizes[1], "another level makes another graph"


def test_a_target_and_a_config_at_once_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert.aot.aot_compile", reason="needs tqdm, on Linux")
    with pytest.raises(UsageError, match="both a target and a config are given"):
        aot.aot_compile(QUANTIZED, tmp_path, target=object(), config=object())


@pytest.mark.slow
def test_a_fresh_export_of_litert_torch_is_split_and_computes_the_same() -> None:
    torch = pytest.importorskip("torch", reason="extra torch is not installed")
    exporter = pytest.importorskip("litert_torch", reason="extra torch is not installed")

    class Attention(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: object) -> object:
            return self.attention(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    x = torch.randn(1, 10, 32)
    exported = exporter.convert(Attention().eval(), (x,))
    made = edge_opt.convert(exported, require_match=True)
    assert type(made) is type(exported)
    assert np.array_equal(exported(x.numpy()), made(x.numpy()))
