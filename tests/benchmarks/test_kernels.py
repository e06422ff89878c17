"""The benchmark's check of the kernels, without kernels."""

import sys
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(("lines", "status"), [(["ok   a", "ok   b"], 0), (["ok   a", "FAIL b", "ok   c"], 1)])
def test_a_check_ends_with_1_if_a_case_failed_and_prints_them_all(kernels, monkeypatch, capsys, lines, status):
    monkeypatch.setitem(sys.modules, "ops.mla_decode", SimpleNamespace(check=lambda: iter(lines)))
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--check", "--ops", "mla_decode"])
    with pytest.raises(SystemExit) as ended:
        kernels.main()
    assert ended.value.code == status
    assert capsys.readouterr().out.splitlines() == lines
