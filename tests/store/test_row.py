import tracemalloc
from dataclasses import replace

import pytest

from tests.store.catalogs import ROOT, UUID, row_of
from tiered.errors import CorruptionError, UsageError
from tiered.store.format import row as codec
from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.root import ExternalFile, Root, RootHeader, decode_root, encode_root
from tiered.store.format.row import Extent, ExternalRange, Row, encode_row, row_seed

# --- the format is fixed ---


def test_bytes_of_a_row_are_fixed():
    row = Row(3, "w", "float32", (2, 3), 24, 5, (Extent(1, 2, 4096, 8192),), bytes(range(8)), None)
    body, digest = encode_row(row, UUID)
    assert body.hex() == (
        "0500000000000000" "1800000000000000" "01000000" "01000000" "07" "02" "00" "16"
        "77" "666c6f61743332" "0200000000000000" "0300000000000000"
        "0100" "02000000" "0010000000000000" "0020000000000000" "0001020304050607"
    )  # fmt: skip
    assert digest.hex() == "c13ef0e688b926c3"


def test_bytes_of_the_root_are_fixed():
    body, digest = encode_root(
        Root(UUID, 5, 9, 2, '{"a":1}', 6, (ExternalFile("f.st", 4096, 0x0102030405060708),)), 3, 2**64 + 7
    )
    assert body.hex() == UUID.hex() + (
        "0500000000000000" "0600000000000000" "0900000000000000" "02000000" "16000000" "0300000000000000"
        "0700000000000000" "0010000000000000" "0807060504030201" "0400" "662e7374" "7b2261223a317d"
    )  # fmt: skip
    assert digest.hex() == "3e5288587820be9e"


def test_a_row_has_room_for_255_dimensions():
    row = Row(3, "w", "uint8", (1,) * 256, 1, 5, (), b"", b"x")
    with pytest.raises(ValueError, match="256 dimensions"):
        encode_row(row, UUID)
    assert encode_row(replace(row, shape=(1,) * 255), UUID)


# --- hostile numbers: nothing is allocated that the bytes do not hold ---

HEADER = RootHeader(UUID, 5, 0, 100, 2, 0, num_rows=1, digest_sum=0)


def list_of(raw, header, file, **options):
    return list(CommittedRows.decode(raw, header, file, **options))


def decode_one(key_id, body, header=HEADER, **options):
    digest = codec._row_digest(key_id, body, row_seed(UUID))
    header = replace(header, digest_sum=int.from_bytes(digest, "little"))
    return list_of([(key_id, body, digest)], header, "file", **options)


def test_row_bodies_cut_or_altered_anywhere_are_decoded_within_their_size():
    good, _ = encode_row(row_of(7, "name"), UUID)
    assert decode_one(7, good) == [row_of(7, "name")]
    tracemalloc.start()
    try:
        for i in range(len(good)):
            for value in (0, 1, 0x7F, 0x80, 0xFF):
                body = good[:i] + bytes([value]) + good[i + 1 :]
                try:
                    (row,) = decode_one(7, body)
                except CorruptionError as error:
                    assert error.file == "file"
                except UsageError as error:
                    assert "a dtype that this torch does not know" in str(error)
                else:
                    assert encode_row(row, UUID)[0] == body
            with pytest.raises(CorruptionError):
                decode_one(7, good[:i])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "row, problem",
    [
        (row_of(100), "the next key id is 100"),
        (row_of(7, generation=6), "generation 6"),
        (replace(row_of(7), extents=(Extent(2, 0, 0, 8192),)), "outside the store's 2 directories"),
    ],
)
def test_rows_that_do_not_go_with_the_root_are_corruption(row, problem):
    with pytest.raises(CorruptionError, match=problem) as caught:
        decode_one(row.key_id, encode_row(row, UUID)[0])
    assert caught.value.key == row.name


@pytest.mark.parametrize(
    "row, problem",
    [
        pytest.param(Row(7, "a", "uint8", (400_000,), 400_000, 3, (), b"", bytes(400_000)), "inline", id="inline"),
        pytest.param(Row(7, "a", "uint8", (1025,), 1025, 3, (), b"", bytes(1025)), "inline", id="a byte too many"),
        pytest.param(Row(7, "a", "float32", (0, 1 << 62, 4), 0, 3, (), b"", b""), "strides are out", id="strides"),
        pytest.param(Row(7, "a", "of_2040", (0, *[1 << 40] * 3), 0, 3, (), b"", b""), "strides are out", id="unknown"),
    ],
)
def test_rows_of_tensors_that_no_torch_makes_are_corruption(row, problem, monkeypatch):
    with pytest.raises(ValueError, match=problem):
        encode_row(row, UUID)
    with monkeypatch.context() as patch:
        patch.setattr(codec, "row_problem", lambda row: None)
        body, _ = encode_row(row, UUID)
    with pytest.raises(CorruptionError, match=problem) as caught:
        decode_one(7, body)
    assert (caught.value.key, caught.value.file) == ("a", "file")


FILES = (ExternalFile("a", 1600, 1), ExternalFile("b", 7096, 2))
EXTERNAL = replace(row_of(7), extents=(), ranges=(ExternalRange(0, 1, 4096, 3000), ExternalRange(3500, 0, 100, 1500)))


def test_a_row_in_external_files_is_one_of_the_files_that_the_root_has():
    body, _ = encode_row(EXTERNAL, UUID)
    assert decode_one(7, body, external=FILES) == [EXTERNAL]
    for external, problem in (
        (FILES[:1], "not among the 1 of the root row"),
        ((FILES[0], ExternalFile("b", 7095, 2)), "bytes behind the end of 'b'"),
    ):
        with pytest.raises(CorruptionError, match=problem) as caught:
            decode_one(7, body, external=external)
        assert (caught.value.file, caught.value.key) == ("file", EXTERNAL.name)


@pytest.mark.parametrize(
    "start, nbytes",
    [
        pytest.param(2999, 1500, id="begins within the one before"),
        pytest.param(3500, 0, id="is empty"),
        pytest.param(3500, 1501, id="ends behind the tensor"),
    ],
)
def test_a_range_that_is_none_of_the_tensor_is_never_written_and_is_corruption(start, nbytes):
    row, problem = replace(EXTERNAL, ranges=(EXTERNAL.ranges[0], ExternalRange(start, 0, 0, nbytes))), "in order"
    with pytest.raises(ValueError, match=problem):
        encode_row(row, UUID)
    good = codec._RANGE.pack(*EXTERNAL.ranges[1])
    body = encode_row(EXTERNAL, UUID)[0].replace(good, codec._RANGE.pack(*row.ranges[1]))
    with pytest.raises(CorruptionError, match=problem) as caught:
        decode_one(7, body, external=FILES)
    assert (caught.value.file, caught.value.key) == ("file", row.name)


def test_rows_lost_added_or_stale_are_corruption():
    raw = {row.key_id: (row.key_id, *encode_row(row, UUID)) for row in (row_of(1), row_of(2), row_of(3, "key 2"))}
    total = sum(int.from_bytes(raw[key_id][2], "little") for key_id in (1, 2))
    header = replace(HEADER, num_rows=2, digest_sum=total % 2**64)
    assert len(list_of([raw[1], raw[2]], header, "file")) == 2
    for rows in ([raw[1]], [], [*raw.values()], [raw[1], raw[3]]):
        with pytest.raises(CorruptionError):
            list_of(rows, header, "file")
    stale = (1, *encode_row(row_of(1, seed=5), UUID))
    with pytest.raises(CorruptionError, match="not those of the last commit"):
        list_of([stale, raw[2]], header, "file")
    both = (raw[2], raw[3])
    header = replace(header, digest_sum=sum(int.from_bytes(r[2], "little") for r in both) % 2**64)
    with pytest.raises(CorruptionError, match="same name"):
        list_of(both, header, "file")


def test_a_row_of_another_key_or_store_does_not_match():
    body, digest = encode_row(row_of(7), UUID)
    for key_id, uuid in ((8, UUID), (7, bytes(16))):
        with pytest.raises(CorruptionError, match="digest"):
            list_of([(key_id, body, digest)], replace(HEADER, store_uuid=uuid), "file")


def test_root_cut_or_altered_anywhere_is_corruption():
    body, digest = encode_root(ROOT, 0, 0)
    assert decode_root(body, digest, "file")[0] == ROOT
    for i in range(len(body)):
        for other in (body[:i], body[:i] + bytes([body[i] ^ 1]) + body[i + 1 :]):
            with pytest.raises(CorruptionError):
                decode_root(other, digest, "file")
