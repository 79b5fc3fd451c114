"""Small byte-level tokenizers with the chat templates that differ in what matters: markers, header tokens, nesting."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Renders tools, as Qwen and Hermes do.
CHATML_TOOLS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + ({'name': call.function.name, "
    "'arguments': call.function.arguments} | tojson) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The header and the newline stand inside the markers, as SmolLM3 has them: neither is generated.
CHATML_MARKERS_WIDE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
    "{{ '<|im_start|>assistant\n' + message.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The end of turn stands outside the markers, though it is generated.
CHATML_MARKERS_NARROW = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Counts the messages at the start: no rendered prefix is a prefix of the whole.
BREAKS_NESTING = "{{ messages | length }} messages\n" + CHATML
# The same, with markers: these say where the assistant speaks all the same.
BREAKS_NESTING_MARKED = "{{ messages | length }} messages\n" + CHATML_MARKERS_NARROW
# Shows the reasoning of the last answer only, as Qwen3 does.
THINKS_LAST_ONLY = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Shows no reasoning at all.
DROPS_THINKING = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(last='assistant') %}{% for message in messages %}"
    "{% if message['role'] == ns.last or message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% set ns.last = message['role'] %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Closes no turn with a token of its own, so generation could not know where to stop.
NEVER_CLOSES = (
    "{% for m in messages %}{{ m.role + ':\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)
# The generation prompt ends in a space that merges with the answer's first word.
MERGES = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
_LINES = (
    "The harbour was quiet and the blue boats lay still.",
    "assistant\nuser\nsystem\nYou are helpful",
    "Name three rivers in Peru. Repeat after me: blue blue blue",
    "4 degrees and raining. 0 1 2 3 4 5 6 7 8 9 10 11 12",
)


@functools.cache
def _backend() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(_SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    return tokenizer.to_str()


def make_tokenizer(template: str | None, *, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 400 entries with ``template``; any text round-trips through it byte for byte."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()), bos_token="<s>", eos_token=eos, pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer
