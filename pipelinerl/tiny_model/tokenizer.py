"""A byte-level BPE tokenizer with chat template, trained on the recipe's own text.

A number up to ``max_number`` is always one token, so the model copies a number by copying one token. It is a
``Qwen2Tokenizer``, because transformers loads any tokenizer of a Qwen2 model as that class.
"""

import json
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</tool_call>' }}"
    "{%- endfor -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
VOCAB_SIZE = 400
"""256 bytes, and merges for the words of the task. Whole tokens are added to them."""


def train_tokenizer(texts: Iterable[str], tags: tuple[str, ...], max_number: int) -> Qwen2Tokenizer:
    """Learns merges from ``texts``, then makes tags and the numbers 0 … max_number whole tokens."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens([AddedToken(TURN_START, special=True)])
    whole = [*tags, *(str(number) for number in range(max_number + 1))]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in whole])
    return tokenizer
