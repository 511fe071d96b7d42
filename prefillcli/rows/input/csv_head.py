"""The form of a CSV or TSV file by its beginning: what separates fields, whether they are quoted, and the names.

The separator is the one under which the header and the first rows agree. Where two are as good, the user is asked.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from prefillcli.errors import UsageError, counted
from prefillcli.rows.input.delimited import ONE_COLUMN, Delimited, line_numbers
from prefillcli.rows.records import BadLine

HEAD_BYTES = 1 << 18
_ROWS = 100
BOM = b"\xef\xbb\xbf"
_SEPARATORS = {"csv": ",;\t|", "tsv": "\t"}
_WORDS = {"tab": "\t", "none": ONE_COLUMN}
_SHOWN = {"\t": "tab", ONE_COLUMN: "none"}


@dataclass(frozen=True, slots=True)
class CsvRules:
    """What the user says of CSV files: `auto` is what each file's beginning shows."""

    separator: str = "auto"  # or tab, none (one column) or a character
    quoting: str = "auto"  # or quotes or none


@dataclass(slots=True)
class CsvHead:
    """What is known of a file before its rows are read."""

    form: Delimited
    names: list[str] = field(default_factory=list)  # of the columns; none in an empty file
    fields: list[str | None] = field(default_factory=list)  # of the header
    # Fields that a row may have: those beyond the names are empty, where all rows end with separators.
    width: int = 0
    skipped: int = 0  # bytes before the header: a byte order mark, and Excel's line `sep=;`
    skipped_lines: int = 0
    returns: bool = False  # whether lines end with carriage returns, as on old Macs


def head_of(path: str, kind: str, start: bytes, *, whole: bool, rules: CsvRules) -> CsvHead:
    """Return the head of a file that begins with the bytes `start`, which are `whole` if there are no others.

    Raises UsageError if there is no header, or if it is in doubt how the file is to be read.
    """
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start.partition(b"\n")[0]:
        raise not_utf8(path, "UTF-16")
    skipped = len(BOM) if start.startswith(BOM) else 0
    named = _SEP_LINE.match(start, skipped)
    separators = _SEPARATORS[kind]
    if named is not None:
        skipped, separators = named.end(), (named[1] or named[2]).decode()
    if rules.separator != "auto":
        separators = _WORDS.get(rules.separator, rules.separator)
    start = start[skipped:]
    plain = rules.quoting == "none" or (rules.quoting == "auto" and kind == "tsv")
    unquoted = start if plain else re.sub(rb'"[^"]*"', b"", start)
    line_end = _LINE_END.search(unquoted)
    returns = line_end is not None and line_end[0] == b"\r"
    if returns:
        start, unquoted = (each.replace(b"\r", b"\n") for each in (start, unquoted))
    header = unquoted.lstrip(b"\r\n").partition(b"\n")[0].decode(errors="replace")
    found = [each for each in separators if each in header] or [separators if len(separators) == 1 else ONE_COLUMN]
    looks = [_Look(path, start, whole, separator, _quoted(kind, rules, separator, start)) for separator in found]
    looks = [look for look in looks if look.header is not None]
    if not looks:
        return CsvHead(Delimited(found[0]), [], [], 0, skipped, 1 if named else 0, returns)
    asked = named is None and rules.separator == "auto"
    look = _best(path, looks) if asked else looks[0]
    look.check(asked=asked)
    if rules.quoting == "auto" and not look.form.quotes:
        _require_plain(path, start, whole, look)
    return CsvHead(look.form, look.names, look.header_fields, look.width, skipped, 1 if named else 0, returns)


_SEP_LINE = re.compile(rb'(?:"sep=([^\r\n"])"|sep=([^\r\n]))\r?\n', re.IGNORECASE)
_LINE_END = re.compile(rb"\r(?!\r*\n|\r*\Z)|\n")


def _quoted(kind: str, rules: CsvRules, separator: str, start: bytes) -> bool:
    # Between tabs a quote is a character like any other (text/tab-separated-values), unless the header's names have
    # some around them: no column is called that.
    if rules.quoting != "auto":
        return rules.quoting == "quotes"
    if separator != "\t" and kind != "tsv":
        return True
    names = start.lstrip(b"\r\n").partition(b"\n")[0].rstrip(b"\r").split(separator.encode())
    return all(len(name) > 1 and name.startswith(b'"') and name.endswith(b'"') for name in names)


class _Look:
    """The header and the first rows of a file, read with one separator."""

    def __init__(self, path: str, start: bytes, whole: bool, separator: str, quotes: bool) -> None:
        self.path = path
        self.form = Delimited(separator, quotes=quotes)
        records: list[tuple[int, int, bytes | BadLine]] = []
        for record in islice(self.form.records(io.BytesIO(start), len(start), {}, lambda: 0), _ROWS + 2):
            records.append((self.form.first_line, self.form.last_line, record))
        cut = not whole and len(records) < _ROWS + 2  # the last record may go on
        self.header = records[0][2] if records else None
        # The fields of each row, and its lines; no fields if it cannot be read.
        self.rows = [(self._fields(record), first, last) for first, last, record in records[1 : -1 if cut else None]]
        self.names = self._names(cut and len(records) == 1)
        self.width = len(self.header_fields) if self.header is not None else 0
        counts = {len(row) for row, _, _ in self.rows}
        if len(self.rows) > 1 and len(counts) == 1 and not any(any(row[len(self.names) :]) for row, _, _ in self.rows):
            self.width = max(self.width, *counts)  # all rows end with a separator
        self.agreeing = sum(self.agrees(row) for row, _, _ in self.rows)

    @property
    def separator(self) -> str:
        return self.form.delimiter

    @property
    def share(self) -> float:
        return self.agreeing / max(len(self.rows), 1)

    def agrees(self, row: Sequence[str | None]) -> bool:
        return len(self.names) <= len(row) <= self.width and not any(row[len(self.names) :])

    def _fields(self, record: bytes | BadLine) -> list[str | None]:
        try:
            return [] if isinstance(record, BadLine) else self.form.fields(record.decode(errors="replace"))
        except ValueError:
            return []

    def _names(self, cut: bool) -> list[str]:
        self.wrong = ""  # what is wrong with the header
        self.header_fields: list[str | None] = []
        if self.header is None:
            return []
        try:
            if cut:
                raise ValueError(f"it is longer than {HEAD_BYTES:,} bytes, or a quote in it is never closed")
            if isinstance(self.header, BadLine):
                raise ValueError(self.header.error.detail)
            self.header_fields = self.form.fields(self.header.decode())
        except UnicodeDecodeError:
            raise not_utf8(self.path, "WINDOWS-1252") from None
        except ValueError as error:
            self.wrong = f"its header cannot be read: {error}"
            return []
        names = [name or "" for name in self.header_fields]
        while len(names) > 1 and not names[-1]:
            names.pop()
        if len(names) > 1 and not names[0]:  # the index of a data frame, by the name that pandas gives it
            names[0] = next(name for name in map(_index_name, count()) if name not in names)
        return names

    def check(self, *, asked: bool) -> None:
        """Raise UsageError unless the header names each column once, and rows agree with it."""
        if self.wrong:
            raise UsageError(f"{self.path}: {self.wrong}\n{_A_HEADER}")
        if "" in self.names:
            raise UsageError(f"{self.path}: column {self.names.index('') + 1} has no name in the header\n{_A_HEADER}")
        for name, number in Counter(self.names).items():
            if number > 1:
                raise UsageError(f"{self.path}: two columns are named {name[:60]!r}\n{_A_HEADER}")
        if self._numbered():
            raise UsageError(
                f"{self.path}: its rows begin with row numbers, for which the header has no name\n"
                "leave them out, or name them: R does with write.csv, or with row.names=FALSE or col.names=NA"
            )
        if len(self.rows) > 1 and not self.agreeing:
            row, first, last = self.rows[0]
            found = f"has {counted(len(row), 'field')}" if row else "cannot be read"
            named = f"{counted(len(self.names), 'column')} (separator: {shown(self.separator)})"
            advice = "say what separates fields with --csv-separator (none: the file has one column)"
            raise UsageError(
                f"{self.path}: its first rows do not agree with its header: that has {named}, and "
                f"{line_numbers(first, last)} {found}\n{advice if asked else _A_HEADER}"
            )

    def _numbered(self) -> bool:
        # Whether each row has a number before the fields that the header names.
        if len(self.rows) < 3:
            return False
        texts = [row[0] or "" if row else "" for row, _, _ in self.rows]
        if self.separator != ONE_COLUMN:
            more = all(len(row) == len(self.names) + 1 for row, _, _ in self.rows)
            return more and "" not in self.names and _counts_up(texts)
        return any(
            all(each in text for text in texts) and _counts_up([text.partition(each)[0] for text in texts])
            for each in _SEPARATORS["csv"]
        )


def _index_name(number: int) -> str:
    return "Unnamed: 0" + (f".{number}" if number else "")


def _counts_up(texts: Sequence[str]) -> bool:
    return any(list(texts) == [str(first + at) for at in range(len(texts))] for first in (0, 1))


def _best(path: str, looks: Sequence[_Look]) -> _Look:
    # The look under which most rows agree with the header, and of these the one with most columns. One that has fewer
    # rows, because quotes hold the others, is no better. Raises UsageError if another one is as good.
    best = max(looks, key=lambda look: (look.share, len(look.names)))
    rivals = [look for look in looks if look is not best and _rivals(look, best)]
    if not rivals:
        return best
    columns = [f"{shown(look.separator)} ({counted(len(look.names), 'column')})" for look in (best, *rivals)]
    raise UsageError(
        f"{path}: it is in doubt what separates its fields: {' or '.join(columns)}\n"
        "say it with --csv-separator, or put quotes around names and texts with such characters"
    )


def _rivals(look: _Look, best: _Look) -> bool:
    if best.rows and best.share < 0.5:
        return look.agreeing > 0
    return look.agreeing > best.agreeing or (look.agreeing == best.agreeing and len(look.names) >= len(best.names))


def _require_plain(path: str, start: bytes, whole: bool, plain: _Look) -> None:
    # Raise UsageError if rows without quoting look as if they had it.
    quoted = _Look(path, start, whole, plain.separator, True)
    fits = plain.agreeing < len(plain.rows) and quoted.rows and quoted.agreeing == len(quoted.rows)
    lines = ""
    for (row, *_), (unquoted, first, last) in zip(plain.rows, quoted.rows, strict=False):
        if not lines and row != unquoted and (fits or any(map(_has_doubled_quotes, row))):
            lines = line_numbers(first, last)
    if lines:
        raise UsageError(
            f"{path}: {lines} looks like CSV with tabs, whose fields may be in quotes; TSV has no quotes\n"
            "say which it is: --csv-quoting quotes, as spreadsheets and pandas write it, or --csv-quoting none"
        )


def _has_doubled_quotes(text: str | None) -> bool:
    # Whether a field is in quotes, and each quote inside is doubled.
    inner = text[1:-1] if text is not None and len(text) > 3 and text[0] == text[-1] == '"' else ""
    return '""' in inner and '"' not in inner.replace('""', "")


_A_HEADER = "the first line must name each column once"


def shown(separator: str) -> str:
    """Return a separator as messages name it and the command line takes it."""
    return _SHOWN.get(separator, repr(separator))


def not_utf8(path: str, likely: str) -> UsageError:
    """Return the error of a file in another encoding."""
    return UsageError(
        f"{path}: not UTF-8\nsave it as UTF-8, or convert it, for example: iconv -f {likely} -t UTF-8 {path} > new.csv"
    )
