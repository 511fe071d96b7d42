"""What every error keeps to."""

from __future__ import annotations

from prefillcli.errors import PrefillError


def test_a_message_that_quotes_something_very_long_leaves_out_its_middle() -> None:
    message = str(PrefillError("t.jinja, line 1: unknown tag '" + "x" * 100_000 + "'\nwrite {{ prompt }}"))
    assert len(message) <= 3000
    assert message.startswith("t.jinja, line 1: unknown tag 'x")
    assert message.endswith("\nwrite {{ prompt }}")
    assert str(PrefillError(message)) == message, "it is not cut again when another process raises it anew"


def test_a_message_of_a_usual_length_stays_whole() -> None:
    message = "no such file: " + "/a/path" * 300
    assert str(PrefillError(message)) == message
