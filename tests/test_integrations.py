"""Models from litert-torch come in and go out as what they are; LiteRT's ahead-of-time pipeline takes a component."""

from pathlib import Path

import numpy as np
import pytest

import edge_opt
from edge_opt.conversion import ConversionResult
from edge_opt.integrations import aot, litert_torch
from edge_opt.ir import load
from edge_opt.schema.errors import UsageError

DEMO = Path(__file__).parent.parent / "testdata" / "demo_gemma3.tflite"


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
    made = edge_opt.convert(given, verify="none")
    assert type(made) is kind
    assert given.content == DEMO.read_bytes(), "the given model stays as it is"
    assert edge_opt.compare(DEMO.read_bytes(), made.content).bitwise
    assert made.content != given.content


def test_optimize_tells_what_was_done_too() -> None:
    made, result = litert_torch.optimize_with_report(Exported(DEMO.read_bytes()), verify="none")
    assert isinstance(result, ConversionResult)
    assert len(result.converted) == 5
    assert isinstance(made, Exported)


def test_anything_else_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"builtins\.dict is no exported model: give what litert_torch\.convert"
    ):
        edge_opt.convert({})  # type: ignore[call-overload]


def test_the_ahead_of_time_component_converts_the_model_it_is_given(tmp_path: Path) -> None:
    types = pytest.importorskip("ai_edge_litert.aot.core.aot_types", reason="needs tqdm, on Linux")
    component = aot.transforms(verify="none")
    output = types.Model.create_from_path(tmp_path / "out.tflite")
    component(types.Model.create_from_path(DEMO), output, None)
    assert component.component_name == "edge_opt"
    assert [signature.key for signature in load(output.path).signatures] == ["prefill_8", "decode"]
    assert len(component.results[0].converted) == 5
    in_memory = types.Model.create_from_path(tmp_path / "second.tflite")
    component(types.Model.create_from_bytes(DEMO.read_bytes()), in_memory)
    assert (tmp_path / "second.tflite").read_bytes() == (tmp_path / "out.tflite").read_bytes()


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
    made, result = litert_torch.optimize_with_report(exported)
    assert type(made) is type(exported)
    assert [site.heads for site in result.converted] == [4]
    assert np.array_equal(exported(x.numpy()), made(x.numpy()))
