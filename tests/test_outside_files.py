"""Nothing outside a model is opened because the model names it: in this process, and in the processes it starts."""

import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from bundles import bundle, model_part
from cli_runs import DEMO, Patch
from litert_lm_builder import litertlm_peek

from edge_opt.base.errors import EdgeOptError, UsageError
from edge_opt.building import stage_process
from edge_opt.building.sections import check_words, closed
from edge_opt.building.source import look_at
from edge_opt.building.stages import Job
from edge_opt.ir import load, to_tables
from edge_opt.schema import model_bytes, new_table
from edge_opt.schema.litertlm import read_bundle

OUTSIDE = "/outside_of_the_model"
_HOOK = f"""
import os, sys
told = os.path.join(os.path.dirname(__file__), "told")
def note(event, arguments):
    if event == "open" and {OUTSIDE!r} in str(arguments[0]):
        os.close(os.open(told, os.O_CREAT))
sys.addaudithook(note)
"""
_RUN = """
import json, sys
from edge_opt.cli import main
from kept_workers import kept_workers
with kept_workers():
    print([main(arguments) for arguments in json.loads(sys.argv[1])])
"""
NAMING = (
    "tokenizer_json_path",
    "SP_Tokenizer",
    "tf_lite_embedder",
    "transformers_model_path",
    "chat_template",
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    path = tmp_path / "names.litertlm"
    root = to_tables(load(DEMO))
    root.set(
        "external_buffer_groups", [new_table("ExternalBufferGroup", name=f"{OUTSIDE}/weights.bin")]
    )
    root.set("external_buffers", [new_table("ExternalBuffer", id=1, group=0, offset=0, length=4)])
    model = model_bytes(root)
    path.with_suffix(".tflite").write_bytes(model)
    entries = dict.fromkeys(NAMING, f"{OUTSIDE}/x.json") | {"uuid": "1"}
    path.write_bytes(bundle([model_part("prefill_decode", model)], entries))
    return path


def test_no_command_opens_a_file_that_a_model_names(hostile: Path, tmp_path: Path) -> None:
    told = tmp_path / "hook" / "told"  # a worker process prints nowhere that is seen here
    told.parent.mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(_HOOK)
    commands = []
    for path in (hostile, hostile.with_suffix(".tflite")):
        out = [str(tmp_path / f"{path.suffix[1:]}{number}") for number in range(2)]
        commands += [
            ["inspect", str(path), "--shapes"],
            ["convert", str(path), "-o", out[0] + path.suffix, "--verify", "full"],
            ["compare", str(path), str(path)],
            ["golden", "record", str(path), "-o", f"{out[1]}.npz"],
            ["golden", "check", str(path), f"{out[1]}.npz"],
            ["profile", str(path), "--soc", "SM8750", "--sdk", str(tmp_path / "none")],
            ["build", str(path), "-o", f"{out[1]}.litertlm", "--soc", "SM8750"],
        ]
    found = os.pathsep.join(map(str, (tmp_path / "hook", Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": found}
    ran = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert not told.exists()
    assert "Traceback" not in ran.stderr
    noticed = [sys.executable, "-c", f"open('{OUTSIDE}')"]
    subprocess.run(noticed, capture_output=True, check=False, env=environment)
    assert told.exists(), "the hook works"


def test_stages_get_bundles_that_name_nothing(
    hostile: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[Job] = []

    def run(job: Job, _: object) -> dict[str, Any]:
        seen.append(job)
        return {}

    monkeypatch.setitem(stage_process.STAGES, "calibrate", run)
    stage_process._answer(Job("calibrate", "", {"model": str(hostile), "prompts": str(DEMO)}))
    (job,) = seen
    assert job.inputs["prompts"] == str(DEMO)
    told = io.StringIO()
    litertlm_peek.peek_litertlm_file(job.inputs["model"], dump_files_dir=None, output_stream=told)
    assert OUTSIDE not in told.getvalue()
    assert "uuid" in told.getvalue()
    before, after = read_bundle(hostile), read_bundle(job.inputs["model"])
    assert [one.items for one in before.sections] == [one.items for one in after.sections]
    assert before.content(0).read(0, 9999) == after.content(0).read(0, 9999)
    assert asdict(job)["stage"] == "calibrate"
    plain = hostile.with_name("plain.litertlm")
    known = {"Authors": "The ODML Authors", "uuid": "1"}
    plain.write_bytes(bundle([model_part("prefill_decode", DEMO.read_bytes())], known))
    assert closed(plain) == plain, "nothing is copied without need"


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("/../../x", "uuid"),
        ("aux", 'x" }]\n[[section]]\ndata_path = "/etc/passwd'),
        ("a\\b", "uuid"),
    ],
)
def test_a_bundle_whose_words_may_become_paths_is_refused(
    kind: str, key: str, tmp_path: Path
) -> None:
    path = tmp_path / "words.litertlm"
    path.write_bytes(bundle([model_part(kind, DEMO.read_bytes())], {key: "x"}))
    with pytest.raises(EdgeOptError, match="has an unusual name"):
        check_words(read_bundle(path))
    with pytest.raises(EdgeOptError, match="has an unusual name"):
        look_at(path)


@pytest.mark.parametrize("name", ["../../x.safetensors", "/x.safetensors", "", "a/b.safetensors"])
def test_an_index_of_weights_names_files_of_its_folder_only(name: str, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": name}}
    for file, text in (
        ("config.json", "{}"),
        ("tokenizer.json", "{}"),
        ("model.safetensors", "\2\0\0\0\0\0\0\0{}"),
    ):
        (tmp_path / file).write_text(text)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match="is not a file of the checkpoint's folder"):
        look_at(tmp_path)
    index["weight_map"].pop("b")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    look_at(tmp_path)
