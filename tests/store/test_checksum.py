from hypothesis import given
from hypothesis import strategies as st

from tiered.store.format.checksum import BLOCK_NBYTES, block_seed, digest

UUID = bytes(range(16))
places = st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**63 - 1))


def test_format_is_fixed():
    seed = block_seed(UUID, 1, 2, 3)
    assert seed == 0x021D81FA0CBA2C30
    assert digest(b"tiered" * 1000, seed) == 0x00E6E4D9E7B37DED
    assert BLOCK_NBYTES == 4 << 20


@given(places, places)
def test_seed_tells_key_block_and_generation_apart(a, b):
    assert (block_seed(UUID, *a) == block_seed(UUID, *b)) == (a == b)


def test_seed_tells_stores_apart():
    assert block_seed(UUID, 1, 2, 3) != block_seed(bytes(16), 1, 2, 3)


@given(st.binary(min_size=1, max_size=5000), st.integers(0, 2**64 - 1), st.data())
def test_any_flipped_bit_changes_the_digest(content, seed, data):
    flipped = bytearray(content)
    flipped[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(memoryview(flipped), seed) != digest(content, seed)
