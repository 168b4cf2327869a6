"""The rewrites, in the order in which they run."""

from edge_opt.passes.contract import Context, Demand, Pass, Proof, Prover, SiteReport, Status, run_pass
from edge_opt.passes.mha_to_sha import MhaToSha

PASSES: dict[str, Pass] = {chosen.name: chosen for chosen in (MhaToSha(),)}

__all__ = ["PASSES", "Context", "Demand", "Pass", "Proof", "Prover", "SiteReport", "Status", "run_pass"]
