"""The rewrites, in the order in which they run. Your own pass runs last once it is in `PASSES`."""

from edge_opt.passes.balanced_norms import BalancedNorms
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.passes.inline_composites import InlineComposites
from edge_opt.passes.mask_before_join import MaskBeforeJoin
from edge_opt.passes.mask_to_add import MaskToAdd
from edge_opt.passes.matmul_convert import MatMulConvert
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.passes.position_table import PositionTable
from edge_opt.passes.quantized_mask import QuantizedMaskToSelect
from edge_opt.passes.run import run_pass
from edge_opt.passes.unread_caches import UnreadCaches
from edge_opt.verification.check import Check, Exact, Steps, Table, Within
from edge_opt.verification.rewrite import Rewrite
from edge_opt.verification.verdict import Proof, Status, Verdict

PASSES: dict[str, Pass] = {
    chosen.name: chosen
    for chosen in (
        UnreadCaches(),
        PositionTable(),
        InlineComposites(),
        QuantizedMaskToSelect(),
        MaskToAdd(),
        MatMulConvert(),
        MhaToSha(),
        MaskBeforeJoin(),
        BalancedNorms(),
    )
}

__all__ = [
    "PASSES",
    "Check",
    "Context",
    "Exact",
    "Pass",
    "Proof",
    "Rewrite",
    "Site",
    "Status",
    "Steps",
    "Table",
    "Verdict",
    "Within",
    "run_pass",
]
