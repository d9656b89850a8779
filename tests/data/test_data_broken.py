import pytest

from adaptive_platform.data.broken import BrokenLedger, BrokenSample
from adaptive_platform.errors import DataError

A, B, C = (BrokenSample(k, f"{name}.jpg", "cut short") for k, name in enumerate("abc"))


def test_each_path_is_news_once_and_every_skip_counts():
    ledger = BrokenLedger(size=40, max_share=0.1)
    assert ledger.record([A, B]) == (A, B)
    assert ledger.record([B, C, A]) == (C,)
    assert ledger.paths == ("a.jpg", "b.jpg", "c.jpg")
    assert ledger.skips == 5


def test_exactly_the_allowed_share_passes_and_one_more_stops():
    ledger = BrokenLedger(size=20, max_share=0.1)
    ledger.record([A, B])
    with pytest.raises(DataError, match=r"3 of 20 .*max_broken_share = 0.1.*a.jpg: cut short"):
        ledger.record([C])


def test_no_broken_sample_is_allowed_by_a_share_of_zero():
    with pytest.raises(DataError, match="1 of 20"):
        BrokenLedger(size=20, max_share=0.0).record([A])


def test_a_restored_ledger_goes_on_and_does_not_raise_for_what_is_known():
    first = BrokenLedger(size=20, max_share=0.1)
    first.record([A, B, A])
    second = BrokenLedger(size=20, max_share=0.1)
    second.load_state_dict(first.state_dict())
    assert second.record([A]) == ()
    assert (second.skips, second.paths) == (4, ("a.jpg", "b.jpg"))
    with pytest.raises(DataError):
        second.record([C])
