"""A cache that no operator of one signature reads -> the type that it has in the signature that reads it."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from edge_opt.base.words import shortened
from edge_opt.ir import Model, Shape, Tensor, same_type
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.runtime.description import tensor_info
from edge_opt.runtime.tensors import cache_of
from edge_opt.verification.verdict import Status, Verdict


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
        """No site: each such input of a chosen signature is changed at once."""
        del context
        return ()

    def fix_interface(self, model: Model, signatures: Collection[str]) -> Iterator[Verdict]:
        """Change inputs of these signatures, and report each.

        Signatures of one subgraph share a tensor, so those that were not chosen are reported with the chosen ones.
        """
        found = list(unread_caches(model))
        changed = {one.cache for one in found if one.signature in signatures}
        chosen = [one for one in found if one.cache in changed]
        types = {one.cache: one.cache.dtype for one in chosen}
        for index, one in enumerate(chosen):
            before = types[one.cache]
            after = one.read.dtype.name
            if one.read.dtype is before:
                after += " with another scale"
            text = f"input '{shortened(one.name)}' was {before.name} and is {after} now, so callers must pass that"
            one.cache.dtype = one.read.dtype
            one.cache.quantization = one.read.quantization
            yield Verdict(
                pass_name=self.name,
                signature=one.signature,
                index=index,
                operator=one.cache.name,
                status=Status.CONVERTED,
                note=f"{text}: no operator reads it, but '{one.reader}' does, and LiteRT-LM has one buffer for both",
            )


class UnreadCache(NamedTuple):
    """An input that no operator of its signature reads; `read` is the tensor of that name in the signature `reader`."""

    signature: str
    name: str
    cache: Tensor
    reader: str
    read: Tensor


def unread_caches(model: Model) -> Iterator[UnreadCache]:
    """Caches that no operator of their signature reads, and that have another type where they are read."""
    readers: defaultdict[tuple[str, Shape], list[tuple[str, Tensor]]] = defaultdict(list)
    unread: list[tuple[str, str, Tensor]] = []
    for signature in model.signatures:
        for name, tensor in signature.inputs.items():
            if cache_of(tensor_info(tensor, name)) != name:
                continue
            if tensor.consumers:
                readers[name, tensor.shape].append((signature.key, tensor))
            elif not signature.subgraph.is_output(tensor):
                unread.append((signature.key, name, tensor))
    for key, name, tensor in unread:
        found = readers[name, tensor.shape]
        if len({read.kind for _, read in found}) != 1:
            continue  # none, or they disagree
        reader, read = found[0]
        if not same_type(tensor, read):
            yield UnreadCache(key, name, tensor, reader, read)
