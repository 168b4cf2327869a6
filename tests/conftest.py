"""Fixtures that many tests share."""

from collections.abc import Iterator

import pytest

from edge_opt.proof.regions import RegionProver


@pytest.fixture(scope="session")
def prover() -> Iterator[RegionProver]:
    """The real one; its process is started once for all tests."""
    with RegionProver() as made:
        yield made
