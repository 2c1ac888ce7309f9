"""The generator behind a dropout seed: Random123's known answers, and masks that do not depend on how they are cut."""

from __future__ import annotations

import numpy as np
import pytest

from attnswitch.problem.philox import keep_mask, philox4x32

Words = tuple[int, int, int, int]

ONES = 0xFFFFFFFF
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
#: kat_vectors of Random123 for philox4x32-7 and philox4x32-10.
KNOWN: list[tuple[int, Words, tuple[int, int], Words]] = [
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (ONES,) * 4, (ONES, ONES), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, *PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), KNOWN)
def test_known_answers(rounds: int, counter: Words, key: tuple[int, int], words: Words) -> None:
    assert tuple(int(word) for word in philox4x32(counter, key, rounds)) == words


def test_arrays_of_counters_give_what_each_gives() -> None:
    first = np.array([[0, 17]])
    words = philox4x32((first, 0, 0, 0), (0, 0))
    assert [int(word[0, 0]) for word in words] == [int(word) for word in philox4x32((0, 0, 0, 0), (0, 0))]
    assert [int(word[0, 1]) for word in words] == [int(word) for word in philox4x32((17, 0, 0, 0), (0, 0))]


def test_an_element_is_the_word_that_the_module_says() -> None:
    seed, p = 0x0123456789ABCDEF, 0.3
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 3, 5), (7, 31, 100, 4094), (2, 0, 2**31, 2**20 + 3)):
        word = int(philox4x32((j // 4, i, h, b), (seed & 0xFFFFFFFF, seed >> 32))[j % 4])
        assert keep_mask(seed, p, b, h, i, j, 1).tolist() == [word >> 9 >= round(p * 2**23)]


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_tiles_agree_with_the_whole(seed: int) -> None:
    b, h, i = np.arange(2)[:, None, None], np.arange(3)[:, None], np.arange(7)
    whole = keep_mask(seed, 0.4, b, h, i, 0, 23)
    assert whole.shape == (2, 3, 7, 23)
    assert whole.dtype == np.bool_
    for first in range(23):
        for keys in range(23 - first + 1):
            np.testing.assert_array_equal(
                keep_mask(seed, 0.4, b, h, i[2:5], first, keys), whole[:, :, 2:5, first : first + keys]
            )


def test_every_index_and_every_half_of_the_seed_counts() -> None:
    def mask(seed: int, b: int, h: int, i: int, first: int) -> bytes:
        return keep_mask(seed, 0.5, b, h, i, first, 64).tobytes()

    places = [
        (0, 0, 0, 0, 0),
        (1, 0, 0, 0, 0),
        (2**32, 0, 0, 0, 0),
        (0, 1, 0, 0, 0),
        (0, 0, 1, 0, 0),
        (0, 0, 0, 1, 0),
        (0, 0, 0, 0, 64),
    ]
    assert len({mask(*place) for place in places}) == len(places)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_of_what_is_kept(p: float) -> None:
    share = keep_mask(3, p, 0, 0, np.arange(500), 0, 400).mean()
    assert abs(share - (1 - p)) <= 5 * (p * (1 - p) / 200_000) ** 0.5


def test_nothing_is_kept_at_probability_one() -> None:
    assert not keep_mask(3, 1.0, 0, 0, np.arange(50), 0, 40).any()
