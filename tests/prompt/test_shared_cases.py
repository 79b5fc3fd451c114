"""The shared folder of difficult inputs, where it stands beside the checkout: each comes out as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers_for_tests as toks

from mtp_train.prompt.build import build_response, turns_to_answer
from mtp_train.prompt.load import load_prompts
from mtp_train.prompt.template import ChatTemplate, TemplateRefusal

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="no shared/cases beside the checkout")
MAX_LENGTH = 300
END = "<|im_end|>"
# case -> the text that counts, per answer
KEPT = {
    "messages_single": ["The Amazon, the Ucayali and the Huallaga." + END],
    "messages_multi_turn": ["4" + END, "12" + END],
    "sharegpt_from_value": ["Bonjour !" + END],
    "sharegpt_starts_with_gpt": ["A neutron walks into a bar." + END],
    "sharegpt_role_names": ["Santiago." + END],
    "alpaca_input_field": ["Das Brot liegt auf dem Tisch." + END],
    "prompt_completion": [" red." + END],
    "two_users_in_a_row": ["Both received." + END],
    "assistant_repeats_user_text": ["blue blue blue" + END],
    "user_text_with_role_marker": ["It opens the assistant's turn." + END],
    "content_parts": ["Soft drops on warm stone." + END],
    "thinking_block": ["<think>7*13=91</think>No, 91 = 7 x 13." + END],
    "unicode": ["👩\u200d💻 e\u0301 شمس" + END],
    "nul_and_control_bytes": ["seen" + END],
    "eos_inside_assistant": ["With " + END],
    "duplicate_of_first": ["The Amazon, the Ucayali and the Huallaga." + END],
}
# case -> (reason, what it must name)
SKIPPED_BY_LOADER = {
    "system_only": ("no_user_turn", "system"),
    "empty_assistant": ("empty_assistant", "no token to learn"),
    "whitespace_assistant": ("empty_assistant", "no token to learn"),
    "image_part": ("content_part", "image_url"),
    "lone_surrogate": ("lone_surrogate", "U+D83D"),
    "role_unknown": ("role_unknown", "critic"),
    "content_is_number": ("content_type", "int"),
}
# case -> (reason as a response, no room for an answer either)
SKIPPED_BY_BUILDER = {
    "plain_text_document": ("no_assistant_text", False),
    "prompt_only": ("no_assistant_text", False),
    "tool_calls": ("tools_not_rendered", False),
    "prompt_longer_than_max_length": ("prompt_too_long", True),
}


def rows() -> dict[str, dict]:
    if not CASES.is_dir():
        return {}
    cases = [json.loads(line) for line in (CASES / "conversations.jsonl").read_text(encoding="utf-8").splitlines()]
    return {case["case"]: case["row"] for case in cases}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(tokenizer=toks.make_tokenizer(toks.CHATML))


def load(tmp_path, *cases: str, deduplicate: bool = False):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(rows()[case]) + "\n" for case in cases), encoding="utf-8")
    return load_prompts(source=path, on_bad_row="skip", deduplicate=deduplicate)


def test_every_case_is_known_here():
    elsewhere = {"no_known_columns", "longer_than_max_length"}
    assert set(rows()) == set(KEPT) | set(SKIPPED_BY_LOADER) | set(SKIPPED_BY_BUILDER) | elsewhere


@pytest.mark.parametrize("case", KEPT)
def test_kept(tmp_path, template, case):
    (prompt,), counts = load(tmp_path, case)
    response = build_response(prompt, template, max_length=MAX_LENGTH, policy="drop")
    ids = [token for token, flag in zip(response.token_ids, response.loss_mask, strict=True) if flag]
    assert template.decode(ids) == "".join(KEPT[case])
    runs = sum(flag and not before for before, flag in zip((False, *response.loss_mask), response.loss_mask, strict=False))
    assert runs == len(KEPT[case])
    assert response.finish_reason == "given"
    assert counts.num_kept == 1


def test_details_of_kept_cases(tmp_path):
    assert load(tmp_path, "sharegpt_starts_with_gpt")[1].notes["leading_turn_dropped"].count == 1
    assert "The bread is on the table." in load(tmp_path, "alpaca_input_field")[0][0].messages[0]["content"]
    assert load(tmp_path, "content_parts")[0][0].messages[0]["content"] == "Describe rain in five words."


@pytest.mark.parametrize("case", SKIPPED_BY_LOADER)
def test_skipped_by_the_loader(tmp_path, case):
    prompts, counts = load(tmp_path, case)
    reason, named = SKIPPED_BY_LOADER[case]
    assert prompts == []
    assert counts.skipped[reason].count == 1
    assert named in counts.skipped[reason].examples[0]["why"]


@pytest.mark.parametrize("case", SKIPPED_BY_BUILDER)
def test_skipped_by_the_builder(tmp_path, template, case):
    (prompt,), _ = load(tmp_path, case)
    reason, too_long = SKIPPED_BY_BUILDER[case]
    assert build_response(prompt, template, max_length=MAX_LENGTH, policy="truncate").reason == reason
    if case == "tool_calls":
        with pytest.raises(TemplateRefusal, match="tool calls"):
            template.encode_prompt(turns_to_answer(prompt)[0])
    else:
        assert (len(template.encode_prompt(turns_to_answer(prompt)[0])) > MAX_LENGTH) == too_long


def test_tool_calls_are_kept_where_rendered(tmp_path):
    tools = ChatTemplate(tokenizer=toks.make_tokenizer(toks.CHATML_TOOLS))
    response = build_response(load(tmp_path, "tool_calls")[0][0], tools, max_length=MAX_LENGTH, policy="drop")
    assert tools.decode(response.token_ids).count("Oslo") == 2


def test_two_users_where_the_template_refuses(tmp_path):
    strict = ChatTemplate(tokenizer=toks.make_tokenizer(toks.MISTRAL, eos="</s>"))
    skip = build_response(load(tmp_path, "two_users_in_a_row")[0][0], strict, max_length=MAX_LENGTH, policy="drop")
    assert (skip.reason, "must alternate" in skip.why) == ("template_error", True)


def test_thinking_that_the_template_drops_is_reported(tmp_path):
    drops = ChatTemplate(tokenizer=toks.make_tokenizer(toks.DROPS_THINKING))
    notes = drops.analyse(load(tmp_path, "thinking_block")[0][0].messages).notes
    assert [note.reason for note in notes] == ["thinking_dropped"]


def test_longer_than_max_length(tmp_path, template):
    (prompt,), _ = load(tmp_path, "longer_than_max_length")
    cut = build_response(prompt, template, max_length=MAX_LENGTH, policy="truncate")
    assert (len(cut.token_ids), len(cut.loss_mask), cut.finish_reason) == (MAX_LENGTH, MAX_LENGTH, "length")
    assert build_response(prompt, template, max_length=MAX_LENGTH, policy="drop").reason == "too_long"


def test_no_known_columns(tmp_path):
    with pytest.raises(ValueError, match="columns found: foo, bar; shapes known: messages"):
        load(tmp_path, "no_known_columns")


def test_duplicates(tmp_path):
    assert load(tmp_path, "messages_single", "duplicate_of_first")[1].num_kept == 2
    counts = load(tmp_path, "messages_single", "duplicate_of_first", deduplicate=True)[1]
    assert (counts.num_kept, counts.skipped["duplicate"].count) == (1, 1)


def test_all_rows_in_one_file(tmp_path):
    prompts, counts = load(tmp_path, *rows())
    assert len(prompts) == len(rows()) - len(SKIPPED_BY_LOADER) - 1
    assert counts.skipped["unknown_columns"].count == 1
    assert counts.num_rows == counts.num_kept + counts.num_skipped == len(rows())


@pytest.mark.parametrize("on_bad_row", ["skip", "error"])
def test_whole_files(on_bad_row):
    def load_file(name):
        return load_prompts(source=CASES / name, on_bad_row=on_bad_row, deduplicate=False)

    assert len(load_file("bom_crlf.jsonl")[0]) == len(load_file("json_array_not_lines.json")[0]) == 2
    with pytest.raises(ValueError, match="empty file"):
        load_file("empty.jsonl")
    with pytest.raises(ValueError, match="expected UTF-8, found byte 0xe9 at byte position 42"):
        load_file("latin1.jsonl")
    if on_bad_row == "error":
        with pytest.raises(ValueError, match="row 2: truncated_line"):
            load_file("truncated_last_line.jsonl")
    else:
        prompts, counts = load_file("truncated_last_line.jsonl")
        assert (len(prompts), counts.skipped["truncated_line"].examples[0]["row"]) == (1, 2)
