"""What `import engram` loads: nothing that a net does not need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import engram

# Only tables, pages, linear models and examples want these.
HEAVY = ("matplotlib", "pandas", "sklearn", "scipy", "statsmodels", "gpytorch", "lightning")
LOOK = "import sys, json; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after some code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {LOOK}"], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_import_loads_no_heavy_library() -> None:
    assert loaded_by("import engram").isdisjoint(HEAVY)


def test_a_net_is_judged_without_them() -> None:
    code = (
        "import torch, engram; model = torch.nn.Linear(3, 2); "
        "data = torch.randn(8, 3), torch.randint(2, (8,)); "
        "posterior = engram.laplace(model, data, prior_precision=1.0, progress=False); "
        "str(engram.sensitivities(model, data, posterior, progress=False))"
    )
    assert loaded_by(code).isdisjoint({"matplotlib", "pandas", "sklearn"})


@pytest.mark.parametrize("name", engram.__all__)
def test_every_public_name_is_there_in_a_fresh_interpreter(name: str) -> None:
    assert name in dir(engram)
    assert getattr(engram, name) is not None


def test_lazy_names_are_what_they_say() -> None:
    code = (
        "import engram; assert 'engram.models' not in __import__('sys').modules; "
        "from engram import families, from_estimator, models, optimizers; "
        "assert models.from_estimator is from_estimator is engram.from_estimator; "
        "assert callable(from_estimator) and engram.models is models"
    )
    assert "scipy" in loaded_by(code)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'laplacian'"):
        engram.laplacian  # noqa: B018
