"""Merges a LoRA adapter into its base model: `W + (alpha / r) B A` for every weight that it changes, in float32.

The logits of a few tokens must be the same before and after: peft adds what is meant for the head alone to a shared
embedding, too.
"""

import shutil
from pathlib import Path

from edge_opt.base.errors import UsageError
from edge_opt.base.words import Progress
from edge_opt.base.work import CHECKPOINT
from edge_opt.building.checkpoint import TEXTS, Streamed, load
from edge_opt.building.rotation import change_of, run_once
from edge_opt.building.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from edge_opt.building.stages import Job, Values

_SETTINGS = {ADAPTER_CONFIG, "config.json", "generation_config.json"}


def merge(job: Job, _: Progress) -> Values:
    """Write the merged checkpoint, with the adapter's tokenizer if it has one.

    Raises:
        UsageError: the adapter has weights that the base has not, or too few, or peft cannot read or merge it, or the
            merged checkpoint gives other logits.
    """
    import peft
    from safetensors import safe_open

    adapter = Path(job.inputs["adapter"])
    base = Path(job.inputs["source"])
    model = load(base, stream=False).model
    try:
        adapted = peft.PeftModel.from_pretrained(model, adapter)
        with safe_open(adapter / ADAPTER_WEIGHTS, "pt") as file:
            held = set(file.keys())
        known = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=True))
        needed = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
        before = run_once(adapted)[0]
        merged = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # peft's and safetensors'
        cause = str(error).partition("\n")[0]
        raise UsageError(f"{adapter} cannot be merged with {base}: {cause}") from error
    unknown = held - known
    missing = needed - held
    if unknown or missing:
        raise UsageError(
            f"{adapter} does not fit {base}: only one of them has {min(unknown | missing)}; give the base that it was "
            f"trained on"
        )
    output = Path(job.output, CHECKPOINT)
    whole = Streamed(merged, {})
    places = whole.prepare_copy(base, output, ())
    whole.copy_to(places)
    after = run_once(load(output).model)[0]
    change = change_of(before, after)
    if change:
        raise UsageError(
            f"{adapter} cannot be merged with {base}: {change}; if it changes an embedding that the logits share, "
            f"merge it with peft, with tie_word_embeddings=False"
        )
    for file in adapter.iterdir():
        if file.suffix in TEXTS and file.name not in _SETTINGS:
            shutil.copy(file, output)  # its tokenizer, which may have other special tokens
    return {"notes": [f"Merged the adapter {adapter.name} with {base.name}"]}
