"""Text as a stream of bytes, and the batches drawn from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiered.errors import UsageError
from tiered.tools.train.task import Corpus, Loader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three text files of 5, 0 and 300 bytes, and what is no text."""
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_bytes(bytes(range(1, 251)) + b"z" * 50)
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_bytes(b"secret")
    os.symlink("/etc/passwd", tmp_path / "link.txt")
    return tmp_path


def test_a_directory_is_its_visible_text_files_by_name(folder: Path) -> None:
    corpus = Corpus.of_paths([folder])
    assert (corpus.num_files, corpus.nbytes) == (3, 305)
    assert corpus.read(0, 305) == b"first" + (folder / "sub" / "c.txt").read_bytes()


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=6), st.data())
def test_reads_are_slices_of_the_files_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("corpus")
    for number, part in enumerate(parts):
        (root / f"{number}").write_bytes(part)
    whole = b"".join(parts)
    offset = data.draw(st.integers(0, len(whole)))
    nbytes = data.draw(st.integers(0, len(whole) - offset))
    corpus = Corpus([root / f"{number}" for number in range(len(parts))], name="parts")
    assert corpus.read(offset, nbytes) == whole[offset : offset + nbytes]


def test_the_standard_library_is_real_text() -> None:
    corpus = Corpus.of_standard_library()
    assert corpus.nbytes > 5_000_000
    assert b"import" in corpus.read(0, 100_000)


def test_wrong_data_is_refused_with_its_name(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no data at .*nowhere"):
        Corpus.of_paths([folder / "nowhere"])
    with pytest.raises(UsageError, match="has 1 text files with 5 bytes, a context of 8 needs at least 9"):
        Loader(Corpus.of_paths([folder / "a.txt"]), batch=1, context=8, seed=0)


def test_a_file_that_shrinks_is_noticed(folder: Path) -> None:
    corpus = Corpus.of_paths([folder])
    (folder / "a.txt").write_bytes(b"f")
    with pytest.raises(UsageError, match=r"a\.txt has changed while in use"):
        corpus.read(0, 10)


def test_targets_are_the_tokens_one_later(folder: Path) -> None:
    tokens, targets = next(Loader(Corpus.of_paths([folder]), batch=3, context=16, seed=0))
    assert tokens.shape == targets.shape == (3, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_a_batch_depends_on_seed_and_number_alone(folder: Path) -> None:
    def batches(seed: int, count: int) -> list[torch.Tensor]:
        loader = Loader(Corpus.of_paths([folder]), batch=2, context=8, seed=seed)
        return [next(loader)[0] for _ in range(count)]

    torch.manual_seed(1)
    first = batches(0, 4)
    torch.manual_seed(2)
    assert all(torch.equal(one, other) for one, other in zip(first, batches(0, 4), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(first, batches(1, 4), strict=True))
    assert len({tuple(batch.flatten().tolist()) for batch in first}) == 4


def test_each_rank_draws_other_batches_and_rank_0_those_of_one_process(folder: Path) -> None:
    corpus = Corpus.of_paths([folder])
    alone, *ranks = (
        next(Loader(corpus, batch=2, context=8, seed=0, **given))[0] for given in ({}, *({"rank": n} for n in range(3)))
    )
    assert torch.equal(alone, ranks[0])
    assert len({tuple(batch.flatten().tolist()) for batch in ranks}) == 3


def test_a_state_of_other_data_is_refused_with_what_differs(folder: Path) -> None:
    state = Loader(Corpus.of_paths([folder]), batch=2, context=8, seed=0).state_dict()
    (folder / "d.txt").write_bytes(b"more")
    loader = Loader(Corpus.of_paths([folder]), batch=2, context=8, seed=0)
    with pytest.raises(UsageError, match=r"num_files: was 3, is 4; nbytes: was 305, is 309"):
        loader.load_state_dict(state)
    assert loader.position == 0


def test_data_that_changed_under_the_same_name_and_size_is_refused(folder: Path) -> None:
    state = Loader(Corpus.of_paths([folder]), batch=2, context=8, seed=0).state_dict()
    (folder / "a.txt").write_bytes(b"First")
    with pytest.raises(UsageError, match=r"other data.*fingerprint: was '2-"):
        Loader(Corpus.of_paths([folder]), batch=2, context=8, seed=0).load_state_dict(state)


def test_large_data_is_known_by_blocks_from_its_first_byte_to_its_last(tmp_path: Path) -> None:
    nbytes = (1 << 30) + 12345
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", nbytes)
    known = set()
    for offset in (None, 0, 1 << 29, nbytes - 1):
        if offset is not None:
            with open(tmp_path / "large", "r+b") as file:
                file.seek(offset)
                file.write(b"x" * min(8 << 20, nbytes - offset))
        known.add(Corpus([tmp_path / "large"], name="large").fingerprint)
    assert len(known) == 4
