"""The paper's figures: every panel at the smallest scale, the nets' sizes, the command line."""

import json

import pytest
import torch
from experiments.__main__ import chosen_panels, main, run
from experiments.cost import check_affordable
from experiments.figures import PANELS
from experiments.models import MODELS, SIZES, make
from experiments.page import ACCURACIES, page
from experiments.panel import LARGE, SCALES, Outcome, Scale
from experiments.workplace import Workplace


@pytest.mark.parametrize("name", MODELS)
def test_the_nets_have_the_paper_s_numbers_of_parameters(name):
    colour = name in LARGE
    shape = (2, 3, 32, 32) if colour else (2, 1, 16, 16) if name == "usps_mlp" else (2, 1, 28, 28)
    outputs = make(name, 0)(torch.zeros(shape))
    assert outputs.shape == (2, 1 if name == "usps_mlp" else 10)
    assert sum(p.numel() for p in make(name, 0).parameters()) == SIZES[name]


# of panels that differ by data and rates alone, one of each net is enough here
DIFFERENT = [
    name
    for name in PANELS
    if (not name.startswith(("fig10", "fig8")) or name.endswith(("mlp-8", "mlp-b", "mlp-c")))
    and name not in ("fig11d", "fig4c", "fig11c", "fig4b")
]


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_panel_runs_at_the_smallest_scale(name, tmp_path):
    panel = PANELS[name]
    place = Workplace(tmp_path, progress=False)
    found = run(panel, "smoke", place, tmp_path / "results", force=False)
    assert found.numbers["verdict"] in ("reproduced", "partly", "not reproduced")
    assert json.loads((tmp_path / "outcome.json").read_text())["seed"] == 0
    assert all((tmp_path / f"figure.{kind}").stat().st_size > 2000 for kind in ("png", "svg"))
    stages = {p: p.stat().st_mtime_ns for p in (tmp_path / "stages").glob("*")}
    again = run(panel, "smoke", place, None, force=False)  # goes on with what is finished
    assert again.numbers["results"] == found.numbers["results"]
    assert stages == {p: p.stat().st_mtime_ns for p in (tmp_path / "stages").glob("*")}
    text = page(tmp_path / "results", tmp_path / "paper.md").read_text()
    assert f"## {name}" in text
    assert panel.finding in text


def test_every_panel_has_all_scales_and_a_title():
    assert len(PANELS) >= 35
    for panel in PANELS.values():
        assert set(panel.scales) == set(SCALES)
        assert panel.title
        assert panel.finding
    assert set(ACCURACIES) <= set(PANELS)


def test_a_stage_that_is_finished_is_read(tmp_path):
    place = Workplace(tmp_path)
    kept = place.stage("one", lambda: Outcome({"a": 1}, {"b": torch.ones(2)}))
    assert kept.numbers["a"] == 1
    again = place.stage("one", lambda: pytest.fail("made again"))
    assert again.numbers == kept.numbers
    assert torch.equal(again.arrays["b"], torch.ones(2))


def test_an_unknown_panel_shows_the_list(capsys):
    with pytest.raises(SystemExit, match=r"unknown panel 'fig2aa'; did you mean fig2a"):
        chosen_panels(["fig2aa"])
    main(["list"])
    assert "fig11a" in capsys.readouterr().out
    assert len(chosen_panels(["all"])) == len(PANELS)


def test_data_that_is_not_there(tmp_path, monkeypatch):
    from engram.errors import DataError

    monkeypatch.setattr("engram.data.loading.fetch", _offline)
    place = Workplace(tmp_path, data_dir=str(tmp_path / "none"), progress=False)
    with pytest.raises(DataError):
        place.data("usps", Scale(10, 10, 1))


def _offline(*given, **named):
    from engram.errors import DataError

    raise DataError("a connection", "none", "put the files where they are looked for")


def test_a_scale_that_the_machine_cannot_hold(monkeypatch):
    class Memory:
        available = 10_000_000

    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory)
    with pytest.raises(SystemExit, match=r"GB of free memory for fig2a.*--force"):
        check_affordable(PANELS["fig2a"], PANELS["fig2a"].scales["paper"])
