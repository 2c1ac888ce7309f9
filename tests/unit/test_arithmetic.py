"""What the project's own kernels reckon alike from a problem."""

from __future__ import annotations

import importlib
import math
import random

import pytest

from attnswitch import Problem
from attnswitch.problem import Mask

arithmetic = importlib.import_module("attnswitch.backends.own.arithmetic")
PLAIN = Problem.parse("b4.h16/4.s1024.d128.bf16")


@pytest.mark.parametrize(
    ("changes", "folds", "factors"),
    [
        ({}, True, (1 / math.sqrt(128), 0.0)),
        ({"scale": 2, "mask": Mask("bool")}, True, (2.0, 0.0)),
        ({"mask": Mask("float16")}, False, (1 / math.sqrt(128), 0.0)),
        ({"scale": -1.0}, False, (-1.0, 0.0)),
        ({"scale": 0.0}, False, (0.0, 0.0)),
        ({"scale": 3, "softcap": 2}, False, (1.5, 2.0)),
        ({"softcap": 1e30}, True, (1 / math.sqrt(128), 0.0)),  # which caps nothing
    ],
    ids=str,
)
def test_scores_are_products_times_a_factor(
    changes: dict[str, object], folds: bool, factors: tuple[float, ...]
) -> None:
    problem = PLAIN.replace(**changes)
    assert arithmetic.folds(problem) is folds
    assert arithmetic.factors(problem) == factors
    assert [type(number) for number in arithmetic.factors(problem)] == [float, float]
    assert arithmetic.capped(problem) is (factors[1] > 0.0)


def test_dropout_keeps_the_mean() -> None:
    assert arithmetic.keep_scale(PLAIN) == 1.0
    assert math.isclose(arithmetic.keep_scale(PLAIN.replace(dropout=0.2)), 1.25)
    assert arithmetic.keep_scale(PLAIN.replace(dropout=1.0)) == 0.0


def test_a_section_leaves_its_keys_and_values_in_the_cache() -> None:
    long = PLAIN.replace(seq_k=8192)  # 4 MiB of keys and values a head
    assert arithmetic.heads_a_section(long) == 4 * 4  # with the four query heads of each
    assert arithmetic.heads_a_section(long, packed=True) == 4
    assert arithmetic.heads_a_section(long, queries=True) == 32
    assert arithmetic.heads_a_section(long.replace(seq_k=2**20, heads_q=4)) == 1
    assert arithmetic.heads_a_section(long.replace(seq_k=0), packed=True) == 16 * 2**20


@pytest.mark.parametrize("how", ["", ".causal", ".causal-br", ".window=5,9", ".causal-br.window=7,0", ".window=*,3"])
def test_keys_that_queries_in_succession_see_are_counted(how: str) -> None:
    """At least the farthest apart that any of them see, and all where position hides none."""
    draw = random.Random(how)
    for _ in range(200):
        queries, keys, together = draw.randint(1, 40), draw.randint(1, 40), draw.randint(1, 20)
        p = Problem.parse(f"b1.h1.s{queries}x{keys}.d64.bf16{how}")
        left, right = p.reach
        offset = keys - queries if p.bottom_right else 0
        most = 0
        for first in range(queries):
            seen = [
                j
                for i in range(first, min(queries, first + together))
                for j in range(keys)
                if (left is None or j >= i + offset - left) and (right is None or j <= i + offset + right)
            ]
            most = max(most, max(seen) - min(seen) + 1) if seen else most
        assert most <= arithmetic.seen(p, together) <= keys
        if not how or (together == 1 == queries):
            assert arithmetic.seen(p, together) == most
