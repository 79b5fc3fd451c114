"""Responses from given answers: lengths, policies, counts; and the turns that are left to the target."""

from __future__ import annotations

import pytest
import tokenizers_for_tests as toks

from mtp_train.prompt.build import build_response, build_responses, turns_to_answer
from mtp_train.prompt.skips import Skip
from mtp_train.prompt.template import ChatTemplate
from mtp_train.records import Prompt, Response

COUNTING = " ".join(str(number) for number in range(60))


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(tokenizer=toks.make_tokenizer(toks.CHATML))


def prompt(*turns: str, prompt_id: str = "p") -> Prompt:
    """User and assistant turns, one after the other."""
    messages = tuple({"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(turns))
    return Prompt(prompt_id=prompt_id, messages=messages, category="c", source="s")


def built(prompt, template, **settings) -> Response:
    response = build_response(prompt, template, **{"max_length": 4096, "policy": "truncate", **settings})
    assert isinstance(response, Response), response
    return response


def counted(response, template) -> str:
    return template.decode([token for token, flag in zip(response.token_ids, response.loss_mask, strict=True) if flag])


def test_a_whole_answer_is_given(template):
    response = built(prompt("Count.", COUNTING), template)
    assert (response.finish_reason, response.category, response.source) == ("given", "c", "s")
    assert counted(response, template) == COUNTING + "<|im_end|>"


def test_every_cut_keeps_mask_and_text_and_is_never_called_finished(template):
    whole = built(prompt("Count.", COUNTING), template)
    start = whole.num_prompt_tokens
    for length in range(start + 1, len(whole.token_ids)):
        cut = built(prompt("Count.", COUNTING), template, max_length=length)
        assert (cut.token_ids, cut.loss_mask) == (whole.token_ids[:length], whole.loss_mask[:length])
        assert cut.finish_reason == "length"
        assert cut.messages[-1]["content"] == template.decode(whole.token_ids[start:length])
        assert build_response(prompt("Count.", COUNTING), template, max_length=length, policy="drop").reason == "too_long"
    assert built(prompt("Count.", COUNTING), template, max_length=len(whole.token_ids)) == whole


def test_no_answer_token_left_is_skipped_by_either_policy(template):
    start = built(prompt("Count.", COUNTING), template).num_prompt_tokens
    for policy in ("truncate", "drop"):
        for length in (2, start):
            skip = build_response(prompt("Count.", COUNTING), template, max_length=length, policy=policy)
            assert isinstance(skip, Skip)
            assert skip.reason == "prompt_too_long"
            assert "no answer token left" in skip.why


def test_a_cut_between_turns_ends_with_the_last_answer(template):
    talk = prompt("a", "b", COUNTING, "d")
    first = built(prompt("a", "b"), template)
    cut = built(talk, template, max_length=len(first.token_ids) + 20)
    assert (cut.token_ids, cut.messages, cut.finish_reason) == (first.token_ids, first.messages, "length")


def test_a_question_behind_the_last_answer_is_left_out(template):
    assert built(prompt("a", "b", "c"), template) == built(prompt("a", "b"), template)
    _, counts = build_responses([prompt("a", "b", "c")], template, max_length=99, policy="drop")
    assert counts.notes["trailing_turn_dropped"].count == 1


@pytest.mark.parametrize(
    ("turns", "reason"), [(("a",), "no_assistant_text"), (("a", ""), "empty_assistant"), (("a", "", "c"), "empty_assistant")]
)
def test_nothing_to_learn_is_skipped(template, turns, reason):
    assert build_response(prompt(*turns), template, max_length=99, policy="drop").reason == reason


def test_counts_over_a_data_set(template):
    prompts = [prompt("a", "b", prompt_id="good"), prompt("a", prompt_id="open"), prompt("word " * 300, "b", prompt_id="long")]
    responses, counts = build_responses(prompts, template, max_length=100, policy="drop")
    assert [response.prompt_id for response in responses] == ["good"]
    assert (counts.num_rows, counts.num_kept) == (3, 1)
    assert {reason: tally.examples[0]["row"] for reason, tally in counts.skipped.items()} == {
        "no_assistant_text": "open",
        "prompt_too_long": "long",
    }


def test_an_empty_mask_over_the_whole_set_is_an_error(template):
    with pytest.raises(ValueError, match=r"no token of the whole data set counts in the loss.*2 no_assistant_text"):
        build_responses([prompt("a"), prompt("b")], template, max_length=100, policy="drop")


def test_a_template_that_cannot_say_is_refused_before_the_data_is_read():
    def unread():
        raise AssertionError("read")
        yield

    with pytest.raises(ValueError, match="cannot say where the assistant speaks"):
        build_responses(unread(), ChatTemplate(tokenizer=toks.make_tokenizer(toks.BREAKS_NESTING)), max_length=100, policy="drop")


def test_unusable_settings_are_refused(template):
    with pytest.raises(ValueError, match="policy"):
        build_response(prompt("a", "b"), template, max_length=100, policy="cut")
    with pytest.raises(ValueError, match="max_length"):
        build_response(prompt("a", "b"), template, max_length=1, policy="drop")


def contents(groups) -> list[list[str]]:
    return [[message["content"] for message in group] for group in groups]


def test_turns_to_answer():
    assert contents(turns_to_answer(prompt("a"))) == [["a"]]
    assert contents(turns_to_answer(prompt("a", "b", "c", "d"))) == [["a"], ["c"]]
    assert contents(turns_to_answer(prompt("a", "", "c"))) == [["a"], ["c"]]
    system = ({"role": "system", "content": "s"}, *prompt("a", "b").messages)
    assert contents(turns_to_answer(Prompt(prompt_id="p", messages=system, category="", source=""))) == [["s", "a"]]
    users = (*prompt("a").messages, *prompt("b", "c").messages)
    assert contents(turns_to_answer(Prompt(prompt_id="p", messages=users, category="", source=""))) == [["a", "b"]]


def test_tool_results_stay_with_the_calls_they_answer():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = (*prompt("a").messages, call, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "b"})
    assert turns_to_answer(Prompt(prompt_id="p", messages=messages, category="", source="")) == (messages[:3],)
