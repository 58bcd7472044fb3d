import pytest

from weft._distribution import warn_of_namesake


def test_another_distribution_called_weft_is_named(tmp_path, monkeypatch):
    (tmp_path / "weft-3.1.dist-info").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path / "gone"), str(tmp_path)])
    with pytest.warns(UserWarning, match=r"weft-3\.1 is installed in .*`pip uninstall weft`, then"):
        warn_of_namesake()


def test_weft_itself_is_no_namesake(tmp_path, monkeypatch, recwarn):
    (tmp_path / "weft_jax-0.2.0.dist-info").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    warn_of_namesake()
    assert not recwarn.list
