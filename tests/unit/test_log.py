"""The logger ``reigen``: who shows a message, once, and how it looks."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from reigen import log


@contextmanager
def unconfigured() -> Iterator[logging.Logger]:
    """``reigen``, as in a program that has not configured logging: pytest's own handlers are taken off the root."""
    root, ours = logging.getLogger(), logging.getLogger("reigen")
    before = root.handlers[:], ours.handlers[:], ours.level, ours.propagate
    root.handlers[:], ours.handlers[:] = [], []
    ours.setLevel(logging.NOTSET)
    try:
        yield ours
    finally:
        root.handlers[:], ours.handlers[:] = before[0], before[1]
        ours.setLevel(before[2])
        ours.propagate = before[3]


@pytest.mark.parametrize(("level", "shown"), [("trace", 6), ("debug", 5), ("info", 4), ("error", 2), ("fatal", 1)])
def test_levels(level, shown, capsys):
    with unconfigured() as logger:
        log.attach(level, hide_time=True)
        for number in (log.TRACE, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
            logger.getChild("engine").log(number, "at %d", number)
        assert len(capsys.readouterr().err.splitlines()) == shown


def test_how_a_line_looks(capsys):
    with unconfigured() as logger:
        log.attach("trace", rank=3)
        logger.warning("one of %d", 2)
        assert re.fullmatch(
            r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} reigen warning rank 3: one of 2\n", capsys.readouterr().err
        )
        log.attach("trace", hide_time=True)
        logger.log(log.TRACE, "fine")
        assert capsys.readouterr().err == "reigen trace: fine\n"


def test_attaching_again_adds_no_handler(capsys):
    with unconfigured() as logger:
        log.attach("info", hide_time=True)
        log.attach("error", hide_time=True)
        logger.warning("no")
        logger.error("yes")
        assert capsys.readouterr().err == "reigen error: yes\n"
        assert len(logger.handlers) == 1


@pytest.mark.parametrize("where", ["reigen", None])
@pytest.mark.parametrize("late", [False, True])
def test_a_handler_of_the_program_hears_instead(where, late, capsys):
    with unconfigured() as logger:
        heard = io.StringIO()
        if late:
            log.attach("info")
        logging.getLogger(where).addHandler(logging.StreamHandler(heard))
        if not late:
            log.attach("info")
        logger.info("once")
        assert heard.getvalue() == "once\n"
        assert not capsys.readouterr().err


def test_a_level_that_the_program_has_set_stays(capsys):
    with unconfigured() as logger:
        logger.setLevel(logging.ERROR)
        log.attach("info")
        logger.warning("no")
        assert not capsys.readouterr().err


def test_the_root_logger_is_left_alone():
    with unconfigured():
        root = logging.getLogger()
        before = root.handlers[:], root.level
        log.attach("debug")
        assert (root.handlers, root.level) == before


def test_a_closed_stderr_is_no_error(monkeypatch):
    with unconfigured() as logger:
        closed = io.StringIO()
        closed.close()
        monkeypatch.setattr("sys.stderr", closed)
        log.attach("info")
        logger.warning("nobody hears")
        monkeypatch.setattr("sys.stderr", None)
        logger.warning("nobody hears")
