"""Counts the tokens of a prompt as litert-torch's calibration makes them: its templates, its tokenizer, its `<bos>`.

Loaded in a stage's own process, as `pipeline` is.
"""

import importlib
import tempfile
import zlib
from pathlib import Path
from typing import Any

from edge_opt.build.prompts import Count
from edge_opt.output.errors import UsageError
from edge_opt.schema.litertlm import read_bundle

_SENTENCEPIECE, _METADATA, _TOKENIZER = 4, 5, 6
"""Types of a bundle's sections."""
_SIZE_BYTES = 8


def tokenizer_of(model: Path) -> Any:
    """The tokenizer that calibration makes of a bundle, or would make of one exported from a checkpoint.

    Raises:
        UsageError: the bundle has none.
    """
    if model.is_dir():
        return _calibration("tokenizer").Tokenizer(transformers_model_path=str(model))
    bundle = read_bundle(model)
    held = {
        section.data_type: bytes(source.view(0, source.size))
        for index, section in enumerate(bundle.sections)
        if section.data_type in (_SENTENCEPIECE, _METADATA, _TOKENIZER)
        for source in [bundle.content(index)]
    }
    if not held.keys() & {_SENTENCEPIECE, _TOKENIZER}:
        raise UsageError(
            f"{model} has no tokenizer, so no prompt can be calibrated on: export it again with one"
        )
    metadata = importlib.import_module("litert_lm_builder.runtime.proto.llm_metadata_pb2").LlmMetadata
    template = metadata.FromString(held.get(_METADATA, b"")).jinja_prompt_template or None
    make = _calibration("tokenizer").Tokenizer
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer"
        # A SentencePiece model goes first, and without the template, as there.
        if _SENTENCEPIECE in held:
            path.write_bytes(held[_SENTENCEPIECE])
            return make(spm_model_path=str(path))
        path.write_bytes(_unpacked(held[_TOKENIZER]))
        return make(tokenizer_json_path=str(path), chat_template=template)


def counter(tokenizer: Any) -> Count:
    """How many tokens calibration makes of a prompt."""
    shown = _calibration("quant_utils").get_example_prompt
    return lambda prompt: len(tokenizer.tokenize(shown(prompt, tokenizer=tokenizer)))


def template_note(tokenizer: Any) -> list[str]:
    """What is to be said where calibration puts Gemma's turns around prompts, for want of a chat template."""
    module = _calibration("tokenizer")
    fallback = f"{module.PROMPT_TEMPLATE_PREFIX}x{module.PROMPT_TEMPLATE_SUFFIX}"
    note = (
        "No chat template reaches the calibration, so litert-torch puts Gemma's turn markers around every prompt: for "
        "another family add its chat_template to the tokenizer's files"
    )
    return [note] if tokenizer.format_chat_prompt("x") == fallback else []


def _calibration(name: str) -> Any:
    return importlib.import_module(f"litert_torch.generative.export_hf.experimental.calib.{name}")


def _unpacked(content: bytes) -> bytes:
    """The builder writes the size in front, other tools do not."""
    try:
        return zlib.decompress(content[_SIZE_BYTES:])
    except zlib.error:
        return zlib.decompress(content)
