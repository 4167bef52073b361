"""The demo's data: every text error is one line, the split doesn't leak, the order depends on the position alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.installed import need

EXAMPLES = Path(__file__).parents[2] / "examples"
need("tokenizers")


@pytest.fixture(autouse=True)
def _examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_held_out_text_shares_no_paragraph_with_the_training_text() -> None:
    from corpus import read_text, split

    train, held_out = split(read_text([]))
    trained = {" ".join(paragraph.split()) for piece in train for paragraph in piece.split("\n\n")}
    unseen = {" ".join(paragraph.split()) for piece in held_out for paragraph in piece.split("\n\n")}
    assert not trained & unseen
    assert 0.03 < len(unseen) / len(trained) < 0.12


def test_every_window_of_an_epoch_comes_once_and_epochs_differ() -> None:
    from corpus import Windows

    windows = Windows(torch.arange(1000), 10)
    first, second = windows.take(0, windows.count), windows.take(windows.count, windows.count)
    assert len({int(row[0]) for row in first}) == windows.count
    assert not torch.equal(first, second)
    assert torch.equal(first[:, 0] + 9, first[:, -1])


@pytest.mark.parametrize("cut", [0, 1, 7, 98, 99, 150])
def test_the_windows_depend_on_the_position_alone(cut: int) -> None:
    from corpus import Windows

    tokens = torch.arange(1000)
    whole = Windows(tokens, 10, seed=3).take(0, 200)
    assert torch.equal(Windows(tokens, 10, seed=3).take(cut, 200 - cut), whole[cut:])
    assert not torch.equal(Windows(tokens, 10, seed=4).take(0, 200), whole)


def test_the_tokenizer_gives_back_any_text(tmp_path: Path) -> None:
    from corpus import load, prepare, save

    corpus, tokenizer = prepare([], 512)
    text = "  def f(x):\n\treturn 'é漢🙂'\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    save(corpus, tokenizer, tmp_path / "new")
    again = load(tmp_path / "new")
    assert torch.equal(again.train, corpus.train)
    assert again.vocabulary == corpus.vocabulary == 512
    assert int(corpus.train.max()) < 512


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such text file"),
        (b"", "is empty"),
        (b"  \n\n ", "is empty"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"A few words only.", "too short: .* tokens, and at least 257 are needed"),
        (b"word another more. " * 300, "the held-out part of the text is too short"),
    ],
)
def test_text_that_cannot_be_trained_on_is_named_in_one_line(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    from corpus import CorpusError, prepare

    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        prepare([path], 400)
    assert "\n" not in str(caught.value)


def test_a_folder_in_place_of_a_file_says_how_to_name_its_files(tmp_path: Path) -> None:
    from corpus import CorpusError, prepare

    with pytest.raises(CorpusError, match="is a folder"):
        prepare([tmp_path], 400)
