"""From files, manifests and data sets to prompts: shapes, roles, counts, duplicates, samples."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from mtp_train.prompt.load import load_prompts
from mtp_train.prompt.long_documents import materialise
from mtp_train.prompt.skips import Skip, SkipCounts

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def write(tmp_path, rows, name="set.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(source, **settings):
    return load_prompts(**{"source": source, "on_bad_row": "skip", "deduplicate": False, **settings})


def said(prompt):
    return [(message["role"], message["content"]) for message in prompt.messages]


Q_AND_A = [("user", "q"), ("assistant", "a")]
SHAPES = {
    "messages": ({"messages": TALK}, Q_AND_A),
    "sharegpt": ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, Q_AND_A),
    "alpaca": ({"instruction": "q", "input": "", "output": "a"}, Q_AND_A),
    "alpaca_input": ({"instruction": "q", "input": "more", "output": "a"}, [("user", "q\n\nmore"), ("assistant", "a")]),
    "alpaca_history": ({"instruction": "q", "output": "a", "history": [["p", "b"]]}, [("user", "p"), ("assistant", "b"), *Q_AND_A]),
    "alpaca_system": ({"instruction": "q", "output": "a", "system": "s"}, [("system", "s"), *Q_AND_A]),
    "sharegpt_system": ({"system": "s", "conversations": [{"from": "human", "value": "q"}]}, [("system", "s"), ("user", "q")]),
    "prompt_completion": ({"prompt": "q", "completion": "a"}, Q_AND_A),
    "prompt_completion_messages": ({"prompt": TALK[:1], "completion": TALK[1:]}, Q_AND_A),
    "prompt": ({"prompt": "q"}, [("user", "q")]),
    "text": ({"text": "q"}, [("user", "q")]),
    "turns": ({"question_id": 81, "category": "writing", "turns": ["q", "r"]}, [("user", "q"), ("assistant", ""), ("user", "r")]),
    "null_columns": ({"messages": None, "text": "q"}, [("user", "q")]),
    "developer": ({"messages": [{"role": "developer", "content": "s"}, TALK[0]]}, [("system", "s"), ("user", "q")]),
    "text_parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q "}, {"type": "text", "text": "r"}]}]},
        [("user", "q r")],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_told_by_their_columns(tmp_path, name):
    row, expected = SHAPES[name]
    prompts, counts = load(write(tmp_path, [row]))
    assert [said(prompt) for prompt in prompts] == [expected]
    assert (counts.num_rows, counts.num_kept, counts.num_skipped) == (1, 1, 0)


@pytest.mark.parametrize("spelling", ["human", "user", "Human", " USER "])
@pytest.mark.parametrize("answerer", ["gpt", "chatgpt", "bing", "bard", "assistant", "GPT"])
def test_role_spellings(tmp_path, spelling, answerer):
    row = {"conversations": [{"from": spelling, "value": "q"}, {"from": answerer, "value": "a"}]}
    assert said(load(write(tmp_path, [row]))[0][0]) == Q_AND_A


def test_a_file_may_mix_shapes_and_a_format_can_be_forced(tmp_path):
    path = write(tmp_path, [SHAPES["sharegpt"][0], SHAPES["alpaca"][0], {"messages": TALK}])
    assert [said(prompt) for prompt in load(path)[0]] == [Q_AND_A] * 3
    both = write(tmp_path, [{"messages": TALK, "text": "document"}])
    assert said(load(both, format="text")[0][0]) == [("user", "document")]
    with pytest.raises(ValueError, match="format text needs text; columns found: messages"):
        load(write(tmp_path, [{"messages": TALK}]), format="text")
    with pytest.raises(ValueError, match="expected format among"):
        load(both, format="sharegbt")


def test_field_map_names_the_columns(tmp_path):
    path = write(tmp_path, [{"question": "q", "answer": "a", "topic": "math"}])
    prompts, _ = load(path, field_map={"prompt": "question", "completion": "answer", "category": "topic"})
    assert (said(prompts[0]), prompts[0].category) == (Q_AND_A, "math")
    with pytest.raises(ValueError, match="columns found: question, answer, topic"):
        load(path, field_map={"prompt": "query"})
    with pytest.raises(ValueError, match="from the known column to the data set's own"):
        load(path, field_map={"question": "prompt"})


FAULTS = {
    "no_user_turn": {"messages": [{"role": "system", "content": "s"}]},
    "empty_assistant": {"messages": [TALK[0], {"role": "assistant", "content": ""}]},
    "empty_user": {"messages": [{"role": "user", "content": " "}, TALK[1]]},
    "role_unknown": {"messages": [{"role": "critic", "content": "q"}, TALK[1]]},
    "role_type": {"messages": [{"role": 3, "content": "q"}]},
    "content_type": {"messages": [{"role": "user", "content": 42}, TALK[1]]},
    "content_part": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x.png"}}]}]},
    "lone_surrogate": {"messages": [{"role": "user", "content": "bad \ud83d text"}]},
    "messages_type": {"messages": "q"},
    "message_type": {"messages": ["q"]},
    "tool_call_type": {
        "messages": [TALK[0], {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]
    },
    "row_type": ["q"],
    "unknown_columns": {"foo": 1},
}
# More of a kind: each value of another type than its key should have.
FAULTS |= {
    "tool_call_type ": {"messages": [TALK[0], {"role": "assistant", "content": None, "tool_calls": 3}]},
    "messages_type ": {"instruction": "q", "history": 3},
    "messages_type  ": {"instruction": "q", "history": {"a": "b"}},
    "content_type ": {"prompt": 42},
    "content_type  ": {"instruction": "q", "output": 42},
}
SAYS = {
    "role_unknown": "critic",
    "content_type": "int 42",
    "content_part": "image_url",
    "lone_surrogate": "U+D83D",
    "unknown_columns": "foo",
    "no_user_turn": "system",
}


@pytest.mark.parametrize("reason", FAULTS)
def test_faults_are_counted_with_their_row_and_stop_the_run_where_asked(tmp_path, reason):
    path = write(tmp_path, [{"messages": TALK}, FAULTS[reason], {"messages": TALK}])
    reason = reason.strip()
    prompts, counts = load(path)
    assert len(prompts) == 2
    assert {name: tally.count for name, tally in counts.skipped.items()} == {reason: 1}
    example = counts.skipped[reason].examples[0]
    assert example["row"] == 2 and not counts.has_more, "the summary shows it"
    assert SAYS.get(reason, "") in example["why"]
    counts.write(tmp_path / "skips.json")
    written = json.loads((tmp_path / "skips.json").read_text(encoding="utf-8"))
    assert (written["num_rows"], written["num_kept"], written["skipped"][reason]["count"]) == (3, 2, 1)
    with pytest.raises(ValueError, match=f"row 2: {reason}"):
        load(path, on_bad_row="error")


def test_there_is_more_where_a_reason_came_twice():
    counts = SkipCounts()
    for row, more in ((1, False), (2, True)):
        counts.note(Skip(reason="odd", why="it is"), row=row)
        assert counts.has_more is more


def test_nul_and_control_characters_are_kept(tmp_path):
    text = "tab\tnul\x00bell\x07"
    assert said(load(write(tmp_path, [{"prompt": text}]))[0][0]) == [("user", text)]


def test_unknown_columns_are_refused_with_what_is_known(tmp_path):
    with pytest.raises(
        ValueError, match=r"row 1: no known shape; columns found: foo, bar; shapes known: messages .*sharegpt.*alpaca.*text"
    ) as refusal:
        load(write(tmp_path, [{"foo": 1, "bar": "x"}]))
    assert "field_map" in str(refusal.value)


def test_a_leading_answer_is_dropped_and_noted(tmp_path):
    row = {"conversations": [{"from": "system", "value": "s"}, {"from": "gpt", "value": "hello"}, {"from": "human", "value": "q"}]}
    prompts, counts = load(write(tmp_path, [row]))
    assert said(prompts[0]) == [("system", "s"), ("user", "q")]
    assert counts.notes["leading_turn_dropped"].count == 1


def test_tool_arguments_become_an_object(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    row = {
        "messages": [
            TALK[0],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ]
    }
    messages = load(write(tmp_path, [row]))[0][0].messages
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": 1}}}]}
    assert messages[2] == {"role": "tool", "content": "r", "tool_call_id": "1"}


def test_duplicates_by_normal_form(tmp_path):
    rows = [{"prompt": "cafe\u0301  au lait"}, {"prompt": "other"}, {"prompt": " caf\u00e9 au\nlait"}, {"prompt": "Café au lait"}]
    path = write(tmp_path, rows)
    assert len(load(path)[0]) == 4
    prompts, counts = load(path, deduplicate=True)
    assert [prompt.prompt_id for prompt in prompts] == ["set/row-1", "set/row-2", "set/row-4"]
    assert counts.skipped["duplicate"].examples[0]["row"] == 3
    assert counts.num_rows == counts.num_kept + counts.num_skipped == 4


def test_limit_and_seed(tmp_path):
    path = write(tmp_path, [{"prompt": f"q{n}"} for n in range(40)])
    assert [prompt.prompt_id for prompt in load(path, limit=3)[0]] == ["set/row-1", "set/row-2", "set/row-3"]
    chosen = [prompt.prompt_id for prompt in load(path, limit=10, seed=1)[0]]
    assert chosen == [prompt.prompt_id for prompt in load(path, limit=10, seed=1)[0]]
    assert chosen != [prompt.prompt_id for prompt in load(path, limit=10, seed=2)[0]]
    assert len(set(chosen)) == 10
    assert chosen == sorted(chosen, key=lambda name: int(name.rsplit("-", 1)[1]))


def test_ids_are_the_rows_own_where_it_has_any(tmp_path):
    rows = [{"prompt": "a", "prompt_id": "mine"}, {"prompt": "b", "id": "x"}, {"prompt": "c", "id": "x"}, {"prompt": "d"}]
    assert [prompt.prompt_id for prompt in load(write(tmp_path, rows))[0]] == ["mine", "set/x", "set/x#row-3", "set/row-4"]


def test_several_sources_in_order_with_ids_that_must_differ(tmp_path):
    first, second = write(tmp_path, [{"prompt": "a"}], "one.jsonl"), write(tmp_path, [{"prompt": "b"}], "two.jsonl")
    prompts, counts = load([first, second])
    assert [prompt.source for prompt in prompts] == ["one", "two"]
    assert counts.num_kept == 2
    with pytest.raises(ValueError, match="must be unique in a run"):
        load([first, first])


def manifest(tmp_path, source, text):
    path = tmp_path / "set.yaml"
    path.write_text(f"name: named\nsource: {source}\nlicence: CC0-1.0\n{text}", encoding="utf-8")
    return path


def test_manifest_is_read_and_checked(tmp_path):
    data = write(tmp_path, [{"question": "q"}, {"question": "r"}])
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    good = f"count: 2\nsha256: {digest}\nformat: prompt_completion\nfield_map: {{prompt: question}}\ncategory: math\n"
    prompts, _ = load(manifest(tmp_path, data.name, good))
    assert [(prompt.prompt_id, prompt.category, prompt.source) for prompt in prompts] == [
        ("named/row-1", "math", "named"),
        ("named/row-2", "math", "named"),
    ]
    assert load(manifest(tmp_path, data.name, good))[1].as_dict()["sources"][0] == {
        "name": "named",
        "source": data.name,
        "revision": None,
        "split": None,
        "licence": "CC0-1.0",
        "sha256": digest,
    }
    with pytest.raises(ValueError, match="expected sha256 ffff"):
        load(manifest(tmp_path, data.name, good.replace(digest, "f" * 64)))
    with pytest.raises(ValueError, match="expected 3 rows"):
        load(manifest(tmp_path, data.name, good.replace("count: 2", "count: 3")))
    with pytest.raises(ValueError, match="found licens"):
        load(manifest(tmp_path, data.name, "licens: x\n"))
    with pytest.raises(ValueError, match="found nothing"):
        load(manifest(tmp_path, "missing.jsonl", ""))


def test_manifest_must_name_its_licence(tmp_path):
    path = tmp_path / "set.yaml"
    path.write_text("name: named\nsource: set.jsonl\n", encoding="utf-8")
    with pytest.raises(ValueError, match="licence"):
        load(path)


def test_a_hub_id_needs_a_revision():
    with pytest.raises(ValueError, match="needs a revision"):
        load("owner/name")
    with pytest.raises(ValueError, match="expected a file, a folder or a hub id"):
        load("no_such_thing")


def test_a_hub_id_is_asked_for_at_its_revision(monkeypatch, tmp_path):
    """Without a network: what ``datasets`` would be asked for, and that its rows and its errors arrive."""
    import datasets

    asked = []

    def answer(source, **settings):
        asked.append((source, settings))
        if settings["split"] == "missing":
            raise ValueError("Unknown split")
        return datasets.Dataset.from_list([SHAPES["sharegpt"][0]])

    monkeypatch.setattr(datasets, "load_dataset", answer)
    path = manifest(tmp_path, "owner/name", "revision: 0123abc\nsplit: train_sft\nconfig: all\ndata_files: one.json\n")
    assert said(load(path)[0][0]) == Q_AND_A
    assert asked == [("owner/name", {"name": "all", "revision": "0123abc", "split": "train_sft", "data_files": "one.json"})]
    with pytest.raises(ValueError, match=r"owner/name at 0123abc: datasets cannot load it .split missing.: Unknown split"):
        load(path, split="missing")


def test_a_folder_is_read_by_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    tool_talk = [*TALK, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b", "name": "x"}]
    write(folder, [{"messages": TALK}, {"messages": tool_talk}], "train.jsonl")
    prompts, _ = load(folder, split="train")
    # columns that other rows have are null here: absent, not an error
    assert prompts[0].messages == tuple(TALK)
    assert prompts[1].messages[3] == tool_talk[3]


def test_a_broken_row_of_a_folder_is_named_and_nothing_stands_above_it(tmp_path, monkeypatch, capfd):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, [{"messages": TALK}], "a.jsonl")
    (folder / "b.jsonl").write_text('{"messages": []}\n{"messages', encoding="utf-8")
    with pytest.raises(ValueError, match=r"datasets cannot load it .*; \S*b\.jsonl, row 2: line 2 .*; mend it, or name the files"):
        load(folder)
    assert capfd.readouterr() == ("", ""), "its own words for it, or a bar"
    assert not datasets.are_progress_bars_disabled() and datasets.logging.get_verbosity() != datasets.logging.CRITICAL


def test_columns_of_no_known_name_are_told_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"row 1: no known shape; .*question.*such as prompt\.field_map='\{prompt: question\}'"):
        load(write(tmp_path, [{"question": "q"}]))


def test_unusable_settings_are_refused(tmp_path):
    path = write(tmp_path, [{"prompt": "q"}])
    with pytest.raises(ValueError, match="on_bad_row"):
        load(path, on_bad_row="ignore")
    with pytest.raises(ValueError, match="limit"):
        load(path, limit=0)
    with pytest.raises(ValueError, match="empty list"):
        load([])
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n\n", encoding="utf-8")
    with pytest.raises(ValueError, match="expected rows, found none"):
        load(blank)


def test_the_projects_own_data_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts, counts = load("data/prompts/heldout.jsonl", on_bad_row="error", deduplicate=True)
    assert len(prompts) == counts.num_rows > 0
    mine = write(tmp_path, [{"prompt": "q"}])
    assert said(load(mine.name)[0][0]) == [("user", "q")]


def test_a_recipe_is_made_at_run_time_and_its_note_kept(tmp_path):
    recipe = Path(__file__).resolve().parents[2] / "data" / "prompts" / "long.json"
    path = manifest(tmp_path, recipe, "format: long_recipe\nsplit: heldout\n")
    prompts, counts = load(path)
    assert prompts == materialise(recipe, "heldout")[0]
    assert counts.sources[0]["made_from"] == materialise(recipe, "heldout")[1]
    assert counts.num_rows == counts.num_kept == len(prompts)
    assert load(path, split="train")[0] == materialise(recipe, "train")[0]
    with pytest.raises(ValueError, match=r"expects source .the recipe's path. and split"):
        load(manifest(tmp_path, recipe, "format: long_recipe\n"))
