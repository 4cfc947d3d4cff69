"""--wandb: what is logged to Weights & Biases, and the errors when it is unavailable. Uses a fake package."""

import json
import sys
import types

import pytest

from striped_attention import cli
from striped_attention.errors import UsageError
from striped_attention.training.config import TrainConfig
from striped_attention.training.watch import Watch
from striped_attention.training.weights_and_biases import WandbRun
from tests.test_display import metrics


class Service(types.ModuleType):
    """A fake of the package `wandb`; `runs` lists the runs that were started."""

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.errors, self.Settings = [], types.SimpleNamespace(Error=ConnectionError), dict

    def init(self, **options):
        self.runs.append(types.SimpleNamespace(options=options, lines=[], axes={}, ended=None))
        run = self.runs[-1]
        run.log = run.lines.append
        run.define_metric = lambda name, step_metric=None: run.axes.update({name: step_metric})
        run.finish = lambda exit_code: vars(run).update(ended=exit_code)
        return run


@pytest.fixture
def service(monkeypatch):
    module = Service()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def config(folder, **options):
    return TrainConfig(wandb="project", checkpoint_dir=folder, **options)


def watched(config, step):
    """Log one step of a run."""
    with Watch(step - 1, 9, quiet=False, wandb=WandbRun(config)) as watch:
        watch.keep(config.checkpoint_dir)
        watch.step(metrics(step))


def test_a_resumed_run_goes_on_with_the_same_run(service, tmp_path):
    folder = tmp_path / "first"
    folder.mkdir()
    watched(config(folder), 1)
    watched(config(folder, resume=True), 2)
    first, second = service.runs
    assert json.loads((folder / "wandb.json").read_text()) == {"project": "project", "id": first.options["id"]}
    assert first.options["id"] == second.options["id"]
    assert first.options["resume"] == second.options["resume"] == "allow"
    assert (first.options["project"], first.options["name"]) == ("project", "first")
    assert first.options["config"]["sequence_length"] == 2048
    assert first.axes == {"step": None, "*": "step"}
    assert [line["step"] for line in (*first.lines, *second.lines)] == [1, 2]
    assert first.lines[0]["loss"] == pytest.approx(3.99)
    assert "mfu" not in first.lines[0], "it is None"
    assert first.ended == 0


def test_a_run_that_fails_is_told_so(service, tmp_path):
    with pytest.raises(NotADirectoryError), Watch(0, 9, quiet=False, wandb=WandbRun(config(None))):
        raise NotADirectoryError
    assert service.runs[0].ended == 1


def test_other_runs_are_other_runs(service):
    for _ in range(2):
        WandbRun(config(None))
    first, second = service.runs
    assert first.options["id"] != second.options["id"]


def test_a_service_that_fails_ends_no_training(service, tmp_path, capsys):
    def fail(line):
        raise BrokenPipeError("the service is gone\nfor good")

    with Watch(0, 2, quiet=False, wandb=WandbRun(config(tmp_path))) as watch:
        service.runs[0].log = fail
        watch.keep(tmp_path)
        for step in (1, 2):
            watch.step(metrics(step))
    said = [line for line in capsys.readouterr().out.splitlines() if "Weights & Biases" in line]
    assert said == ["Warning: logging to Weights & Biases stopped: the service is gone. metrics.jsonl has all metrics."]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def refuse(message, *arguments, **options):
    with pytest.raises(UsageError, match=message) as caught:
        WandbRun(config(*arguments, **options))
    assert "\n" not in str(caught.value)


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refuse(r"--wandb needs the package wandb.*pip install 'striped-attention\[wandb\]'", None)


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--local-processes", "2")])
def test_without_the_package_nothing_is_loaded_first(more, tmp_path, monkeypatch, capsys):
    """Not even the data, whose path does not exist."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    asked = ("--wandb", "project", "--data", str(tmp_path / "missing"), "--cpu-devices", "8", *more)
    assert cli.main(["train", *asked]) == 2
    said = capsys.readouterr().err
    assert said.startswith("striped: --wandb needs the package wandb")
    assert said.count("\n") == 1


def test_what_the_service_refuses_is_told_in_one_line(service, monkeypatch):
    def refused(**_):
        raise ConnectionError("No API key configured. Use `wandb login` to log in.\nAnd more.")

    monkeypatch.setattr(service, "init", refused)
    refuse("No API key configured. Use `wandb login` to log in. Set WANDB_MODE=offline", None)


@pytest.mark.parametrize("content", ["{", "[]", '{"project": "project"}', '{"project": 1, "id": "x"}'])
def test_a_damaged_note_of_the_run_is_told(service, tmp_path, content):
    (tmp_path / "wandb.json").write_text(content)
    refuse("wandb.json is damaged.*Move it away", tmp_path, resume=True)


def test_a_run_stays_in_its_project(service, tmp_path):
    (tmp_path / "wandb.json").write_text('{"project": "another", "id": "x"}')
    refuse("logs to the project another; got --wandb project. Use --wandb another", tmp_path, resume=True)
    assert service.runs == []
