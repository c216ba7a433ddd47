"""What is installed, against the metadata of the installed package."""

from importlib import metadata

import pytest
import torch

from engram.core.installation import Library, installation


def test_versions_are_those_that_are_installed():
    found = installation()
    by_name = {library.name: library for library in found.libraries}
    if not by_name:  # from a folder of sources
        assert any("pip install" in line for line in found.advice)
        return
    assert by_name["torch"].installed == metadata.version("torch")
    assert by_name["torch"].extra == ""
    assert by_name["lightning"].extra == "lightning"
    assert "pytest" not in by_name
    assert found.machine["threads"] == str(torch.get_num_threads())


@pytest.mark.parametrize(
    ("installed", "supported", "extra", "fits"),
    [
        ("2.13.0+cpu", ">=2.4,<3", "", True),
        ("3.0", ">=2.4,<3", "", False),
        ("3.0.dev1", ">=2.4", "", True),
        (None, ">=1", "", False),
        (None, ">=1", "gp", True),
        ("0.5", ">=1", "gp", False),
    ],
)
def test_what_fits(installed, supported, extra, fits):
    assert Library("name", installed, supported, extra).fits is fits
