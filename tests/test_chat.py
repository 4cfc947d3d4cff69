"""`striped generate --chat`: conversations in the model's chat template, from prompts and interactively."""

import io
import json
import os
import pty
import shutil

import pytest

from striped_attention import cli
from striped_attention.generation.engine import Engine
from tests.chat_model import TEMPLATE, ids, oracle, text_of, write_model
from tests.test_generate import generate, trained, write_byte_tokenizer  # noqa: F401  a fixture

STEPS = 6
COMMON = ("--dtype", "float32", "--max-tokens", STEPS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def copied(model, tmp_path):
    """A copy of the model that a test may change."""
    return shutil.copytree(model, tmp_path / "model")


def user(text):
    return {"role": "user", "content": text}


def said(role, text):
    return {"role": role, "content": text}


def rows(out):
    return [json.loads(line) for line in out.splitlines()]


def test_a_prompt_becomes_a_users_message(model, capsys):
    """The tokens equal those of transformers, with one <s>: the template adds it, the tokenizer does not."""
    theirs = oracle(model)
    prompt = theirs.prompt([user("Hello!")])
    assert prompt.count(1) == 1
    code, out, err = generate(capsys, "--model", model, *COMMON, "--chat", "--prompt", "Hello!")
    assert (code, out) == (0, text_of(theirs.greedy(prompt, STEPS)) + "\n")
    assert f"prefill {len(prompt)} tokens" in err
    prompt = theirs.prompt([said("system", "Be brief."), user("Hello!")])
    system = generate(capsys, "--model", model, *COMMON, "--chat", "--prompt", "Hello!", "--system", "Be brief.")
    assert system[:2] == (0, text_of(theirs.greedy(prompt, STEPS)) + "\n")


def test_without_chat_the_tokenizer_adds_its_special_tokens(model, capsys):
    prompt = [1, *ids("Hello!")]
    out = generate(capsys, "--model", model, *COMMON, "--prompt", "Hello!")[1]
    assert out == text_of(oracle(model).greedy(prompt, STEPS)) + "\n"


def test_lines_may_have_whole_conversations_and_fields_of_their_own(model, capsys, tmp_path):
    talks = [
        [said("system", "no"), user("a"), said("assistant", "b"), user("c?")],
        [user("a longer message than the other")],
    ]
    lines = [{"messages": talks[0], "id": 17, "text": "lost"}, {"messages": talks[1], "logprobs": 1}]
    lines.append({"prompt": "hi", "tags": ["x"]})
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = generate(capsys, "--model", model, *COMMON, "--chat", "--prompts", file, "--batch", 2)
    assert code == 0
    for row, talk in zip(rows(out), [*talks, [user("hi")]], strict=True):
        prompt = oracle(model).prompt(talk)
        assert row["tokens"] == oracle(model).greedy(prompt, STEPS)
        assert row["prompt_tokens"] == len(prompt)
    first, second, third = rows(out)
    assert (first["messages"], first["id"], "prompt" in first) == (talks[0], 17, False)
    assert ("id" in second, second["logprobs"]) == (False, 1)
    assert (third["prompt"], third["tags"]) == ("hi", ["x"])
    assert first["text"] == text_of(first["tokens"])
    assert "fields that the output also has (text): the output's values replace them." in " ".join(err.split())
    _, out, err = generate(capsys, "--model", model, *COMMON, "--chat", "--prompts", file, "--logprobs")
    assert "fields that the output also has (logprobs, text)" in " ".join(err.split())
    assert len(rows(out)[1]["logprobs"]) == STEPS


def test_standard_input_that_is_no_terminal_is_one_message(model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n"))
    wanted = text_of(oracle(model).greedy(oracle(model).prompt([user("Hello!")]), STEPS)) + "\n"
    assert generate(capsys, "--model", model, *COMMON, "--chat")[:2] == (0, wanted)


def test_a_special_token_ends_an_answer_and_its_name_may_be_a_stop_string(copied, capsys):
    """In a chat the tokenizer's end token ends an answer, even if eos_token_id names another token."""
    theirs = oracle(copied)
    prompt = theirs.prompt([user("Hello!")])
    free = theirs.greedy(prompt, STEPS)
    at = next(i for i in range(2, STEPS) if free[i] not in free[:i])
    # Mark the token that is generated there as special.
    renamed = text_of([free[at]])
    config = json.loads((copied / "tokenizer.json").read_text())
    config["added_tokens"].append({**config["added_tokens"][0], "id": free[at], "content": renamed})
    (copied / "tokenizer.json").write_text(json.dumps(config))
    command = ("--model", copied, *COMMON, "--chat", "--prompt", "Hello!", "--output", copied / "out.jsonl")

    def finish(*more):
        assert generate(capsys, *command, *more)[0] == 0
        (row,) = rows((copied / "out.jsonl").read_text())
        return row["finish"], row["tokens"], row["text"]

    assert finish()[:2] == ("length", free)
    assert finish("--stop", renamed) == ("stop", free[: at + 1], text_of(free[:at]))
    said = json.loads((copied / "tokenizer_config.json").read_text()) | {"eos_token": renamed}
    (copied / "tokenizer_config.json").write_text(json.dumps(said))
    assert finish() == ("end", free[: at + 1], text_of(free[:at]))


class Spy:
    """Records what an engine prefills and how often its cache is cleared."""

    def __init__(self, monkeypatch):
        self.read, self.cleared = [], 0
        read, clear = Engine.prefill, Engine.clear

        def spied(engine, texts, say=None):
            if len(texts[0]):
                self.read.append(list(texts[0]))
            read(engine, texts, say)

        def counted(engine):
            self.cleared += 1
            clear(engine)

        monkeypatch.setattr(Engine, "prefill", spied)
        monkeypatch.setattr(Engine, "clear", counted)


@pytest.fixture
def terminal(monkeypatch):
    """Make a pseudo-terminal standard input; return a function that types into it."""
    keyboard, screen = pty.openpty()
    with os.fdopen(screen, encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield lambda text: os.write(keyboard, text.encode())
    os.close(keyboard)


@pytest.mark.parametrize("end", ["\n", "\x04"], ids=["empty line", "end of input"])
def test_a_conversation_keeps_its_cache(model, capsys, monkeypatch, terminal, end):
    spy, theirs = Spy(monkeypatch), oracle(model)
    talk, wanted, prompts = [said("system", "no")], [], []
    for text in ("Hello!", "and?", "so"):
        talk.append(user(text))
        prompts.append(theirs.prompt(talk))
        wanted.append(text_of(theirs.greedy(prompts[-1], STEPS)))
        talk.append(said("assistant", wanted[-1]))
    terminal(f"Hello!\nand?\nso\n{end}")
    code, out, err = generate(capsys, "--model", model, *COMMON, "--chat", "--system", "no")
    assert code == 0
    assert out == "".join(f"> {answer}\n" for answer in wanted) + "> " + "\n" * (end == "\x04")
    assert "a cache for 1 × 128 tokens" in err, "the model's maximum length, because it is below 8,192"
    assert spy.cleared == 0
    assert spy.read[0] == prompts[0]
    for turn in (1, 2):
        assert spy.read[turn] == prompts[turn][len(prompts[turn - 1]) + STEPS :], "only the new tokens"


def test_a_conversation_that_is_told_otherwise_starts_anew(copied, capsys, monkeypatch, terminal):
    """A template that drops earlier answers, as those of reasoning models drop thoughts, forces a new prefill."""
    forgetful = TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] if message.role == 'user' }}")
    (copied / "chat_template.jinja").write_text(forgetful)
    spy, theirs = Spy(monkeypatch), oracle(copied)
    first = theirs.prompt([user("Hello!")])
    second = theirs.prompt([user("Hello!"), said("assistant", ""), user("and?")])
    terminal("Hello!\nand?\n\n")
    code, out, _ = generate(capsys, "--model", copied, *COMMON, "--chat")
    answers = [text_of(theirs.greedy(prompt, STEPS)) for prompt in (first, second)]
    assert (code, out) == (0, f"> {answers[0]}\n> {answers[1]}\n> ")
    assert spy.read == [first, second]
    assert spy.cleared == 1


def test_a_conversation_goes_on_after_a_stop_string(model, capsys, terminal):
    theirs = oracle(model)
    first = text_of(theirs.greedy(theirs.prompt([user("Hello!")]), STEPS))
    stop = first[3]
    cut = first[: first.index(stop)]
    second = theirs.prompt([user("Hello!"), said("assistant", cut), user("and?")])
    answer = text_of(theirs.greedy(second, STEPS)).split(stop)[0]
    terminal("Hello!\nand?\n\n")
    out = generate(capsys, "--model", model, *COMMON, "--chat", "--stop", stop)[1]
    assert out == f"> {cut}\n> {answer}\n> "


def test_a_conversation_that_outgrows_its_cache_says_so(model, capsys, terminal):
    terminal("Hello!\nand?\n\n")
    code, out, err = generate(capsys, "--model", model, *COMMON, "--chat", "--capacity", 20)
    assert code == 2
    assert out.count(">") == 2, "the first message is answered"
    assert err.splitlines()[-1].startswith("striped: The conversation has 24 tokens and does not fit in --capacity 20.")


def test_two_processes_answer_as_one(model, monkeypatch, tmp_path):
    command = ["generate", "--model", str(model), *map(str, COMMON), "--chat", "--prompt", "Hello!", "--output"]
    more = ["--logprobs", "2", "--stop", "zzz"]
    assert cli.main([*command, str(tmp_path / "one"), *more]) == 0
    both = ["--local-processes", "2", "--cpu-devices", "1"]
    assert cli.main([*command, str(tmp_path / "two"), *more, *both]) == 0
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    for row in (one, two):
        assert len(row.pop("logprobs")) == len(row.pop("top_logprobs")) == STEPS
    assert one == two


def template(text):
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def without_template(folder):
    (folder / "tokenizer_config.json").write_text("{}")


HELLO = ("--prompt", "Hello!")


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        (HELLO, template("{{ ''.__class__.__mro__ }}"), "refuses the conversation (access to attribute '__class__'"),
        (HELLO, template("{{ raise_exception.__globals__ }}"), "access to attribute '__globals__'"),
        (HELLO, template("{{ cycler.__init__.__globals__.os.system('x') }}"), "access to attribute '__init__'"),
        (HELLO, template("{{ messages | map(attribute='__class__') | list }}"), "access to attribute '__class__'"),
        (HELLO, template("{% for i in range(10**12) %}{% endfor %}"), "(Range too big"),
        (HELLO, template("{{ messages.append(1) }}"), "access to attribute 'append'"),
        (HELLO, template("{{ raise_exception('no users') }}"), "refuses the conversation (no users)"),
        (HELLO, template("{{ 1 / (messages | length - 1) }}"), "refuses the conversation (division by zero)"),
        (HELLO, template("{% include '/etc/passwd' %}"), "refuses the conversation"),
        (HELLO, template("{% for %}"), "is not valid Jinja"),
        (HELLO, template("{% for i in '1' %}" * 30 + "{% endfor %}" * 30), "is not valid Jinja (too many"),
        (HELLO, template(""), "The prompt is empty"),
        (HELLO, without_template, "template, but there is no chat_template.jinja beside"),
        (("--prompt", "\udcff"), None, "The prompt cannot be encoded as UTF-8"),
        ((*HELLO, "--system", "\udcff"), None, "refuses the conversation ('utf-8' codec"),
        ((*HELLO, "--stop", ""), None, "--stop must not be empty"),
        ((*HELLO, "--logprobs"), None, "--logprobs requires lines of JSON as output: give --output or --prompts."),
        ((*HELLO, "--output", "x", "--logprobs", 1, 2), None, "--logprobs takes at most one number, at least 0"),
        ((*HELLO, "--output", "x", "--logprobs", -1), None, "--logprobs takes at most one number, at least 0"),
        ((*HELLO, "--output", "x", "--logprobs", 500), None, "--logprobs 500 is more than the vocabulary of 102."),
    ],
    ids=lambda value: "" if callable(value) else str(value)[-40:],
)
def test_what_cannot_be_chatted_is_one_line(copied, capsys, monkeypatch, options, change, message):
    monkeypatch.chdir(copied)
    if change is not None:
        change(copied)
    code, out, err = generate(capsys, "--model", copied, *COMMON, "--chat", *options)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("striped: ")
    assert message in line
    assert not (copied / "x").exists()


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ({"messages": [user("a")]}, (), "Line 2 of {} has messages, which require --chat."),
        ({"messages": [user("a")], "prompt": "a"}, ("--chat",), "Line 2 of {} has both a prompt and messages."),
        ({"messages": []}, ("--chat",), "Line 2 of {} must have a list of messages; got []."),
        ({"messages": "hi"}, ("--chat",), 'Line 2 of {} must have a list of messages; got "hi".'),
        ({"messages": ["hi"]}, ("--chat",), "Line 2 of {}: message 1 must be like"),
        ({"messages": [user("a"), {"role": "user"}]}, ("--chat",), "Line 2 of {}: message 2 must be like"),
        ({"messages": [{"role": 3, "content": "a"}]}, ("--chat",), "Line 2 of {}: message 1 must be like"),
        ({"messages": [user(["a"])]}, ("--chat",), "Line 2 of {}: message 1 must be like"),
        ({"messages": [user("a"), said("assistant", "b")]}, ("--chat",), "Line 2 of {} ends with a message of the"),
        ({"messages": [user("\udcff")]}, ("--chat",), "Line 2 of {} cannot be encoded as UTF-8"),
        ({"messages": [said("system", "a"), user("b")]}, ("--chat", "--system", "c"), "Line 2 of {} already has a"),
        ({"text": "a"}, ("--chat",), 'Line 2 of {} must be like {{"prompt": "Once upon"}}; got {{"text": "a"}}'),
        ([1], (), 'Line 2 of {} must be like {{"prompt": "Once upon"}}; got [1]'),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_line_that_is_no_prompt_is_named(model, capsys, tmp_path, line, options, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps(line) + "\n")
    code, out, err = generate(capsys, "--model", model, *COMMON, *options, "--prompts", file)
    assert (code, out) == (2, "")
    (found,) = err.splitlines()
    assert found.startswith(f"striped: {message.format(file)}")


def test_options_that_do_not_go_together(model, trained, capsys, monkeypatch, terminal):  # noqa: F811  a fixture
    refuse = lambda *options: generate(capsys, *options)[2].splitlines()  # noqa: E731
    assert refuse("--model", model, *HELLO, "--system", "a") == [
        "striped: --system is the first message of a conversation: give --chat too."
    ]
    (line,) = refuse("--model", trained, *HELLO, "--chat")
    assert "--chat needs a tokenizer with a chat template, but the tokens of the model in" in line
    (line,) = refuse("--model", model)
    assert "There is no prompt. Give --prompt, --prompts, or text on standard input." in line
    (line,) = refuse("--model", model, "--chat", "--local-processes", 2)
    assert "An interactive conversation runs in one process. Leave out --local-processes." in line
    (line,) = refuse("--model", model, "--chat", "--output", "x")
    assert "An interactive conversation has no output file." in line
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setattr("striped_attention.training.launch.connect", lambda config: None)
    monkeypatch.setattr("jax.process_count", lambda: 4)
    (line,) = refuse("--model", model, "--chat")
    assert "Standard input cannot be read by several processes. Give --prompt or --prompts." in line


def test_a_template_outside_the_folder_of_a_run_is_not_used(trained, capsys, tmp_path):  # noqa: F811  a fixture
    folder = shutil.copytree(trained, tmp_path / "run")
    write_byte_tokenizer(folder / "tokenizer.json")
    (tmp_path / "secret.jinja").write_text("secret")
    (folder / "chat_template.jinja").symlink_to("../secret.jinja")
    code, _, err = generate(capsys, "--model", folder, "--chat", *HELLO)
    assert code == 2
    assert "The files of a run must lie in its folder, but" in err
