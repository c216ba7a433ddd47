"""No public name, parameter or default changes without a word."""

from public_names import changes


def test_the_public_names_are_as_stored() -> None:
    found = changes()
    told = "changed; where that is meant, run python -m tests.public_names"
    assert not found, "\n".join([told, *found])
