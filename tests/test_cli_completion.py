"""What a shell offers at the tabulator key: commands, options, and the names that an option knows."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from edge_opt.cli import options as shared
from edge_opt.cli.app import app
from edge_opt.passes import PASSES
from edge_opt.targets import target_names

BIN = Path(sys.executable).parent
SHELLS = ("bash", "zsh")
LOAD = "source <(_EDGE_OPT_COMPLETE=source_{shell} edge-opt)"
# Calls the function that the script defines as the shell does, and prints what it offers for the last word.
ASK = {
    "bash": """
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _edge_opt_completion edge-opt
printf "%s\\n" "${{COMPREPLY[@]}}"
""",
    "zsh": "words=({words}); CURRENT=${{#words}}; _edge_opt_completion\n",
}
ZSH = 'compdef() { :; }\n_arguments() { print -r -- "$@"; }\n'


def in_shell(shell: str, script: str, home: Path) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(home)}
    environment.pop("ZDOTDIR", None)
    command = [shell, "-f" if shell == "zsh" else "--norc", "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_and_the_values_of_options(shell: str, tmp_path: Path) -> None:
    asked = [ASK[shell].format(words=f"edge-opt {words}") for words in ("conv", "convert m --target q")]
    script = "\n".join([ZSH if shell == "zsh" else "", LOAD.format(shell=shell), *asked])
    said = in_shell(shell, script, tmp_path)
    assert "convert" in said
    assert "qualcomm-htp" in said
    assert "compare" not in said
    assert "generic" not in said


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_installed_for_the_shell_that_asks(shell: str, tmp_path: Path) -> None:
    # The shell must stay: typer looks at the process that started it.
    said = in_shell(shell, "edge-opt --install-completion; echo end", tmp_path)
    assert f"{shell} completion installed" in said
    assert (tmp_path / f".{shell}rc").exists()
    assert any("edge-opt" in path.name for path in tmp_path.rglob("*edge-opt*"))


def options() -> list[Any]:
    """Every option of every command, and its command's context."""
    root = typer.main.get_command(app)
    groups = [root, *(c for c in root.commands.values() if hasattr(c, "commands"))]  # type: ignore[attr-defined]
    commands = [command for group in groups for command in group.commands.values()]
    return [
        p for command in commands for p in getattr(command, "params", ()) if p.param_type_name == "option"
    ]


def test_every_option_that_takes_one_of_some_names_completes_them() -> None:
    known = {"target": target_names(), "passes": list(PASSES), "skip": list(PASSES)}
    named = [option for option in options() if option.name in known]
    assert len(named) > len(known)
    for option in named:
        assert offered(option) == known[option.name], option
    chosen = {
        option.name: offered(option) for option in options() if option.name in ("verify", "sections", "on")
    }
    assert chosen == {
        "verify": [*get_args(shared.Verify)],
        "sections": [*get_args(shared.Sections)],
        "on": [*get_args(shared.Place)],
    }


def offered(option: Any) -> list[str]:
    return [item.value for item in option.shell_complete(None, "")]


def test_of_a_list_the_last_name_is_completed_and_none_offered_twice() -> None:
    assert shared.complete_pass("") == list(PASSES)
    assert shared.complete_pass("mha_to_sha,ti") == ["mha_to_sha,tile_rows"]
    assert shared.complete_pass("mha_to_sha,mha") == []


def test_targets_are_those_that_are_bundled() -> None:
    assert shared.complete_target("") == target_names()


def test_offering_the_values_of_a_choice_loads_nothing() -> None:
    code = "import sys; from edge_opt.cli import app; print('numpy' in sys.modules or 'edge_opt.passes' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
