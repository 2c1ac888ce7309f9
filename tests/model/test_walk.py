"""Every model class of transformers that can be made small: right, or refused before it computes. The report counts.

uv run --group model pytest tests/model/test_walk.py -m 'slow or not slow' -n 2
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import walk

from attnswitch.integrations.transformers import fit

SHARDS = 16
#: Decoders, encoders, both, vision, audio, a state-space model; refused: eager only, layers by name.
SOME = ["bert", "llama", "t5", "vit", "whisper", "clip", "mamba", "mpnet", "bloom", "falcon"]


def check(results: list[walk.Result], record: Callable[[str, object], None]) -> collections.Counter[str]:
    counts = collections.Counter(row.outcome for row in results)
    for outcome, count in counts.items():
        record(outcome, count)
    record("right with sdpa (as marked, or refused here)", sum(map(_right_with_sdpa, results)))
    for row in results:
        assert row.outcome in ("right", "refused", "as sdpa", "not built"), row
        # A difference from eager attention that sdpa has as well, to the rounding, is the model's.
        assert row.outcome != "as sdpa" or row.sdpa_right is False, row
        # What sdpa gets right is refused only where a model keeps sdpa's layer in a table of its own.
        assert not (row.outcome == "refused" and row.sdpa_right) or "table of its own" in row.why, row
    return counts


def _right_with_sdpa(row: walk.Result) -> bool:
    if row.sdpa_right is not None:
        return row.sdpa_right
    return row.outcome == "right" and row.sdpa is True


@pytest.mark.filterwarnings("ignore")
def test_some_families(record_property: Callable[[str, object], None]) -> None:
    results = list(walk.walk(SOME))
    counts = check(results, record_property)
    assert counts["right"] > 30
    assert counts["not built"] <= 3
    assert counts["wrong"] == 0
    for row in results:
        refused = row.family in ("mpnet", "bloom", "falcon")
        assert row.outcome in ("refused" if refused else "right", "not built"), row
        assert row.outcome != "right" or row.calls > 0 or row.family == "mamba", row


@pytest.mark.filterwarnings("ignore")
def test_the_walk_sees_a_model_that_only_takes_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_why_not", lambda model: None)
    fit._why_not_config.cache_clear()
    results = list(walk.walk(["mpnet", "bloom"]))
    fit._why_not_config.cache_clear()
    assert {row.outcome for row in results} == {"wrong"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_family(shard: int, record_property: Callable[[str, object], None]) -> None:
    counts = check(list(walk.walk(walk.families(), shard, SHARDS)), record_property)
    assert counts["right"] > counts["not built"]
