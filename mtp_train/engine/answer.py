"""Lets an engine answer whole conversations, turn by turn, and keeps exactly the tokens it read and wrote."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtp_train.engine.base import Engine, Generated, GenerateRequest, Sampling
from mtp_train.prompt.build import turns_to_answer
from mtp_train.prompt.skips import Skip, SkipCounts
from mtp_train.prompt.template import ChatTemplate, TemplateRefusal
from mtp_train.records import FinishReason, Prompt, Response

Message = Mapping[str, Any]


def answer_id(prompt_id: str, number: int) -> str:
    """The id of a prompt's answer: the prompt's own for the first, ``<id>#<n>`` for further ones."""
    return prompt_id if number == 0 else f"{prompt_id}#{number}"


def check_earlier(prompts: Sequence[Prompt], responses: Sequence[Response], *, num_answers: int, counts: SkipCounts) -> set[str]:
    """The ids among ``responses`` that need no answer any more; conversations that had ended early are noted in ``counts`` again.

    Errors: ValueError where a prompt of an earlier run has the same id and says something else, since answers are found by id.
    """
    by_id = {response.prompt_id: response for response in responses}
    done: set[str] = set()
    for prompt in prompts:
        pieces = turns_to_answer(prompt)
        for response_id in (answer_id(prompt.prompt_id, number) for number in range(num_answers)):
            if response_id not in by_id:
                continue
            num_answered = _num_answered(pieces, by_id[response_id])
            if num_answered < len(pieces):
                why = f"answered {num_answered} of {len(pieces)} turns in an earlier run"
                counts.note(Skip(reason="conversation_cut", why=why), row=response_id)
            done.add(response_id)
    return done


def check_asked(prompts: Sequence[Prompt], responses: Sequence[Response], *, num_answers: int, where: Path) -> None:
    """ValueError where the folder ``where`` holds answers to prompts that are not among ``prompts``: they would be trained on
    beside these, and nothing would say so."""
    asked = {answer_id(prompt.prompt_id, number) for prompt in prompts for number in range(num_answers)}
    if others := [response for response in responses if response.prompt_id not in asked]:
        raise ValueError(
            f"{where}: expected answers to the {len(prompts)} prompts of this run alone ({len(responses) - len(others)} are there), "
            f"found {len(others)} others, the first to {others[0].prompt_id!r} of {others[0].source}; use another run= for other prompts, "
            "or ask for all at once: every source in prompt.source=[...], prompt.limit and num_answers no smaller than before"
        )


def _num_answered(pieces: Sequence[Sequence[Message]], response: Response) -> int:
    """How many of a prompt's turns a response answers; ValueError where it is an answer to something else."""
    said, number = response.messages, 0
    while said:
        asked = list(pieces[number]) if number < len(pieces) else []
        if list(said[: len(asked)]) != asked or len(said) <= len(asked) or said[len(asked)]["role"] != "assistant":
            found = list(said[: max(len(asked), 1)])
            raise ValueError(
                f"{response.prompt_id}: expected an answer to {asked}, found one to {found} "
                "from an earlier run; the prompts have changed: use another run folder, or delete its responses"
            )
        said, number = said[len(asked) + 1 :], number + 1
    return number


@dataclass(kw_only=True)
class _Conversation:
    """One answer in the making."""

    prompt: Prompt
    response_id: str
    pieces: tuple[tuple[Message, ...], ...]
    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    num_answered: int = 0

    def ask(self, template: ChatTemplate) -> tuple[int, ...]:
        """Append the next piece and return the prompt's ids. TemplateRefusal where the template does not take it."""
        self.messages += self.pieces[self.num_answered]
        if self.num_answered == 0:
            prompt_ids = template.encode_prompt(self.messages)
        else:
            prompt_ids = template.encode_next_prompt(self.token_ids, self.messages)
        self.loss_mask += [False] * (len(prompt_ids) - len(self.token_ids))
        self.token_ids = list(prompt_ids)
        return prompt_ids

    def hear(self, generated: Generated, template: ChatTemplate) -> None:
        """Append what the target wrote."""
        self.messages.append({"role": "assistant", "content": template.decode_answer(generated.token_ids)})
        self.token_ids += generated.token_ids
        self.loss_mask += [True] * len(generated.token_ids)
        self.num_answered += 1

    def response(self, finish_reason: FinishReason) -> Response:
        return Response(
            prompt_id=self.response_id,
            token_ids=tuple(self.token_ids),
            loss_mask=tuple(self.loss_mask),
            messages=tuple(dict(message) for message in self.messages),
            finish_reason=finish_reason,
            category=self.prompt.category,
            source=self.prompt.source,
        )


def answer(
    engine: Engine,
    template: ChatTemplate,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    num_answers: int,
    max_length_tokens: int,
    done: Collection[str],
    counts: SkipCounts,
) -> Iterator[Response]:
    """Answer every prompt ``num_answers`` times; yields each conversation as it is finished, skipping ids in ``done``.

    ``counts`` is the loader's, and is continued. A prompt that the template refuses, or that leaves no room for an answer
    within ``max_length_tokens``, is skipped and counted. Of a conversation that ends early (an answer cut by a limit, a next
    turn that doesn't fit or nest) what was answered so far is kept and noted. The first answer is drawn with
    ``sampling.seed``, answer n with seed + n.
    """
    for number in range(num_answers):
        waiting: list[_Conversation] = []
        for prompt in prompts:
            response_id = answer_id(prompt.prompt_id, number)
            if response_id not in done:
                waiting.append(_Conversation(prompt=prompt, response_id=response_id, pieces=turns_to_answer(prompt)))
        seeded = replace(sampling, seed=sampling.seed + number)
        while waiting:
            yield from _one_turn(engine, template, waiting, sampling=seeded, max_length_tokens=max_length_tokens, counts=counts)
            waiting = [c for c in waiting if 0 < c.num_answered < len(c.pieces) and c.token_ids[-1] in template.stop_ids]


def _one_turn(
    engine: Engine, template: ChatTemplate, waiting: list[_Conversation], *, sampling: Sampling, max_length_tokens: int, counts: SkipCounts
) -> Iterator[Response]:
    """Ask every waiting conversation's next turn; yield those that are over. A conversation that cannot go on leaves the list."""
    asked: dict[str, _Conversation] = {}
    requests: list[GenerateRequest] = []
    for conversation in list(waiting):
        before, mask_before, messages_before = conversation.token_ids, list(conversation.loss_mask), list(conversation.messages)
        try:
            ids = conversation.ask(template)
            if len(ids) + 1 > max_length_tokens:
                raise TemplateRefusal("prompt_too_long", f"{len(ids)} tokens leave no room for an answer within {max_length_tokens}")
        except TemplateRefusal as refusal:
            waiting.remove(conversation)
            if conversation.num_answered == 0:
                if conversation.response_id == conversation.prompt.prompt_id:  # once per prompt, however many answers it was to get
                    counts.skip(refusal.skip, row=conversation.response_id)
                    counts.num_kept -= 1
                continue
            counts.note(Skip(reason="conversation_cut", why=refusal.skip.why), row=conversation.response_id)
            conversation.token_ids, conversation.loss_mask, conversation.messages = before, mask_before, messages_before
            yield conversation.response("stop")
            continue
        asked[conversation.response_id] = conversation
        requests.append(GenerateRequest(request_id=conversation.response_id, token_ids=ids, max_new_tokens=max_length_tokens - len(ids)))
    for generated in engine.generate(requests, sampling):
        conversation = asked[generated.request_id]
        conversation.hear(generated, template)
        last = conversation.num_answered == len(conversation.pieces)
        ended = generated.token_ids[-1] in template.stop_ids
        if last or not ended:
            if not last:
                why = "an answer ended without the template's end of turn (cut by sampling.max_new_tokens?): later turns are not asked"
                counts.note(Skip(reason="conversation_cut", why=why), row=conversation.response_id)
            yield conversation.response(generated.finish_reason)
