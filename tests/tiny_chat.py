"""Small tokenizers with chat templates written for the tests: byte level, every character a token or more."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blockdraft.data.conversations import Conversation

CHATML = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Reasoning only behind the last user turn; an empty block where the last turn has none (as Qwen3).
THINKING = """\
{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}\
{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>
{{ (m.reasoning_content or '').strip('\\n') }}
</think>

{{ m.content.lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

# The block is always there behind the last user turn, and the prompt opens it (as Qwen3.5).
OPENED_THINKING = THINKING.replace(" and (loop.last or m.reasoning_content)", "").replace(
    "<think>\n\n</think>\n\n{% endif %}{% endif %}", "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)

# The header tells how many messages the conversation has.
UNSTABLE = "({{ messages | length }} messages)" + CHATML

# The last answer ends in another token than the earlier ones.
UNSTABLE_END = CHATML.replace("<|im_end|>", "{% if loop.last %}<|return|>{% else %}<|im_end|>{% endif %}")

# Nothing marks the end of a turn.
PLAIN = """\
{%- for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}
{% else %}A: {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"""

REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + CHATML


def tiny_tokenizer(template: str, *, words: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, `words` being merged to one token each; ids below 300."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    merges = []
    for word in words:
        for length in range(2, len(word) + 1):
            if word[:length] not in vocab:
                vocab[word[:length]] = len(vocab)
                merges.append((word[: length - 1], word[length - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|return|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = template
    fast.name_or_path = "tiny"
    return fast


def save_tokenizer(path: Path, template: str) -> str:
    """A directory that `load_tokenizer` reads."""
    tiny_tokenizer(template).save_pretrained(path)
    return str(path)


def chat(*turns: str | dict[str, Any], tools: list[Any] | None = None) -> Conversation:
    """user, assistant, user, ...; a dict is a message of its own."""
    messages = []
    for number, turn in enumerate(turns):
        role = "assistant" if number % 2 else "user"
        messages.append(turn if isinstance(turn, dict) else {"role": role, "content": turn})
    return Conversation(messages, tools, "chat.jsonl:1")


def reasoned(content: str, reasoning: str) -> dict[str, Any]:
    """An assistant message with reasoning."""
    return {"role": "assistant", "content": content, "reasoning_content": reasoning}
