"""Options from files and from a run's record, and their help: `striped --version`, `--config FILE`, `--resume`."""

import dataclasses
import json
import pathlib
import re
import tempfile

import pytest
import tyro

from striped_attention import cli
from striped_attention.cli.arguments import expand
from striped_attention.cli.plan import PlanConfig
from striped_attention.cli.train import complete
from striped_attention.errors import UsageError
from striped_attention.evaluation.config import EvaluateConfig
from striped_attention.evaluation.forward import plain_config
from striped_attention.generation.config import GenerateConfig
from striped_attention.models.config import PRESETS
from striped_attention.training.config import TrainConfig

ROOT = pathlib.Path(__file__).parent.parent


def expanded(command, options, path, *more):
    return expand(command, options, [command, "--config", str(path), *more])


def test_the_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("striped_attention ")
    assert "jax " in text


def test_a_toml_file_stands_for_flags_which_override_it(tmp_path, capsys):
    path = tmp_path / "plan.toml"
    path.write_text('devices = 4\nlength = "64k"\nmask = "documents"\ndocument-length = 900\nlayouts = ["zigzag"]\n')
    assert cli.main(["plan", "--config", str(path), "--preset", "debug", "--length", "8k"]) == 0
    text = capsys.readouterr().out
    assert "8,192 tokens (documents, median 900 tokens) on 4 × h100, debug" in text
    assert "zigzag()" in text
    assert "striped(" not in text.split("Kernels:")[0].split("strategy")[0]


def test_json_and_the_record_of_a_run(tmp_path):
    options = {"preset": "1b", "data": ["a=0.7", "b=0.3"], "resume": True, "dry_run": False, "chunk": None}
    flags = ["train", "--preset=1b", "--data", "a=0.7", "b=0.3", "--resume", "--batch", "4"]
    for name, content in (("plain.json", options), ("run.json", [{"options": {"seed": 3}}, {"options": options}])):
        (tmp_path / name).write_text(json.dumps(content))
        found = expanded("train", TrainConfig, tmp_path / name, "--batch", "4")
        assert found == [flag for flag in flags if flag != "--resume" or name == "plain.json"], "of one start"


def test_all_options_of_a_run_can_be_read_back(tmp_path):
    config = TrainConfig(preset="debug", steps=7, learning_rate=-0.0, rope_scaling="linear:2,original=512")
    (tmp_path / "run.json").write_text(json.dumps([{"options": config.record()}]))
    _, *flags = expanded("train", TrainConfig, tmp_path / "run.json")
    again = tyro.cli(TrainConfig, args=flags, config=(tyro.conf.FlagCreatePairsOff,))
    assert dataclasses.asdict(again) == dataclasses.asdict(config)


def test_the_example_of_the_documents(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    (tmp_path / "long.toml").write_text(text)
    _, *flags = expanded("train", TrainConfig, tmp_path / "long.toml", "--steps", "9")
    config = tyro.cli(TrainConfig, args=flags, config=(tyro.conf.FlagCreatePairsOff,))
    assert (config.sequence_length, config.devices, config.steps) == (2**18, 8, 9), "flags override the file"
    assert config.data == ("web.parquet=0.7", "code=0.3")


def test_options_that_are_repeated_are_repeated(tmp_path):
    (tmp_path / "o.json").write_text(json.dumps({"stop": ["---", "\n"], "model": "m"}))
    assert expanded("generate", GenerateConfig, tmp_path / "o.json")[1:] == ["--stop=---", "--stop=\n", "--model=m"]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("device = 4", "o.toml", "'device' is not an option of striped plan. Did you mean 'devices'?"),
        ("devices = ", "o.toml", "is not valid TOML"),
        ("devices = 4", "o.json", "is not valid JSON; names of TOML files end in .toml"),
        ("[1, 2]", "o.json", "must hold one table of options"),
        ("[devices]\nx = 4", "o.toml", "'devices' must be text, a number, true, false or a list of text or numbers"),
        ("config = 'x'", "o.toml", "'config' is not an option of striped plan"),
    ],
)
def test_bad_files_get_one_line(tmp_path, capsys, content, name, message):
    (tmp_path / name).write_text(content)
    assert cli.main(["plan", "--config", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there():
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        expand("plan", PlanConfig, ["plan", "--config=nowhere.toml"])
    with pytest.raises(UsageError, match="needs a JSON or TOML file"):
        expand("plan", PlanConfig, ["plan", "--config", "--devices", "4"])


def test_resume_needs_only_the_folder_of_the_run(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    shape = "--cpu-devices 8 --length 64 --layers 1 --dim 32 --ffn 32 --heads 4 --kv-heads 2 --strategy ring"
    (tmp_path / "text.txt").write_text("All roads lead to Rome. " * 99)
    monkeypatch.chdir(tmp_path)
    options = [*shape.split(), "--steps", "2", "--seed", "7", "--data", "text.txt=1"]
    assert cli.main(["train", *options, "--checkpoint-dir", "run"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    capsys.readouterr()
    assert cli.main(["train", "--resume", "--checkpoint-dir", str(folder), "--steps", "3", "--batch", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Changed since the last start: --batch 2 (before: 1), --steps 3 (before: 2)." in text
    assert "Resuming from step 2." in text
    first, second = json.loads((folder / "run.json").read_text())
    assert second["from_step"] == 2
    assert second["options"] == first["options"] | {"steps": 3, "batch": 2, "resume": True}
    assert first["options"]["layout"] == "auto", "kept as given, to be resolved again on other devices"
    assert first["settled"]["layout"] in ("contiguous", "zigzag", "striped")
    other = ["--checkpoint-dir", "elsewhere", f"--checkpoint_dir={folder}", "--resume", "--steps", "3"]
    for more in (["--devices", "4", "--cpu-devices", "4"], ["--mesh", "data=2,sequence=4"], ["--stripe", "4"]):
        assert cli.main(["train", *other, *more, "--dry-run"]) == 0, capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["train", "--resume", f"--checkpoint-dir={folder}", "--stepps", "3"])
    assert cli.main(["train", "--resume", f"--checkpoint-dir={folder}", "--seed", "8", "--steps", "4"]) == 2
    assert "seed" in capsys.readouterr().err, "a different seed would be a different run"


def test_options_that_replace_each_other_can_be_changed():
    record = {"mesh": "data=2,sequence=4", "stripe": 8, "layout": "striped", "steps": 5, "local_processes": 2}
    for asked, kept in {"--devices": {"layout", "stripe"}, "--layout": {"mesh"}, "--steps": {"mesh", "layout"}}.items():
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "run.json").write_text(json.dumps([{"options": record}]))
            found = complete(["train", "--resume", "--checkpoint-dir", folder, asked, "1"])
        names = {flag.partition("=")[0].removeprefix("--") for flag in found[1 : found.index("--resume")]}
        assert kept <= names
        assert "local-processes" not in names
        assert not names & {"--devices": {"mesh"}, "--layout": {"stripe", "layout"}}.get(asked, set())


def test_the_help_of_a_suite_shows_its_options_and_defaults(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "decode", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "usage: striped bench decode" in text
    assert "--devices INT ..., --members INT ... Devices that share a sequence. Default: 1 2 4 8." in text
    assert "--kernels" not in text
    assert "--quick Use small defaults" in text


@pytest.mark.parametrize("flag", ["--length", "--sequence-length"])
def test_lengths_are_written_in_one_way(flag, capsys):
    options = ["train", "--preset", "1b", flag, "256k", "--strategy", "ring", "--dry-run"]
    assert cli.main([*options, "--devices", "8"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 × 262,144 tokens per step on 8 devices" in text
    assert cli.main([*options, "--devices", "8", "--mesh", "sequence=8"]) == 2
    assert "--devices 8 is short for --mesh sequence=8" in capsys.readouterr().err
    assert cli.main(["train", flag, "2.5"]) == 2
    assert "--length must be a number of tokens, like 786432, 256k or 1M; got '2.5'" in capsys.readouterr().err


def test_several_lengths_are_written_like_one(capsys):
    config = tyro.cli(EvaluateConfig, args=["--model", "m", "--lengths", "1k", "2048", "--devices", "2"])
    assert config.lengths == (1024, 2048)
    assert plain_config(config, PRESETS["debug"], 64).devices == 2
    assert cli.main(["evaluate", "--model", "m", "--lengths", "1k", "many"]) == 2
    assert "--lengths must be a number of tokens, like 786432, 256k or 1M; got 'many'" in capsys.readouterr().err


def test_hardware_is_for_dry_runs():
    with pytest.raises(UsageError, match="--hardware is for --dry-run"):
        TrainConfig(hardware="a100")
    with pytest.raises(UsageError, match=r"--hardware must be one of a100, h100, .*; got abacus"):
        TrainConfig(hardware="abacus", dry_run=True)


def test_every_help_mentions_files_of_options(capsys):
    for command in ("train", "generate", "evaluate", "plan", "tokenize"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert "--config FILE" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("width", [80, 100, 140])
def test_help_texts_fill_the_lines(width, capsys, monkeypatch):
    """Help texts are wrapped to the terminal; only breaks between paragraphs are kept."""
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    lines = [line.strip("│| ") for line in capsys.readouterr().out.splitlines()]
    (line,) = (line for line in lines if "Layouts to compare with contiguous" in line)
    assert len(line[line.index("Layouts") :]) > width - 40
