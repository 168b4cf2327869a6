"""What a model holds, and what a conversion makes of it: as data, as an overlay, as a report."""

from edge_opt.inspection.holdings import (
    AttentionBlock,
    Explanation,
    Inspection,
    SignatureContent,
    example_rewrite,
    explain,
    inspect,
)

__all__ = [
    "AttentionBlock",
    "Explanation",
    "Inspection",
    "SignatureContent",
    "example_rewrite",
    "explain",
    "inspect",
]
