"""The house as data: what may stand where, who may import whom, and how long a thing may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mtp_train"

TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "requirements.lock", "requirements-engine.lock"}
TOP_FOLDERS = {"mtp_train", "conf", "data", "jobs", "tests", "tools", ".ci"}
VERBS = ("regenerate", "precompute", "train", "evaluate", "export", "plan", "advise")
# A line imports from the lines above it only, and nothing from its own line but itself.
ORDER = (
    ("typed", "faults", "commandline", "orphan"),
    ("records", "runtime", "quantity"),
    ("lock", "results"),
    ("target", "cache", "acceptance", "nn", "checkpoint", "run"),
    ("prompt", "batch", "published"),
    ("head", "loss"),
    ("decoding", "exporter"),
    ("engine", "trainer"),
    ("planning", "ablation"),
    ("advising",),
    ("stage",),
    ("opening",),
    VERBS,
    ("__main__",),
)
# Allowed by the order, and still forbidden: formats and heads stay a sum, not a product.
NEVER = {("exporter", "head"), ("trainer", "decoding"), ("trainer", "exporter")}
# Imported where they are needed, never when a module loads.
HEAVY = {"transformers", "vllm", "deepspeed", "wandb", "matplotlib", "datasets", "accelerate"}
# A module that only an engine's own process loads, since its class must inherit from the engine's.
LOADED_BY_ENGINE = {"mtp_train/engine/vllm_plugin_model.py": {"vllm"}}
DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "wrapper"}
CODE_GROUPS = ("head", "loss", "engine", "exporter", "decoding")
# Words that are settings of one computation, or cases of one definition, and so have one test together.
TESTED_TOGETHER = {
    "tests/head/test_pair.py": {"mtp", "eagle"},
    "tests/loss/test_losses.py": {"forward_kl", "topk_kl", "cross_entropy", "total_variation", "hidden_l1"},
}
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 320, 70


def _tracked() -> list[Path]:
    """Files that are, or are about to be, in the repository and exist."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def _modules() -> list[Path]:
    return [path for path in _tracked() if path.suffix == ".py" and path.is_relative_to(PACKAGE)]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _imported(node: ast.AST) -> list[str]:
    """Dotted names that an import statement names; ``from a.b import c`` gives ``a.b`` and ``a.b.c``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import at line {node.lineno}"
        return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _parts(path: Path) -> tuple[str, set[str]]:
    """The part of the house that a module belongs to, and those that it imports."""
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    names = [name for node in ast.walk(_tree(path)) for name in _imported(node)]
    return own, {name.split(".")[1] for name in names if name.startswith("mtp_train.")} - {own}


def _at_load(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module loads: not those in functions, nor what only a type checker reads."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_load(node.orelse)
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from _at_load(getattr(node, field, []))


def test_top_level_is_fixed() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in _tracked()}
    strangers = {name for name in found if not name.startswith(".")} - TOP_LEVEL - TOP_FOLDERS
    assert not strangers, f"not a top-level name: {sorted(strangers)}"


def test_imports_point_down() -> None:
    rank = {part: line for line, parts in enumerate(ORDER) for part in parts}
    wrong = []
    for path in _modules():
        if path == PACKAGE / "__init__.py":
            continue
        own, imported = _parts(path)
        assert own in rank, f"{_name(path)}: {own} has no place in ORDER"
        for other in sorted(imported):
            if rank.get(other, -1) >= rank[own] or (own, other) in NEVER:
                wrong.append(f"{_name(path)} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_only_stage_and_verbs_know_hydra() -> None:
    knowing = {"stage", *VERBS}
    wrong = [
        _name(path)
        for path in _modules()
        for node in ast.walk(_tree(path))
        if path.stem not in knowing and {name.split(".")[0] for name in _imported(node)} & {"hydra", "omegaconf"}
    ]
    assert not wrong, f"these import hydra or omegaconf: {wrong}"


def test_heavy_imports_wait_until_they_are_needed() -> None:
    wrong = []
    for path in _modules():
        for node in _at_load(_tree(path).body):
            heavy = {name.split(".")[0] for name in _imported(node)} & HEAVY - LOADED_BY_ENGINE.get(_name(path), set())
            wrong += [f"{_name(path)}:{node.lineno} imports {', '.join(sorted(heavy))}"] if heavy else []
    assert not wrong, "\n".join(wrong)


def test_modules_and_functions_stay_short() -> None:
    wrong = []
    for path in _modules():
        tree = _tree(path)
        length = len(path.read_text(encoding="utf-8").splitlines())
        wrong += [f"{_name(path)}: {length} lines"] if length > MAX_MODULE_LINES else []
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                wrong += [f"{_name(path)}:{node.lineno} {node.name}: {lines} lines"] if lines > MAX_FUNCTION_LINES else []
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    silent = [_name(path) for path in _tracked() if path.suffix == ".py" and not ast.get_docstring(_tree(path))]
    assert not silent, f"no docstring: {silent}"


def test_there_are_no_drawers() -> None:
    wrong = [_name(path) for path in _tracked() if set(re.split(r"[._/]", _name(path))) & DRAWERS]
    assert not wrong, f"named after nothing in particular: {wrong}"


def test_packages_are_named_in_pyproject() -> None:
    named = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in _modules()}
    assert named == found | {"mtp_train.conf"}


def _words() -> list[tuple[str, str]]:
    return [(group, path.stem) for group in CODE_GROUPS for path in sorted((ROOT / "conf" / group).glob("*.yaml"))]


@pytest.mark.parametrize(("group", "word"), _words())
def test_a_word_is_one_spelling(group: str, word: str) -> None:
    """``conf/head/eagle.yaml`` builds a class of ``mtp_train/head/eagle.py``, tested by ``tests/head/test_eagle.py``.

    A long test may be parted: ``test_hf_generate.py`` and ``test_hf_prefill.py`` are tests of ``hf``.
    """
    found = re.search(r"^_target_: *(\S+)", (ROOT / "conf" / group / f"{word}.yaml").read_text(encoding="utf-8"), re.M)
    assert found is not None, "no _target_"
    assert found[1].startswith(f"mtp_train.{group}.{word}."), f"_target_ is {found[1]}"
    assert (PACKAGE / group / f"{word}.py").is_file(), f"missing: mtp_train/{group}/{word}.py"
    tests = {_name(path): path for path in sorted((ROOT / "tests" / group).glob("test_*.py"))}
    own = [name for name in tests if re.fullmatch(rf"tests/{group}/test_{word}(_\w+)?\.py", name)]
    shared = [name for name in tests if word in TESTED_TOGETHER.get(name, ()) and word in tests[name].read_text(encoding="utf-8")]
    assert own or shared, f"missing: tests/{group}/test_{word}.py"


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_says_command_cost_and_what_to_expect(path: Path) -> None:
    header = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    for word in ("COMMAND", "COST", "EXPECT"):
        assert re.search(rf"^# *{word}\b", header, re.M), f"{_name(path)}: no {word} in its header"
    assert re.search(r"EXPECT\b[\s\S]*\d", header), f"{_name(path)}: EXPECT holds no number"


def test_tests_mirror_the_package() -> None:
    folders = {path.parent.name for path in _tracked() if path.is_relative_to(ROOT / "tests") and path.suffix == ".py"} - {"tests"}
    assert folders <= {part for parts in ORDER for part in parts} | {"data", "tools"}, folders


def test_no_machine_s_paths_or_hosts() -> None:
    # Put together here, so that this file does not hold what it looks for.
    paths = "|".join(f"/{name}/" for name in ("work", "root", "opt", "Users"))
    pattern = re.compile(rf"(?<![\w.])({paths})|/home/(?!user\b)\w|file://|\bpypi\.org\b|index-url|find-links")
    wrong = []
    for path in _tracked():
        if path == Path(__file__) or path.suffix in (".png", ".jsonl", ".json"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(line):
                wrong.append(f"{_name(path)}:{number}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["mtp_train", "mtp_train.records", "mtp_train.stage"])
def test_importing_costs_nothing(module: str) -> None:
    _assert_light(f"import {module}")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if (PACKAGE / f"{verb}.py").is_file()])
def test_help_costs_nothing(verb: str) -> None:
    shown = _assert_light(f"sys.argv = ['{verb}', '--help']; runpy.run_module('mtp_train.{verb}', run_name='__main__')")
    assert f"python -m mtp_train.{verb}" in shown
    assert "groups" in shown


_FIRST_WORD = """
import mtp_train.runtime

def say(message):
    print(message)
    raise SystemExit

mtp_train.runtime.log = say
sys.argv = {words}
try:
    runpy.run_module('mtp_train.' + sys.argv[0], run_name='__main__', alter_sys=True)
except SystemExit:
    pass
"""


@pytest.mark.parametrize("verb", ["precompute", "train", "evaluate", "export"])
def test_a_stage_says_what_it_opens_before_the_imports_that_take_seconds(tmp_path: Path, verb: str) -> None:
    """Bare ``import torch`` takes a second, and what a target's tokenizer needs three more."""
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses/meta.json").write_text('{"format_version": 1, "identity": {"target_name": "some model"}}')
    (tmp_path / "responses/finished.json").write_text("{}")
    words = [verb, "target=local", f"target.path={tmp_path}", "target.name=mine", f"run={tmp_path}"]
    said = _assert_light(_FIRST_WORD.format(words=words))
    assert str(tmp_path) in said and "opening target mine" in said


def _assert_light(code: str) -> str:
    """Run code in a fresh interpreter; fail where it imported what takes seconds. Returns what it printed."""
    heavy = ("torch", "transformers", "vllm", "deepspeed", "datasets", "matplotlib", "wandb")
    script = f"import runpy, sys\n{code}\nprint('HEAVY', [name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("HEAVY []"), done.stdout.rstrip().splitlines()[-1]
    return done.stdout
