# SPDX-License-Identifier: Apache-2.0
"""The command line as a person meets it: each command in a process of its own."""

import hashlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios

import pytest

from checkpoint_files import MANIFEST, RECORDED
from mojolearn import __version__, _checkpoint

TEXT = "".join(f"{count} green bottles hanging on the wall, and {count} it was.\n" for count in range(100)).encode()
SMALL = ["--length=8", "--d-model=8", "--n-heads=2", "--n-kv=1", "--intermediate=8", "--n-layers=1", "--sample=30"]
STEPS = 6000


def mojolearn(*arguments, **options):
    """Runs the command to its end."""
    command = [sys.executable, "-m", "mojolearn", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)


def start(*arguments, **options):
    command = [sys.executable, "-u", "-m", "mojolearn", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text, and with the checkpoint of a complete run on it."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text").write_bytes(TEXT)
    finished = mojolearn("train", *SMALL, "--data=text", f"--steps={STEPS}", "--checkpoint=whole", cwd=folder)
    assert finished.returncode == 0, finished.stderr
    (folder / "report").write_text(finished.stdout)
    return folder


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- train -----------------------------------------------------------------------------------------------------------


def test_training_reports_and_learns(folder):
    report = (folder / "report").read_text()
    assert report.startswith(f"mojolearn {__version__}\n")
    for part in ("parameters: 1 layers, width 8", "text: 4,7", "held out", "cpu: ", f"{STEPS:,} steps of 2 × 8 bytes"):
        assert part in report
    milestones = re.findall(
        r"step +([\d,]+)  loss (\d\.\d+)  [\d,]+ tokens/s  \d+:\d\d left  held out (\d\.\d+)", report
    )
    assert [int(step.replace(",", "")) for step, _, _ in milestones] == list(range(STEPS // 10, STEPS + 1, STEPS // 10))
    before, after = map(float, re.search(r"held-out loss  (\S+) -> (\S+) nats", report).groups())
    assert after < before - 1
    assert float(milestones[-1][2]) == after
    assert "\x1b" not in report
    assert "\r" not in report
    state = _checkpoint.read_binary(folder / "whole")
    assert hashlib.sha256(state["parameters"]).hexdigest() in report
    assert state["data_schedule"]["sha256"] == hashlib.sha256(TEXT).hexdigest()


def test_every_run_gives_the_same_bits_and_another_seed_others(folder, tmp_path):
    for seed in (0, 1):
        for name in ("one", "two"):
            arguments = ["--steps=50", f"--seed={seed}", f"--checkpoint={tmp_path / name}{seed}", "--data=text"]
            assert mojolearn("train", *SMALL, *arguments, cwd=folder).returncode == 0
    assert digest(tmp_path / "one0") == digest(tmp_path / "two0")
    assert digest(tmp_path / "one1") == digest(tmp_path / "two1")
    assert digest(tmp_path / "one0") != digest(tmp_path / "one1")


@pytest.mark.parametrize("checkpoint", ["part", "part.json"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_cut_short_resumes_to_the_same_bits(folder, tmp_path, sent, checkpoint):
    part = tmp_path / checkpoint
    options = ["--data=text", f"--steps={STEPS}", f"--checkpoint={part}", "--checkpoint-every=700"]
    with start("train", *SMALL, *options, cwd=folder) as process:
        for line in process.stdout:
            if re.match(rf"  step +{STEPS // 5:,} ", line):
                break
        process.send_signal(sent)
        process.stdout.read()
        errors = process.stderr.read()
    if sent == signal.SIGINT:
        assert process.returncode == 130
        (step,) = re.fullmatch(r"mojolearn: interrupted after step ([\d,]+); saved: go on with `.*`\n", errors).groups()
        step = int(step.replace(",", ""))
    else:
        assert process.returncode == -signal.SIGKILL
        step = 700
    read = _checkpoint.read_json_file if checkpoint.endswith(".json") else _checkpoint.read_binary
    assert step <= read(part)["completed_steps"] < STEPS
    resumed = mojolearn("train", f"--resume={part}", "--data=text", f"--checkpoint={part}", "--sample=0", cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed" in resumed.stdout
    _checkpoint.write_binary(tmp_path / "end", read(part))
    assert digest(tmp_path / "end") == digest(folder / "whole")


def test_ctrl_c_without_a_checkpoint_saves_nothing(folder, tmp_path):
    with start("train", "--steps=100000000", "--evaluate-every=50", cwd=tmp_path) as process:
        while not process.stdout.readline().startswith("  step"):
            pass
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        errors = process.stderr.read()
    assert process.returncode == 130
    assert re.fullmatch(r"mojolearn: interrupted after step [\d,]+\n", errors)
    assert os.listdir(tmp_path) == []


def test_a_finished_run_can_be_given_more_steps(folder, tmp_path):
    finished = mojolearn("train", "--resume=whole", "--data=text", f"--steps={STEPS + 20}", "--sample=0",
                         f"--checkpoint={tmp_path / 'more'}", cwd=folder)  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    state = _checkpoint.read_binary(tmp_path / "more")
    assert state["completed_steps"] == state["data_schedule"]["planned_steps"] == STEPS + 20


def test_toml_options_are_those_of_flags_and_flags_overrule_them(folder, tmp_path):
    config = "".join(f"{option[2:].replace('-', '_').replace('=', ' = ')}\n" for option in SMALL)
    (tmp_path / "run.toml").write_text(config + 'data = "text"\nsteps = 70\nlr = 2e-3\n')
    by_file = mojolearn(
        "train", f"--config={tmp_path / 'run.toml'}", "--steps=60", f"--checkpoint={tmp_path / 'a'}", cwd=folder
    )
    by_flag = mojolearn(
        "train", *SMALL, "--data=text", "--steps=60", "--lr=0.002", f"--checkpoint={tmp_path / 'b'}", cwd=folder
    )
    assert by_file.returncode == by_flag.returncode == 0
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    (tmp_path / "again.toml").write_text(
        config + f'resume = "{tmp_path / "a"}"\ndata = "text"\nsteps = 65\nlr = 2e-3\n'
    )
    assert mojolearn("train", f"--config={tmp_path / 'again.toml'}", cwd=folder).returncode == 0


def test_without_arguments_the_shipped_text_is_trained_on(tmp_path):
    finished = mojolearn("train", "--steps=30", "--checkpoint=model.json", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "asyoulik.txt" in finished.stdout
    state = _checkpoint.read_json_file(tmp_path / "model.json")
    assert "model_shape" not in state
    resumed = mojolearn("train", "--resume=model.json", "--steps=31", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr


def test_a_terminal_shows_a_bar_on_one_line(folder):
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80)) if hasattr(termios, "tcsetwinsize") else None
    size = ["--length=20", "--batch=8", "--steps=3000", "--evaluate-every=0"]
    command = [sys.executable, "-m", "mojolearn", "train", "--data=text", *size]
    environment = os.environ | {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder, env=environment
    ) as process:
        os.close(terminal)
        shown = b""
        while select.select([controller], [], [], 60)[0]:
            try:
                shown += os.read(controller, 65536)
            except OSError:  # the other side is closed
                break
    os.close(controller)
    assert process.returncode == 0
    text = shown.decode()
    bars = re.findall(r"\r\x1b\[K(  ━+─+  \d+%  loss \d\.\d+  [\d,]+ tokens/s  \d+:\d\d left)", text)
    assert len(bars) >= 2
    assert all(len(bar) < 80 for bar in bars)
    left = re.sub(r"[^\n]*\r\x1b\[K", "", text.replace("\r\n", "\n"))  # what the terminal shows at the end
    assert "━" not in left
    assert "\x1b" not in left
    assert "held-out loss" in left


def test_output_that_is_not_utf8_is_no_error(folder):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    finished = mojolearn("train", *SMALL, "--data=text", "--steps=20", cwd=folder, env=environment)
    assert finished.returncode == 0, finished.stderr
    assert "steps of 2 ? 8 bytes" in finished.stdout


# ---- sample and info -------------------------------------------------------------------------------------------------


def test_a_sample_is_determined_by_its_seed(folder):
    def sample(*arguments):
        finished = mojolearn("sample", "whole", "--length=80", "--prompt=3 green", *arguments, cwd=folder)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    assert sample() == sample("--seed=0") == sample("--temperature=0.8")
    assert sample() != sample("--seed=1")
    greedy = sample("--temperature=0")
    assert greedy == sample("--temperature=0", "--seed=5")
    assert greedy.startswith("3 green")
    assert len(sample("--length=0")) == len("3 green\n")
    assert len(sample().encode()) >= len(b"3 green") + 80


def test_a_model_of_tokens_speaks_in_ids():
    finished = mojolearn("sample", RECORDED / "small.json", "--prompt=3 256", "--length=6")
    ids = list(map(int, finished.stdout.split()))
    assert ids[:2] == [3, 256]
    assert len(ids) == 8
    assert all(0 <= token < 257 for token in ids)


def test_a_reader_that_has_enough_ends_a_sample(folder):
    with start("sample", "whole", "--length=100000", cwd=folder) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("row", MANIFEST, ids=lambda row: row["tag"])
@pytest.mark.parametrize("kind", ["json", "binary"])
def test_info(row, kind):
    path = RECORDED / row[kind]
    finished = mojolearn("info", path)
    assert finished.returncode == 0, finished.stderr
    for part in (
        row["at_checkpoint"]["m"],
        digest(path),
        f"{row['completed_steps']} completed",
        "sämple ☃",
        "lr 0.002",
    ):
        assert part in finished.stdout
    document = json.loads(mojolearn("info", path, "--json").stdout)
    assert document["format"] == kind
    assert document["model_shape"] == row["shape"]
    assert {name: document["arrays"][name] for name in ("parameters", "m", "v")} == row["at_checkpoint"]
    assert document["sha256"] == digest(path)
    assert document["data_schedule"]["planned_steps"] == 5


# ---- doctor and verify -----------------------------------------------------------------------------------------------


def test_doctor():
    finished = mojolearn("doctor")
    findings = json.loads(mojolearn("doctor", "--json").stdout)
    assert findings["self_test"]["passed"], findings["self_test"]
    assert finished.returncode == 0
    assert findings["healthy"]
    for part in (
        findings["library"]["library"],
        findings["library"]["build"]["compiler"],
        "rounds to nearest",
        "every bit",
    ):
        assert part in finished.stdout
    assert findings["backends"]["cpu"]["usable"]
    assert set(findings["backends"]) == {"cpu", "cuda", "hip"}
    for backend in findings["backends"].values():
        assert backend["usable"] or backend["reason"] in finished.stdout


def test_doctor_without_a_library(tmp_path):
    environment = os.environ | {"MOJOLEARN_LIBRARY": str(tmp_path / "none.so")}
    finished = mojolearn("doctor", env=environment)
    assert finished.returncode == 1
    assert "none.so" in finished.stdout
    assert finished.stderr == ""
    assert not json.loads(mojolearn("doctor", "--json", env=environment).stdout)["healthy"]


def test_verify_is_a_command(tmp_path):
    assert mojolearn("verify", f"--vectors={tmp_path}").returncode == 2
    assert "--vectors" in mojolearn("verify", "--help").stdout


# ---- help and errors -------------------------------------------------------------------------------------------------


def test_help_and_version():
    overview = mojolearn("--help").stdout
    for command in ("train", "sample", "info", "verify", "doctor"):
        assert re.search(rf"^ +{command} +\w+", overview, re.MULTILINE)
        finished = mojolearn(command, "--help")
        assert finished.returncode == 0
        assert finished.stdout.startswith(f"usage: mojolearn {command}")
    assert mojolearn("--version").stdout == f"mojolearn {__version__}\n"
    script = shutil.which("mojolearn", path=os.path.dirname(sys.executable))
    if script:  # there is none where the package is used from its folder
        assert (
            subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout
            == f"mojolearn {__version__}\n"
        )


TINY = RECORDED / "tiny.mjl"
ERRORS = {
    "no command": ([], 2, "COMMAND"),
    "unknown command": (["fly"], 2, "fly"),
    "unknown flag": (["train", "--speed=9"], 2, "--speed"),
    "no number": (["train", "--lr=fast"], 2, "argument --lr: must be a number, not 'fast'"),
    "no steps": (["train", "--steps=0"], 2, "argument --steps: must be a whole number of at least 1, not '0'"),
    "bad shape": (["train", "--d-model=30"], 2, "d_model"),
    "bad learning rate": (["train", "--lr=-1"], 2, "lr"),
    "no text": (["train", "--data=none"], 1, "none: No such file"),
    "short text": (["train", "--data=short"], 2, "short has 5 bytes"),
    "text is a folder": (["train", "--data=."], 1, "Is a directory"),
    "bad temperature": (["train", "--temperature=-1"], 2, "--temperature"),
    "nowhere to save": (["train", "--checkpoint=none/here"], 2, "--checkpoint"),
    "overwrites a text": (["train", "--checkpoint=short"], 2, "exists and is not a checkpoint"),
    "never saved": (["train", "--checkpoint-every=5"], 2, "--checkpoint-every"),
    "too large for JSON": (["train", "--checkpoint=a.json", "--d-model=96"], 2, "too large for JSON"),
    "no backend": (["train", "--vendor=metal"], 1, "metal"),
    "unknown vendor": (["train", "--vendor=abacus"], 2, "abacus"),
    "no config": (["train", "--config=none.toml"], 1, "none.toml: No such file"),
    "not TOML": (["train", "--config=short"], 2, "short is not TOML"),
    "unknown option": (["train", "--config=unknown.toml"], 2, "there is no option 'speed'"),
    "wrong type": (["train", "--config=wrong.toml"], 2, "steps must be a whole number"),
    "a list": (["train", "--config=list.toml"], 2, "steps must be a number or a string"),
    "no checkpoint": (["train", "--resume=none"], 1, "none: No such file"),
    "not a checkpoint": (["info", "short"], 1, "short: not a checkpoint"),
    "damaged": (["info", "damaged"], 1, "damaged"),
    "a folder": (["info", "."], 1, "Is a directory"),
    "of another origin": (["train", f"--resume={TINY}"], 1, "does not come from"),
    "empty prompt": (["sample", TINY, "--prompt="], 2, "--prompt"),
    "no ids": (["sample", TINY, "--prompt=hello"], 2, "token ids"),
    "ids out of range": (["sample", TINY, "--prompt=2"], 2, "from 0 to 1"),
    "bad length": (["sample", TINY, "--length=-1"], 2, "--length"),
}


@pytest.fixture(scope="module")
def odd_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    (folder / "short").write_bytes(b"brief")
    (folder / "damaged").write_bytes(TINY.read_bytes()[:-3])
    (folder / "unknown.toml").write_text("speed = 9\n")
    (folder / "wrong.toml").write_text("steps = 1.5\n")
    (folder / "list.toml").write_text("steps = [1]\n")
    return folder


@pytest.mark.parametrize(("arguments", "status", "message"), ERRORS.values(), ids=ERRORS)
def test_an_error_is_one_line_and_a_status(arguments, status, message, odd_files):
    before = sorted(os.listdir(odd_files))
    finished = mojolearn(*arguments, cwd=odd_files)
    assert finished.returncode == status
    assert re.fullmatch(r"mojolearn: error: [^\n]+\n", finished.stderr)
    assert message in finished.stderr
    assert sorted(os.listdir(odd_files)) == before


def test_resuming_with_what_differs_is_an_error(folder, tmp_path):
    (tmp_path / "other").write_bytes(TEXT[1:])
    cases = {
        ("--lr=0.5",): (2, "--lr is 0.5, but whole was made with"),
        ("--n-layers=2",): (2, "--n-layers is 2, but whole was made with 1"),
        ("--seed=3",): (2, "--seed"),
        (): (2, "has completed 6,000 steps"),
        (f"--data={tmp_path / 'other'}", "--steps=7000"): (1, "other is not the text"),
    }
    for arguments, (status, message) in cases.items():
        data = [] if any("data" in argument for argument in arguments) else ["--data=text"]
        finished = mojolearn("train", "--resume=whole", *data, *arguments, cwd=folder)
        assert (finished.returncode, message in finished.stderr) == (status, True), finished.stderr
    finished = mojolearn("train", "--resume=whole", "--steps=7000", cwd=folder)
    assert (finished.returncode, "give it with --data" in finished.stderr) == (2, True)


def test_a_traceback_only_with_debug(odd_files):
    for arguments in (["--debug", "info", "short"], ["info", "short", "--debug"]):
        finished = mojolearn(*arguments, cwd=odd_files)
        assert finished.returncode == 1
        assert finished.stderr.startswith("Traceback")
        assert finished.stderr.splitlines()[-1].startswith("mojolearn: error: ")
