"""Data sets of a few images with checksums of their own, in the forms that others keep."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import struct
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from engram.data.arrays import NAMES, Arrays
from engram.data.catalogue import Entry, File
from engram.data.layouts import idx


def arrays(shape, classes=10, train=20, test=10, seed=0):
    random = np.random.default_rng(seed)

    def part(count):
        images = random.integers(0, 256, (count, *shape), dtype=np.uint8)
        return images, (np.arange(count) % classes).astype(np.uint8)

    return Arrays(*part(train), *part(test))


def entry(found, name="small", **more):
    counts = tuple(
        tuple(np.bincount(y, minlength=10).tolist()) for y in (found.y_train, found.y_test)
    )
    digests = {column: found.digest(column) for column in NAMES}
    shape = found.x_train.shape[1:]
    more = {"folders": ("small/raw", "small")} | more
    return Entry(name, "Small", shape, counts, tuple("0123456789"), digests, **more)


def idx_bytes(array):
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_idx(found, folder, compressed=False):
    folder.mkdir(parents=True, exist_ok=True)
    for column, name in idx.FILES.items():
        content = idx_bytes(getattr(found, column))
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content, mtime=0) if compressed else content)


def idx_files(folder):
    """What a server of these files offers, with checksums."""
    import hashlib

    return tuple(
        File(path.name, f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")
        for path in sorted(folder.iterdir())
    )


def cifar_rows(images, labels):
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([labels[:, None], planes], 1).astype(np.uint8)


def write_cifar_binary(found, folder):
    folder.mkdir(parents=True)
    parts = np.array_split(cifar_rows(found.x_train, found.y_train), 5)
    for number, rows in enumerate(parts, 1):
        (folder / f"data_batch_{number}.bin").write_bytes(rows.tobytes())
    (folder / "test_batch.bin").write_bytes(cifar_rows(found.x_test, found.y_test).tobytes())


def write_cifar_archive(found, path):
    folder = path.parent / "to_pack"
    write_cifar_binary(found, folder)
    with tarfile.open(path, "w:gz") as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, f"cifar-10-batches-bin/{file.name}")


def python_2_pickle(images, labels):
    """What Python 2 wrote: the instructions of a dictionary, byte by byte."""
    planes = images.transpose(0, 3, 1, 2).tobytes()
    short = lambda text: b"U" + bytes([len(text)]) + text  # noqa: E731
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
        + short(b"b")
        + b"\x87R(K\x01K\x02K\x03\x86cnumpy\ndtype\n"
        + short(b"u1")
        + b"K\x00K\x01\x87R\x89T"
        + struct.pack("<I", len(planes))
        + planes
        + b"tb"
    )
    return (
        b"\x80\x02}("
        + short(b"batch_label")
        + short(b"training batch 1 of 5")
        + short(b"labels")
        + b"]("
        + numbers
        + b"e"
        + short(b"data")
        + array
        + short(b"filenames")
        + b"]("
        + short(b"leptodactylus_pentadactylus_s_000004.png")
        + b"eu."
    )


def write_cifar_python(found, folder):
    folder.mkdir(parents=True)
    images, labels = np.array_split(found.x_train, 5), np.array_split(found.y_train, 5)
    for number, part in enumerate(zip(images, labels, strict=True), 1):
        (folder / f"data_batch_{number}").write_bytes(python_2_pickle(*part))
    (folder / "test_batch").write_bytes(python_2_pickle(found.x_test, found.y_test))


def write_sprites(found, folder):
    folder.mkdir(parents=True)
    flat = found.x_train.reshape(len(found.x_train), -1, 3)
    for number, rows in enumerate(np.array_split(flat, 5), 1):
        Image.fromarray(rows).save(folder / f"data_batch_{number}.png")
    Image.fromarray(found.x_test.reshape(len(found.x_test), -1, 3)).save(folder / "test_batch.png")
    (folder / "train_lables.json").write_text(json.dumps(found.y_train.tolist()))
    (folder / "test_lables.json").write_text(json.dumps(found.y_test.tolist()))


def write_libsvm(found, folder):
    folder.mkdir(parents=True)
    for name, part in (("usps.bz2", "train"), ("usps.t.bz2", "test")):
        lines = []
        for image, label in zip(
            getattr(found, f"x_{part}"), getattr(found, f"y_{part}"), strict=True
        ):
            cells = [f"{n}:{value / 127.5 - 1:.6f}" for n, value in enumerate(image.ravel(), 1)]
            lines.append(f"{label + 1} {' '.join(cells)}")
        (folder / name).write_bytes(bz2.compress("\n".join(lines).encode()))


def png(image):
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def hugging_face_table(found, part, column):
    images, labels = getattr(found, f"x_{part}"), getattr(found, f"y_{part}")
    return pa.table({column: [png(image) for image in images], "label": labels.astype(np.int64)})


def write_parquet(found, folder, column="image"):
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        path = folder / f"{part}-00000-of-00001.parquet"
        pq.write_table(hugging_face_table(found, part, column), path)


def write_arrow(found, folder, column="image"):
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        table = hugging_face_table(found, part, column)
        path = Path(folder / part / "data-00000-of-00001.arrow")
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
