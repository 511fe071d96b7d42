"""What goes to stderr, as lines for people and as JSON objects."""

from __future__ import annotations

import json
import sys
import threading

import pytest

from prefillcli.runtime import log

SECRET = "s3://key:hidden@bucket/path"


def test_people_read_lines_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    log.info("12 rows")
    log.warning(f"{SECRET} is slow")
    log.error("no space\nmake room")
    log.event("ended", "only for logs")
    found = capsys.readouterr().err
    assert found == (
        "prefill: 12 rows\nprefill: warning: s3://***@bucket/path is slow\nprefill: no space\nmake room\n"
    )


def test_a_log_is_one_object_a_line_with_what_libraries_print(capsys: pytest.CaptureFixture[str]) -> None:
    with log.log_of("r1", json_lines=True, worker=2):
        log.warning("two\nlines", event="gates", path=SECRET)
        print("from a library", end=" ", file=sys.stderr)
        print("in pieces\nhalf", end="", file=sys.stderr)
    log.info("text again")
    *lines, last = capsys.readouterr().err.splitlines()
    found = [json.loads(line) for line in lines]
    assert [each["level"] for each in found[:2]] == ["warning", "info"]
    assert (found[0]["message"], found[0]["path"]) == ("two\nlines", "s3://***@bucket/path")
    assert [each["message"] for each in found[1:]] == ["from a library in pieces", "half"]
    assert all((each["run_id"], each["worker"]) == ("r1", 2) for each in found)
    assert last == "prefill: text again"


def test_lines_of_many_threads_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    with log.log_of("r1", json_lines=True):
        threads = [
            threading.Thread(target=lambda name=name: [log.info(f"{name} {at} " + "x" * 300) for at in range(50)])
            for name in "abcd"
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    found = [json.loads(line)["message"].split()[0] for line in capsys.readouterr().err.splitlines()]
    assert {name: found.count(name) for name in "abcd"} == dict.fromkeys("abcd", 50)
