"""A cache that no operator of one signature reads -> the type that it has in the signature that reads it."""

from collections.abc import Iterable, Iterator

from edge_opt.ir import Model, Shape, Tensor, same_type
from edge_opt.passes.contract import Context, Pass, Proof, Site, Status
from edge_opt.passes.rewrite import Demand


class UnreadCaches(Pass):
    """A prefill has the last layer's caches as inputs, and reads only that layer's new keys and values.

    ai-edge-quantizer collects no ranges for an input that no operator reads: it stays FLOAT32, while decode's input of
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
        for index, (signature, cache, reader, read) in enumerate([*unread_caches(model)]):
            own, other = cache.dtype.name, read.dtype.name
            scale = " with another scale" if own == other else ""
            types = f"the cache is {own} and read by no operator, while '{reader}' reads it as {other}{scale}"
            cache.dtype, cache.quantization = read.dtype, read.quantization
            yield Site(
                None,
                pass_name=self.name,
                signature=signature,
                index=index,
                operator=cache.name,
                status=Status.CONVERTED,
                proof=Proof(Demand(), holds=True, bitwise=True, max_abs=0.0, note="no operator reads it"),
                note=f"without this, LiteRT-LM may not start: {types}",
            )


def unread_caches(model: Model) -> Iterator[tuple[str, Tensor, str, Tensor]]:
    """Caches that no operator of their signature reads, and that have another type where they are read.

    Each with its signature's name, the name of a signature that reads it, and its tensor there.
    """
    caches = [
        (each, name, tensor)
        for each in model.signatures
        for name, tensor in each.inputs.items()
        if "cache" in name
    ]
    readers, disagreeing = dict[tuple[str, Shape], tuple[str, Tensor]](), set[tuple[str, Shape]]()
    for signature, name, tensor in caches:
        if tensor.consumers:
            _, first = readers.setdefault((name, tensor.shape), (signature.key, tensor))
            if not same_type(tensor, first):
                disagreeing.add((name, tensor.shape))
    for signature, name, tensor in caches:
        place = name, tensor.shape
        reader, read = readers.get(place, ("", tensor))
        is_unread = not tensor.consumers and not signature.subgraph.is_output(tensor)
        if is_unread and place not in disagreeing and not same_type(tensor, read):
            yield signature.key, tensor, reader, read
