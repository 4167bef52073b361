"""Text to token batches: what every rank reads, in an order that is a function of the position alone.

    text files -> paragraphs (repeats dropped) -> pieces of about 4 kB -> train | held out -> tokens -> windows

The order of the windows is a shuffle seeded by (seed, epoch), so the data state of a run is one number, the count of
windows consumed: a resumed run continues with the next one, at any world size. An iterator with a saved generator state
was rejected: its state depends on the number of workers and can't be read by a person.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PIECE_CHARACTERS = 4000
HELD_OUT_EVERY = 16
END = "<|end|>"
LENGTH = 128
"""Tokens in a window, so in a training sequence."""
PROMPTS = 3
PROMPT_WORDS = 6


class CorpusError(Exception):
    """The text can't be trained on; the message is one line that says why and what to do."""


def read_text(files: Sequence[Path]) -> list[str]:
    """The paragraphs of `files`, or of the language reference that Python carries where no file is named.

    Raises:
        CorpusError: a file that is missing, not text, or empty.
    """
    if not files:
        documents = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
        return _paragraphs(documents)
    return _paragraphs([_read_file(path) for path in files])


def _read_file(path: Path) -> str:
    if not path.exists():
        raise CorpusError(f"no such text file: {path}")
    if path.is_dir():
        raise CorpusError(f"{path} is a folder; name its text files, as in {path}/*.txt")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text (byte {error.start}); convert it or name another file") from error
    except OSError as error:
        raise CorpusError(f"can't read {path}: {error.strerror}") from error
    if not text.strip():
        raise CorpusError(f"{path} is empty; name a file with text in it")
    return text


def _paragraphs(documents: Sequence[str]) -> list[str]:
    """Every paragraph once: Python's topics repeat whole sections, and held-out text must not be trained on."""
    seen: set[str] = set()
    kept: list[str] = []
    for document in documents:
        for paragraph in document.replace("\r\n", "\n").split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                kept.append(paragraph.rstrip())
    return kept


def split(paragraphs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Pieces to train on and pieces held out: every 16th, of about 4,000 characters each."""
    pieces: list[str] = []
    current: list[str] = []
    size = 0
    for paragraph in paragraphs:
        current.append(paragraph)
        size += len(paragraph) + 2
        if size >= PIECE_CHARACTERS:
            pieces.append("\n\n".join(current))
            current, size = [], 0
    if current:
        pieces.append("\n\n".join(current))
    if len(pieces) < 2:
        # A short text: its last tenth is held out.
        text = "\n\n".join(paragraphs)
        cut = len(text) - max(1, len(text) // 10)
        return [text[:cut]], [text[cut:]]
    held_out = {index for index in range(len(pieces)) if index % HELD_OUT_EVERY == HELD_OUT_EVERY // 2}
    held_out = held_out or {len(pieces) - 1}
    return (
        [piece for index, piece in enumerate(pieces) if index not in held_out],
        [piece for index, piece in enumerate(pieces) if index in held_out],
    )


def train_tokenizer(pieces: Sequence[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE: no text is out of its vocabulary, and it never sees what is held out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out, both int64 of one dim, the size of their vocabulary, and a few openings
    of held-out paragraphs for the trained model to go on from."""

    train: torch.Tensor
    held_out: torch.Tensor
    vocabulary: int
    prompts: list[str]


def prepare(files: Sequence[Path], vocabulary: int) -> tuple[Corpus, Tokenizer]:
    """Reads, splits and tokenizes the text.

    Raises:
        CorpusError: a file that can't be read, or too little text.
    """
    train, held_out = split(read_text(files))
    tokenizer = train_tokenizer(train, vocabulary)
    corpus = Corpus(
        train=torch.tensor(_encode(tokenizer, train)),
        held_out=torch.tensor(_encode(tokenizer, held_out)),
        vocabulary=tokenizer.get_vocab_size(),
        prompts=_openings(held_out),
    )
    Windows(corpus.train, LENGTH)
    Windows(corpus.held_out, LENGTH, part="the held-out part of the text")
    return corpus, tokenizer


def save(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> None:
    """Leaves corpus.json and tokenizer.json in `folder` for the ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"train": corpus.train.tolist(), "held_out": corpus.held_out.tolist()}
    content = {"vocabulary": corpus.vocabulary, "prompts": corpus.prompts, **tokens}
    (folder / "corpus.json").write_text(json.dumps(content))


def _openings(pieces: Sequence[str]) -> list[str]:
    """The first words of paragraphs that look like prose, or of whatever there is."""
    paragraphs = [paragraph for piece in pieces for paragraph in piece.split("\n\n")]
    prose = [text for text in paragraphs if text[:1].isupper() and len(text.split()) > 3 * PROMPT_WORDS]
    chosen = prose or paragraphs
    spread = [chosen[index * len(chosen) // PROMPTS] for index in range(min(PROMPTS, len(chosen)))]
    return [" ".join(text.split()[:PROMPT_WORDS]) for text in spread]


def _encode(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[int]:
    end = tokenizer.token_to_id(END)
    assert end is not None
    return [token for encoding in tokenizer.encode_batch(list(pieces)) for token in (*encoding.ids, end)]


def load(folder: Path) -> Corpus:
    """The corpus that `save` left in `folder`."""
    content = json.loads((folder / "corpus.json").read_text())
    return Corpus(
        torch.tensor(content["train"]), torch.tensor(content["held_out"]), content["vocabulary"], content["prompts"]
    )


class Windows:
    """Windows of `length` tokens over a row of tokens, each once an epoch, in a seeded order.

    Every epoch cuts the row at another offset, so that a model doesn't see the same cuts again.

    Raises:
        CorpusError: fewer than two windows.
    """

    def __init__(self, tokens: torch.Tensor, length: int, seed: int = 0, part: str = "the text"):
        self.count = (len(tokens) - 1) // length - 1
        if self.count < 1:
            raise CorpusError(
                f"{part} is too short: {len(tokens)} tokens, and at least {2 * length + 1} are needed "
                f"for windows of {length}; name more text"
            )
        self._tokens = tokens
        self._length = length
        self._seed = seed
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.int64)

    def take(self, position: int, number: int) -> torch.Tensor:
        """Windows `position` to `position + number` of the endless row of epochs, int64 (number, length)."""
        return torch.stack([self._window(index) for index in range(position, position + number)])

    def in_order(self, number: int) -> torch.Tensor:
        """Up to `number` windows evenly spread over the row, always the same ones, int64 (n, length)."""
        number = min(number, self.count)
        starts = [index * self.count // number * self._length for index in range(number)]
        return torch.stack([self._tokens[start : start + self._length] for start in starts])

    def _window(self, index: int) -> torch.Tensor:
        epoch, place = divmod(index, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            offset = int(torch.randint(self._length, (1,), generator=generator))
            self._starts = torch.randperm(self.count, generator=generator) * self._length + offset
            self._epoch = epoch
        start = int(self._starts[place])
        return self._tokens[start : start + self._length]
