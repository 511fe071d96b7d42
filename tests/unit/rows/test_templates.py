"""The user's template: rendered like Jinja renders it, and unable to hang or reach out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.errors import UsageError
from prefillcli.prompts.templates import RowTemplate
from prefillcli.rows.records import RowError


def render(template: str, values: dict[str, Any]) -> str | RowError:
    """The text of one row."""
    (result,) = RowTemplate(template).render([values])
    return result


VALUES: dict[str, Any] = {
    "user": "Ann",
    "posts": [{"title": "a", "tags": ["x", "y"]}, {"title": "b", "tags": []}],
    "n": 3,
    "ratio": 0.5,
    "none": None,
}


@pytest.mark.parametrize(
    "text",
    [
        "Hello {{ user }}!",
        "{% for p in posts %}{{ loop.index }}/{{ loop.length }} {{ p.title }}: {{ p.tags|join(', ') }}\n{% endfor %}",
        "{% for p in posts if p.tags %}{{ p.title }}{% else %}none{% endfor %}",
        "{{ user ~ n ~ ' ' ~ ratio }}",
        "{{ 'ab' * n }} {{ n * 2 }} {{ 'a' + 'b' }} {{ [1] + [2] }} {{ 2 ** 10 }} {{ 7 % 4 }}",
        "{{ '%.2f|%5d' % (ratio, n) }} {{ '%s' % user }} {{ '%.3f'|format(ratio) }} {{ '%(a)s'|format(a=n) }}",
        "{{ user.upper().replace('N', 'M') }} {{ user|replace('n', '') }} {{ ', '.join(['a', 'b']) }}",
        "{{ posts|map(attribute='title')|join('+') }} {{ posts|join(';', attribute='title') }}",
        "{{ user|center(9) }}|{{ 'a\nb'|indent(2) }}|{{ user|truncate(3) }}|{{ posts|tojson }}",
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}{{ m(user) }}",
        "{% set ns = namespace(t='') %}{% for i in range(3) %}{% set ns.t = ns.t ~ i %}{% endfor %}{{ ns.t }}",
        "{% for p in posts recursive %}{{ p.title }}{{ loop(p.tags) if p.tags is string else '' }}{% endfor %}",
        "{% set block %}x{{ user }}{% endset %}{{ block }} {{ none or 'nothing' }} {{ none is none }}",
        "{% for a, b in {'k': 1}.items() %}{{ a }}={{ b }}{% endfor %} {{ range(3)|list }}",
        "{{ [1, 2, 3]|batch(2)|list }} {{ user[0] }} {{ posts[0]['title'] }} {{ n if n > 2 else 0 }}\n",
    ],
)
def test_it_renders_what_jinja_renders(text: str) -> None:
    jinja = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)  # noqa: S701
    assert render(text, VALUES) == jinja.from_string(text).render(VALUES)


@given(st.lists(st.tuples(st.text(), st.integers(), st.lists(st.text(), max_size=4))))
def test_values_come_through_unchanged(rows: list[tuple[str, int, list[str]]]) -> None:
    expected = [f"{a}|{b}|{''.join(f'[{item}]' for item in c)}" for a, b, c in rows]
    assert LISTED.render([dict(zip("abc", row, strict=True)) for row in rows]) == expected


LISTED = RowTemplate("{{ a }}|{{ b }}|{% for x in c %}[{{ x }}]{% endfor %}")


def test_data_that_looks_like_a_template_is_not_rendered() -> None:
    assert render("{{ a }}", {"a": "{{ 7 * 7 }}{% raw %}"}) == "{{ 7 * 7 }}{% raw %}"


def test_needed_columns_are_the_undeclared_variables() -> None:
    text = "{% set x = 1 %}{{ x }}{{ user }}{% for p in posts %}{{ p.title }}{% endfor %}{{ range(2)|length }}"
    assert RowTemplate(text).columns == ("posts", "user")


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n", " \n", "{{ '\\n' }}\n"])
def test_a_file_is_read_as_jinja_reads_one_without_the_break_that_ends_its_last_line(tmp_path: Path, end: str) -> None:
    (tmp_path / "prompt.j2").write_text(f"Hi {{{{ user }}}}{end}", encoding="utf-8", newline="")
    jinja = jinja2.Environment(loader=jinja2.FileSystemLoader(tmp_path))  # noqa: S701
    assert render(str(tmp_path / "prompt.j2"), VALUES) == jinja.get_template("prompt.j2").render(VALUES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("line one\n{{ user", "line 2"),
        ("{{ user|nosuch }}", "nosuch"),
        ("{% include 'other' %}", "other templates"),
        ("{% extends user %}", "other templates"),
        ("missing.j2", "missing.j2"),
        ("x" * 5000, "nor a readable file"),
    ],
)
def test_a_wrong_template_is_a_usage_error(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        RowTemplate(text)
    assert str(caught.value).count("\n") < 3


def test_the_line_of_a_syntax_error_in_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompt.j2").write_text("ok\nok\n{% for %}", encoding="utf-8")
    with pytest.raises(UsageError, match=r"prompt\.j2, line 3"):
        RowTemplate(str(tmp_path / "prompt.j2"))


@pytest.mark.parametrize(
    "text",
    [
        "{{ nosuch }}",
        "{{ user.nosuch }}",
        "{{ none }}",
        "{{ 'a' ~ none }}",
        "{{ 1 / 0 }}",
        "{{ user + 1 }}",
        "{{ user.__class__.__mro__ }}",
        "{{ posts.append(1) }}",
        "{{ ''['__class__'] }}",
        "{{ user|attr('__class__') }}",
        "{{ '{0.__class__}'.format(user) }}",
    ],
)
def test_what_cannot_be_rendered_is_an_error_of_the_row(text: str) -> None:
    result = render(text, VALUES)
    assert isinstance(result, RowError)
    assert result.code == "template_error"
    assert result.detail


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in big %}{% for j in big %}{% for k in big %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ 'a' * 10**10 }}",
        "{{ 2 ** (10**10) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% macro m() %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endmacro %}{{ m()|length }}",
        "{{ 'a'.center(10**10) }}",
        "{{ 'a\nb'|indent(10**10) }}",
        "{{ '%10000000000d' % 3 }}",
        "{{ ('a' * 10**7).replace('a', 'b' * 10**6) }}",
        "{{ range(99999)|join('a' * 10**6) }}",
        "{{ [1]|batch(10**10, 'x')|list }}",
        "{{ [1]|tojson(indent=10**10) }}",
        "{{ 'a b'|wordwrap(1, wrapstring='x' * 10**7) }}",
        "{{ 7 .to_bytes(10**10, 'big') }}",
        "{{ 5|round(1000000000, 'ceil') }}",
        "{{ 'a'.encode().center(3000000000) }}",
    ],
)
def test_abuse_is_an_error_of_the_row_and_ends_soon(text: str) -> None:
    started = time.perf_counter()
    result = render(text, {"big": list(range(2000))})
    assert isinstance(result, RowError)
    assert time.perf_counter() - started < 30


def test_the_work_of_one_row_does_not_count_for_the_next() -> None:
    template = RowTemplate("{% for i in range(90000) %}{% endfor %}{{ 'a' * 60000000 if n else 'ok' }}")
    assert template.render([{"n": 0}] * 5) == ["ok"] * 5
    assert [len(str(text)) for text in template.render([{"n": 1}] * 2)] == [60_000_000] * 2


@pytest.mark.parametrize("name", ["items", "values", "get"])
def test_a_field_that_is_named_like_a_method_is_the_field(name: str) -> None:
    text = f"{{{{ order.{name} }}}} {{{{ order['{name}'] }}}} {{{{ [order]|map(attribute='{name}')|join }}}}"
    assert render(text, {"order": {name: "a book"}}) == "a book a book a book"
    null = f"{{{{ order.{name} or 'none' }}}}{{% if order.{name} %}}yes{{% endif %}}"
    assert render(null, {"order": {"a": 1}}) == "none", "absent and null are the same"


def test_methods_of_an_object_are_called_whatever_its_fields_are_named() -> None:
    order = {"items": "a book", "b": 1}
    assert (
        render("{% for k, v in order.items() %}{{ k }}:{{ v }} {% endfor %}", {"order": order}) == "items:a book b:1 "
    )
    assert render(
        "{{ order.get('c', 2) }} {{ {'k': 3}.get('k') }} {{ user.upper() }}", {"order": order, "user": "a"}
    ) == ("2 3 A")


def test_a_method_that_is_printed_is_an_error_of_the_row() -> None:
    result = render("{{ user.upper }}", {"user": "Ann"})
    assert isinstance(result, RowError)
    assert "upper is a method: write upper()" in result.detail
