"""Layers in 4 bits: the least harmful products are rounded before the export, and stored as rounded after it."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from cli_runs import Patch

from edge_opt.base.errors import EdgeOptError, UsageError
from edge_opt.base.work import CHECKPOINT
from edge_opt.building import network, rounding
from edge_opt.building.checkpoint import Streamed
from edge_opt.building.codes import read_rounded
from edge_opt.building.gptq import BOTTOM, TOP, Grid, Rounder, damping_for
from edge_opt.building.logits import by_row
from edge_opt.building.narrowing import narrow_layers
from edge_opt.building.network import PRODUCTS, Network, Product, by_onednn, check_family
from edge_opt.building.plan import PLAN, Choice, Plan, allowed_for, choose, plan_lines
from edge_opt.building.rounding import checked_plan, grids_of
from edge_opt.building.stages import Job
from edge_opt.ir import Buffer, DType, Model, Tensor, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.schema import Data

ROWS, COLUMNS = 12, 16
RNG = np.random.default_rng(3)


def grid_of(seed: int) -> Grid:
    """Random codes whose rows have every smallest code from -8 to 0."""
    random = np.random.default_rng(seed)
    largest = np.resize(np.arange(9), ROWS)[:, None]
    codes = random.integers(-largest, largest, (ROWS, COLUMNS), endpoint=True).clip(BOTTOM, TOP)
    codes[:, :1] = -largest
    return Grid(codes.astype(np.int8), random.uniform(0.001, 0.1, ROWS).astype(np.float32))


def exported(grid: Grid) -> tuple[str, str, str]:
    """Codes, scales and zero points of the same weights as the exporter quantizes them, by the largest of each row."""
    values = grid.values().astype(np.float32)
    scales = np.maximum(np.abs(values).max(axis=1), np.float32(1e-9)) / np.float32(127)
    codes = np.rint(values / scales[:, None]).astype(int)
    return (
        ", ".join(map(str, codes.ravel())),
        ", ".join(map(str, scales)),
        ", ".join("0" * len(codes)),
    )


def model(*grids: Grid, bias: str = "") -> Model:
    """Two entry points with one product for each grid, all of one input."""
    graphs = []
    rows = len(grids[0].codes)
    for number, name in enumerate(("prefill", "decode")):
        lines = []
        for place, grid in enumerate(grids):
            codes, scales, zeros = exported(grid)
            added = (
                bias.format(*(float(scale) * 0.001 for scale in scales.split(", ")))
                if bias
                else "none"
            )
            lines.append(
                f"  %y{place}: int16[1,{rows}] q(0.05, 0) = FULLY_CONNECTED(%x, int8[{rows},{COLUMNS}]{{{codes}}} "
                f"q([{scales}], [{zeros}], axis 0), {added}) {{keep_num_dims: true}}\n"
            )
        results = ", ".join(f"y{place}=%y{place}" for place in range(len(grids)))
        returned = ", ".join(f"%y{place}" for place in range(len(grids)))
        graphs.append(
            f"signature {name} = #{number} (x=%x) -> ({results})\n"
            f"subgraph {name} (%x: int16[1,{COLUMNS}] q(0.001, 0)) {{\n{''.join(lines)}  return {returned}\n}}\n"
        )
    return parse("".join(graphs))


def run(found: Model, signature: str, codes: Any) -> dict[str, Any]:
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    runner = Interpreter(model_content=to_bytes(found), experimental_op_resolver_type=plain)
    return dict(runner.get_signature_runner(signature)(x=codes))


def test_weights_are_stored_as_they_were_rounded_not_as_they_were_exported() -> None:
    grids = {f"layer{seed}": grid_of(seed) for seed in range(3)}
    found = model(*grids.values())
    narrow_layers(found, grids, {})
    for graph in found.subgraphs:
        for operator, grid in zip(graph, grids.values(), strict=True):
            weights = operator.input(1)
            assert weights.dtype is DType.INT4
            assert weights.buffer is not None
            assert weights.buffer.data is not None
            packed = np.frombuffer(bytes(weights.buffer.data.view()), np.int8)
            codes = np.stack([packed << 4 >> 4, packed >> 4], axis=1).ravel()
            np.testing.assert_array_equal(codes.reshape(ROWS, COLUMNS), grid.codes)
            assert weights.quantization is not None
            np.testing.assert_array_equal(weights.quantization.scale, grid.scales)


def test_both_entry_points_keep_sharing_their_weights() -> None:
    grid = grid_of(1)
    found = model(grid)
    one, other = (next(iter(graph)) for graph in found.subgraphs)
    other.input(1).buffer = one.input(1).buffer
    narrow_layers(found, {"layer": grid}, {})
    assert one.input(1).buffer is other.input(1).buffer


def test_a_bias_in_codes_takes_the_scales_of_the_narrow_weights() -> None:
    grid = grid_of(2)
    real = RNG.normal(0, 0.5, ROWS)
    scales = [float(scale) * 0.001 for scale in exported(grid)[1].split(", ")]
    codes = np.rint(real / scales).astype(int)
    zeros = ", ".join("0" * ROWS)
    bias = (
        (
            f"int64[{ROWS}]{{{', '.join(map(str, codes))}}} q([{', '.join(map(str, scales))}], [{zeros}], axis 0)"
        )
        .replace("{", "{{")
        .replace("}", "}}")
    )
    old, new = model(grid, bias=bias), model(grid, bias=bias)
    narrow_layers(new, {"layer": grid}, {"layer": real.astype(np.float32)})
    x = RNG.integers(-3000, 3000, (1, COLUMNS)).astype(np.int16)
    wanted = (x * 0.001) @ grid.values().T + real
    # The quantizer clips the bias of a row of zeros.
    rows = np.abs(grid.codes).max(axis=1) > 0
    before = run(old, "decode", x)["y0"] * 0.05
    assert np.abs(before - wanted)[0, rows].max() <= 2 * 0.05
    after = run(new, "decode", x)["y0"] * 0.05
    assert np.abs(after - wanted).max() <= 0.05
    with pytest.raises(EdgeOptError, match=r"has a bias '.*' that fits 0 products of the checkp"):
        narrow_layers(model(grid, bias=bias), {"layer": grid}, {})


def biased(grid: Grid, *reals: Any) -> Model:
    """Products with these weights, each with its own bias, clipped as the quantizer does."""
    scales = [float(scale) * 0.001 for scale in exported(grid)[1].split(", ")]
    found = model(*[grid] * len(reals), bias=f"float32[{ROWS}]{{{{{', '.join('0' * ROWS)}}}}}")
    for graph in found.subgraphs:
        for product, real in zip(graph, reals, strict=True):
            codes = np.clip(np.rint(real / np.array(scales)), -(2**31) + 1, 2**31 - 1)
            buffer = Buffer(Data(codes.astype(np.int64).tobytes()))
            bias = Tensor("bias", (ROWS,), DType.INT64, quantization=by_row(scales), buffer=buffer)
            graph.set_input(product, 2, graph.add_tensor(bias))
    return found


def test_products_of_the_same_weights_keep_their_own_biases() -> None:
    grid = grid_of(1)
    grid.codes[:, 0] = -8
    reals = [RNG.normal(0, 5, ROWS).astype(np.float32) for _ in range(2)]
    found = biased(grid, *reals)
    narrow_layers(found, {"a": grid, "b": grid}, {"b": reals[1], "a": reals[0]})
    x = RNG.integers(-3000, 3000, (1, COLUMNS)).astype(np.int16)
    after = run(found, "decode", x)
    for place, real in enumerate(reals):
        wanted = (x * 0.001) @ grid.values().T + real
        assert np.abs(after[f"y{place}"] * 0.05 - wanted).max() <= 0.05
    zeros = Grid(np.zeros_like(grid.codes), grid.scales)
    with pytest.raises(EdgeOptError, match="that fits 2 products of the checkpoint, not one"):
        narrow_layers(
            biased(zeros, *reals), {"a": zeros, "b": zeros}, {"a": reals[0], "b": reals[1]}
        )


def test_a_bias_keeps_its_value_where_weights_are_zeros_or_too_fine_for_it() -> None:
    grid = grid_of(2)
    grid.codes[:, 0] = -8
    grid.codes[3] = 0
    grid.scales[3] = 1
    grid.scales[5] = 1e-6
    real = RNG.normal(0, 0.5, ROWS).astype(np.float32)
    real[3] = 0.01
    real[5] = 30
    found = biased(grid, real)
    narrow_layers(found, {"layer": grid}, {"layer": real})
    for graph in found.subgraphs:
        (product,) = graph
        bias = product.input(2)
        assert bias.quantization is not None
        np.testing.assert_allclose(bias.array() * bias.quantization.scale, real, atol=1e-4)
        weights = product.input(1).quantization
        assert weights is not None
        others = [row for row in range(ROWS) if row not in (3, 5)]
        np.testing.assert_array_equal(weights.scale[others], grid.scales[others])
    x = RNG.integers(-3000, 3000, (1, COLUMNS)).astype(np.int16)
    wanted = (x * 0.001) @ grid.values().T + real
    assert np.abs(run(found, "decode", x)["y0"] * 0.05 - wanted).max() <= 0.05


@pytest.mark.parametrize("change", [1, 9])
def test_weights_that_are_not_found_by_their_values_are_an_error(change: int) -> None:
    grid = grid_of(4)
    other = Grid(grid.codes, grid.scales * np.float32(1 + change / 100))
    with pytest.raises(
        EdgeOptError, match="no weights of layer as they were rounded, the first of 1"
    ):
        narrow_layers(model(grid), {"layer": other}, {})


def test_few_inputs_for_each_column_take_more_damping() -> None:
    """What a rounding for 128 inputs of 128 columns destroys of other inputs' results, if no few directions rule."""
    random = np.random.default_rng(5)
    mixing = random.normal(size=(128, 128)) / 8
    inputs, others = (random.normal(size=(count, 128)) @ mixing for count in (128, 4096))
    weights = random.normal(size=(64, 128)).astype(np.float32)
    moments = (inputs.T @ inputs).astype(np.float32)

    def destroyed(rounder: Rounder) -> float:
        return float(np.square(others @ (rounder.rounded(weights).values() - weights).T).sum())

    damping = damping_for(128, len(inputs))
    assert destroyed(Rounder(moments, damping)) < 0.97 * destroyed(Rounder(moments))


def test_rounded_weights_make_up_for_what_their_inputs_lost() -> None:
    random = np.random.default_rng(5)
    inputs = random.normal(size=(256, 16)).astype(np.float32)
    mixing = np.eye(16) + random.normal(size=(16, 16)) / 20
    now = (inputs @ mixing).astype(np.float32)
    weights = random.normal(size=(8, 16)).astype(np.float32)
    lost = ((inputs - now) @ weights.T).T @ now
    rounder = Rounder(now.T @ now, damping=0.001)

    def differs(grid: Grid) -> float:
        return float(np.square(inputs @ weights.T - now @ grid.values().T).sum())

    assert differs(rounder.rounded(weights, lost)) < 0.5 * differs(rounder.rounded(weights))


def on_grid(values: Any) -> Grid | None:
    weights = SimpleNamespace(
        model=SimpleNamespace(named_modules=lambda: [("q_proj", None)]),
        read=lambda _, rows=slice(None): values[rows],
    )
    return grids_of(cast(Streamed, weights)).get("q_proj")


@pytest.mark.parametrize("largest", [7, 8])
def test_a_grid_is_recognized_if_its_codes_fit_4_bits(largest: int) -> None:
    """Stored in 4 bits, 8 would be -8."""
    grid = grid_of(6)
    grid.codes[0, :3] = -8, largest, 1
    found = on_grid(grid.values())
    if largest == 8:
        assert found is None
    else:
        assert found is not None
        np.testing.assert_allclose(found.values(), grid.values(), rtol=1e-6)


@pytest.mark.parametrize("bits", [0, 16])
def test_a_grid_is_recognized_as_bfloat16_stores_it(bits: int) -> None:
    random = np.random.default_rng(1)
    codes = random.integers(BOTTOM, TOP, (96, 576), endpoint=True).astype(np.float32)
    scales = random.uniform(0.005, 0.05, (96, 1)).astype(np.float32)
    codes[5] = 0
    values = codes * scales
    values[5, 0] = 1e-12  # less than the exporter keeps
    half = 1 << bits >> 1
    rows = ((values.view(np.uint32) + half) >> bits << bits).view(np.float32)
    found = on_grid(rows)
    assert found is not None
    np.testing.assert_array_equal(found.codes, codes)
    wanted = np.where(codes.any(axis=1), scales[:, 0], 1)
    np.testing.assert_allclose(found.scales, wanted, rtol=2**-8)
    assert on_grid(random.normal(size=(1, 24)).astype(np.float32)) is None


def test_a_row_that_the_exporter_makes_zeros_is_rounded_to_zeros() -> None:
    weights = RNG.normal(size=(3, COLUMNS)).astype(np.float32)
    weights[1] *= np.float32(1e-12)
    grid = Rounder(np.eye(COLUMNS, dtype=np.float32)).rounded(weights)
    assert [bool(row.any()) for row in grid.codes] == [True, False, True]
    narrow_layers(model(grid), {"layer": grid}, {})


def test_the_allowance_leaves_room_for_activations_and_for_text_of_another_kind() -> None:
    assert 0.01 + 1.3 * allowed_for(1.05) == pytest.approx(math.log(1.05))
    assert allowed_for(1.005) == 0, "what int16 activations alone cost"


def test_the_least_harmful_products_for_their_size_are_chosen_while_together_they_fit() -> None:
    harms = {"q": (0.01, 100), "o": (0.02, 100), "gate_up": (0.005, 1000), "down": (0.5, 1000)}
    measured = [Choice(0, name, count, 8, kl) for name, (kl, count) in harms.items()]

    def together(plan: Plan) -> float:
        """More than the sum of their harms."""
        return 0.01 + 2 * sum(one.harm for one in plan.products if one.bits == 4)

    for allowance, narrow in (
        (2.0, {"q", "gate_up", "o", "down"}),
        (0.08, {"q", "gate_up", "o"}),
        (0.079, {"q", "gate_up"}),
        (0.02, {"gate_up"}),
        (0.019, set()),
        (0.001, set()),
    ):
        plan = choose(measured, together, allowance)
        assert {one.name for one in plan.products if one.bits == 4} == narrow
        assert plan.together == (together(plan) if narrow else None)


def test_the_line_of_products_at_8_bits_tells_costs_only_where_they_were_measured() -> None:
    for kl, line in (
        (0.01, "At 8 bits, for the KL divergence that 4 would cost: o of layer 1 (0.0100)"),
        (None, "At 8 bits: o of layer 1"),
    ):
        assert line in plan_lines(Plan((Choice(0, "o", 9, 4), Choice(1, "o", 9, 8, kl))))


GIVEN = [
    {"layer": 0, "name": "o", "weights": 9, "bits": 4},
    {"layer": 1, "name": "o", "weights": 9, "bits": 8},
]


@pytest.mark.parametrize(
    ("products", "message"),
    [
        ([{**GIVEN[0], "bits": "4"}], r"the plan is not valid: .*`int`.*`\$.products\[0\].bits`; give"),
        ([{**GIVEN[0], "bits": 3}], "has 3 bits for o of layer 0: give 4 or 8"),
        ([{**GIVEN[0], "kl": math.inf}], "has the kl inf for o of layer 0: give a number or null"),
        (GIVEN[:1], "has 1 products, and the checkpoint 2 in 2 layers; o of layer 1 is missing"),
        ([*GIVEN, GIVEN[0]], "has 3 products.*; o of layer 0 is one too many: give the plan of"),
        ([*GIVEN, {**GIVEN[0], "name": "q"}], "has 3 products.*; q of layer 0 is one too many"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused_with_the_product(products: Any, message: str) -> None:
    layers = [[Product(layer, "o", {})] for layer in range(2)]
    network = cast(Network, SimpleNamespace(products=layers))
    with pytest.raises(UsageError, match=message):
        checked_plan({"products": products}, network)


def narrow_of(plan: Plan) -> set[Choice]:
    return {one for one in plan.products if one.bits == 4}


class Rounding:
    """Costs about the sum of harms; what a product costs depends on the plan that it was rounded in."""

    def __init__(self, cost: Callable[[float], float]) -> None:
        self.cost = cost
        self.rounded: list[set[Choice]] = []
        self.measured = 0

    def together(self, plan: Plan) -> float:
        self.measured += 1
        narrow = narrow_of(plan)
        if not self.rounded or not narrow <= self.rounded[-1]:
            self.rounded.append(narrow)
        return (1 + len(self.rounded) / 100) * self.cost(sum(one.harm for one in narrow))


@pytest.mark.parametrize(
    ("cost", "most_rounded"),
    [
        (lambda harm: 0.9 * harm, 1),
        (lambda harm: 1.3 * harm, 1),
        (lambda harm: 0.6 * harm, 2),
        (lambda harm: 8 * harm**2, 1),
    ],
)
def test_a_plan_that_costs_rather_too_much_is_rounded_once_and_a_part_of_it_is_taken(
    cost: Callable[[float], float], most_rounded: int
) -> None:
    rounding = Rounding(cost)
    measured = [Choice(layer, "o", 100, 8, 1e-6 * layer) for layer in range(960)]
    plan = choose(measured, rounding.together, 0.1)
    assert plan.together is not None
    assert 0.095 <= plan.together <= 0.1
    assert len(rounding.rounded) <= most_rounded
    assert rounding.measured <= 5


def test_what_a_chosen_plan_costs_is_measured_as_it_was_rounded_last() -> None:
    rounding = Rounding(float)
    harmful = Choice(1, "o", 100, 8, 0.5)
    plan = choose([Choice(0, "o", 100, 8, 0.01), harmful], rounding.together, 0.1)
    assert harmful not in narrow_of(plan)
    assert len(rounding.rounded) == 2
    assert plan.together == rounding.together(plan)


def test_the_weights_with_the_most_harm_for_their_size_stay_at_8_bits_whatever_is_allowed() -> None:
    rounding = Rounding(lambda harm: 0.6 * harm)
    measured = [Choice(layer, "o", 100, 8, 0.005) for layer in range(20)]
    harmful = Choice(20, "kv", 100, 8, 0.05)
    for allowance in (0.1, 10):
        plan = choose([*measured, harmful], rounding.together, allowance)
        assert narrow_of(plan) == {replace(one, bits=4) for one in measured}
    assert len(rounding.rounded) == 1


def test_nothing_is_measured_if_the_logits_alone_cost_more_than_is_allowed() -> None:
    def never(_: Plan) -> float:
        raise AssertionError

    plan = choose([Choice(0, "o", 100, 8, 0.01)], never, -0.001)
    assert [one.bits for one in plan.products] == [8]


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_modules_that_multiply_by_onednn_give_the_same_and_may_get_other_weights(
    bias: bool,
) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(5, 3, bias=bias)
    inputs = torch.randn(2, 7, 5).transpose(0, 1)
    added = module.bias if bias else 0
    with torch.no_grad(), by_onednn():
        for _ in range(2):
            module.weight = torch.nn.Parameter(torch.randn(3, 5))
            torch.testing.assert_close(module(inputs), inputs @ module.weight.T + added)


@pytest.mark.slow
def test_modules_that_gave_results_again_compute_as_before() -> None:
    """A module that reads its weights from disk when it runs has a function of its own for that."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(2, 2)
    ran: list[Any] = []
    own = module.forward = lambda inputs: ran.append(inputs) or inputs
    inputs = torch.ones(1, 2)
    with network._recalled(network.Product(0, "o", {"o_proj": module}), [inputs]):
        module(inputs)
    assert len(ran) == 1
    assert module.forward is own


def divided(folder: Path, monkeypatch: Patch, texts: list[list[int]], template: str = "") -> Any:
    """How texts, as tokens, are divided; a character of the template is a token."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'"{texts.index(text)}"\n' for text in texts))

    def tokenize(text: str) -> list[int]:
        plain = text.removeprefix(template)
        return [*map(ord, text[: -len(plain)]), *texts[int(plain)]]

    tokenizer = SimpleNamespace(tokenize=tokenize)
    wording = SimpleNamespace(tokenizer=tokenizer, text=lambda prompt: template + prompt)
    monkeypatch.setattr(rounding, "wording_of", lambda _: wording)
    return rounding._texts(folder, prompts)


@pytest.mark.slow
def test_every_other_prompt_to_judge_by_is_without_the_chat_template(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    pytest.importorskip("torch")
    found = divided(tmp_path, monkeypatch, [[number] * 600 for number in range(16)], "<")
    assert [text[0, :2].tolist() for text in found[1]] == [
        [60, 3],
        [7, 7],
        [60, 11],
        [15, 15],
    ]
    assert {int(text[0, 0]) for text in found[0]} == {60}
    # Without it, the seventh has too few tokens to judge each product by.
    short = [[number] * (95 if number == 7 else 600) for number in range(16)]
    found = divided(tmp_path, monkeypatch, short, "<")
    assert [text[0, :2].tolist() for text in found[1]] == [
        [60, 3],
        [60, 7],
        [60, 11],
        [15, 15],
    ]


@pytest.mark.slow
def test_every_fourth_long_prompt_is_judged_by_each_once(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    pytest.importorskip("torch")
    long = [[number] * 600 for number in range(12)]
    short = [[number] * 50 for number in range(12)]
    every = [text for pair in zip(long, short, strict=True) for text in pair]
    found = divided(tmp_path, monkeypatch, [[], *every, *every])
    assert [int(text[0, 0]) for text in found[1]] == [3, 7, 11]
    assert len(found[0]) == 21
    message = "there are 1200 tokens and 1 such prompt: give more different prompts"
    for texts in ([[5] * 20000], [[5] * 20000] * 9):
        with pytest.raises(UsageError, match=message):
            divided(tmp_path, monkeypatch, texts)


TEXTS = [[(7 * start + 3 * place) % 50 for place in range(600)] for start in range(12)]


def checkpoint(folder: Path, **settings: Any) -> Any:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, head_dim=8, vocab_size=50, **settings
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    ids = torch.tensor([text[:64] for text in TEXTS])
    for _ in range(40):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return model.eval()


def rounded(
    folder: Path, monkeypatch: Patch, source: Path, **options: Any
) -> tuple[Path, dict[str, Any]]:
    output = folder / f"rounded{len([*folder.iterdir()])}"
    output.mkdir()
    given = {"ratio": 1.05, "plan": None, "rotate": True, **options}
    divided(folder, monkeypatch, TEXTS)
    inputs = {"checkpoint": str(source), "prompts": str(folder / "prompts.jsonl")}
    return output, rounding.round_weights(
        Job("round", str(output), inputs, options=given), lambda *_: None
    )


@pytest.mark.slow
def test_a_rounded_checkpoint_has_the_values_of_its_codes_and_stays_near_the_original(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = checkpoint(tmp_path / "model")
    output, told = rounded(tmp_path, monkeypatch, tmp_path / "model")
    plan = json.loads((output / PLAN).read_text())
    found = read_rounded(output)
    grids, moments = found.grids, found.moments
    made = transformers.AutoModelForCausalLM.from_pretrained(output / CHECKPOINT).eval()
    narrow = {(one["layer"], one["name"]) for one in plan["products"] if one["bits"] == 4}
    assert len(narrow) > 0
    assert len(grids) == sum(len(PRODUCTS[name]) for _, name in narrow)
    for name, grid in grids.items():
        np.testing.assert_array_equal(
            made.get_submodule(name).weight.detach().numpy(), grid.values()
        )
    assert moments.shape == (32, 32)
    assert "products of the layers" in "".join(told["notes"])
    losses = []
    with torch.no_grad():
        for one in (model, made):
            ids = torch.tensor([TEXTS[0][:64]])
            losses.append(float(one(ids, labels=ids).loss))
    assert math.exp(losses[1] - losses[0]) < 1.1


@pytest.mark.slow
def test_a_plan_that_is_given_is_carried_out_and_a_grid_that_is_there_is_kept(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    checkpoint(tmp_path / "model")
    products = [
        {"layer": layer, "name": name, "weights": 1, "bits": 4 if name == "o" else 8}
        for layer in range(2)
        for name in PRODUCTS
    ]
    with pytest.raises(
        UsageError, match="the plan has 9 products, and the checkpoint 10 in 2 layers"
    ):
        rounded(tmp_path, monkeypatch, tmp_path / "model", plan={"products": products[1:]})
    of_another = {"products": products, "together": 9.0, "logits": 9.0}
    output, _ = rounded(tmp_path, monkeypatch, tmp_path / "model", plan=of_another)
    kept_plan = json.loads((output / PLAN).read_text())
    assert all(one["weights"] > 1 for one in kept_plan["products"]), "counted, not as the file says"
    assert kept_plan["logits"] is None, "not measured here"
    grids = read_rounded(output).grids
    assert sorted(grids) == [f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)]
    every = [{**one, "bits": 4} for one in products]
    output, _ = rounded(tmp_path, monkeypatch, tmp_path / "model", plan={"products": every})
    costs = kept_plan["together"], json.loads((output / PLAN).read_text())["together"]
    assert 0 < 2 * costs[0] < costs[1], "rounding more products costs more"
    grids = read_rounded(output).grids
    monkeypatch.setattr("edge_opt.building.gptq._CORRECTED", np.float32(0))
    alone, _ = rounded(tmp_path, monkeypatch, tmp_path / "model", plan={"products": every})
    without = json.loads((alone / PLAN).read_text())["together"]
    assert costs[1] < 0.7 * without, "later products make up for earlier ones"
    again, told = rounded(tmp_path, monkeypatch, output / CHECKPOINT)
    kept = read_rounded(again).grids
    assert told["notes"][0] == "The checkpoint's weights lie on a 4-bit grid already"
    assert "10 of 10 products" in told["notes"][1]
    for name, grid in grids.items():
        np.testing.assert_allclose(kept[name].values(), grid.values(), rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("Phi3", {"pad_token_id": 0}, "differs in gate_proj, gate_up_proj, .* in layer 0"),
        ("Mixtral", {}, "in layer 0"),
        ("GPT2", {}, "differs in its layers"),
    ],
)
def test_families_with_other_products_are_refused(family: str, settings: Any, message: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    made = getattr(transformers, f"{family}Config")(**sizes, **settings)
    name = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    with pytest.raises(UsageError, match=message):
        check_family(getattr(transformers, name)(made))
