"""Conversations are answered turn by turn: exact ids, limits, refusals, resuming, several answers per prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mtp_train.engine.answer import answer, answer_id, check_asked, check_earlier
from mtp_train.engine.base import Engine, Generated, GenerateRequest, Sampling
from mtp_train.prompt.skips import SkipCounts
from mtp_train.prompt.template import ChatTemplate
from mtp_train.records import Prompt, Response

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Renders all answers but the last without their reasoning, as Qwen3 does: what was read is no prefix of what would be.
DROPS_THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAMPLING = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=50, seed=5)


def make_template(text: str = CHATML) -> ChatTemplate:
    """Bytes and one merge, b + l: a target that writes the two apart writes what the tokenizer would not choose."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, "bl"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("b", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = text
    return ChatTemplate(tokenizer=fast)


class Scripted(Engine):
    """Says what ``script`` holds for a request's id, call by call; keeps what it was asked. The last request comes back first."""

    word = "scripted"
    version = dtype = "none"

    def __init__(self, template: ChatTemplate, script: dict[str, list[str]], default: str = "yes<|im_end|>") -> None:
        self.template, self.script, self.default = template, {key: list(texts) for key, texts in script.items()}, default
        self.calls: list[tuple[tuple[GenerateRequest, ...], Sampling]] = []

    def spell(self, text: str) -> list[int]:
        """Letter by letter, special tokens whole."""
        body, end, _ = text.partition("<|im_end|>")
        letters = [self.template.tokenizer.convert_tokens_to_ids(letter) for letter in body]
        return letters + ([self.template.end_of_turn_id] if end else [])

    def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> Iterator[Generated]:
        self.calls.append((tuple(requests), sampling))
        for request in reversed(requests):
            texts = self.script.get(request.request_id)
            ids = self.spell(texts.pop(0) if texts else self.default)
            limit = min(request.max_new_tokens, sampling.max_new_tokens)
            reason = "stop" if len(ids) <= limit and ids[-1] == self.template.end_of_turn_id else "length"
            yield Generated(request_id=request.request_id, token_ids=tuple(ids[:limit]), finish_reason=reason)

    def prefill(self, responses: Any, settings: Any) -> Any:
        raise AssertionError("not asked for")

    speculate = baseline = describe = prefill


def talk(name: str, *turns: str, category: str = "c") -> Prompt:
    """A conversation with the data set's own answers between its turns, which are to be replaced."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "the data set's own"}]
    return Prompt(prompt_id=name, messages=tuple(messages[:-1]), category=category, source="s")


def run(engine: Scripted, prompts: list[Prompt], *, counts: SkipCounts | None = None, **changes: Any) -> dict[str, Response]:
    settings: dict[str, Any] = {"sampling": SAMPLING, "num_answers": 1, "max_length_tokens": 1000, "done": ()} | changes
    counts = SkipCounts(num_rows=len(prompts), num_kept=len(prompts)) if counts is None else counts
    found = list(answer(engine, engine.template, prompts, counts=counts, **settings))
    assert len({response.prompt_id for response in found}) == len(found)
    return {response.prompt_id: response for response in found}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return make_template()


def test_every_turn_reads_exactly_what_was_read_and_written_before(template: ChatTemplate) -> None:
    texts = ["blue<|im_end|>", "blot<|im_end|>", "able<|im_end|>"]
    engine = Scripted(template, {"three": texts, "one": ["bl<|im_end|>"]})
    found = run(engine, [talk("three", "q1", "q2", "q3", category="math"), talk("one", "q")])
    assert [[request.request_id for request in requests] for requests, _ in engine.calls] == [["three", "one"], ["three"], ["three"]]
    response = found["three"]
    ids, expected_mask, read = response.token_ids, [], ()
    for (requests, _), text in zip(engine.calls, texts, strict=True):
        asked = requests[0].token_ids
        assert asked[: len(read)] == read, "what was read and written stands in front of the next prompt, token for token"
        assert ids[: len(asked)] == asked
        written = tuple(engine.spell(text))
        expected_mask += [False] * (len(asked) - len(read)) + [True] * len(written)
        read = asked + written
    assert ids == read and response.loss_mask == tuple(expected_mask)
    said = [("user", "q1"), ("assistant", "blue"), ("user", "q2"), ("assistant", "blot"), ("user", "q3"), ("assistant", "able")]
    assert [(message["role"], message["content"]) for message in response.messages] == said
    assert template.decode(ids) + "\n" == template.render(response.messages, add_generation_prompt=False)
    assert template.tokenise(template.decode(ids)) != ids, "the tokenizer would have merged what the target wrote apart"
    assert (response.finish_reason, response.category, response.source) == ("stop", "math", "s")
    assert found["one"].num_prompt_tokens == len(engine.calls[0][0][1].token_ids)


def test_an_answer_cut_by_a_limit_ends_the_conversation(template: ChatTemplate) -> None:
    engine = Scripted(template, {"cut": ["short<|im_end|>", "x" * 60 + "<|im_end|>"], "last": ["y" * 60]})
    counts = SkipCounts(num_rows=2, num_kept=2)
    found = run(engine, [talk("cut", "q1", "q2", "q3"), talk("last", "q")], counts=counts)
    assert len(engine.calls) == 2, "the third turn is never asked"
    assert found["cut"].finish_reason == "length" and found["last"].finish_reason == "length"
    assert [message["content"] for message in found["cut"].messages] == ["q1", "short", "q2", "x" * 50]
    assert sum(found["cut"].loss_mask) == len("short") + 1 + 50 and found["cut"].loss_mask[-1]
    # Only a conversation with turns left was cut; a last answer that ran to its limit is an answer of that length.
    assert counts.notes["conversation_cut"].count == 1 and counts.notes["conversation_cut"].examples[0]["row"] == "cut"
    assert counts.num_skipped == 0 and counts.num_kept == 2


def test_the_conversation_ends_where_the_length_does(template: ChatTemplate) -> None:
    """Each answer may fill what is left; a prompt that leaves no room is skipped, a further turn that does not fit is left out."""
    prompt_length = len(template.encode_prompt([{"role": "user", "content": "q1"}]))
    first = len("yes") + 1
    second = prompt_length + first + len(template.tokenise("\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n"))

    def lengths(limit: int) -> tuple[int | None, int, int]:
        counts = SkipCounts(num_rows=1, num_kept=1)
        engine = Scripted(template, {})
        found = run(engine, [talk("p", "q1", "q2")], counts=counts, max_length_tokens=limit)
        for requests, _ in engine.calls:
            assert all(len(request.token_ids) + request.max_new_tokens == limit for request in requests)
        assert counts.num_kept + counts.num_skipped == 1
        notes = counts.notes["conversation_cut"].count if counts.notes else 0
        return (len(found["p"].token_ids) if found else None), counts.num_skipped, notes

    assert lengths(prompt_length) == (None, 1, 0)
    assert lengths(prompt_length + 1) == (prompt_length + 1, 0, 1)
    assert lengths(prompt_length + first) == (prompt_length + first, 0, 1)
    assert lengths(second) == (prompt_length + first, 0, 1)
    assert lengths(second + 1) == (second + 1, 0, 0)
    assert lengths(second + first) == (second + first, 0, 0)


def test_a_turn_that_does_not_fit_leaves_the_answered_part_whole(template: ChatTemplate) -> None:
    counts = SkipCounts(num_rows=1, num_kept=1)
    engine = Scripted(template, {})
    found = run(engine, [talk("p", "q1", "q" * 100)], counts=counts, max_length_tokens=80)["p"]
    assert found.token_ids == engine.calls[0][0][0].token_ids + tuple(engine.spell("yes<|im_end|>"))
    assert len(found.loss_mask) == len(found.token_ids) and sum(found.loss_mask) == 4 and found.finish_reason == "stop"
    assert [message["role"] for message in found.messages] == ["user", "assistant"]
    assert "leave no room" in counts.notes["conversation_cut"].examples[0]["why"]


def test_a_template_that_renders_earlier_answers_otherwise_ends_it() -> None:
    template = make_template(DROPS_THINKING)
    engine = Scripted(template, {"thinks": ["a</think>b<|im_end|>"], "plain": ["b<|im_end|>"]})
    counts = SkipCounts(num_rows=2, num_kept=2)
    found = run(engine, [talk("thinks", "q1", "q2"), talk("plain", "q1", "q2")], counts=counts)
    assert [message["content"] for message in found["thinks"].messages] == ["q1", "a</think>b"]
    assert len(found["plain"].messages) == 4
    assert counts.notes["conversation_cut"].examples == [
        {"row": "thinks", "why": "message 1: the conversation up to this answer is rendered otherwise than inside the whole"}
    ]


def test_what_is_done_is_not_asked_again_and_changes_nothing_for_the_rest(template: ChatTemplate) -> None:
    prompts = [talk(f"p{number}", "q1", "q2") for number in range(4)]
    script = {f"p{number}": [f"first{number}<|im_end|>", f"second{number}<|im_end|>"] for number in range(4)}
    whole = run(Scripted(template, script), prompts)
    engine = Scripted(template, script)
    rest = run(engine, prompts, done={"p0", "p2", "of another run"})
    assert rest == {name: whole[name] for name in ("p1", "p3")}
    assert {request.request_id for requests, _ in engine.calls for request in requests} == {"p1", "p3"}
    nothing = Scripted(template, script)
    assert run(nothing, prompts, done=set(whole)) == {} and not nothing.calls


def test_several_answers_have_ids_and_seeds_of_their_own(template: ChatTemplate) -> None:
    engine = Scripted(template, {"p#1": ["other<|im_end|>"]})
    long = talk("long", "q" * 2000)
    counts = SkipCounts(num_rows=2, num_kept=2)
    found = run(engine, [talk("p", "q"), long], num_answers=3, done={"p#2"}, counts=counts)
    assert list(found) == ["p", "p#1"] == [answer_id("p", number) for number in range(2)]
    assert found["p"].token_ids != found["p#1"].token_ids
    assert [(requests[0].request_id, sampling.seed) for requests, sampling in engine.calls if requests] == [("p", 5), ("p#1", 6)]
    assert all(sampling.max_new_tokens == 50 and sampling.temperature == 0.0 for _, sampling in engine.calls)
    assert (counts.num_kept, counts.num_skipped) == (1, 1), "a prompt is skipped once, however many answers it was to get"
    assert counts.skipped["prompt_too_long"].examples[0]["row"] == "long"


def test_tool_results_keep_the_history_as_given(template: ChatTemplate) -> None:
    """A result belongs to the call that it answers, so only the last answer is the target's."""
    roles = ("user", "assistant", "tool")
    prompt = Prompt(prompt_id="p", messages=tuple({"role": r, "content": r} for r in roles), category="c", source="s")
    found = run(Scripted(template, {}), [prompt])["p"]
    assert [message["content"] for message in found.messages] == ["user", "assistant", "tool", "yes"]
    assert sum(found.loss_mask) == 4, "the given answer is not the target's own text"
    assert check_earlier([prompt], [found], num_answers=1, counts=SkipCounts()) == {"p"}


def test_earlier_answers_count_where_they_answer_this_prompt(template: ChatTemplate) -> None:
    prompts = [talk("whole", "q1", "q2"), talk("cut", "q1", "q2"), talk("missing", "q")]
    engine = Scripted(template, {"cut": ["x" * 60]})
    found = [response for name, response in run(engine, prompts, num_answers=2).items() if name in ("whole", "whole#1", "cut")]
    counts = SkipCounts()
    assert check_earlier(prompts, found, num_answers=2, counts=counts) == {"whole", "whole#1", "cut"}
    assert check_earlier(prompts[:1], found, num_answers=1, counts=SkipCounts()) == {"whole"}
    assert counts.notes["conversation_cut"].count == 1, "an interrupted run does not forget what it cut"
    for other in (talk("cut", "q1", "another"), talk("cut", "another", "q2")):
        changed = [prompts[0], other]
        if other.messages[0]["content"] == "q1":  # the cut conversation never came to its second turn
            assert "cut" in check_earlier(changed, found, num_answers=1, counts=SkipCounts())
            continue
        with pytest.raises(ValueError, match=r"cut: expected an answer to .*another.*found one to .*q1.*use another run folder"):
            check_earlier(changed, found, num_answers=1, counts=SkipCounts())
    with pytest.raises(ValueError, match="whole: expected an answer to"):
        check_earlier([talk("whole", "q1")], found, num_answers=1, counts=SkipCounts())


def test_answers_to_prompts_that_are_not_asked_are_refused(template: ChatTemplate, tmp_path: Path) -> None:
    """Another source, a smaller limit, fewer answers: what is there would be trained on and is none of this run's."""
    prompts = [talk("p0", "q"), talk("p1", "q")]
    found = sorted(run(Scripted(template, {}), prompts, num_answers=2).values(), key=lambda response: response.prompt_id)
    check_asked([*prompts, talk("p2", "q")], found, num_answers=3, where=tmp_path)
    check_asked(prompts, [], num_answers=1, where=tmp_path)
    for asked, num_answers, message in (
        ([talk("other", "q")], 2, r"1 prompts of this run alone .0 are there., found 4 others, the first to 'p0' of s; .*prompt\.source"),
        (prompts[:1], 2, r"2 are there., found 2 others, the first to 'p1'"),
        (prompts, 1, r"2 are there., found 2 others, the first to 'p0#1'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_asked(asked, found, num_answers=num_answers, where=tmp_path)


def test_a_real_engine_s_answer_is_its_own_continuation(tiny_llama: Path, tmp_path: Path, make_engine: Any) -> None:
    """Through engine=hf: the ids behind the prompt are those that the engine generates for it, written and read back alike."""
    from mtp_train.prompt.responses import ResponseWriter, read_responses
    from mtp_train.prompt.tokenizer import load_tokenizer

    template, engine = ChatTemplate(tokenizer=load_tokenizer(tiny_llama)), make_engine(tiny_llama)
    prompts = [talk(f"p{number}", f"question {number}") for number in range(5)]
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=9, seed=2)
    counts = SkipCounts(num_rows=5, num_kept=5)
    asked: dict[str, Any] = {"sampling": sampling, "num_answers": 2, "max_length_tokens": 300, "counts": counts}
    found = {response.prompt_id: response for response in answer(engine, template, prompts, done=(), **asked)}
    assert len(found) == 10 and found["p0"].token_ids != found["p0#1"].token_ids
    requests = [GenerateRequest(request_id=p.prompt_id, token_ids=template.encode_prompt(p.messages), max_new_tokens=100) for p in prompts]
    for generated, request in ((g, r) for g in engine.generate(requests, sampling) for r in requests if r.request_id == g.request_id):
        assert found[request.request_id].token_ids == request.token_ids + generated.token_ids
        assert found[request.request_id].finish_reason == generated.finish_reason
    rest = {response.prompt_id: response for response in answer(engine, template, prompts, done=set(found) - {"p1#1", "p3"}, **asked)}
    assert rest == {name: found[name] for name in ("p1#1", "p3")}, "drawn again, it is the same answer"
    with ResponseWriter(directory=tmp_path / "answers", identity={"target_name": "tiny"}) as writer:
        for response in found.values():
            writer.write(response)
    writer.finish()
    assert read_responses(writer.directory) == [found[name] for name in sorted(found)]
    finished = json.loads((writer.directory / "finished.json").read_text())
    assert finished["num_responses"] == 10 and list(finished["sha256"]) == ["responses.jsonl"]
