"""MediaTek's compiler: it takes operators and compiles them; it has no time estimate and no emulator.

Not tested with the real library or a phone: operators and chips are those of LiteRT's plugin, tests use a stand-in.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edge_opt.base.atomic import scratch_folder
from edge_opt.npu.compiler import (
    Backend,
    Compiler,
    Figures,
    operator_counts,
    operators_left,
)

_VERSION_FLAG = "--mediatek_sdk_version_type"
# litert/python/aot/vendors/mediatek/target.py: chips whose NPU needs version 9 of the SDK; others take version 8.
_VERSION_9 = ("MT6993",)


class MediaTek(Backend):
    """MediaTek's compiler, with the libraries of the NeuroPilot SDK."""

    manufacturer = "MediaTek"
    compiler = "MediaTek's compiler"
    library = "libneuron_adapter.so"
    needs = "libneuron_adapter.so of MediaTek's NeuroPilot SDK"
    how_to_get = (
        "run `pip install ai-edge-litert-sdk-mediatek` on x86-64 Linux, or give the SDK's folder with sdk=DIR or in "
        "EDGE_OPT_NEUROPILOT"
    )
    variables = ("EDGE_OPT_NEUROPILOT",)
    results_from = "lib*.so"

    def places(self, chip: str) -> Sequence[str]:
        """The SDK has a folder for each version."""
        return (f"v{_version(chip)}_*/host/lib", "host/lib", ".")

    def package_arguments(self, chip: str) -> Sequence[str]:
        """The version that the chip needs."""
        return (f"v{_version(chip)}",)

    def measure(self, path: Path, signature: str, compiler: Compiler) -> Figures:
        """Compile; there are only figures of operators and partitions."""
        libraries = self.libraries(compiler)
        flags = compiler.flags
        if not compiler.has_flag(_VERSION_FLAG):
            flags = (*flags, f"{_VERSION_FLAG}=version{_version(compiler.chip)}")
        # The plugin knows chips by their names in lower case only.
        settings = replace(compiler, chip=compiler.chip.lower(), flags=flags)
        with scratch_folder() as scratch:
            done = self.run_tool(path, settings, [libraries], scratch)
            self.check_ended(done.returncode, done.stdout, done.stderr)
            on_cpu = operators_left(path, scratch, {})
        return Figures(
            signature,
            *operator_counts(done.stderr),
            note=self.note(compiler.chip),
            on_cpu=on_cpu,
        )


def _version(chip: str) -> int:
    return 9 if chip.upper() in _VERSION_9 else 8
