"""Counts the tokens of a prompt as litert-torch's calibration makes them: its templates, its tokenizer, its `<bos>`.

Loaded in a stage's own process, as `pipeline` is.
"""

import importlib
import tempfile
import zlib
from pathlib import Path
from typing import Any

from edge_opt.build.prompts import Count
from edge_opt.schema.litertlm import read_bundle

_CALIBRATION = "litert_torch.generative.export_hf.experimental.calib"
_SENTENCEPIECE, _METADATA, _TOKENIZER = 4, 5, 6
"""Types of a bundle's sections."""
_SIZE_BYTES = 8


def tokenizer_of(model: Path) -> Any:
    """The tokenizer that calibration makes of a bundle, or would make of one exported from a checkpoint."""
    tokenizer = importlib.import_module(f"{_CALIBRATION}.tokenizer").Tokenizer
    if model.is_dir():
        return tokenizer(transformers_model_path=str(model))
    bundle = read_bundle(model)
    held = {
        section.data_type: bytes(source.view(0, source.size))
        for index, section in enumerate(bundle.sections)
        if section.data_type in (_SENTENCEPIECE, _METADATA, _TOKENIZER)
        for source in [bundle.content(index)]
    }
    metadata = importlib.import_module("litert_lm_builder.runtime.proto.llm_metadata_pb2").LlmMetadata()
    metadata.ParseFromString(held.get(_METADATA, b""))
    with tempfile.TemporaryDirectory() as folder:
        # A SentencePiece model goes first, as there.
        if _SENTENCEPIECE in held:
            path = Path(folder) / "tokenizer.model"
            path.write_bytes(held[_SENTENCEPIECE])
            return tokenizer(spm_model_path=str(path))
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(_unpacked(held[_TOKENIZER]))
        return tokenizer(tokenizer_json_path=str(path), chat_template=metadata.jinja_prompt_template or None)


def counter(tokenizer: Any) -> Count:
    """How many tokens calibration makes of a prompt."""
    shown = importlib.import_module(f"{_CALIBRATION}.quant_utils").get_example_prompt
    return lambda prompt: len(tokenizer.tokenize(shown(prompt, tokenizer=tokenizer)))


def template_note(tokenizer: Any) -> list[str]:
    """What is to be said where calibration puts Gemma's turns around prompts, for want of a chat template."""
    module = importlib.import_module(f"{_CALIBRATION}.tokenizer")
    fallback = f"{module.PROMPT_TEMPLATE_PREFIX}x{module.PROMPT_TEMPLATE_SUFFIX}"
    note = (
        "No chat template reaches the calibration, so litert-torch puts Gemma's turn markers around every prompt: for "
        "another family add its chat_template to the tokenizer's files"
    )
    return [note] if tokenizer.format_chat_prompt("x") == fallback else []


def _unpacked(content: bytes) -> bytes:
    """The builder writes the size in front, other tools do not."""
    try:
        return zlib.decompress(content[_SIZE_BYTES:])
    except zlib.error:
        return zlib.decompress(content)
