"""Which signatures run in one session, in which order, and how often.

A signature without state runs alone. Signatures that keep state run in one session, because one may read what another
wrote. A difference in state may show only if the right signature runs next, so each runs directly after every one.
"""

from collections.abc import Sequence

from edge_opt.runtime.inputs import runs_for
from edge_opt.runtime.tensors import SignatureInfo

_LEAST_CALLS = 8
"""Calls of each signature that keeps state: a value may pass through several variables before it shows."""


def orders(signatures: Sequence[SignatureInfo]) -> list[list[str]]:
    """The calls of each session, by name: one session a signature, and one for all that keep state."""
    found: list[list[str]] = []
    stateful: list[str] = []
    for signature in signatures:
        if signature.keeps_state:
            stateful.append(signature.name)
        else:
            found.append([signature.name] * runs_for(signature))
    if stateful:
        # One cycle calls each signature once after every one of them.
        cycles = -(-_LEAST_CALLS // len(stateful))
        found.append(_each_after_each(stateful) * cycles)
    return found


def _each_after_each(names: Sequence[str]) -> list[str]:
    """A cycle in which each name follows each name once, itself too: the de Bruijn sequence of order 2."""
    cycle: list[str] = []
    for place, name in enumerate(names):
        cycle.append(name)
        for other in names[place + 1 :]:
            cycle += [name, other]
    return cycle
