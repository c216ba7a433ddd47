"""The paper's figures: every panel at the smallest scale, the nets' sizes, the command line."""

import json

import pytest
import torch
from experiments.__main__ import chosen_panels, main, run
from experiments.accuracies import ACCURACIES, UNTRAINED, judged
from experiments.cost import check_affordable
from experiments.figures import PANELS
from experiments.figures.beyond import AHEAD, BEHIND, OFF
from experiments.figures.deviations import training_again
from experiments.measures import NOT, PARTLY, REPRODUCED, of_rank_and_size
from experiments.models import MODELS, SIZES, make
from experiments.page import page
from experiments.panel import LARGE, SCALES, Outcome, Scale
from experiments.remarks import REMARKS
from experiments.training import STABLE, Training
from experiments.workplace import WHOLE, Data, Workplace


@pytest.mark.parametrize("name", MODELS)
def test_the_nets_have_the_paper_s_numbers_of_parameters(name):
    colour = name in LARGE
    shape = (2, 3, 32, 32) if colour else (2, 1, 16, 16) if name == "usps_mlp" else (2, 1, 28, 28)
    outputs = make(name, 0)(torch.zeros(shape))
    assert outputs.shape == (2, 1 if name == "usps_mlp" else 10)
    assert sum(p.numel() for p in make(name, 0).parameters()) == SIZES[name]


VERDICTS = (REPRODUCED, PARTLY, NOT, AHEAD, BEHIND, OFF)


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_runs_at_the_smallest_scale(name, tmp_path):
    panel = PANELS[name]
    place = Workplace(tmp_path, progress=False)
    found = run(panel, "smoke", place, tmp_path / "results", force=False)
    assert found.numbers["verdict"] in VERDICTS
    folder = tmp_path / name
    kept = json.loads((folder / "outcome.json").read_text())
    assert kept["seed"] == 0
    assert kept["processor_seconds"] > 0
    assert kept["wall_seconds"] > 0
    assert all((folder / f"figure.{kind}").stat().st_size > 2000 for kind in ("png", "svg"))
    stages = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/*/*.json")}
    assert stages
    again = run(panel, "smoke", place, None, force=False)  # goes on with what is finished
    assert again.numbers["results"] == found.numbers["results"]
    assert stages == {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/*/*.json")}
    text = page(tmp_path / "results", tmp_path / "paper.md").read_text()
    assert f"## {name}" in text
    assert panel.finding in text
    assert panel.criterion in text


def test_every_panel_has_all_scales_and_a_title():
    assert len(PANELS) >= 35
    for panel in PANELS.values():
        assert set(panel.scales) == set(SCALES)
        assert panel.title
        assert panel.finding
        assert panel.criterion
    assert set(ACCURACIES) <= set(PANELS)
    assert set(REMARKS) <= set(PANELS)


def test_a_stage_that_is_finished_is_read(tmp_path):
    place = Workplace(tmp_path)
    kept = place.stage("one", lambda: Outcome({"a": 1}, {"b": torch.ones(2)}))
    assert kept.numbers["a"] == 1
    again = place.stage("one", lambda: pytest.fail("made again"))
    assert again.numbers == kept.numbers
    assert torch.equal(again.arrays["b"], torch.ones(2))


def test_stages_whose_names_differ_behind_a_dot(tmp_path):
    place = Workplace(tmp_path)
    for value in (0.01, 0.05):
        kept = place.stage(f"h0-{value}", lambda v=value: Outcome({"a": v}, {"b": torch.ones(1)}))
        assert kept.numbers["a"] == value


def test_a_stage_of_other_settings_is_not_read(tmp_path):
    place = Workplace(tmp_path)
    place.at("panel", Scale(10, 10, 1)).stage("one", lambda: Outcome({"a": 1}))
    other = place.at("panel", Scale(10, 10, 2)).stage("one", lambda: Outcome({"a": 2}))
    assert other.numbers["a"] == 2
    assert place.at("panel", Scale(10, 10, 1)).stage("one", lambda: Outcome({})).numbers["a"] == 1


def test_images_are_standardised_and_delta_goes_with_their_number(tmp_path):
    scale = Scale(120, 60, 1, faster=4.0, data="digits")
    raw = Workplace(tmp_path).data("cifar10", scale)
    data = raw.standardised()
    assert data.train[0].mean((0, 2, 3)).abs().max() < 1e-5
    assert torch.allclose(data.train[0].std((0, 2, 3)), torch.ones(3))
    mean, deviation = raw.train[0][:, 0].mean(), raw.train[0][:, 0].std()  # of training alone
    assert torch.allclose(data.test[0][:, 0], (raw.test[0][:, 0] - mean) / deviation, atol=1e-5)
    here = Training("sgd", (0.05, 0.005), 32, 100.0).on(data, scale)
    assert here.prior_precision / data.num_train == pytest.approx(100 / 50_000)
    assert here.rates == pytest.approx((0.1, 0.01))  # four times would not be stable


@pytest.mark.parametrize("name", ["fig2a", "fig2b", "fig2c", "fig6a", "fig6b", "fig3a", "fig11d"])
def test_training_again_has_the_paper_s_sum_of_rates(name, tmp_path):
    panel = PANELS[name]
    one = getattr(panel.settings, "net", panel.settings)
    for net in getattr(one, "nets", (one,)):
        small, whole = panel.scales["cpu"], panel.scales["paper"]
        count = small.num_train or WHOLE[net.data]
        data = Data((torch.zeros(count), torch.zeros(count)), (), (), WHOLE[net.data])
        found = training_again(net, data, small)
        steps = small.again * count / found.batch_size
        theirs = whole.again * data.whole / net.training.batch_size
        wanted = min(STABLE, net.rates_again[0] * theirs / steps)
        assert found.learning_rate == pytest.approx(wanted)
        assert wanted * steps >= 0.75 * net.rates_again[0] * theirs
        fall = net.rates_again[1] / net.rates_again[0]
        assert found.final_learning_rate == pytest.approx(wanted * fall)


def test_a_net_far_from_the_paper_s_accuracy_is_not_judged():
    assert judged("fig8-cifar-cnn-b", {"test accuracy": 0.2}, REPRODUCED, "why")[0] == UNTRAINED
    assert judged("fig8-cifar-cnn-b", {"test accuracy": 0.7}, REPRODUCED, "why")[0] == REPRODUCED
    two = {"mlp_32_16": {"test accuracy": 0.85}, "lenet5": {"test accuracy": 0.5}}
    assert judged("fig3a", two, PARTLY, "why")[0] == UNTRAINED
    assert judged("h0", {"test accuracy": 0.1}, PARTLY, "why")[0] == PARTLY  # none is stated


def test_a_verdict_looks_at_sizes_too():
    right = {"spearman": 0.9, "ratio": 1.4}
    assert of_rank_and_size(right, 0.8, 0.5)[0] == REPRODUCED
    assert of_rank_and_size({**right, "ratio": 8.0}, 0.8, 0.5)[0] == PARTLY
    assert of_rank_and_size({**right, "ratio": 0.1}, 0.8, 0.5)[0] == PARTLY
    assert of_rank_and_size({"spearman": 0.3, "ratio": 1.0}, 0.8, 0.5)[0] == NOT


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
        place.data("usps_3v5", Scale(10, 10, 1))
    missing = ["--data-dir", str(tmp_path / "none"), "--folder", str(tmp_path), "--quiet"]
    with pytest.raises(SystemExit, match="put the files where they are looked for"):
        main(["run", "fig6a", "--results", str(tmp_path / "results"), *missing])


def test_an_interrupted_run_says_that_it_goes_on(tmp_path, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.__main__.run", interrupted)
    with pytest.raises(SystemExit, match="the same command goes on"):
        main(["run", "fig6a", "--scale", "smoke", "--folder", str(tmp_path)])


def _offline(*given, **named):
    from engram.errors import DataError

    raise DataError("a connection", "none", "put the files where they are looked for")


def test_a_scale_that_the_machine_cannot_hold(monkeypatch):
    class Memory:
        available = 10_000_000

    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory)
    with pytest.raises(SystemExit, match=r"GB of free memory for fig2a.*--force"):
        check_affordable(PANELS["fig2a"], PANELS["fig2a"].scales["paper"])
