"""Captions varied: parts shuffled or left out, wildcards, a trigger word, text before and after.

Encoded text is cached, so an image has a pool of at most `variants` texts. The pool depends on its captions and these
keys alone, not on the seed: runs of other seeds find it encoded. Which text a step sees follows from (seed, epoch,
image); see `order.py`. The tools run in this order: wildcards, shuffle and dropout of tags, trigger, prefix, suffix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from flame_train.data.order import fraction, permutation
from flame_train.errors import DataError
from flame_train.settings import Section, field

_TRIGGERS = ("[trigger]", "[name]")  # as ai-toolkit replaces them
_MOST_NESTED = 20


class CaptionKeys(Section):
    """How captions are read and varied."""

    shuffle: bool = field(False, "the parts of a caption, its tags, come in another order", aka=("shuffle_caption",))
    keep_tokens: int = field(0, "tags at the beginning that keep their place and are never left out", ge=0)
    separator: str = field(",", "what stands between tags", aka=("caption_separator",))
    keep_separator: str = field(
        "",
        "what ends the part of a caption that keeps its place, such as |||; a second one begins another",
        aka=("keep_tokens_separator",),
    )
    tag_dropout: float = field(0.0, "probability that a tag is left out", ge=0, le=1, aka=("caption_tag_dropout_rate",))
    protected: tuple[str, ...] = field((), "tags that are never left out")
    wildcards: bool = field(False, "{a|b} is a or b; {{ and }} are the signs themselves", aka=("enable_wildcard",))
    trigger: str = field(
        "",
        "trigger word: it replaces [trigger], or is put in front of captions that hold neither",
        aka=("trigger_word",),
    )
    prefix: str = field("", "text before each caption", aka=("caption_prefix",))
    suffix: str = field("", "text after each caption", aka=("caption_suffix",))
    lines: bool = field(False, "each line of a caption file is a caption of its own; false: they are one")
    folder_name: bool = field(False, "an image without a caption has its folder's name as one")
    variants: int = field(8, "texts of an image that are encoded at most, where they vary", ge=1, le=10_000)

    def texts(self, captions: Sequence[str]) -> tuple[str, ...]:
        """Returns the pool of texts of an image with these captions, each once. DataError for a wrong wildcard."""
        texts = dict.fromkeys(self._varied(captions))
        return tuple(texts)[: self.variants]

    @property
    def vary(self) -> bool:
        """Whether a caption has texts without end."""
        return bool(self.shuffle or self.tag_dropout or self.wildcards)

    def drawn(self, captions: Sequence[str], number: int) -> str:
        """Returns the text of a number, of those of an image with these captions: for texts that are not cached."""
        return self._variant(captions[number % len(captions)], number)

    def _varied(self, captions: Sequence[str]) -> Iterator[str]:
        if not self.vary:
            yield from (self._decorated(self._joined(*self._split(caption))) for caption in captions)
            return
        for number in range(self.variants):
            yield self._variant(captions[number % len(captions)], number)

    def _variant(self, caption: str, number: int) -> str:
        if self.wildcards:
            caption = expand(caption, (fraction(f"wildcard {caption}", number, place) for place in range(10**9)))
        before, tags, after = self._split(caption)
        if self.shuffle:
            order = permutation(len(tags), f"tags {caption}", number).tolist()
            tags = [tags[i] for i in order]
        if self.tag_dropout:
            protected = {tag.strip() for tag in self.protected}
            tags = [
                tag
                for place, tag in enumerate(tags)
                if tag in protected or fraction(f"tag {caption}", number, place) >= self.tag_dropout
            ]
        return self._decorated(self._joined(before, tags, after))

    def _split(self, caption: str) -> tuple[list[str], list[str], list[str]]:
        """Tags that keep their place at the beginning, those that do not, those that do at the end."""
        if not (self.shuffle or self.tag_dropout or (self.keep_separator and self.keep_separator in caption)):
            return [caption], [], []
        parts = caption.split(self.keep_separator, 2) if self.keep_separator else [caption]
        lists = [self._tags(part) for part in parts]
        if len(lists) > 1:
            return lists[0], lists[1], lists[2] if len(lists) > 2 else []
        return lists[0][: self.keep_tokens], lists[0][self.keep_tokens :], []

    def _tags(self, text: str) -> list[str]:
        return [tag for tag in (part.strip() for part in text.split(self.separator)) if tag]

    def _joined(self, *parts: list[str]) -> str:
        between = self.separator if self.separator[-1:].isspace() else f"{self.separator} "
        return between.join(tag for part in parts for tag in part)

    def _decorated(self, text: str) -> str:
        if self.trigger:
            for place in _TRIGGERS:
                text = text.replace(place, self.trigger)
            if self.trigger not in text:
                text = f"{self.trigger} {text}".rstrip()
        return " ".join(part for part in (self.prefix, text, self.suffix) if part)


def expand(text: str, numbers: Iterable[float]) -> str:
    """Returns `text` with each {a|b|c} replaced by one of its parts, chosen by the next of `numbers` in [0, 1).

    Parts may hold braces of their own. {{ and }} are the signs themselves, outside of such braces. Raises DataError
    for a brace that does not close, or closes nothing.
    """
    out, at, drawn = [], 0, iter(numbers)
    while at < len(text):
        if text[at : at + 2] in ("{{", "}}"):
            out.append(text[at])
            at += 2
        elif text[at] == "{":
            end, parts = _alternatives(text, at)
            chosen = parts[int(next(drawn) * len(parts))]
            out.append(expand(chosen, drawn) if "{" in chosen else chosen)
            at = end
        elif text[at] == "}":
            raise DataError(f"a wildcard ends at character {at + 1} and none began: remove the }} or write }}}}")
        else:
            out.append(text[at])
            at += 1
    return "".join(out)


def _alternatives(text: str, begin: int) -> tuple[int, list[str]]:
    """Returns the parts of the wildcard that begins at `begin`, and where it ends."""
    depth, parts, start = 0, list[str](), begin + 1
    for at in range(begin, len(text)):
        if text[at] == "{":
            depth += 1
            if depth > _MOST_NESTED:
                raise DataError(f"wildcards are nested more than {_MOST_NESTED} deep: write fewer")
        elif text[at] == "}":
            depth -= 1
        if depth == 0 or (depth == 1 and text[at] == "|"):
            parts.append(text[start:at])
            start = at + 1
        if depth == 0:
            return at + 1, parts
    raise DataError(
        f"the wildcard that begins at character {begin + 1} does not close: write a }} or {{{{ for the sign"
    )
