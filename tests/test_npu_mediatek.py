"""MediaTek's compiler, the second vendor's: what it takes is told, and that it estimates and emulates nothing."""

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from cli_runs import QUANTIZED, Captured, Patch, run
from pretend_npu import Compilers, calls
from test_npu_export import Stage
from test_npu_probe import COMPILER, needs_compiler

from edge_opt.base.errors import UsageError
from edge_opt.integrations import npu_export
from edge_opt.npu import (
    Compiler,
    CompilerMissingError,
    Figures,
    Measured,
    compare_on_npu,
    profile,
    tune,
)
from edge_opt.npu.mediatek import MediaTek
from edge_opt.npu.qualcomm import Qualcomm
from edge_opt.npu.vendors import backend_of, target_backend
from edge_opt.targets import load_target

LOG = "Partitioned subgraph<0>, selected 2 ops, from a total of 3 ops. resulted in 1 partitions."
TAKES = f"import sys; print({LOG!r}, file=sys.stderr)"
FAILS = "import sys; print('ERROR: no room', file=sys.stderr); raise SystemExit(161)"
LISTENS = """
    import json, sys
    print(json.dumps(sys.argv[1:]), file=open(__file__ + ".calls", "a"))
    """


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: Patch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_the_chips_target_names_the_compiler() -> None:
    for chip, kind in (("SM8750", Qualcomm), ("SM9999", Qualcomm), (" mt6993", MediaTek)):
        assert isinstance(backend_of(chip), kind)
    with pytest.raises(UsageError, match="cannot run the compiler for Tensor_G5, of google_tensor"):
        backend_of("Tensor_G5")
    with pytest.raises(
        UsageError, match="compiler 'other' does not exist: give one of qualcomm, mediatek"
    ):
        target_backend("other")
    assert load_target("mediatek").compiler == "mediatek"


@pytest.mark.parametrize(("chip", "version"), [("MT6993", 9), ("MT6991", 8)])
def test_the_tool_gets_the_chip_in_lower_case_and_the_version_of_the_sdk(
    model: Path, compiler: Compilers, chip: str, version: int
) -> None:
    sdk = compiler(f"{LISTENS}{TAKES}")
    found = profile(model, Compiler(chip, ("--own",), sdk))
    (told,) = calls(sdk)
    assert {"--soc_manufacturer=MediaTek", f"--soc_model={chip.lower()}", "--own"} <= {*told}
    assert told[-1] == f"--mediatek_sdk_version_type=version{version}"
    (figures,) = found.signatures
    assert (figures.taken, figures.operators, figures.time, figures.spill) == (2, 3, None, None)
    assert found.notes == ("no estimate for MediaTek",)
    libraries = MediaTek().libraries(Compiler(chip, sdk=sdk))
    assert libraries.parent.parent.name.startswith(f"v{version}_")


def test_the_command_shows_what_is_taken(
    model: Path, compiler: Compilers, capsys: Captured
) -> None:
    shown = run(capsys, "profile", model, "--sdk", compiler(TAKES), "--soc", "MT6993")
    assert shown.code == 0
    assert ["main", "2/3", "1", "-", "-", "20", "B", "-", "-", "-"] in [
        line.split() for line in shown.out.splitlines()
    ]
    assert "no estimate for MediaTek" in shown.out


def test_the_missing_library_is_named(
    model: Path, tmp_path: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    missing = "MediaTek's compiler needs libneuron_adapter.so of MediaTek's NeuroPilot SDK: run `pip install"
    told = run(capsys, "profile", model, "--soc", "MT6993").failed_in_one_sentence(2)
    assert told.startswith(missing)
    assert "--sdk DIR or in EDGE_OPT_NEUROPILOT" in told
    package = ModuleType("ai_edge_litert_sdk_mediatek")
    package.__spec__ = type("Spec", (), {"name": package.__name__})()  # type: ignore[assignment]
    monkeypatch.setitem(__import__("sys").modules, package.__name__, package)
    folder = tmp_path / "v9_0_3"
    for found, words in ((None, missing), (folder, f"folder {folder} does not exist")):
        package.path_to_sdk_libs = lambda version, found=found: (
            found if version == "v9" else "other"
        )  # type: ignore[attr-defined]
        with pytest.raises(CompilerMissingError, match=words):
            MediaTek().libraries(Compiler("MT6993"))


def test_a_compiler_that_fails_is_told_in_one_sentence(
    model: Path, compiler: Compilers, capsys: Captured
) -> None:
    shown = run(capsys, "profile", model, "--sdk", compiler(FAILS), "--soc", "MT6991")
    assert "MediaTek's compiler ended with code 161: no room" in shown.failed_in_one_sentence(3)


def test_what_needs_an_estimate_or_an_emulator_says_that_there_is_none(model: Path) -> None:
    phone = Compiler("MT6993")
    with pytest.raises(
        UsageError, match="no estimate for MediaTek: forms are ranked by estimated time"
    ):
        tune(QUANTIZED, compiler=phone)
    with pytest.raises(UsageError, match="no estimate for MediaTek"):
        tune(QUANTIZED, "mediatek")
    with pytest.raises(CompilerMissingError, match="no emulator for MediaTek"):
        compare_on_npu(model, model, phone)


def test_without_an_estimate_a_conversion_is_kept_unless_it_compiles_worse(stage: Stage) -> None:
    phone = {"backend": "mediatek", "soc_model": "mt6993"}
    done = stage(sdk=stage.pretend(TAKES), **phone)
    assert done.notes == ("no estimate for MediaTek",)
    assert str(done.signatures[0]) == "prefill_8 kept as converted: no estimate for MediaTek"
    done = stage(sdk=stage.pretend(FAILS), overwrite=True, **phone)
    assert "neither compiles" in done.signatures[0].why
    part, whole = (Measured("decode", Figures("decode", 3, taken, 1)) for taken in (2, 3))
    assert npu_export._judged(part, whole, repairs=False)[0]
    assert not npu_export._judged(whole, part, repairs=False)[0]


@needs_compiler
def test_litert_s_own_tool_and_plugin_compile_with_a_library_in_the_given_folder(
    tmp_path: Path,
) -> None:
    library = tmp_path / "host" / "lib" / MediaTek.library
    library.parent.mkdir(parents=True)
    source = Path(__file__).with_name("fake_neuron.c")
    command = [COMPILER or "cc", "-w", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    model = shutil.copy(QUANTIZED, tmp_path)
    try:
        found = profile(model, Compiler("MT6993", sdk=tmp_path))
    except CompilerMissingError as error:
        pytest.skip(str(error))
    assert {one.signature: one.partitions for one in found.signatures} == {
        "prefill_8": 1,
        "decode": 1,
    }
    assert all(0 < one.taken <= one.operators for one in found.signatures)
    assert all(len(one.on_cpu) == one.operators - one.taken for one in found.signatures)
