"""The wheel holds all that the verbs need: installed elsewhere and started from another folder, they find their settings."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VERBS = [
    verb
    for verb in ("regenerate", "precompute", "train", "evaluate", "export", "plan", "advise")
    if (ROOT / "mtp_train" / f"{verb}.py").is_file()
]


def _pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of what the repository tracks, so that the build leaves nothing in the tree."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True)
    for line in listed.stdout.splitlines():
        if (ROOT / line).is_file():
            (copy / line).parent.mkdir(parents=True, exist_ok=True)
            (copy / line).write_bytes((ROOT / line).read_bytes())
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(copy))
    (built,) = out.glob("mtp_train-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    _pip("install", "--no-deps", "--target", str(folder), str(wheel))
    return folder


def test_the_wheel_holds_every_module_and_every_setting(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        held = set(opened.namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mtp_train").rglob("*.py")}
    settings = {f"mtp_train/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert modules | settings <= held, sorted((modules | settings) - held)
    assert not [name for name in held if name.startswith(("tests/", "tools/", "conf/", "data/"))]
    assert any(name.endswith("licenses/LICENSE") for name in held)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_finds_its_settings_from_another_folder(installed: Path, tmp_path: Path, verb: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    code = "import mtp_train, sys; from mtp_train.stage import conf_dir; print(mtp_train.__file__); print(conf_dir())"
    where = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert all(line.startswith(str(installed)) for line in where.stdout.splitlines()), where.stdout
    command = [sys.executable, "-m", f"mtp_train.{verb}"]
    shown = subprocess.run([*command, "--help"], cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert f"# --- {verb}.yaml" in shown.stdout
    settings = subprocess.run([*command, "--cfg", "job"], cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert settings.returncode == 0, settings.stderr
    assert not list(tmp_path.iterdir()), "asking for help or settings wrote something"
