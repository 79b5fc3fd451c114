"""The bridge to Hydra: help without heavy imports, one word for a run's settings, and nothing but our own classes built."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtp_train import stage
from mtp_train.opening import OpenTarget, build_head
from mtp_train.stage import build, call, check_name, conf_dir, load_word, plain

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "datasets", "accelerate", "vllm", "matplotlib")
GROUPS = {
    "regenerate": {"target", "engine", "prompt"},
    "precompute": {"target", "engine", "prompt"},
    "train": {"target", "head"},
    "evaluate": {"target", "engine", "decoding"},
    "export": {"target", "exporter"},
}
# Runs every verb's --help in one process and says what each printed and which heavy module it brought in.
ASK_ALL = """
import contextlib, io, json, runpy, sys
import mtp_train
found = {}
for verb in sys.argv[2].split(","):
    sys.argv[1:] = [sys.argv[1], sys.argv[2]]
    words, sys.argv = sys.argv, [verb, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_module("mtp_train." + verb, run_name="__main__")
    sys.argv = words
    found[verb] = [out.getvalue(), [name for name in sys.argv[1].split(",") if name in sys.modules]]
print(json.dumps(found))
"""


def run(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)


def settings_of(verb: str, *words: str) -> dict[str, Any]:
    """What a command line would run with."""
    import yaml

    shown = run("-m", f"mtp_train.{verb}", "--cfg", "job", *words)
    assert shown.returncode == 0, shown.stderr
    found = yaml.safe_load(shown.stdout)
    assert isinstance(found, dict)
    return found


def fail(*words: str) -> str:
    """The one message of a command that is refused."""
    done = run(*words)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stderr


def test_help_of_every_verb_is_quick_and_explains_every_setting() -> None:
    done = run("-c", ASK_ALL, ",".join(HEAVY), ",".join(GROUPS))
    assert done.returncode == 0, done.stderr
    for verb, (text, heavy) in json.loads(done.stdout).items():
        assert not heavy, f"{verb} --help imports {heavy}"
        assert f"python -m mtp_train.{verb}" in text
        assert ("torchrun --nproc-per-node" in text) == (verb in ("regenerate", "precompute", "train")), "which share their work"
        listed = {line.split(":")[0].strip(): line for line in text.splitlines() if line.startswith("  ") and ": " in line}
        for group in {*GROUPS[verb], "experiment"}:
            for word in (path.stem for path in (conf_dir() / group).glob("*.yaml")):
                assert word in listed[group], f"{verb} --help does not list {group}={word}"
        comments = [line for line in (conf_dir() / f"{verb}.yaml").read_text(encoding="utf-8").splitlines() if "#" in line]
        assert comments and all(comment in text for comment in comments)


def test_help_shows_the_settings_of_a_choice() -> None:
    shown = run("-m", "mtp_train.train", "--help", "head=eagle")
    assert shown.returncode == 0
    assert (conf_dir() / "head" / "eagle.yaml").read_text(encoding="utf-8") in shown.stdout
    assert "# --- head/mtp.yaml" not in shown.stdout


@pytest.fixture
def experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "head").mkdir()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "train:\n  - num_steps=7\n  - head=eagle\n  - +losses.total_variation=0.5\n  - ~losses.topk_kl\nexport: []\n"
    )
    monkeypatch.setattr(stage, "conf_dir", lambda: tmp_path)
    return tmp_path


def test_an_experiment_is_settings_typed_and_the_command_line_wins(experiments: Path) -> None:
    with_experiment = stage._with_experiment
    assert with_experiment("train", ["a=1"]) == ["a=1"]
    assert with_experiment("export", ["a=1", "experiment=mine"]) == ["a=1"]
    assert with_experiment("evaluate", ["experiment=mine"]) == [], "a stage that the experiment does not name"
    found = with_experiment("train", ["experiment=mine", "num_steps=9"])
    assert found == ["head=eagle", "+losses.total_variation=0.5", "~losses.topk_kl", "num_steps=9"]
    assert with_experiment("train", ["head=mtp", "experiment=mine", "losses.total_variation=1"]) == [
        "num_steps=7",
        "~losses.topk_kl",
        "head=mtp",
        "losses.total_variation=1",
    ]
    # argparse does not take overrides on both sides of an option.
    assert with_experiment("train", ["--cfg", "job", "seed=1", "experiment=mine", "num_steps=9", "head=mtp"])[:3] == [
        "--cfg",
        "job",
        "+losses.total_variation=0.5",
    ]
    with pytest.raises(ValueError, match=r"experiment: expected one of \['mine'\], found 'yours'"):
        with_experiment("train", ["experiment=yours"])


@pytest.mark.parametrize("verb", GROUPS)
@pytest.mark.parametrize("word", sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml")))
def test_every_experiment_fits_every_verb(verb: str, word: str) -> None:
    """An experiment that names a setting which is no longer there is found here, not in the third hour of a run."""
    import yaml

    found = settings_of(verb, f"experiment={word}", "run=elsewhere")
    assert found["run"] == "elsewhere"
    for setting in load_word("experiment", word).get(verb, []):
        key, _, value = setting.partition("=")
        node: Any = found
        for part in key.lstrip("+").split("."):
            node = node[part]
        if not isinstance(node, dict):  # a group's choice: the settings of its yaml stand there
            assert node == yaml.safe_load(value), setting


def test_unknown_keys_choices_and_missing_values_are_one_message(tmp_path: Path) -> None:
    unknown = run("-m", "mtp_train.train", "no_such_key=1")
    assert unknown.returncode != 0 and "no_such_key" in unknown.stderr and "Traceback" not in unknown.stderr
    choice = run("-m", "mtp_train.train", "head=nope")
    assert choice.returncode != 0 and "eagle" in choice.stderr and "Traceback" not in choice.stderr
    out = f"run={tmp_path}"
    assert "experiment: expected one of" in fail("-m", "mtp_train.train", "experiment=nope")
    assert "prompt.source: expected a value, found none" in fail("-m", "mtp_train.regenerate", "prompt=file", out)
    assert "target.path: expected a value, found none" in fail("-m", "mtp_train.export", "target=local", out)
    added = fail("-m", "mtp_train.regenerate", "prompt=file", "prompt.source=x.jsonl", "+prompt.limt=3", out)
    assert "prompt: expected the settings" in added and "limt, which it does not know" in added and "'limit'" in added
    assert not list(tmp_path.iterdir())


# Runs a stage in one process once per line of settings and prints what each said (a child per line, so that sys.exit ends it).
SAY_ALL = """
import json, os, runpy, sys
import hydra, omegaconf
for line in json.load(sys.stdin):
    sys.stdout.flush()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 2)
        sys.argv = [sys.argv[1], *line]
        try:
            runpy.run_module("mtp_train." + sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            os._exit(end.code)
        except BaseException:
            import traceback; traceback.print_exc()
        os._exit(1)
    os.close(write)
    said = os.fdopen(read, encoding="utf-8").read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said]))
"""
REFUSED = {
    "regenerate": {
        "num_answers=x": "num_answers: expected a whole number, found 'x'; its default is 1",
        "num_answers=null": "num_answers: expected a whole number, found null",
        "max_length_tokens=1": "max_length_tokens: expected at least 2, found 1",
        "prompt.limit=many": "prompt.limit: expected a whole number or null, found 'many'",
        "prompt.deduplicate=maybe": "prompt.deduplicate: expected true or false, found 'maybe'",
        "sampling.temperature=nan": "sampling.temperature: expected a finite number, found nan",
        "sampling=null": "sampling: expected a mapping, found null",
        "run=": "run: expected text, found none",
        "+nope=1": "nope: expected no further setting, found this one",
        "nope=1": "nope: expected a setting of regenerate, found none of that name",
        "sampling.tempreature=1": "did you mean sampling.temperature",
        "engine.bacht_size=3": "did you mean engine.batch_size",
        "promt=file": "did you mean prompt or ",
        "engine=nope": "Could not find 'engine/nope'",
        "engine=serv": "did you mean server? ",
        "--num_answers=3": "settings are key=value: expected num_answers=3, found --num_answers=3;",
        "~sampling.seed": "sampling.seed: expected a value, found it taken away",
        "~engine": "engine: expected a value, found it taken away",
        "x y": "python -m mtp_train.regenerate --help lists groups, choices and settings",
        "out='${nope}'": "Interpolation key 'nope' not found",
    },
    "train": {
        "optimizer=null": "optimizer: expected a mapping, found null",
        "losses.kl=1": "losses.kl: expected one of cross_entropy, forward_kl, hidden_l1, sampled_kl, topk_kl, total_variation, "
        "found 'kl'\n",
        "losses.forward_kl=1": "expected one that is there (hidden_l1, topk_kl), found 'forward_kl'; +losses.forward_kl=... adds it",
        "depth_weights=[1.0,0.5]": "depth_weights: expected one weight per depth (draft_steps=1)",
        "compile=true": "compile: expected a loss whose passes can be compiled (forward_kl), found hidden_l1, topk_kl",
        "losses.topk_kl=x": "losses.topk_kl: expected a number or a mapping, found 'x'",
        "num_steps=1.5": "num_steps: expected a whole number or null, found 1.5",
        "validation.fraction=null": "validation.fraction: expected a number, found null",
        "+seeed=3": "did you mean seed",
    },
    "evaluate": {
        "ways=3": "ways: expected a mapping, found 3",
        "aims=3": "aims: expected a list (a mapping each), found 3",
        "aims={}": "Cannot merge",
        "ways.greedy.prompt_sets=[mine]": "ways: expected prompt sets among ['gsm8k', 'humaneval', 'project'] (prompt_sets), found",
        "benchmark=file": "found none of that name; benchmark is chosen for a place (prompt_sets.project, prompt_sets.gsm8k, "
        "prompt_sets.humaneval): benchmark@prompt_sets.project=file prompt_sets.project.source=[...]; python -m",
        "benchmark.source=question.jsonl": "benchmark@prompt_sets.project=file prompt_sets.project.source=[...]; python -m",
        "benchmark@prompt_sets.projct=file": "benchmark@prompt_sets.project=file prompt_sets.project.source=[...]; python -m",
        "identity.num_prompts=x": "identity.num_prompts: expected a whole number or null, found 'x'",
    },
}


@pytest.mark.parametrize("verb", REFUSED)
def test_a_wrong_setting_is_one_short_message(verb: str, tmp_path: Path) -> None:
    """Whatever is wrong with a setting: no traceback, exit status 2, the key, what was expected and what was found."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "one?"}\n')
    own = {"regenerate": ["prompt=file", f"prompt.source=[{prompts}]"]}.get(verb, [])
    lines = [["target=local", f"target.path={tmp_path}", f"run={tmp_path}/run", *own, word] for word in REFUSED[verb]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SAY_ALL, verb],
        input=json.dumps(lines),
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for (word, message), (code, said) in zip(REFUSED[verb].items(), found, strict=True):
        assert code == 2 and "Traceback" not in said, (word, code, said)
        fault = "".join(line for line in said.splitlines(keepends=True) if not line.startswith("[mtp-train] "))  # what it was about to do
        assert message in fault, (word, said)
        assert len(said) < 900 and fault.lstrip().startswith(f"mtp-train {verb}: "), (word, said)
    assert not (tmp_path / "run").exists()


def test_errors_that_need_no_model_come_before_its_libraries(tmp_path: Path) -> None:
    """What is not there, or is no loss, is told before transformers is imported, which takes longer than all the rest."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    code = "import runpy, sys\nverb, *sys.argv[1:] = sys.argv[1:]\n"
    code += "try: runpy.run_module('mtp_train.' + verb, run_name='__main__', alter_sys=True)\n"
    code += "except SystemExit: print([name for name in ('transformers', 'accelerate', 'datasets') if name in sys.modules])"
    for verb, message in (
        ("train", "run precompute"),
        ("precompute", "run regenerate"),
        ("export", "run train"),
        ("evaluate", "run train"),
    ):
        done = run("-c", code, verb, "target=local", f"target.path={tmp_path}", f"run={tmp_path}/run")
        assert message in done.stderr and done.stdout == "[]\n", (verb, done.stdout, done.stderr)


def test_without_a_stage_all_are_listed() -> None:
    shown = run("-m", "mtp_train")
    assert shown.returncode == 0
    listed = [line.split()[2] for line in shown.stdout.splitlines() if line.startswith("  python -m ")]
    assert listed[:5] == [f"mtp_train.{verb}" for verb in GROUPS]
    assert set(listed) == {f"mtp_train.{path.stem}" for path in conf_dir().glob("*.yaml")}
    assert "expected a stage as below, found 'trian'" in fail("-m", "mtp_train", "trian")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stranger:
    """A class of some other package."""

    value: int


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "subprocess.Popen",
        f"{__name__}.Stranger",
        "mtp_training.head.Mtp",
        "mtp_train",
        "mtp_train.Path",
        "mtp_train.runtime.os.system",
        "mtp_train.runtime.subprocess.Popen",
        "mtp_train.stage.Path",
        "mtp_train.runtime.log",
        "mtp_train.no_such.Thing",
        "mtp_train.head.mtp.Nothing",
        "../mtp_train.head.mtp.Mtp",
        "",
        None,
        7,
    ],
)
def test_only_classes_of_this_package_are_built(target: object) -> None:
    with pytest.raises(ValueError, match="expected a node whose _target_ is a class in mtp_train"):
        build({"_target_": target, "value": 1})
    with pytest.raises(ValueError, match="expected a node whose _target_ is a class in mtp_train"):
        build({"value": 1})


def test_built_from_exactly_the_keys_of_the_class() -> None:
    node = {"_target_": "mtp_train.trainer.settings.Schedule", "kind": "cosine", "warmup_steps": 3, "min_ratio": 0.1}
    made = build(node)
    assert (made.kind, made.warmup_steps, made.min_ratio) == ("cosine", 3, 0.1)
    assert node["_target_"], "the node is not consumed"
    with pytest.raises(ValueError, match=r"expected the settings .*'warmup_steps'.*found warm_up, which it does not know; no warmup_steps"):
        build({"_target_": node["_target_"], "kind": "cosine", "warm_up": 3, "min_ratio": 0.1})
    with pytest.raises(ValueError, match="min_ratio, which it does not know"):
        build(node, min_ratio=0.2)
    with pytest.raises(ValueError, match=r"kind"):
        build({**node, "kind": "sine"})
    # Records handed over are kept as they are: through OmegaConf they would come out as dicts.
    record = Stranger(value=3)
    assert call(lambda *, a, given: (a, given), {"a": [1]}, where="x", given=record) == ([1], record)


def test_settings_read_from_a_checkpoint_cannot_name_code(tmp_path: Path) -> None:
    """head.json may come from anywhere; a dotted path inside it is refused, not called."""
    touched = tmp_path / "touched"
    call_touch = {"_target_": "pathlib.Path.touch", "self": {"_target_": "pathlib.Path", "_args_": [str(touched)]}}
    usual = {key: value for key, value in load_word("head", "mtp").items() if key != "_target_"}
    opened = OpenTarget(path=tmp_path, spec=None, template=None, trust_remote_code=False)  # type: ignore[arg-type]
    for settings in ({**usual, "norms": call_touch}, {**usual, "seed": [call_touch]}, {**usual, **call_touch}):
        with pytest.raises(ValueError, match=r"head mtp: .*names code"):
            build_head("mtp", settings, target=opened, shared=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="target_path, which it does not know"):
        build_head("mtp", {**usual, "target_path": "/elsewhere"}, target=opened, shared=None)  # type: ignore[arg-type]
    assert not touched.exists()


@pytest.mark.parametrize(
    "word", ["../head/mtp", "head/mtp", "/etc/passwd", "mtp.yaml", "Mtp", "mtp\n", "", ".", "..", "mtp_train.head.mtp.Mtp"]
)
def test_words_on_disk_are_plain_words(word: str) -> None:
    with pytest.raises(ValueError, match=r"head: expected one of \[.*'mtp'.*\], found "):
        load_word("head", word)


@pytest.mark.parametrize("group", ["head", "loss", "engine", "exporter"])
def test_every_word_of_a_code_group_names_its_class(group: str) -> None:
    """The yaml's word, the module and the class are one spelling."""
    import yaml

    for path in sorted((conf_dir() / group).glob("*.yaml")):
        target = yaml.safe_load(path.read_text(encoding="utf-8"))["_target_"]
        assert stage.class_of(target).__module__ == f"mtp_train.{group}.{path.stem}"


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a b", "a\n"])
def test_a_name_is_one_plain_word(name: str) -> None:
    with pytest.raises(ValueError, match="it becomes a folder of the run"):
        check_name(name)


def test_plain_resolves_and_names_what_is_missing() -> None:
    from omegaconf import OmegaConf

    node = OmegaConf.create({"a": 1, "b": {"c": "${a}", "d": [1, "${a}"]}, "e": {"f": "???"}})
    assert plain(node.b) == {"c": 1, "d": [1, 1]}
    assert plain({"x": 1}) == {"x": 1}
    with pytest.raises(ValueError, match=r"^e\.f: expected a value, found none; add e\.f=\.\.\. to the command$"):
        plain(node)


# Calls train with each line's words in one process; what each said, and which heavy modules were brought in.
REFUSE_ALL = """
import contextlib, io, json, runpy, sys
cases, heavy = json.loads(sys.argv[1]), sys.argv[2].split(",")
said = []
for words in cases:
    sys.argv = ["train", *words]
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.suppress(SystemExit):
        runpy.run_module("mtp_train.train", run_name="__main__", alter_sys=True)
    said.append(err.getvalue())
print(json.dumps([said, [name for name in heavy if name in sys.modules]]))
"""


def test_train_refuses_settings_before_it_opens_anything() -> None:
    """A word mistyped is told at once: not behind the import of torch, nor a target that is opened."""
    cases = {
        "+losses.hiden_l1=1.0": "loss: expected one of",
        "losses.topk_kl={weight: 1.0, tmperature: 2}": "losses.topk_kl: expected a weight, and settings among",
        "optimizer.lr=-1": "optimizer.lr: expected above 0, found -1",
        "schedule.kind=linear": "schedule.kind: expected one of cosine, constant, found 'linear'",
        "num_steps=0": "num_steps: expected at least 1, found 0",
        "num_epochs=0": "num_epochs: expected at least 1, found 0",
        "device=cuda": "device: expected",
        "precision=fp16": "precision: expected",
        "checkpoint.final=first": "checkpoint.final: expected",
        "packs_per_step=0": "packs_per_step: expected at least 1",
    }
    done = run("-c", REFUSE_ALL, json.dumps([[word] for word in cases]), ",".join(HEAVY))
    assert done.returncode == 0, done.stderr
    told, heavy = json.loads(done.stdout)
    assert not heavy
    for said, expected in zip(told, cases.values(), strict=True):
        assert expected in said and "opening target" not in said and "Traceback" not in said, said


def test_processes_without_a_pack_are_refused_at_once_and_by_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    from mtp_train import train

    waited: list[float] = []
    monkeypatch.setattr(train.time, "sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, context, packs in ((0, 1, 3), (0, 2, 1), (1, 1, 1)):
        monkeypatch.setenv("RANK", str(rank))
        settings = OmegaConf.create({"packs_per_step": packs, "parallel": {"context": context}})
        with pytest.raises(ValueError, match=f"packs_per_step: expected at least {4 // context}, .*found {packs}"):
            train._check_packs(settings)
        assert bool(waited) == (rank == 1)
    train._check_packs(OmegaConf.create({"packs_per_step": 2, "parallel": {"context": 2}}))
