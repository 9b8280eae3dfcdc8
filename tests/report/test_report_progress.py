"""Progress goes to the standard error, as a bar or as lines."""

import io
import logging
import re

import pytest

from tfmixed.report.progress import Progress
from tfmixed.report.progress import duration
from tfmixed.report.progress import without_retracing_notes


def test_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    with Progress(stream=stream) as progress:
        progress.describe("unseen")
        progress.say("float32 [x]: 95 %")
        progress.expect(100.0)
        progress.advance(50.0)
        progress.say("half", with_time=True)
        progress.advance(50.0)
        progress.say("all", with_time=True)
    first, second, third = stream.getvalue().splitlines()
    assert first == "float32 [x]: 95 %"
    assert re.fullmatch(r"half \(about \d+ s left\)", second)
    assert third == "all"


def test_the_standard_error_is_used_and_not_the_standard_output(capsys):
    with Progress() as progress:
        progress.say("word")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "word\n"


def test_nothing_is_shown_when_it_should_not(capsys):
    with Progress(visible=False) as progress:
        progress.expect(1.0)
        progress.describe("training")
        progress.advance(0.5)
        progress.say("word")
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(stream=stream) as progress:
        progress.describe("training float32")
        progress.expect(10.0)
        progress.advance(5.0)
        progress.say("seed 1", with_time=True)
    text = stream.getvalue()
    assert "training float32" in text
    assert re.search(r"about \d+ s left", text)
    assert "seed 1\n" in text or "seed 1 \n" in text


def test_only_notes_of_retracing_are_left_out_and_only_meanwhile():
    seen = []

    class Seen(logging.Handler):
        def emit(self, record):
            seen.append(record.getMessage())

    logger, handler = logging.getLogger("tensorflow"), Seen()
    logger.addHandler(handler)
    note = "5 out of the last 9 calls to f triggered tf.function retracing."
    try:
        with without_retracing_notes():
            logger.warning(note)
            logger.warning("another")
        logger.warning(note)
    finally:
        logger.removeHandler(handler)
    assert seen == ["another", note]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "about 1 s"),
        (40.4, "about 40 s"),
        (100, "about 2 min"),
        (3600, "about 60 min"),
        (2 * 3600, "about 2.0 h"),
    ],
)
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words
