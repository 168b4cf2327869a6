"""What a model holds, and what a conversion makes of it: as data, as an overlay, as a report."""

from edge_opt.inspection.holdings import (
    Argument,
    AttentionBlock,
    Explanation,
    Inspection,
    SignatureContent,
    attention_blocks,
    example_rewrite,
    explain,
    inspect,
)

__all__ = [
    "Argument",
    "AttentionBlock",
    "Explanation",
    "Inspection",
    "SignatureContent",
    "attention_blocks",
    "example_rewrite",
    "explain",
    "inspect",
]
