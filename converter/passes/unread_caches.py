"""A cache that no operator of one signature reads -> the type that it has in the signature that reads it."""

from collections.abc import Iterable, Iterator

from edge_opt.ir import Model
from edge_opt.passes.contract import Context, Pass, Proof, Site, Status
from edge_opt.passes.rewrite import Demand
from edge_opt.soundness import unread_caches


class UnreadCaches(Pass):
    """A prefill has the last layer's caches as inputs, and reads only that layer's new keys and values.

    ai-edge-quantizer collects no ranges for an input that no operator reads: it stays FLOAT32, where decode's input of
    that name is INT16. LiteRT-LM makes one buffer for both, and fails to start ("Custom allocation is too small"). The
    unread input gets the other one's type and scale. No operator reads it, so no result can change; a caller that
    passes an array for it must pass one of the new type.
    """

    name = "unread_caches"
    summary = "sets the type of caches that no operator reads, from the signature that reads them"

    def sites(self, context: Context) -> Iterable[Site]:
        """No site: each such input is changed at once, in every signature of the model."""
        del context
        return ()

    def mend(self, model: Model) -> Iterator[Site]:
        """Change the inputs, and report each."""
        for index, found in enumerate([*unread_caches(model)]):
            note = f"the cache was {found.difference}; now it has that type"
            found.tensor.dtype, found.tensor.quantization = found.read.dtype, found.read.quantization
            proof = Proof(Demand(), holds=True, bitwise=True, max_abs=0.0, note="no operator reads it")
            yield Site(
                None,
                settled=True,
                pass_name=self.name,
                signature=found.signature,
                index=index,
                operator=found.tensor.name,
                status=Status.CONVERTED,
                proof=proof,
                note=note,
            )
