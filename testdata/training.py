"""Trains a small language model on text that every Python has: docstrings, help topics and licence of CPython.

A model of random weights cannot tell a good quantization from a bad one: its perplexity is that of chance either way.
`make_checkpoint.py --train` calls this.
"""

import ast
import math
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from checkpoints import Sizes, lib, save_checkpoint

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
BEGIN = 2
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
_SHORTEST, _EVERY = 400, 20
_RATE, _WARM_UP, _DECAY = 1e-2, 40, 0.1
_MARKS = (0xC0, 0x100)
"""Characters of two bytes: a tokenizer of bytes makes the same first token of all, and 64 different second ones."""
_GAP = (40, 1200)
_LENGTHS = (50, 100, 150, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1100, 1200)
"""Tokens of the prompts."""
_CHARACTERS = 4
"""Of a text for each token that is wanted: more than a token has."""


def documents() -> dict[str, str]:
    """The texts by name: each module's docstrings, each help topic, the licence."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _LEFT_OUT & set(name.parts):
            try:
                found[name.as_posix()] = _docstrings(path)
            except SyntaxError:
                continue  # of another version, kept by the library for its own tests
    found |= {f"topic {name}": text for name, text in lib("pydoc_data.topics").topics.items()}
    licence = root / "LICENSE.txt"
    if licence.is_file():
        found["licence"] = licence.read_text(encoding="utf-8")
    return {name: text for name, text in found.items() if len(text) >= _SHORTEST}


def _docstrings(path: Path) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def held_out(names: Sequence[str]) -> set[str]:
    """Those that training does not see: one document in twenty."""
    return set(random.Random(1).sample(sorted(names), max(1, len(names) // _EVERY)))  # noqa: S311


def train_tokenizer(texts: Sequence[str], vocab: int, folder: Path) -> Any:
    """A byte-level BPE of `vocab` pieces, saved as transformers saves one; it begins every text with <bos>."""
    tokenizers = lib("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), SPECIAL, strict=True))
    lib("transformers").PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(
        folder
    )
    return made


def with_marks(text: str, chance: random.Random) -> str:
    """The text with one and the same mark, of 64, on a line of its own now and then.

    Which mark it is, only the earlier ones tell, however far back they are. 800 steps are too few to learn that.
    """
    mark = chr(chance.randrange(*_MARKS))
    pieces, at = [], 0
    while at < len(text):
        size = chance.randrange(*_GAP)
        pieces.append(text[at : at + size])
        at += size
    return f"{mark}\n" + f"\n{mark}\n".join(pieces)


def sequences(
    texts: Sequence[str], tokenizer: Any, length: int, chance: random.Random
) -> Iterator[list[int]]:
    """Endless training sequences of `length` tokens: <bos>, then texts in random order, packed."""
    at = 0
    order = list(texts)
    while True:
        if at == 0:
            chance.shuffle(order)
            whole = "\n\n".join(order)
        piece = whole[at : at + _CHARACTERS * length]
        at = at + len(piece) if at + len(piece) < len(whole) else 0
        ids = tokenizer.encode(with_marks(piece, chance)).ids
        if len(ids) >= length - 1:
            yield [BEGIN, *ids[: length - 1]]


def train(model: Any, texts: Sequence[str], tokenizer: Any, *, length: int, steps: int) -> None:
    """Train in place with AdamW; prints the loss in nats a token."""
    torch = lib("torch")
    lines = sequences(texts, tokenizer, length, random.Random(0))  # noqa: S311
    hidden = [
        weight
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and "embed" not in name
    ]
    known = set(map(id, hidden))
    others = [weight for weight in model.parameters() if id(weight) not in known]
    optimizers = [
        torch.optim.Muon(hidden, lr=_RATE, weight_decay=_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    model.train()
    for step in range(steps):
        warm, left = min(1.0, (step + 1) / _WARM_UP), 0.5 + 0.5 * math.cos(math.pi * step / steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = _RATE * warm * (0.05 + 0.95 * left)
        tokens = torch.tensor([next(lines)])
        loss = model(input_ids=tokens, labels=tokens).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 20 == 19 or step == steps - 1:
            print(f"step {step + 1}/{steps}: {loss.item():.3f} nats a token", flush=True)
    model.eval()


def prompts(
    texts: Sequence[str], tokenizer: Any, lengths: Sequence[int], chance: random.Random
) -> list[str]:
    """One text of about each length in tokens, from the texts as they follow one another, with marks."""
    whole, found, at = "\n\n".join(texts), [], 0
    for length in lengths:
        piece = with_marks(whole[at : at + _CHARACTERS * length], chance)
        found.append(tokenizer.decode(tokenizer.encode(piece).ids[:length]).rstrip("\ufffd"))
        at += _CHARACTERS * length
    return found


def make_trained(
    folder: Path, sizes: Sizes, steps: int, **config: Any
) -> tuple[list[str], list[str]]:
    """Write a trained checkpoint; gives prompts to calibrate with, from the text that it saw, and held-out ones."""
    found = documents()
    apart = held_out(list(found))
    known = [text for name, text in found.items() if name not in apart]
    save_checkpoint("gemma3", sizes, folder, initializer_range=0.02, **config)
    tokenizer = train_tokenizer(known, sizes.vocab, folder)
    model = lib("transformers").AutoModelForCausalLM.from_pretrained(folder)
    train(model, known, tokenizer, length=2 * sizes.window, steps=steps)
    model.save_pretrained(folder)
    chance = random.Random(2)  # noqa: S311
    unseen = [text for name, text in found.items() if name in apart]
    chance.shuffle(known)
    chance.shuffle(unseen)
    calibration = prompts(known, tokenizer, _LENGTHS, chance)
    return calibration, prompts(unseen, tokenizer, _LENGTHS, chance)
