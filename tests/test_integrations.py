"""Models from litert-torch come in and go out as what they are."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_runs import DEMO

import edge_opt
from edge_opt.base.errors import UsageError
from edge_opt.comparison.golden import record


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
    result = edge_opt.convert(given, verify="none")
    made = result.exported
    assert type(made) is kind
    assert len(result.converted) == 5
    assert given.content == DEMO.read_bytes(), "the given model stays as it is"
    assert edge_opt.compare(DEMO.read_bytes(), made.content).bitwise
    assert made.content != given.content


def test_all_functions_take_an_exported_model(tmp_path: Path) -> None:
    given = Exported(DEMO.read_bytes())
    made = edge_opt.convert(given, verify="none").exported
    assert edge_opt.compare(given, made).bitwise
    assert len(edge_opt.inspect(given).attention) == 5
    record(given, tmp_path / "golden.npz")
    edge_opt.testing.assert_golden(made, tmp_path / "golden.npz")


@pytest.mark.parametrize("function", [edge_opt.convert, edge_opt.inspect])
def test_anything_else_is_refused_by_name(function: Callable[..., object]) -> None:
    with pytest.raises(
        UsageError, match=r"builtins\.dict is not a model: give a \.tflite file, .* litert_torch\.convert"
    ):
        function({})


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
    made = edge_opt.convert(exported, require_all=True).exported
    assert type(made) is type(exported)
    assert np.array_equal(exported(x.numpy()), made(x.numpy()))
