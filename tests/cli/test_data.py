"""``engram data``: list, get and where, with a small data set in place of the large ones."""

import json

import pytest

import small_image_sets as small
from command_line import call
from engram.data import catalogue
from engram.data.layouts import npz

GREY = small.arrays((6, 5))


@pytest.fixture
def environment(tmp_path, monkeypatch):
    entry = small.entry(GREY, files=(small.File("a.gz", "md5:0"),))
    monkeypatch.setitem(catalogue.CATALOGUE, "small", entry)
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path), "COLUMNS": "200"}


def test_list_says_what_is_here(environment, tmp_path):
    assert "mnist" in call("data", "list", **environment).stdout
    path = npz.write(GREY, tmp_path / "data", "small")
    found = call("data", "list", "--data-dir", tmp_path / "data", "--json", **environment)
    listed = json.loads(found.stdout)
    assert listed["small"] == str(path)
    assert listed["cifar10"] is None
    narrow = {**environment, "COLUMNS": "60"}
    narrow = call("data", "list", "--data-dir", tmp_path / "data", **narrow)
    assert "not here" in narrow.stdout
    assert "…" not in narrow.stdout


def test_where_by_option_and_by_environment(environment, tmp_path):
    path = npz.write(GREY, tmp_path / "data", "small")
    found = call("data", "where", "small", "--data-dir", path.parent, **environment)
    assert found.stdout.strip() == str(path)
    found = call("data", "where", "small", ENGRAM_DATA=str(path.parent), **environment)
    assert found.stdout.strip() == str(path)


def test_where_of_what_is_nowhere(environment, tmp_path):
    found = call("data", "where", "small", **environment)
    assert found.exit_code == 1
    assert str(tmp_path / "cache" / "engram") in found.stderr
    assert "engram data get small" in found.stderr


def test_get_finds_it_and_says_so(environment, tmp_path):
    npz.write(GREY, tmp_path / "data", "small")
    found = call("data", "get", "small", "--data-dir", tmp_path / "data", **environment)
    assert found.exit_code == 0
    assert "small: 20 images for training and 10 for testing" in found.stdout


def test_get_without_a_network_says_where_to_put_it(environment, tmp_path):
    mirror = "http://127.0.0.1:9"  # nobody listens there
    found = call("data", "get", "small", "-q", "--mirror", mirror, **environment)
    assert found.exit_code == 1
    assert "got http://127.0.0.1:9: ConnectionError" in found.stderr
    assert "what to do: put small.npz, or a.gz" in found.stderr


def test_a_misspelt_name(environment):
    found = call("data", "get", "minst", **environment)
    assert found.exit_code == 1
    assert "did you mean mnist" in found.stderr
