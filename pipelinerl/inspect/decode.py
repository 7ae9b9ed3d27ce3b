"""Decodes token ids to text, one piece per token, and finds the messages in the text.

If a character is split over several tokens, the last of them has the character and the others have empty pieces.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pipelinerl.chat.images import describe_image
from pipelinerl.config.load import load_old_run
from pipelinerl.config.paths import RUN_CONFIG, newest_export
from pipelinerl.errors import ConfigError
from pipelinerl.records import TrainingSequence

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BROKEN = "\ufffd"
MAX_NESTING = 50
"""Depth of nested values up to which a problem is shown field by field."""
LONGEST_CHARACTER = 8
"""Number of tokens after which an incomplete character counts as broken."""


def _format(header: str, starts: str, ends: str) -> re.Pattern[str]:
    """One template's messages: ``header`` and the text up to an end mark, the next header, or the end."""
    return re.compile(rf"{header}(?P<text>.*?)(?:(?:{ends})\n?|(?={starts})|\Z)", re.DOTALL)


FORMATS = (
    _format(r"<\|im_start\|>(?P<role>\w+)\n?", r"<\|im_start\|>", r"<\|im_end\|>"),
    _format(r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n*", r"<\|start_header_id\|>", r"<\|eo[tm]_id\|>"),
    _format(r"<start_of_turn>(?P<role>\w+)\n?", r"<start_of_turn>", r"<end_of_turn>"),
    _format(
        r"<\|start\|>(?P<role>[^<\0]*(?:<\|channel\|>[^<\0]*)?)(?:<\|message\|>)?",
        r"<\|start\|>",
        r"<\|(?:end|return|call)\|>",
    ),
)
"""How chat templates mark messages: ChatML (Qwen and others), Llama 3, Gemma, Harmony."""


class TokenText:
    """Decodes tokens with one tokenizer."""

    def __init__(self, tokenizer: "Tokenizer"):
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = self._decode(self._anchor)
        self._after_text = lru_cache(maxsize=1 << 18)(self._text_after_anchor)

    def pieces(self, token_ids: Iterable[int]) -> list[str]:
        """Return one text per token."""
        texts: list[str] = []
        waiting: list[int] = []
        for token_id in token_ids:
            text = self._after_text((int(token_id),)) if not waiting else ""
            if waiting or BROKEN in text:
                waiting.append(int(token_id))
                text = self._after_text(tuple(waiting))
                if BROKEN in text and len(waiting) < LONGEST_CHARACTER:
                    text = ""
                else:
                    waiting = []
            texts.append(text)
        if waiting:
            texts[-1] = self._text_after_anchor(tuple(waiting))
        return texts

    def text(self, token_ids: Iterable[int]) -> str:
        """Return the text of all tokens at once, which is many times faster. Unknown tokens are left out."""
        return self._decode([*self._anchor, *token_ids]).removeprefix(self._anchor_text)

    def is_known(self, token_id: int) -> bool:
        """Whether the tokenizer has this token."""
        return self._tokenizer.id_to_token(token_id) is not None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _text_after_anchor(self, token_ids: tuple[int, ...]) -> str:
        """Decode the tokens after another token, because some tokenizers drop a space at the beginning of a text."""
        if len(token_ids) == 1 and not self.is_known(token_ids[0]):
            return f"<unknown token {token_ids[0]}>"
        return self.text(token_ids)


class NumberText(TokenText):
    """Replaces a missing tokenizer: the text of every token is its number."""

    def __init__(self) -> None:
        pass

    def pieces(self, token_ids: Iterable[int]) -> list[str]:
        return [f"{int(token_id)} " for token_id in token_ids]

    def text(self, token_ids: Iterable[int]) -> str:
        return "".join(self.pieces(token_ids))

    def is_known(self, token_id: int) -> bool:
        return True


def load_token_text(run_dir: Path) -> TokenText:
    """Load a run's tokenizer from its newest export, its model's folder, or the Hugging Face cache, in this order.

    Raises:
        ConfigError: none of them has a tokenizer.
    """
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    export = newest_export(run_dir)
    folders = [] if export is None else [export]
    model_path = load_old_run(run_dir).model_path if (run_dir / RUN_CONFIG).is_file() else None
    if model_path:
        folders.append(Path(model_path))
    folders.append(run_dir / "model")  # a run folder that was moved still has its own model
    files = [folder / "tokenizer.json" for folder in folders]
    if model_path and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model_path):  # may be a name of the Hugging Face Hub
        cached = try_to_load_from_cache(model_path, "tokenizer.json")
        files += [Path(cached)] if isinstance(cached, str) else []
    for file in files:
        if file.is_file():
            with contextlib.suppress(Exception):  # a damaged one: tokenizers raises nothing narrower
                return TokenText(Tokenizer.from_file(str(file)))
    raise ConfigError(
        f"{run_dir} has no readable tokenizer.json: neither exports/, model/ nor the model {model_path!r} has one"
    )


def text_or_numbers(run_dir: Path, warn: Callable[[ConfigError], None] | None = None) -> TokenText:
    """Load a run's tokenizer. Without one, ``warn`` gets the reason and token ids stand in its place."""
    try:
        return load_token_text(run_dir)
    except ConfigError as error:
        if warn is not None:
            warn(error)
        return NumberText()


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a conversation, as the chat template rendered it."""

    role: str
    """Empty if the text has no marks of a chat template."""
    parts: tuple[tuple[str, bool], ...]
    """(text, whether it was sampled) of each part, in order."""

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


def show_images(
    pieces: list[str], places: np.ndarray, sequence: TrainingSequence, images: Sequence[bytes]
) -> list[str]:
    """Replace the texts of each image's tokens: the first one gets its size, the others are empty.

    Args:
        pieces: text of each shown token. Changed, and returned.
        places: place of each shown token in the sequence, ascending.
    """
    for image, start, end in [] if sequence.images is None else sequence.images.tolist():
        first, last = np.searchsorted(places, (start, end)).tolist()
        if first < last:
            pieces[first:last] = [describe_image(images[image]), *[""] * (last - first - 1)]
    return pieces


def pieces_of(sequence: TrainingSequence, images: Sequence[bytes], text: TokenText) -> list[str]:
    """Return one text per token, with those of ``images``, the rollout's, as ``show_images`` has them."""
    pieces = text.pieces(sequence.token_ids.tolist())
    return show_images(pieces, np.arange(len(pieces)), sequence, images)


def text_of(sequence: TrainingSequence, images: Sequence[bytes], text: TokenText) -> str:
    """Return the whole text of a sequence, which without images costs less than its pieces."""
    if sequence.images is None:
        return text.text(sequence.token_ids.tolist())
    return "".join(pieces_of(sequence, images, text))


def sampled_mask(sequence: TrainingSequence) -> np.ndarray:
    """bool [T]: whether the policy sampled the token."""
    mask = np.zeros(len(sequence.token_ids), bool)
    for start, end, _ in sequence.spans.tolist():
        mask[start:end] = True
    return mask


def messages_in(pieces: Sequence[str], sampled: Sequence[bool]) -> list[Message]:
    """Find the messages in a sequence's text. A mark of a turn that the policy itself sampled begins no message."""
    text = "".join(pieces)
    origin = [flag for piece, flag in zip(pieces, sampled, strict=True) for _ in piece]
    written = "".join("\0" if flag else character for character, flag in zip(text, origin, strict=True))
    for pattern in FORMATS:
        found = list(pattern.finditer(written))
        if found:
            return [Message(role=m["role"].strip(), parts=_parts(text, origin, *m.span("text"))) for m in found]
    return [Message(role="", parts=_parts(text, origin, 0, len(text)))]


def _parts(text: str, origin: Sequence[bool], start: int, end: int) -> tuple[tuple[str, bool], ...]:
    parts: list[tuple[str, bool]] = []
    begin = start
    for place in range(start + 1, end + 1):
        if place == end or origin[place] != origin[begin]:
            parts.append((text[begin:place], bool(origin[begin])))
            begin = place
    if len(parts) > 1 and parts[-1] == ("\n", False):
        del parts[-1]  # the template's, behind an end mark that was sampled
    return tuple(parts)


def problem_fields(problem: str) -> dict[str, Any]:
    """Parse a problem's fields. A text that is no JSON object, or one too deep to show, becomes the field `problem`."""
    try:
        fields = msgspec.json.decode(problem)
    except (ValueError, RecursionError):
        fields = problem
    if is_deeper(fields, MAX_NESTING):
        fields = problem
    return fields if isinstance(fields, dict) else {"problem": fields} if fields else {}


def is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested more than ``limit`` times."""
    level = [value]
    for _ in range(limit):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return any(isinstance(value, dict | list) for value in level)
