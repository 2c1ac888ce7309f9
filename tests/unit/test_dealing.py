"""Rows dealt among ranks, and the calls that are left between them: together they are the whole, each pair once."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import pytest

from attnswitch.errors import InvalidProblem
from attnswitch.parallel.dealing import ORDERS, Dealing, Order
from attnswitch.parallel.pieces import Band, Piece, packed, pieces
from attnswitch.problem import Window


class Drawn(NamedTuple):
    """A call over ranks."""

    queries: Dealing
    keys: Dealing
    causal: bool
    window: Window | None
    offset: int
    cu_seqlens: tuple[int, ...]
    apart: bool

    def sees(self, i: int, j: int) -> bool:
        """Whether query i sees key j, by the contract's words."""
        at = i + self.offset
        left, right = self.window or (None, None)
        together = not self.cu_seqlens or any(a <= i < b and a <= j < b for a, b in itertools.pairwise(self.cu_seqlens))
        return (
            together
            and not (self.causal and j > at)
            and not (left is not None and j < at - left)
            and not (right is not None and j > at + right)
        )


def drawn(seed: int) -> Drawn:
    pick = random.Random(seed)
    ranks, order = pick.randint(1, 5), pick.choice(ORDERS)
    lq = pick.randint(0, 23)
    lk = lq if pick.random() < 0.5 else pick.randint(0, 23)
    sides = pick.choice([None, (pick.choice([None, 0, 1, 3, 9]), pick.choice([None, 0, 2, 5]))])
    window = None if sides == (None, None) else sides
    offset, edges = pick.choice([0, lk - lq]), tuple[int, ...]()
    if lq == lk and pick.random() < 0.4:
        cuts = sorted(pick.choices(range(lq + 1), k=pick.randint(0, 4)))
        offset, edges = 0, (0, *cuts, pick.choice([lq, max([0, *cuts])]))
    dealt = Dealing(lq, ranks, order), Dealing(lk, ranks, order)
    return Drawn(*dealt, pick.random() < 0.5, window, offset, edges, pick.random() < 0.5)


def pairs(piece: Piece) -> list[tuple[int, int]]:
    """The rows and keys that see each other in a call that is as the piece says, counted from where it begins."""
    left, right = piece.window or (None, None)
    return [
        (a, b)
        for a, b in itertools.product(range(len(piece.rows)), range(len(piece.keys)))
        if not (piece.causal and b > a)
        and not (left is not None and b < a - left)
        and not (right is not None and b > a + right)
        and (not piece.cu_seqlens or any(x <= a < y and x <= b < y for x, y in itertools.pairwise(piece.cu_seqlens)))
    ]


def positions(dealt: Dealing, rank: int) -> list[int]:
    return [position for part in dealt.held(rank) for position in part]


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_pieces_are_the_whole_and_each_pair_is_in_one(first: int) -> None:
    for seed in range(first, first + 500):
        call, seen = drawn(seed), set[tuple[int, int]]()
        band = Band.of(call.causal, call.window, call.offset)
        for rank, owner in itertools.product(range(call.queries.ranks), repeat=2):
            mine, theirs = call.queries.held(rank), call.keys.held(owner)
            made = (
                packed(mine, theirs, band, call.cu_seqlens)
                if call.cu_seqlens
                else pieces(mine, theirs, band, apart=call.apart)
            )
            rows, keys = positions(call.queries, rank), positions(call.keys, owner)
            for piece in made:
                assert piece.rows, seed
                assert piece.keys, seed
                assert all(side is None or side >= 0 for side in piece.window or ()), seed
                for a, b in pairs(piece):
                    pair = rows[piece.rows[a]], keys[piece.keys[b]]
                    assert pair not in seen, (seed, piece)
                    seen.add(pair)
        lengths = range(call.queries.length), range(call.keys.length)
        assert seen == {pair for pair in itertools.product(*lengths) if call.sees(*pair)}, seed


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("length", "ranks"), [(0, 3), (1, 4), (7, 4), (64, 4), (65, 8)])
def test_every_row_is_held_once(length: int, ranks: int, order: Order) -> None:
    dealt = Dealing(length, ranks, order)
    assert sorted(dealt.positions()) == list(range(length))
    assert [dealt.rows(rank) for rank in range(ranks)] == [len(positions(dealt, rank)) for rank in range(ranks)]
    assert max(map(dealt.rows, range(ranks))) - min(map(dealt.rows, range(ranks))) <= 2
    for rank in range(ranks):
        assert all(one.stop < two.start for one, two in itertools.pairwise(dealt.held(rank)))


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_as_many_rows_on_every_rank_say_the_length(rows: int, ranks: int) -> None:
    for order in ORDERS:
        dealt = Dealing(rows * ranks, ranks, order)
        assert {dealt.rows(rank) for rank in range(ranks)} == {rows}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_work_is_even_in_zigzag_order(ranks: int) -> None:
    dealt = Dealing(64 * ranks, ranks)

    def work(rank: int) -> int:
        mine = dealt.held(rank)
        return sum(
            len(pairs(p)) for owner in range(ranks) for p in pieces(mine, dealt.held(owner), Band.of(True, None))
        )

    each = [work(rank) for rank in range(ranks)]
    assert max(each) == min(each)


def test_a_causal_step_is_one_call() -> None:
    dealt = Dealing(64, 4)
    for rank, owner in itertools.product(range(4), repeat=2):
        (piece,) = pieces(dealt.held(rank), dealt.held(owner), Band.of(True, None))
        assert piece.causal == (rank == owner)


@pytest.mark.parametrize("said", [{"order": "sideways"}, {"length": -1}, {"length": True}, {"length": 2.0}])
def test_what_makes_no_sense_is_told(said: dict[str, object]) -> None:
    with pytest.raises(InvalidProblem):
        Dealing(**{"length": 8, "ranks": 2, **said})  # type: ignore[arg-type]
