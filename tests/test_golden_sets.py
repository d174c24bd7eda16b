"""Where golden sets are looked for, and that CI cannot do without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import golden_sets

COPIED = ["g4_mixed", "g6_ragged", "g7_mtp", "q1_fp8fp4"]


def test_every_set_is_there_under_ci():
    golden_sets.check_complete()


def test_the_copies_are_small_and_used_once():
    size = sum(f.stat().st_size for f in golden_sets.COPIES.rglob("*") if f.is_file())
    assert size < 15.5e6
    names = [folder.name for folder in golden_sets.sets()]
    assert len(names) == len(set(names))
    assert [f.name for f in golden_sets.sets() if f.parent == golden_sets.COPIES] == COPIED


def test_a_checkout_alone_has_the_copies_and_fails_under_ci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(golden_sets, "ALL", tmp_path)
    monkeypatch.delenv("CI", raising=False)
    assert [f.name for f in golden_sets.sets()] == COPIED
    golden_sets.check_complete()
    with pytest.raises(pytest.skip.Exception, match="g5_long"):
        golden_sets.golden("g5_long")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="not there: g1_sliding, g2_csa, g3_hca, g5_long"):
        golden_sets.check_complete()
    with pytest.raises(pytest.fail.Exception, match="g5_long"):
        golden_sets.golden("g5_long")
