"""Whatever a graph says, a derivation ends with a report: nothing but `ShapeError` is ever raised inside."""

import random
from pathlib import Path

import numpy as np
import pytest
from shapes_referee import placeholders

from edge_opt import ir
from edge_opt.ir.operators import BUILTIN_OPERATORS
from edge_opt.shapes import derive

DEMO = Path(__file__).parent.parent / "testdata" / "demo_gemma3.tflite"
SIZES = [0, 1, 2, 3, 7, 64]
NUMBERS = [-5, -1, 0, 1, 2, 100, 2**31 - 1]


def reshape_tensor(rng: random.Random, subgraph: ir.Subgraph) -> None:
    tensor = rng.choice(subgraph.tensors)
    if not tensor.is_constant:
        tensor.shape = tuple(rng.choice(SIZES) for _ in range(rng.randint(0, 6)))


def make_dynamic(rng: random.Random, subgraph: ir.Subgraph) -> None:
    tensor = rng.choice(subgraph.tensors)
    tensor.shape_signature = tuple(rng.choice([-1, -1, 1, 2, 5]) for _ in range(rng.randint(1, 5)))


def change_option(rng: random.Random, subgraph: ir.Subgraph) -> None:
    options = rng.choice(list(subgraph.operators)).options
    if options is None or not options.fields:
        return
    name = rng.choice(list(options.fields))
    value = options.fields[name]
    if isinstance(value, np.ndarray):
        numbers = [rng.choice([-3, -1, 0, 1, 2, 9]) for _ in range(rng.randint(0, 4))]
        options.fields[name] = np.array(numbers).astype(value.dtype)
    elif isinstance(value, int) and not isinstance(value, bool):
        options.fields[name] = rng.choice(NUMBERS)


def change_input(rng: random.Random, subgraph: ir.Subgraph) -> None:
    operator = rng.choice(list(subgraph.operators))
    if operator.inputs:
        place = rng.randrange(len(operator.inputs))
        subgraph.set_input(operator, place, rng.choice([*subgraph.tensors, None]))


def change_operator(rng: random.Random, subgraph: ir.Subgraph) -> None:
    name = rng.choice(list(BUILTIN_OPERATORS))
    rng.choice(list(subgraph.operators)).code = ir.OperatorCode(BUILTIN_OPERATORS[name])


CHANGES = [reshape_tensor, make_dynamic, change_option, change_input, change_operator]


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 60))]
)
def test_a_damaged_graph_is_reported_not_raised(seed: int) -> None:
    rng, model = random.Random(seed), ir.load(DEMO)
    for _ in range(rng.randint(1, 8)):
        rng.choice(CHANGES)(rng, rng.choice(model.subgraphs))
    for resize in ({}, placeholders(model)):
        report = derive(model, resize=resize)
        assert report.tensors == sum(len(subgraph.tensors) for subgraph in model.subgraphs)
        assert all(str(disagreement) for disagreement in report.disagreements)
        assert report.to_dict()["unknown"] == report.unknown
