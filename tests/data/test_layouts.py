"""Every form in which others keep a data set gives the same bytes; broken files are named."""

import numpy as np
import pytest

import small_image_sets as small
from engram.data.arrays import NAMES
from engram.data.fetching import read_from
from engram.data.layouts import npz
from engram.errors import DataError

GREY, COLOUR = small.arrays((6, 5)), small.arrays((32, 32, 3))
CIFAR = {"aliases": ("cifar-10",), "folders": ("cifar10",)}
USPS = {"files": (small.File("usps.bz2", ""), small.File("usps.t.bz2", ""))}

FORMS = {
    "npz": (GREY, lambda found, root: npz.write(found, root, "small"), {}),
    "idx": (GREY, lambda found, root: small.write_idx(found, root / "small"), {}),
    "idx at the top": (GREY, lambda found, root: small.write_idx(found, root), {}),
    "torchvision idx": (
        GREY,
        lambda found, root: small.write_idx(found, root / "small/raw", True),
        {},
    ),
    "cifar binary": (
        COLOUR,
        lambda found, root: small.write_cifar_binary(found, root / "cifar-10-batches-bin"),
        CIFAR,
    ),
    "cifar archive": (
        COLOUR,
        lambda found, root: small.write_cifar_archive(found, root / "cifar-10-binary.tar.gz"),
        CIFAR,
    ),
    "torchvision cifar": (
        COLOUR,
        lambda found, root: small.write_cifar_python(found, root / "cifar-10-batches-py"),
        CIFAR,
    ),
    "npm cifar": (COLOUR, lambda found, root: small.write_sprites(found, root / "cifar10"), CIFAR),
    "libsvm": (GREY, lambda found, root: small.write_libsvm(found, root / "small"), USPS),
    "parquet": (GREY, lambda found, root: small.write_parquet(found, root / "small"), {}),
    "parquet in colour": (
        COLOUR,
        lambda found, root: small.write_parquet(found, root / "cifar10/plain_text", "img"),
        CIFAR,
    ),
    "hub cache": (
        GREY,
        lambda found, root: small.write_parquet(found, root / "hub/snapshots/1a2b/small"),
        {"folders": ("hub",)},
    ),
    "arrow": (GREY, lambda found, root: small.write_arrow(found, root / "small"), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_bytes(form, tmp_path):
    expected, write, more = FORMS[form]
    write(expected, tmp_path)
    found = read_from(tmp_path, small.entry(expected, **more))
    for name in NAMES:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_what_is_not_there_says_where_to_put_it(tmp_path):
    entry = small.entry(GREY, files=(small.File("a.gz", ""), small.File("b.gz", "")))
    with pytest.raises(DataError, match=r"put small\.npz, or a\.gz, b\.gz \(in a folder small/raw"):
        read_from(tmp_path, entry)


def test_other_content_of_the_same_form_is_refused(tmp_path):
    small.write_idx(small.arrays((6, 5), seed=1), tmp_path / "small")
    with pytest.raises(DataError, match=r"expected Small, whose x_train has the checksum"):
        read_from(tmp_path, small.entry(GREY))


def test_two_data_sets_with_the_same_files_are_told_apart_at_the_top(tmp_path):
    other = small.arrays((6, 5), classes=5)
    small.write_idx(other, tmp_path)
    with pytest.raises(DataError, match="none of its files"):
        read_from(tmp_path, small.entry(GREY))


def test_other_sizes_and_other_classes_are_refused(tmp_path):
    npz.write(small.arrays((6, 5), train=30), tmp_path, "small")
    with pytest.raises(DataError, match=r"with images \(20, 6, 5\); got \(30, 6, 5\)"):
        read_from(tmp_path, small.entry(GREY))
    npz.write(small.arrays((6, 5), classes=5), tmp_path, "small")
    with pytest.raises(DataError, match="examples of its classes"):
        read_from(tmp_path, small.entry(GREY))


@pytest.mark.parametrize("kept", [0, 3, 10, 100])
def test_files_that_are_cut_off_are_named(kept, tmp_path):
    small.write_idx(GREY, tmp_path / "small")
    path = tmp_path / "small" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        read_from(tmp_path, small.entry(GREY))


def test_a_pickle_is_not_run(tmp_path):
    small.write_cifar_python(COLOUR, tmp_path / "cifar-10-batches-py")
    run = tmp_path / "it ran"
    call = f"cos\nsystem\n(S'touch {run}'\ntR.".encode()
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(path.read_bytes()[:-2] + b"u0" + call)
    read_from(tmp_path, small.entry(COLOUR, **CIFAR))
    assert not run.exists()
    path.write_bytes(call)
    with pytest.raises(DataError, match="for each of the 0 labels in data_batch_1"):
        read_from(tmp_path, small.entry(COLOUR, **CIFAR))
    path.write_bytes(b"no pickle")
    with pytest.raises(DataError, match="a batch of CIFAR-10 in data_batch_1"):
        read_from(tmp_path, small.entry(COLOUR, **CIFAR))


def test_a_column_that_is_not_there_is_named(tmp_path):
    small.write_parquet(GREY, tmp_path / "small", column="photo")
    with pytest.raises(DataError, match=r"a column image or img in .*; got photo, label"):
        read_from(tmp_path, small.entry(GREY))
