"""Whether a model was ruined before it came here: what its own scales say, before anything is run.

Knows no target and changes nothing. A rule is a function that takes a model and gives findings.
"""

from edge_opt.soundness.findings import Unsound, sentences
from edge_opt.soundness.positions import stopped_positions
from edge_opt.soundness.ranges import broken_ranges

__all__ = ["Unsound", "broken_ranges", "sentences", "stopped_positions"]
