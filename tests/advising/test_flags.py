"""Flags are the served folder's own with the chosen length; where there is no export, what to run first."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtp_train.advising.flags import Flags, flags, plain_flags
from mtp_train.advising.options import Option, find_options
from mtp_train.exporter.base import MANIFEST
from mtp_train.exporter.served import Served, write_served

Make = Callable[..., Any]


def options(report: Make, table: Make, workload: Make, *acceptances: Any, heads: tuple[str, ...] = ("mtp",), **asked: Any) -> list[Option]:
    found = find_options({"run": report(*acceptances, heads=heads)}, workload(**asked), table_of=lambda run, head: table(head))
    return found.options


def by_engine(found: list[Flags]) -> dict[str, Flags]:
    return {flag.engine: flag for flag in found}


def test_vllm_s_flags_are_the_export_s(acceptance: Make, report: Make, table: Make, workload: Make, tmp_path: Path) -> None:
    hot = acceptance(0.8, temperature=1.0, sampling="probabilistic")
    option = next(o for o in options(report, table, workload, hot, temperature=1.0) if o.num_speculative_tokens == 2)
    before = by_engine(flags(option, run=tmp_path, target="tiny", weights=None))["vllm"]
    assert before.command is None and f"python -m mtp_train.export run={tmp_path} name=mtp exporter=vllm" in before.notes[0]
    folder = tmp_path / "served" / "mtp-vllm"
    folder.mkdir(parents=True)
    served = Served(
        class_name="MiMoMTP",
        speculative_config={"method": "mtp", "model": "."},
        hf_overrides={"num_nextn_predict_layers": 1},
        plugin="mtp-train",
        target_path="/models/it's tiny",
    )
    write_served(folder, served)
    found = by_engine(flags(option, run=tmp_path, target="tiny", weights=None))
    words = shlex.split(found["vllm"].command or "")
    assert words[:4] == ["vllm", "serve", "/models/it's tiny", "--speculative-config"] and words[5] == "--hf-overrides"
    assert json.loads(words[4]) == {
        "method": "mtp",
        "model": str(folder.resolve()),
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    }
    assert json.loads(words[6]) == {"num_nextn_predict_layers": 1} and "install mtp-train" in found["vllm"].notes[0]
    assert "decoding.num_speculative_tokens=2" in (found["hf"].command or "")


def test_an_export_of_other_weights_is_not_what_was_measured(
    acceptance: Make, report: Make, table: Make, workload: Make, tmp_path: Path
) -> None:
    option = options(report, table, workload, acceptance(0.8))[0]
    folder = tmp_path / "served" / "mtp-vllm"
    folder.mkdir(parents=True)
    config = {"method": "mtp", "model": "."}
    write_served(
        folder, Served(class_name="MiMoMTP", speculative_config=config, hf_overrides=None, plugin=None, target_path="/models/tiny")
    )
    (folder / MANIFEST).write_text(json.dumps({"identity": {"head_weights_sha256": "ab" * 32}}))
    same = by_engine(flags(option, run=tmp_path, target="tiny", weights="ab" * 8))["vllm"]
    other = by_engine(flags(option, run=tmp_path, target="tiny", weights="cd" * 8))["vllm"]
    assert same.command is not None and other.command is None and "Export the head that was measured" in other.notes[0]


def test_sglang_s_flags_are_marked_as_not_run(acceptance: Make, report: Make, table: Make, workload: Make, tmp_path: Path) -> None:
    chain = next(o for o in options(report, table, workload, acceptance(0.8), heads=("eagle3",)) if o.num_speculative_tokens == 3)
    found = by_engine(flags(chain, run=tmp_path, target="tiny", weights=None))["sglang"]
    assert found.notes[0].startswith("Not run here")
    assert "--speculative-algorithm EAGLE3" in str(found.command)
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in str(found.command)
    settings = {"max_depth": 4, "width": 2, "max_nodes": 8, "min_confidence": 0.0, "refresh": True}
    tree = acceptance(0.8, scheme="tree", decoding="dynamic_tree", num_nodes=8, notes={"decoding": settings})
    (option,) = options(report, table, workload, tree)
    found_for_tree = by_engine(flags(option, run=tmp_path, target="tiny", weights=None))
    assert "--speculative-num-steps 4 --speculative-eagle-topk 2 --speculative-num-draft-tokens 9" in str(found_for_tree["sglang"].command)
    assert "vllm" not in found_for_tree, "it serves no trees"
    assert "decoding=dynamic_tree name=mtp decoding.max_depth=4" in str(found_for_tree["hf"].command)


def test_prompt_lookup_needs_no_head(acceptance: Make, report: Make, table: Make, workload: Make, tmp_path: Path) -> None:
    settings = {"num_speculative_tokens": 4, "max_ngram": 3, "min_ngram": 1}
    measured = acceptance(0.8, decoding="prompt_lookup", num_nodes=4, notes={"decoding": settings})
    option = next(o for o in options(report, table, workload, measured, heads=("prompt_lookup",)) if o.num_speculative_tokens == 4)
    found = by_engine(flags(option, run=tmp_path, target="tiny", weights=None))
    config = json.loads(shlex.split(found["vllm"].command or "")[4])
    assert config == {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    assert "NGRAM --speculative-num-draft-tokens 5" in str(found["sglang"].command), "the last token is judged too"
    assert option.shape.num_draft_steps == 0 and option.text == "prompt_lookup, prompt lookup, K = 4"


def test_plain_decoding_needs_no_flags() -> None:
    found = by_engine(plain_flags("tiny"))
    assert found["vllm"].command == "vllm serve tiny"
    assert all(any("Put your target's path" in note for note in flag.notes) for flag in found.values()), "tiny is a name of ours, no path"
