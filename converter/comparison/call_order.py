"""Which signatures run in one session, in which order, and how often.

A signature without state runs alone. Signatures that keep state run in one session, because one may read what another
wrote. A difference in state may show only if the right signature runs next, so each runs directly after every one.
Calls with further inputs, which are less like those of real use, come last.
"""

from collections.abc import Sequence
from typing import NamedTuple

from edge_opt.runtime.inputs import runs_for
from edge_opt.runtime.tensors import SignatureInfo

_LEAST_CALLS = 8
"""Calls of each signature that keeps state: a value may pass through several variables before it shows."""


class Turn(NamedTuple):
    """One call of a signature, with ordinary inputs or further ones."""

    name: str
    further: bool = False


def orders(signatures: Sequence[SignatureInfo]) -> list[list[Turn]]:
    """The calls of each session: one session a signature, and one for all that keep state."""
    found: list[list[Turn]] = []
    stateful: list[str] = []
    most = 0
    for signature in signatures:
        ordinary, further = runs_for(signature)
        if signature.keeps_state:
            stateful.append(signature.name)
            most = max(most, further)
        else:
            found.append(_turns([signature.name], ordinary, further))
    if stateful:
        # One cycle calls each signature once after every one of them.
        cycle = _each_after_each(stateful)
        found.append(_turns(cycle, -(-_LEAST_CALLS // len(stateful)), -(-most // len(stateful))))
    return found


def _turns(cycle: Sequence[str], ordinary: int, further: int) -> list[Turn]:
    """So many cycles with ordinary inputs, and with further ones."""
    first = [Turn(name) for name in cycle]
    last = [Turn(name, further=True) for name in cycle]
    return first * ordinary + last * further


def _each_after_each(names: Sequence[str]) -> list[str]:
    """A cycle in which each name follows each name once, itself too: the de Bruijn sequence of order 2."""
    cycle: list[str] = []
    for place, name in enumerate(names):
        cycle.append(name)
        for other in names[place + 1 :]:
            cycle += [name, other]
    return cycle
