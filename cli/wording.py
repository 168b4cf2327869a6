"""The library's words for its arguments in the words of the command line: `overwrite=True` is `--force`."""

import re

_ARGUMENT = re.compile(r"(?<![\w'-])(\w+)=('[^']*'|[\w./…]+)")
_SAME = (
    "cache dry_run evaluate extract_signature form generate inline_composites passes prefill prompts require_all "
    "require_match require_sound rows_per_tile seconds sections signatures skip target verify whole_caches work"
)
OPTIONS = {
    **{name: f"--{name.replace('_', '-')}" for name in _SAME.split()},
    "blocks": "--layers",
    "chip": "--soc",
    "flags": "--flag",
    "overwrite": "--force",
    "settings": "--set",
    "shapes": "--shape",
    "signature": "--signatures",
}
"""Arguments that messages name, and the options that stand for them."""


def in_options(text: str) -> str:
    """A message with options for arguments: `verify='none'` is `--verify none`, `chip=...` is `--soc`."""

    def option(match: re.Match[str]) -> str:
        value = match[2].strip("'")
        name = OPTIONS.get(match[1])
        if name is None:
            return match[0]
        if value == "False":
            return name.replace("--", "--no-")
        return name if value in {"True", "..."} else f"{name} {value}"

    return _ARGUMENT.sub(option, text)
