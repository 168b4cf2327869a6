"""balanced_norms: `x + norm * w` -> `x - norm * -w` where norms that round down made the stream too small."""

from itertools import accumulate

import pytest
from cli_runs import Patch
from pass_runs import convert_text, names, reread, statuses

import edge_opt
from edge_opt.ir.parse import parse
from edge_opt.passes.balanced_norms import residual_sums
from edge_opt.targets import Target, load_target
from edge_opt.verification.examine import Verifier

TARGET = Target("truncates", "", norms_round_down=True)
STEPS = (0.01, 0.02, 0.03, 0.004)
BODY = """
subgraph body (%a: int16[1,3,4] q(0.001, 0), %b: int16[4] q(0.0001, 0)) {
  %c: int16[1,3,4] q(STEP, 0) = MUL(%a, %b)
  return %c
}
"""


def layers(addition: str = "ADD(%x{0}, %n{0})") -> str:
    """A residual stream with one norm a layer, whose result has that step."""
    lines = ["subgraph main (%x0: int16[1,3,4] q(0.001, 0), %h: int16[1,3,4] q(0.001, 0)) {"]
    for place, step in enumerate(STEPS):
        weight = f"int16{{{place + 3}, -700, 20000, 32767}} q(0.0001, 0)"
        body = f"decomposition_subgraph_index: {place + 1}, composite_attributes: {{epsilon: 1.0}}"
        options = f"{{name: 'odml.rms_norm', {body}}}"
        lines.append(
            f"  %n{place}: int16[1,3,4] q({step}, 0) = STABLEHLO_COMPOSITE(%h, {weight}) {options}"
        )
        lines.append(f"  %x{place + 1}: int16[1,3,4] q(0.05, 0) = {addition.format(place)}")
    lines += [f"  return %x{len(STEPS)}", "}"]
    return "\n".join(lines) + "".join(BODY.replace("STEP", str(step)) for step in STEPS)


def test_a_norm_is_negated_where_the_errors_so_far_are_below_zero(verifier: Verifier) -> None:
    model, reports = convert_text(layers(), "balanced_norms", target=TARGET, verifier=verifier)
    assert statuses(reports) == ["converted"] * 2
    kinds = [name for name in names(reread(model)) if name != "STABLEHLO_COMPOSITE"]
    assert kinds == ["ADD", "SUB", "ADD", "SUB"]
    signs = [-1 if kind == "ADD" else 1 for kind in kinds]
    errors = list(accumulate(sign * step / 2 for sign, step in zip(signs, STEPS, strict=True)))
    assert max(map(abs, errors)) <= max(STEPS) / 2 < sum(STEPS) / 2
    weights = [norm.input(1).array().tolist() for _, norm in residual_sums(model.subgraphs[0])]
    assert weights[1] == [-4, 700, -20000, -32767]


def test_what_is_balanced_already_stays() -> None:
    model = parse(layers())
    assert edge_opt.convert(model, target=TARGET, verify="none").converted
    assert not edge_opt.convert(model, target=TARGET, verify="none").converted


def test_a_weight_that_was_not_negated_is_seen(verifier: Verifier, monkeypatch: Patch) -> None:
    monkeypatch.setattr("edge_opt.passes.balanced_norms.np.negative", lambda array: array)
    _, reports = convert_text(layers(), "balanced_norms", target=TARGET, verifier=verifier)
    assert {report.why for report in reports} == {"different"}


def computed(
    text: str, parts: str = "int16[] {10000} q(0.0001, 0), WEIGHT", activation: int = 0
) -> str:
    """The same with weights that are sums of constants, as in Gemma's norm: `1 + w`."""
    lines: list[str] = []
    for line in text.splitlines():
        if "STABLEHLO_COMPOSITE" in line:
            weight = line[line.index("(%h, ") + 5 : line.index(") {name")]
            number = len(lines)
            options = f"{{fused_activation_function: {activation}}}"
            addition = f"ADD({parts.replace('WEIGHT', weight)}) {options}"
            lines.append(f"  %w{number}: int16[4] q(0.0002, 0) = {addition}")
            lines.append(line.replace(weight, f"%w{number}"))
        else:
            lines.append(line)
    return "\n".join(lines)


def test_a_weight_that_is_a_sum_of_constants_is_negated(verifier: Verifier) -> None:
    model, reports = convert_text(
        computed(layers()), "balanced_norms", target=TARGET, verifier=verifier
    )
    assert statuses(reports) == ["converted"] * 2
    (_, negated), *_ = [pair for pair in residual_sums(model.subgraphs[0]) if pair[0].name == "SUB"]
    total = negated.input(1).producer
    assert total is not None
    assert [part.array().tolist() for part in total.inputs if part] == [
        -10000,
        [-4, 700, -20000, -32767],
    ]
    assert len(model.subgraphs[0].operators) == len(
        parse(computed(layers())).subgraphs[0].operators
    )


def test_a_norm_that_is_read_elsewhere_is_in_no_residual_sum() -> None:
    text = layers().replace("return %x4", "return %x4, %n1")
    _, reports = convert_text(text, "balanced_norms", target=TARGET)
    assert len(reports) == 1
    text = layers().replace("odml.rms_norm", "odml.layer_norm")
    assert convert_text(text, "balanced_norms", target=TARGET)[1] == []


@pytest.mark.parametrize(
    "text",
    [
        layers().replace("-700", "-32768"),
        computed(layers()).replace("-700", "-32768"),
        computed(layers(), activation=1),
        computed(layers(), "%b, WEIGHT").replace("%h:", "%b: int16[4] q(0.001, 0), %h:"),
    ],
    ids=["-32768", "-32768 in a sum", "a clipped sum", "a sum with an input"],
)
def test_norms_without_a_negative_are_named(text: str) -> None:
    _, reports = convert_text(text, "balanced_norms", target=TARGET)
    assert statuses(reports) == ["skipped"] * 3
    assert {report.why for report in reports} == {"quantization"}


def test_a_norm_whose_body_adds_to_its_weights_is_skipped() -> None:
    """`norm * (1 + w)`: its negative is not `norm * (1 - w)`."""
    total = "  %o: int16[4] q(0.0002, 0) = ADD(%b, int16[] {10000} q(0.0001, 0))\n  %c"
    text = layers().replace("  %c", total).replace("MUL(%a, %b)", "MUL(%a, %o)")
    _, reports = convert_text(text, "balanced_norms", target=TARGET)
    assert {report.status for report in reports} == {"skipped"}
    assert "does more with its weights than multiply" in reports[0].reason


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        ("q(0.05, 0)", "q(0.0, 0)", 0),
        (" q(0.05, 0)", "", 0),
        ("q(0.02, 0)", "q(0.0, 0)", 3),
        ("q(0.02, 0)", "q(0.02, -32768)", 3),
    ],
    ids=["no step of a sum", "no quantization of a sum", "no step of a norm", "zero point of a norm"],
)  # fmt: skip
def test_sums_and_norms_without_a_step_and_norms_with_a_zero_point_stay(
    old: str, new: str, count: int
) -> None:
    model = parse(layers().replace(old, new))
    edge_opt.convert(model, target=TARGET, verify="none")
    assert len([*residual_sums(model.subgraphs[0])]) == count
    assert names(model).count("SUB") == (count > 0)


def test_a_norm_that_is_added_to_itself_or_a_factor_is_not_in_a_residual_sum() -> None:
    assert edge_opt.convert(parse(layers(addition="ADD(%n{0}, %n{0})")), target=TARGET).sites == []
    model, _ = convert_text(
        layers().replace("ADD(%x0,", "MUL(%x0,"), "balanced_norms", target=TARGET
    )
    assert [name for name in names(model) if len(name) == 3] == ["MUL", "ADD", "SUB", "ADD"]


@pytest.mark.parametrize("name", ["generic", "qualcomm-htp"])
def test_only_a_target_whose_norms_round_down_asks_for_it(name: str) -> None:
    target = load_target(name)
    _, reports = convert_text(layers(), "balanced_norms", target=target)
    assert bool(reports) is target.norms_round_down is (name == "qualcomm-htp")
