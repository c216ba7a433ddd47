"""What earlier versions have saved is read with the same numbers, or refused by a clear error."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file

from engram.errors import EngramError, FormatError, RunFolderError
from golden.stored import relative_error
from saved_things import FOLDER, SAVED

TOLERANCE = 1e-10
REFUSED: dict[str, dict[str, type[EngramError]]] = {
    "0.1": dict.fromkeys(SAVED, FormatError),
    # some do not say whether the refit with everything had converged, or have the likelihood of a
    # result in words only; the blocks of posteriors were of one kind, with and without a rotation
    "0.1-one-writer": dict.fromkeys(
        (
            "retraining",
            "verification",
            "result",
            "result refined",
            *(name for name in SAVED if name.startswith("posterior")),
        ),
        FormatError,
    ),
}
"""What this version refuses of each earlier one; everything else it reads."""

BOUND = {"run folder": RunFolderError}
"""Known again by the code of engram, torch and Python, so that another of these may refuse it."""

KEPT = [
    (version.name, name)
    for version in sorted(FOLDER.iterdir())
    for name in SAVED
    if (version / name.replace(" ", "_")).is_dir()
]


def check_numbers(name: str, folder: Path, place: Path) -> None:
    """The same as when it was saved."""
    found = SAVED[name].read(folder)
    expected = load_file(place.with_name(f"{place.name}.expected.safetensors"))
    assert found.keys() == expected.keys()
    errors = {key: relative_error(found[key], value) for key, value in expected.items()}
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize(("version", "name"), KEPT)
def test_what_an_earlier_version_saved_is_read_or_refused(
    version: str, name: str, tmp_path: Path
) -> None:
    place = FOLDER / version / name.replace(" ", "_")
    copied = Path(shutil.copytree(place, tmp_path / "saved"))
    before = {file.name: file.read_bytes() for file in copied.iterdir()}
    refusal = REFUSED.get(version, {}).get(name)
    if refusal:
        with pytest.raises(refusal, match="What to do"):
            SAVED[name].read(copied)
    else:
        with suppress(*(kind for bound, kind in BOUND.items() if bound == name)):
            check_numbers(name, copied, place)
    after = {file.name: file.read_bytes() for file in copied.iterdir()}
    assert after == before  # reading writes nothing
