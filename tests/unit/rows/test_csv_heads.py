"""The form of CSV files by their beginnings: heads as people have them, with what separates their fields."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from prefillcli.errors import UsageError
from prefillcli.rows.input.csv_head import CsvRules, head_of
from prefillcli.rows.input.delimited import ONE_COLUMN
from prefillcli.rows.input.source import Source

# What separates the fields, the names of the columns, and the file.
HEADS: dict[str, tuple[str, list[str], str]] = {
    "plain": (",", ["id", "text"], "id,text\n1,hello\n2,bye\n"),
    "commas in quotes": (",", ["id", "text"], 'id,text\n1,"well, hello, you"\n2,"a, b"\n'),
    "semicolons in texts": (",", ["id", "text"], "id,text\n1,hello; bye\n2,a; b; c\n"),
    "a header of two kinds, commas right": (",", ["id", "text", "old;new"], "id,text,old;new\n1,a;b,x\n2,c,y;z\n"),
    "a header of two kinds, semicolons right": (";", ["id", "text", "a,b"], "id;text;a,b\n1;hello;x\n2;well, yes;y\n"),
    "values with commas in each": (";", ["id", "text", "a,b"], "id;text;a,b\n1;hello;x,y\n2;bye;z,u\n"),
    "a list in the second of two columns": (";", ["text", "a,b"], "text;a,b\nhello, you, all;1\nbye;0\nx, y, z;1\n"),
    "German Excel": (";", ["Nr", "Text", "Betrag"], "Nr;Text;Betrag\r\n1;Hallo, Welt;3,50\r\n2;Na ja;1.234,00\r\n"),
    "German Excel, names with commas": (
        ";",
        ["Nr", "Name, Vorname", "Betrag"],
        "Nr;Name, Vorname;Betrag\r\n1;Ex, Max;3,50\r\n2;Muster;4\r\n",
    ),
    "sep= of semicolons": (";", ["id", "text,more"], "sep=;\r\nid;text,more\r\n1;a,b\r\n"),
    "sep= of commas, in quotes": (",", ["id", "text"], '"sep=,"\nid,text\n1,a\n'),
    "sep= of bars after a byte order mark": ("|", ["id", "text"], "\ufeffSEP=|\nid|text\n1|a;b,c\n"),
    "bars": ("|", ["id", "text", "label"], "id|text|label\n1|hello, you; there|x\n2|bye|y\n"),
    "tabs in .csv": ("\t", ["id", "text"], "id\ttext\n1\thello, you\n2\tbye; then\n"),
    "tabs and commas in the header": ("\t", ["id", "text, as written", "b"], "id\ttext, as written\tb\n1\ta, b\tc\n"),
    "one column": (ONE_COLUMN, ["text"], "text\nhello\nbye\n"),
    "one column with commas": (ONE_COLUMN, ["text"], "text\nwell, hello, you\nbye\nyes, no\n"),
    "one column with a comma in each row": (ONE_COLUMN, ["text"], "text\nwell, hello\nyes, no\nand, so\n"),
    "one column in quotes": (ONE_COLUMN, ["text"], 'text\n"well, hello"\n"a ""b"" c"\nplain\n'),
    "one column with line breaks": (ONE_COLUMN, ["text"], 'text\n"well,\nhello"\nbye\n'),
    "all in quotes": (";", ["id", "text;more", "c"], '"id";"text;more";"c"\n"1";"a;b";"x"\n"2";"c";"y"\n'),
    "quoted names with commas": (";", ["a,b", "c,d"], '"a,b";"c,d"\n"1,2";"x"\n"3";"y,z"\n'),
    "line breaks in fields": (",", ["id", "text", "n"], 'id,text,n\n1,"a\nb; c\n\nd",2\n2,"x, y",3\n'),
    "line breaks in the header": (",", ["id", "text\n(raw)"], 'id,"text\n(raw)"\n1,a\n2,b\n'),
    "decimal commas and one comma name": (";", ["x,y", "t", "v"], "x,y;t;v\n1,5;a;2,5\n2;b;3,25\n"),
    "JSON in fields": (",", ["id", "tags"], 'id,tags\n1,"[""a"",""b""]"\n2,"{""x"": 1; 2}"\n'),
    "some bad rows": (",", ["id", "text", "a;b"], "id,text,a;b\n1,x,y\n2,z\n3,a;b,c\n4,d,e\n5,f,g\n"),
    "an index of pandas": (",", ["Unnamed: 0", "id", "text"], ",id,text\n0,7,a\n1,8,b\n"),
    "two indexes of pandas": (",", ["Unnamed: 0.1", "Unnamed: 0", "id"], ",Unnamed: 0,id\n0,0,a\n1,1,b\n"),
    "row names of R": (",", ["Unnamed: 0", "id", "text"], '"","id","text"\n"1",7,"a"\n"2",8,"b"\n'),
    "commas at the ends": (",", ["id", "text"], "id,text,,\n1,a,,\n2,b,,\n"),
    "commas at the ends of rows": (",", ["id", "text"], "id,text\n1,a,\n2,b,\n"),
    "carriage returns": (",", ["id", "text"], 'id,text\r1,a\r2,"b\nc"\r'),
    "two carriage returns": (",", ["id", "text"], "id,text\r\r\n1,a\r\r\n2,b\r\r\n"),
    "a header alone": (";", ["id", "text", "a,b"], "id;text;a,b\n"),
    "a bar in a text's name": (",", ["id", "yes|no"], "id,yes|no\n1,a\n2,b|c\n3,d\n"),
}  # fmt: skip


def head(text: str, kind: str = "csv", **rules: str) -> Any:
    return head_of("in.csv", kind, text.encode(), whole=True, rules=CsvRules(**rules))


@pytest.mark.parametrize("name", HEADS)
def test_the_separator_is_the_one_under_which_header_and_rows_agree(name: str) -> None:
    separator, names, text = HEADS[name]
    found = head(text)
    assert (found.form.delimiter, found.names) == (separator, names)


def test_a_long_head_is_judged_by_its_whole_rows_alone() -> None:
    text = "id;text;a,b\n" + "".join(f"{at};well, hello {at};x\n" for at in range(90)) + "90;cut, h"
    found = head_of("in.csv", "csv", text.encode(), whole=False, rules=CsvRules())
    assert found.form.delimiter == ";"


def test_fewer_rows_that_agree_because_quotes_hold_the_others_do_not_decide() -> None:
    # Split at semicolons, a quote in a text swallows all rows but two, which then agree.
    rows = ['1,"a;b"', '2,x;"y', *(f"{at},b;c" for at in range(3, 9)), '9,z"']
    with pytest.raises(UsageError, match="in doubt what separates"):
        head("\n".join(["id,te;xt", *rows, "10;u", ""]))
    assert head("\n".join(["id,te;xt", *rows, "10;u", ""]), separator=",").names == ["id", "te;xt"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b;c\n1,2;3\n", r"',' \(2 columns\) or ';' \(2 columns\)\nsay it with --csv-separator"),
        ("a,b;c\n", r"',' \(2 columns\) or ';' \(2 columns\)"),
        (
            "text, or message\nhello\nbye\n",
            r"2 columns \(separator: ','\), and line 2 has 1 field\n.*none: the file has",
        ),
        ("Report, 2026\nid,text,n\n1,a,b\n", "do not agree with its header"),
        ("id,text\n1,7,a\n2,8,b\n3,9,c\n", r"row numbers, for which the header has no name\n.*row\.names=FALSE"),
        ("text\n1,a\n2,b\n3,c, d\n", "row numbers, for which the header has no name"),
        ("id,,text\n1,2,3\n", "column 2 has no name in the header"),
    ],
)
def test_in_doubt_an_error_names_what_it_is_and_the_option(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        head(text)
    assert str(caught.value).startswith("in.csv: ")
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "rules", "names"),
    [
        ("a,b;c\n1,2;3\n", {"separator": ";"}, ["a,b", "c"]),
        ("text, or message\nhello\nbye\n", {"separator": "none"}, ["text, or message"]),
        ("a:b,c\n1:2\n", {"separator": ":"}, ["a", "b,c"]),
        ("sep=;\na,b\tc\n1,2\t3\n", {"separator": "tab"}, ["a,b", "c"]),
        ('id,"text"\n1,"a\n', {"quoting": "none"}, ["id", '"text"']),
    ],
)
def test_the_options_decide(text: str, rules: dict[str, str], names: list[str]) -> None:
    assert head(text, **rules).names == names


# Quotes in files with tabs.


def read(path: Path, text: str, **rules: str) -> tuple[list[tuple[Any, ...]], list[str]]:
    path.write_text(text, newline="")
    source = Source.open([str(path)], **rules)  # type: ignore[arg-type]
    (batch,) = source.select(columns=source.available, carried=()).batches()
    rows = list(zip(*batch.columns.values(), strict=True))
    return [row for at, row in enumerate(rows) if at not in batch.errors], [e.detail for e in batch.errors.values()]


@pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
def test_between_tabs_a_quote_is_a_character_like_any_other(tmp_path: Path, name: str) -> None:
    rows = [("1", '"To be'), ("2", "or not"), ("3", 'to be"'), ("4", '"the" question'), ("5", '"so"')]
    text = "id\ttext\n" + "".join("\t".join(row) + "\n" for row in rows)
    assert list(csv.reader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))[1:] == [[*row] for row in rows]
    assert read(tmp_path / name, text) == (rows, [])
    swallowed, _ = read(tmp_path / name, text, csv_quoting="quotes")
    assert len(swallowed) < len(rows)


def test_names_in_quotes_show_that_fields_between_tabs_are(tmp_path: Path) -> None:
    text = '"id"\t"text"\n"1"\t"a\tb"\n"2"\t"c\nd"\n'
    assert read(tmp_path / "a.tsv", text) == ([("1", "a\tb"), ("2", "c\nd")], [])


@pytest.mark.parametrize(
    ("row", "lines"), [('1\t"a\nb"', "lines 2 to 3"), ('1\t"say ""hi"""', "line 2"), ('1\tx\n2\t"c\td"', "line 3")]
)
def test_fields_in_quotes_between_tabs_are_read_only_as_the_user_says(tmp_path: Path, row: str, lines: str) -> None:
    text = f"id\ttext\n{row}\n9\tz\n"
    with pytest.raises(UsageError, match=rf"{lines} looks like.*\n.*--csv-quoting quotes,.* --csv-quoting none"):
        read(tmp_path / "a.tsv", text)
    expected = list(csv.reader(io.StringIO(text), delimiter="\t"))[1:]
    assert read(tmp_path / "a.tsv", text, csv_quoting="quotes") == ([tuple(row) for row in expected], [])
    assert read(tmp_path / "a.tsv", text, csv_quoting="none")[0][-1] == ("9", "z")


def test_an_error_row_says_its_lines_and_of_several_files_its_file(tmp_path: Path) -> None:
    text = 'sep=,\n\nid,text\n1,"a\nb"\n\n2,"c\nd",\n3,x,y\n4,z\n5,"\n6,u\n'
    rows, errors = read(tmp_path / "b.csv", text)
    assert rows == [("1", "a\nb"), ("4", "z"), ("6", "u")]
    assert errors == [
        "lines 7 to 8: 3 fields, and 2 in the header",
        "line 9: 3 fields, and 2 in the header",
        "line 11: its last quote is never closed",
    ]
    (tmp_path / "a.csv").write_text("id,text\n0,first\n")
    (batch,) = Source.open([str(tmp_path)], columns=["text"]).batches()
    assert batch.errors[3].detail == f"{tmp_path}/b.csv, line 9: 3 fields, and 2 in the header"


def test_fields_beyond_the_names_are_empty_or_an_error(tmp_path: Path) -> None:
    rows, errors = read(tmp_path / "a.csv", "id,text,,\n1,a,,\n2,b\n3,c,,d\n4,e,\n5\n")
    assert rows == [("1", "a"), ("2", "b"), ("4", "e")]
    assert [error.partition(":")[0] for error in errors] == ["line 4", "line 6"]
    rows, errors = read(tmp_path / "a.csv", "id,text\n1,a\n2,b,\n")
    assert (rows, errors) == ([("1", "a")], ["line 3: 3 fields, and 2 in the header"])


def test_options_of_csv_are_refused_for_other_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--csv-separator ;: .*a\.jsonl is not a CSV file\nleave it out"):
        read(tmp_path / "a.jsonl", '{"id": 1}\n', csv_separator=";")
