"""The library: its public names, cheap to import and typed; in a notebook it prints little, and takes exports."""

import copy
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import DEMO

import edge_opt
from edge_opt.base.errors import UsageError
from edge_opt.comparison.golden import record
from edge_opt.ir import DType, Operator, Tensor, to_bytes

HEAVY = ("numpy", "flatbuffers", "ai_edge_litert", "rich", "typer", "torch", "tensorflow")


def apart(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_else() -> None:
    loaded = apart("import edge_opt, sys; print(*sys.modules)").split()
    ours = [name for name in loaded if name.startswith("edge_opt.")]
    assert ours == []
    assert not {name.split(".")[0] for name in loaded} & set(HEAVY)


def test_every_public_name_is_found_by_name_and_by_from_import() -> None:
    names = edge_opt.__all__
    by_name = "; ".join(f"edge_opt.{name}" for name in names)
    by_import = "; ".join(
        f"from edge_opt import {name}; assert {name} is edge_opt.{name}" for name in names
    )
    codes = f"{by_name}; {by_import}", f"{by_import}; {by_name}"
    assert [apart(f"import edge_opt; {code}") for code in codes] == [""] * 2


def test_no_submodule_hides_a_public_function() -> None:
    assert set(edge_opt.__all__) <= set(dir(edge_opt)), "also names that are not loaded yet"
    functions = [name for name in edge_opt.__all__ if callable(getattr(edge_opt, name))]
    hidden = [
        name for name in functions if importlib.util.find_spec(f"edge_opt.{name}") is not None
    ]
    assert functions
    assert hidden == []
    with pytest.raises(AttributeError, match=r"module 'edge_opt' has no attribute 'converte'"):
        _ = edge_opt.converte  # type: ignore[attr-defined]


def test_help_shows_every_option_of_convert_with_its_type_and_default_and_explains_it() -> None:
    shown = inspect.signature(edge_opt.convert).parameters
    options = {name: entry for name, entry in shown.items() if entry.kind is entry.KEYWORD_ONLY}
    assert len(options) == 13
    assert all(entry.annotation is not entry.empty for entry in options.values())
    arguments = str(inspect.getdoc(edge_opt.convert)).partition("Args:")[2].partition("Raises:")[0]
    assert set(re.findall(r"^ {4}(\w+): ", arguments, re.MULTILINE)) == set(shown)


TYPED = """
import edge_opt
from edge_opt import ConversionResult

result: ConversionResult = edge_opt.convert("a.tflite", require_all=True)
differs: bool = edge_opt.compare("a.tflite", "b.tflite").bitwise
version: str = edge_opt.__version__
shape = edge_opt.shapes.broadcast((1, 2), (3, 1))
edge_opt.convert("a.tflite", overwrite="yes")
edge_opt.converte("a.tflite")
"""


@pytest.mark.slow
def test_type_checkers_see_the_real_types(tmp_path: Path) -> None:
    """Needs no model, but mypy takes its time."""
    if "site-packages" not in Path(str(edge_opt.__file__)).parts:
        pytest.skip("an editable install is invisible to mypy; .ci/run installs a wheel")
    (tmp_path / "user.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, done.stdout
    assert errors[0].startswith("user.py:9:")
    assert "[arg-type]" in errors[0]
    assert errors[1].startswith("user.py:10:")
    assert "[attr-defined]" in errors[1]


def test_what_a_notebook_prints_of_an_object_is_short() -> None:
    model = edge_opt.load(DEMO)
    result = edge_opt.convert(model, dry_run=True, verify="none")
    operator = model.subgraphs[0].operators[0]
    shown = [model, model.table, model.subgraphs[0], model.metadata[0], model.buffers[1], result]
    shown += [edge_opt.inspect(DEMO), edge_opt.compare(DEMO, DEMO)]
    for thing in (*shown, model.operator_codes[0], operator.options):
        assert 0 < len(repr(thing)) < 500, type(thing)
    widest = [Tensor("layer/" * 800 + "\x1b[2J\n", (1, 2), DType.INT8) for _ in range(40)]
    joined = repr(Operator(operator.code, widest, widest[:1]))
    assert len(joined) < 500
    assert "37 more" in joined
    assert joined.isprintable()
    state = Tensor("model/x", (1, 2), DType.INT8)
    assert repr(Operator(model.operator_code("ABS"), [state, None], [state])) == (
        "Operator(ABS('model/x', none) -> 'model/x' INT8[1, 2])"
    )
    assert "prefill_8: 122 operators" in repr(model)
    assert repr(edge_opt.Model()) == "Model(in memory, empty; 0 subgraphs in all)"
    assert "5 of 5 sites converted" in repr(result)


def test_options_of_another_type_are_refused_before_the_work_and_numbers_of_numpy_are_numbers() -> (
    None
):
    with pytest.raises(
        edge_opt.UsageError, match="verification 'fully' does not exist, did you mean 'full'"
    ):
        edge_opt.convert(DEMO, dry_run=True, verify="fully")  # type: ignore[arg-type]
    compared: dict[str, Any] = {"seed": np.int64(3), "atol": np.float32(0.5)}
    assert json.loads(json.dumps(edge_opt.compare(DEMO, DEMO, **compared).to_dict()))["seed"] == 3


def test_operators_are_a_sequence_and_signatures_have_names() -> None:
    model = edge_opt.load(DEMO)
    decode = model.signatures["decode"].subgraph
    assert decode is model.signatures[1].subgraph
    assert [*decode] == [*decode.operators]
    assert len(decode.operators) == len(decode) == 145
    assert [*decode.operators[-2:]] == [*decode][-2:]
    assert repr(decode.operators[1]).startswith(f"Operator({decode.operators[1].name}")
    with pytest.raises(KeyError, match="no signature 'decod', there are: prefill_8, decode"):
        model.signatures["decod"]


def test_a_deep_copy_is_the_same_model_and_is_edited_apart() -> None:
    model = edge_opt.load(DEMO)
    before = to_bytes(model)
    twin = copy.deepcopy(model)
    assert to_bytes(twin) == before
    edge_opt.convert(twin, verify="none")
    twin.subgraphs[0].tensors[0].name = "renamed"
    for operator in twin.subgraphs[0].operators:
        if operator.name == "SOFTMAX" and operator.options is not None:
            operator.options.set("beta", 2.0)
    assert to_bytes(model) == before
    assert to_bytes(twin) != before


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
def test_functions_take_an_export_and_convert_returns_its_kind(
    kind: type[Exported], tmp_path: Path
) -> None:
    given = kind(DEMO.read_bytes())
    result = edge_opt.convert(given, verify="none")
    made = result.exported
    assert type(made) is kind
    assert len(result.converted) == len(edge_opt.inspect(given).attention) == 5
    assert given.content == DEMO.read_bytes(), "the given model stays as it is"
    assert edge_opt.compare(given, made).bitwise
    assert made.content != given.content
    record(given, tmp_path / "golden.npz")
    edge_opt.testing.assert_golden(made, tmp_path / "golden.npz")


@pytest.mark.parametrize("function", [edge_opt.convert, edge_opt.inspect])
def test_anything_else_is_refused_by_name(function: Callable[..., object]) -> None:
    with pytest.raises(
        UsageError, match=r"builtins\.dict is not a model: give a \.tflite file, .* litert_"
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
