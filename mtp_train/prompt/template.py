"""Turns messages into the token ids that the target reads, and marks by token id which of them are the target's own.

Text is tokenised as serving engines do it: the rendered conversation in one piece, special tokens recognised wherever
they stand and none added. So a marker such as ``<|im_start|>`` typed by a user becomes the special id, as it would in
service; the loss mask is not misled by it, because turns are found by rendering, never by searching.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtp_train.prompt import omissions
from mtp_train.prompt.skips import Skip
from mtp_train.prompt.tokenizer import sha256_text, tokenizer_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE: tuple[Message, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


class TemplateRefusal(ValueError):
    """The template cannot render these messages, or cannot say where the assistant speaks; carries the :class:`Skip`."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(f"{reason}: {why}")
        self.skip = Skip(reason=reason, why=why)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The assistant turn ``messages[message_index]`` is tokens ``start`` to ``end`` (exclusive), end-of-turn token included."""

    message_index: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A conversation as tokens. ``turns`` are the assistant turns that count; ``notes`` say what of it does not."""

    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    notes: tuple[Skip, ...]

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """One flag per token: written by the assistant."""
        mask = [False] * len(self.token_ids)
        for turn in self.turns:
            mask[turn.start : turn.end] = [True] * (turn.end - turn.start)
        return tuple(mask)


class ChatTemplate:
    """The target's chat template over its tokenizer.

    ``chat_template`` replaces the tokenizer's own (Jinja text); ``template_kwargs`` are handed to the template, such as
    ``{"enable_thinking": False}``. Both are part of :attr:`template_sha256`.

    Where the template has ``{% generation %}`` markers they say where the assistant speaks; otherwise the conversation
    is rendered up to each assistant turn and through it, and both must be exact prefixes of the whole, as text and as
    token ids. Either way a turn is what the target generates: it begins behind the generation prompt and ends with the
    first token that would stop generation. A turn that doesn't nest is not what the target would have read or written;
    it is left out of the mask and noted, and a conversation with no other turn is refused.
    """

    def __init__(
        self, *, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if chat_template is None:
            if not tokenizer.chat_template:
                raise ValueError(
                    f"{tokenizer.name_or_path or type(tokenizer).__name__}: expected a tokenizer with a chat template, found none; "
                    "use the target's instruct version, or give the template's text as chat_template"
                )
            chat_template = tokenizer.get_chat_template()
        self.tokenizer = tokenizer
        self.text = chat_template
        self.template_kwargs = dict(template_kwargs or {})
        self.has_markers = _GENERATION_MARKER.search(chat_template) is not None

    @functools.cached_property
    def tokenizer_sha256(self) -> str:
        """Identity of vocabulary, merges and text processing."""
        return tokenizer_sha256(self.tokenizer)

    @functools.cached_property
    def template_sha256(self) -> str:
        """Identity of the template's text and settings."""
        settings = "".join(f"\n{key}={self.template_kwargs[key]!r}" for key in sorted(self.template_kwargs))
        return sha256_text(self.text + settings)

    @functools.cached_property
    def end_of_turn_id(self) -> int:
        """The token that closes an assistant turn: the last added token of a rendered answer. TemplateRefusal where there is none."""
        whole = self.tokenise(self.render(_PROBE, add_generation_prompt=False))
        asked = self.tokenise(self.render(_PROBE[:1], add_generation_prompt=True))
        tail = whole[next((i for i, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), min(len(asked), len(whole))) :]
        added = self.tokenizer.added_tokens_decoder
        closing = [token for token in tail if token in added]
        if not closing:
            why = f"the template closes an answer with no special token: it ends in {self.tokenizer.convert_ids_to_tokens(list(tail))}"
            raise TemplateRefusal("no_end_of_turn", why)
        return closing[-1]

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an assistant turn: the template's end of turn, and the tokenizer's end of sequence."""
        eos = self.tokenizer.eos_token_id
        return frozenset({self.end_of_turn_id} if eos is None else {self.end_of_turn_id, eos})

    def check(self) -> None:
        """ValueError unless this template can say where the assistant speaks, tried on a small conversation."""
        try:
            self.analyse(_PROBE)
        except TemplateRefusal as refusal:
            raise ValueError(
                f"this chat template cannot say where the assistant speaks ({refusal}); give a template with "
                "{% generation %} markers, or one whose rendered prefixes nest, as chat_template"
            ) from refusal

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as text. TemplateRefusal, with the template's own message, where it doesn't take it."""
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self.text,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_kwargs,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise TemplateRefusal("template_error", f"the template says: {error}") from error
        assert isinstance(text, str)
        return text

    def tokenise(self, text: str) -> tuple[int, ...]:
        """Token ids of rendered text, special tokens recognised, none added."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TemplateRefusal("lone_surrogate", f"U+{ord(text[error.start]):04X} is half of a surrogate pair") from None
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """What the target wrote as message content: text without the token that ended it, other special tokens shown."""
        ids = list(token_ids)
        return self.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def encode_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids up to and including the generation prompt: what an engine is given to answer."""
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError("encode_prompt: expected messages that end with a user or tool turn, found an assistant turn or none at all")
        self._refuse_lost_tools(messages)
        return self.tokenise(self.render(messages, add_generation_prompt=True))

    def encode_next_prompt(self, token_ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """The next turn's prompt behind what the target has already read and written, without tokenising that again.

        ``token_ids`` is the conversation so far, ending with the token that ended the last answer; ``messages`` is the
        same conversation as messages, with that answer and the next user turn behind it. The result begins with
        ``token_ids``. TemplateRefusal where the template renders the earlier answer otherwise once it is not the last
        (as templates that drop thinking do): then the next turn is a conversation of its own.
        """
        if not token_ids or token_ids[-1] not in self.stop_ids:
            raise ValueError(
                "encode_next_prompt: expected ids that end with the end-of-turn token; an answer cut by a limit has no next turn"
            )
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        text = self.render(messages, add_generation_prompt=True)
        whole = self.tokenise(text)
        return tuple(token_ids) + whole[self._nested_turn(whole, text, messages, last).end :]

    def encode(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Token ids and loss mask of a whole conversation (see :meth:`analyse`)."""
        encoding = self.analyse(messages)
        return encoding.token_ids, encoding.loss_mask

    def analyse(self, messages: Sequence[Message]) -> Encoding:
        """Token ids and assistant turns. Where an assistant turn is last, the ids end with its end-of-turn token.

        What the template writes behind that (ChatML's newline) is never generated and nothing reads it, so that prompt
        ids followed by generated ids are the same as the whole. TemplateRefusal where no assistant turn can be placed.
        """
        self._refuse_lost_tools(messages)
        text = self.render(messages, add_generation_prompt=False)
        whole = self.tokenise(text)
        indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        turns: list[Turn] = []
        refusals: list[Skip] = []
        marked = self._marked_runs(messages, whole, len(indices)) if self.has_markers and indices else None
        for number, index in enumerate(indices):
            try:
                turns.append(
                    self._nested_turn(whole, text, messages, index)
                    if marked is None
                    else self._marked_turn(whole, marked[number], messages, index)
                )
            except TemplateRefusal as refusal:
                refusals.append(refusal.skip)
        if refusals and not turns:
            raise TemplateRefusal(refusals[0].reason, refusals[0].why)
        notes = [Skip(reason="turn_not_counted", why=f"{skip.reason}: {skip.why}") for skip in refusals]
        texts = {turn.message_index: self.decode(whole[turn.start : turn.end]) for turn in turns}
        stops = [self.decode([stop]) for stop in sorted(self.stop_ids)] if turns else []
        notes += omissions.dropped_thinking(messages, texts) + omissions.cut_answers(messages, texts, stops)
        if turns and turns[-1].message_index == len(messages) - 1:
            whole = whole[: turns[-1].end]
        return Encoding(token_ids=whole, turns=tuple(turns), notes=tuple(notes))

    def _nested_turn(self, whole: tuple[int, ...], text: str, messages: Sequence[Message], index: int) -> Turn:
        """Place a turn by rendering up to it and through it; both must be prefixes of the whole, token for token."""
        before = self.render(messages[:index], add_generation_prompt=True)
        through = self.render(messages[: index + 1], add_generation_prompt=False)
        if not (text.startswith(through) and through.startswith(before)):
            why = f"message {index}: the conversation up to this answer is rendered otherwise than inside the whole"
            raise TemplateRefusal("template_does_not_nest", why)
        before_ids = self.tokenise(before)
        if whole[: len(before_ids)] != before_ids:
            why = f"message {index}: the answer's first characters merge with the generation prompt into other tokens than the prompt has"
            raise TemplateRefusal("tokens_do_not_nest", why)
        through_ids = whole if len(through) == len(text) else self.tokenise(through)
        end = self._end_of_turn(whole, len(before_ids), len(through_ids), index)
        if whole[:end] != through_ids[:end]:
            raise TemplateRefusal("tokens_do_not_nest", f"message {index}: the answer's tokens change with what follows it")
        return Turn(message_index=index, start=len(before_ids), end=end)

    def _marked_runs(self, messages: Sequence[Message], whole: tuple[int, ...], num_turns: int) -> list[tuple[int, int]]:
        """The token ranges inside the template's generation markers, one per assistant turn."""
        encoded = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=self.text,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self.template_kwargs,
        )
        assert not isinstance(encoded, str | list)
        assert tuple(encoded["input_ids"]) == whole, "transformers tokenises a rendered conversation otherwise than its text"
        mask = [0, *encoded["assistant_masks"], 0]
        runs = list(
            zip(
                (i for i in range(len(whole)) if mask[i + 1] and not mask[i]),
                (i for i in range(1, len(whole) + 1) if mask[i] and not mask[i + 1]),
                strict=True,
            )
        )
        if len(runs) != num_turns:
            raise TemplateRefusal(
                "markers_unclear", f"the template's generation markers hold {len(runs)} stretches for {num_turns} assistant turns"
            )
        return runs

    def _marked_turn(self, whole: tuple[int, ...], run: tuple[int, int], messages: Sequence[Message], index: int) -> Turn:
        """A marked stretch, cut to what is generated: templates mark the header or the last newline too, or leave out the end of turn."""
        before = self.render(messages[:index], add_generation_prompt=True)
        header = self.tokenise(before.removeprefix(self.render(messages[:index], add_generation_prompt=False)))
        begin = run[0] + len(header) if header and whole[run[0] : run[0] + len(header)] == header else run[0]
        limit = run[1] if self.stop_ids & set(whole[begin : run[1]]) else run[1] + 1
        return Turn(message_index=index, start=begin, end=self._end_of_turn(whole, begin, limit, index))

    def _end_of_turn(self, whole: tuple[int, ...], start: int, limit: int, index: int) -> int:
        """Just behind the first stop token in [start, limit): an end-of-turn typed inside an answer ends it, as it ends generation."""
        for position in range(start, min(limit, len(whole))):
            if whole[position] in self.stop_ids:
                return position + 1
        raise TemplateRefusal("no_end_of_turn", f"message {index}: the template closes this answer with no end-of-turn token")

    def _refuse_lost_tools(self, messages: Sequence[Message]) -> None:
        """TemplateRefusal where tool calls or results would silently vanish."""
        probes = omissions.tool_probes(messages)
        if probes is not None and (lost := omissions.lost_tools(messages, self.render(probes, add_generation_prompt=False))) is not None:
            raise TemplateRefusal(lost.reason, lost.why)
