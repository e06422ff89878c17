"""The benchmark of pages on the host: that its chats are where a row says they are."""

import json
import sys

import host_pages
import pytest


@pytest.mark.deep
@pytest.mark.slow
def test_a_row_has_a_time_for_each_place_and_a_rate_for_each_way(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["host_pages.py", "--small", "--out", str(tmp_path / "found.json")])
    host_pages.main()  # it asserts that pages come from the host exactly where they should
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["tokens held"] == 256
    times = [row[f"{place}, ms"] for place in ("in the pool", "on the host", "read again")]
    rates = [row[f"{way} the host, GiB/s"] for way in ("to", "from")]
    assert all(figure > 0 for figure in times + rates)
    assert times[2] > times[0]
