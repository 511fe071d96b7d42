"""Templates that run away: the rows that make them do so are errors, all others are rendered, and nothing hangs."""

from __future__ import annotations

import datetime
import decimal
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from prefillcli.errors import ResourceError, UsageError
from prefillcli.prompts import templates
from prefillcli.prompts.templates import ChatTemplate, RendererClosed, RenderLimits, RowTemplate
from prefillcli.rows.records import RowError

TIGHT = RenderLimits(cpu_seconds=1, memory_bytes=256 << 20)
CPU, MEMORY = "more than 1 s of processor time", "more than 256 MiB of memory"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("{% for i in range(400) %}{% if range(90000)|sort %}{% endif %}{% endfor %}", CPU),
        ("{% set ns = namespace(x=big) %}{% for i in range(40) %}{% set ns.x = ns.x|tojson %}{% endfor %}", MEMORY),
        ("{% set ns = namespace(x=[1]) %}{% for i in range(900) %}{% set ns.x = [ns.x] %}{% endfor %}"
         "{{ ns.x|tojson(indent=10000) }}", MEMORY),
    ],
)  # fmt: skip
def test_a_row_that_breaks_a_limit_is_an_error_and_all_others_are_rendered(expression: str, why: str) -> None:
    template = RowTemplate("{% if bad %}" + expression + "{% endif %}{{ n }}", TIGHT)
    bad = {2, 3}
    rows = [{"n": n, "bad": n in bad, "big": '"\\' * 500} for n in range(6)]
    results = template.render(rows)
    assert [n for n, result in enumerate(results) if isinstance(result, RowError)] == sorted(bad)
    assert [result for result in results if isinstance(result, str)] == [str(n) for n in range(6) if n not in bad]
    for n in bad:
        assert results[n] == RowError("template_error", f"rendering took {why}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", CPU),
        ("{% if messages[0].content.encode().center(3000000000) %}{% endif %}", MEMORY),
        ("{% if messages[0].content * 3000000000 %}{% endif %}", MEMORY),
        ("{% if (messages|length + 9) ** (10 ** 8) %}{% endif %}", CPU),
    ],
)
def test_the_models_own_chat_template_cannot_run_away(
    chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, body: str, why: str
) -> None:
    text = "{% if messages[0].content == 'bad' %}" + body + "{% endif %}<{{ messages[0].content }}>"
    monkeypatch.setattr(chat_tokenizer, "chat_template", text)
    chats = [[{"role": "user", "content": content}] for content in ("a", "bad", "b")]
    assert ChatTemplate(chat_tokenizer, TIGHT).render(chats) == [
        "<a>",
        RowError("chat_error", f"rendering took {why}"),
        "<b>",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "{% if 1 %}" * 300 + "{% endif %}" * 300,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for i in x %}" * 30 + "{% endfor %}" * 30,
    ],
)
def test_a_template_that_is_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--template: nested too deeply"):
        RowTemplate(text)


@pytest.mark.parametrize("number", ["1e999", "-1e400", "9" * 5000])
def test_a_template_with_a_number_that_is_too_large_is_refused(number: str) -> None:
    with pytest.raises(UsageError, match="--template, line 2: a number is too large"):
        RowTemplate(f"{{{{ x }}}}\n{{{{ {number} }}}}")


def test_compiling_is_limited_too(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_tokenizer, "chat_template", "{{ 10 ** (10 ** 8) }}")  # Jinja computes constants
    with pytest.raises(UsageError, match=f"chat template: compiling it took {CPU}"):
        ChatTemplate(chat_tokenizer, TIGHT)


def test_a_text_that_is_too_long_is_an_error() -> None:
    template = RowTemplate("{{ 'é' * n }}", RenderLimits(text_bytes=1000))
    short, long = template.render([{"n": 500}, {"n": 501}])
    assert short == "é" * 500
    assert isinstance(long, RowError)
    assert "1,002 bytes; the limit is 1,000" in long.detail


def test_memory_is_watched_where_the_kernel_does_not_limit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "KERNEL_LIMITS_MEMORY", False)
    monkeypatch.setattr(templates, "_TICK", 0.01)
    fill = "{% set ns.x = [ns.x, range(99999)|list] %}"
    loop = "{% set ns = namespace(x=[]) %}{% for i in range(999) %}" + fill + "{% endfor %}"
    template = RowTemplate("{% if n %}" + loop + "{% endif %}", RenderLimits(memory_bytes=256 << 20))
    assert template.render([{"n": 1}, {"n": 0}]) == [RowError("template_error", f"rendering took {MEMORY}"), ""]


def test_a_row_that_only_waits_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    template = RowTemplate("{{ n }}", RenderLimits(wall_seconds=0.2))
    pid = worker_of(template)
    os.kill(pid, signal.SIGSTOP)
    late = threading.Timer(30, os.kill, (pid, signal.SIGCONT))
    late.start()
    assert template.render([{"n": 1}]) == ["1"], "stopped from outside: tried again in another process"
    late.cancel()
    assert worker_of(template) != pid, "it was waited for"


def test_the_processor_time_of_one_row_does_not_count_for_the_next() -> None:
    template = RowTemplate("{% for i in range(4) if range(90000)|sort %}{% endfor %}{{ n }}", TIGHT)
    process = worker_of(template)
    assert template.render([{"n": n} for n in range(12)]) == [str(n) for n in range(12)]
    assert worker_of(template) == process


def test_a_process_that_somebody_kills_costs_no_row() -> None:
    template = RowTemplate("{{ n }}")
    os.kill(worker_of(template), signal.SIGKILL)
    assert template.render([{"n": n} for n in range(5)]) == list("01234")


def test_values_keep_their_types_and_texts_their_characters() -> None:
    values = {
        "when": datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC),
        "price": decimal.Decimal("1.10"),
        "raw": b"\x00\xff",
        "pairs": [("a", 1)],
        "nested": {"x": [{"y": None}], "z": float("inf")},
        "ids": np.array([1, 2], np.int64),
        "key": uuid.UUID(int=7),
        "half": "\ud800é\0\n",
    }
    text = (
        "{{ when.year }} {{ when }} {{ price * 2 }} {{ raw[1] }} {{ raw }} {{ pairs }} {{ nested }} "
        "{{ ids }} {{ ids[1] + 1 }} {{ key }} {{ half }}"
    )
    shown = values | {"ids": [1, 2]}
    expected = jinja2.Environment().from_string(text).render(shown)  # noqa: S701
    assert RowTemplate(text).render([values]) == [expected]


def test_a_value_that_is_nested_too_deeply_is_an_error_of_its_row() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    result, other = RowTemplate("{{ a|length }}").render([{"a": deep}, {"a": []}])
    assert isinstance(result, RowError)
    assert other == "0"


def test_rendering_stops_when_another_thread_closes_it() -> None:
    template = RowTemplate("{% for i in range(900) %}{% if range(99999)|sort %}{% endif %}{% endfor %}")
    raised: list[BaseException] = []

    def render() -> None:
        try:
            template.render([{}])
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    time.sleep(0.05)
    template.close()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(error) for error in raised] == [RendererClosed]


def test_the_process_dies_with_its_parent_even_in_the_middle_of_a_row(tmp_path: Path) -> None:
    program = (
        "import os, threading\n"
        "from prefillcli.prompts.templates import RowTemplate\n"
        "t = RowTemplate('{% for i in range(9000) %}{% if range(90000)|sort %}{% endif %}{% endfor %}')\n"
        "print(t._worker._process.pid, flush=True)\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()\n"
        "t.render([{}])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    until = time.monotonic() + 5  # an orphan would run for ten seconds of processor time
    while Path(f"/proc/{ended.stdout.strip()}").exists() and not is_zombie(int(ended.stdout)):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_process_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ResourceError, match="cannot start the process that renders --template"):
        RowTemplate("{{ a }}")


def test_code_and_secrets_around_the_job_do_not_get_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")
    template = RowTemplate("{{ a }}")
    assert template.render([{"a": 1}]) == ["1"]
    environment = Path(f"/proc/{worker_of(template)}/environ")
    if environment.exists():
        assert b"topsecret" not in environment.read_bytes()


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": 'Hi <b> & "é"'}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "1\n2"}],
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5}}}]},
        {"role": "tool", "content": "ö", "name": "f"},
    ],
]
CHAT_TEMPLATES = [
    "{%- for m in messages %}\n    {{- bos_token + '<' + m.role + '>' }}\n    {%- if m.content is string %}\n"
    "{{ m.content | trim }}\n    {%- else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}\n"
    "{%- endfor %}\n{% if add_generation_prompt %}<assistant>{% endif %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}{{ m|tojson(indent=2) }}"
    "{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}"
    "{% else %}{% continue %}{% endif %}{% endfor %}{{ nosuch }}{{ tools is none }}{{ documents }}{{ eos_token }}",
    "{{ strftime_now('%d %b %Y') }}{% set ns = namespace(n=0) %}"
    "{% for m in messages|selectattr('role', 'equalto', 'user') %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ messages[-1].content|length }}{{ messages[0]['content'][:2] }}",
    "{% macro show(m) %}[{{ m.role|upper }}|{{ '%s' % m.role }}]{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("text", CHAT_TEMPLATES)
def test_chats_are_rendered_as_transformers_renders_them(
    chat_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(chat_tokenizer, "chat_template", text)
    day = datetime.datetime(2024, 7, 26)
    expected = chat_tokenizer.apply_chat_template(
        CHATS, tokenize=False, add_generation_prompt=True, strftime_now=day.strftime
    )
    assert ChatTemplate(chat_tokenizer).render(CHATS) == expected


def worker_of(template: RowTemplate) -> int:
    assert template._worker is not None
    return template._worker._process.pid


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each process is started by itself")
def test_processes_of_templates_are_forked_and_share_nothing() -> None:
    first, second = RowTemplate("{{ a }}"), RowTemplate("{{ a + 1 }}")
    parents = {int(Path(f"/proc/{worker_of(each)}/stat").read_text().split()[3]) for each in (first, second)}
    assert len(parents) == 1, "one process has imported Jinja for both"
    assert os.getpid() not in parents
    ours = os.listdir(f"/proc/{worker_of(second)}/fd")
    assert sorted(ours) == ["0", "1", "2"], "pipes of its own, and no others"
    os.kill(worker_of(first), signal.SIGKILL)
    assert (first.render([{"a": 1}]), second.render([{"a": 1}])) == (["1"], ["2"])
    ended = [worker_of(first), worker_of(second)]
    first.close()
    second.close()
    assert not any(Path(f"/proc/{each}").exists() for each in ended), "none is left, not even as a zombie"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each process is started by itself")
def test_where_the_process_that_forks_is_gone_another_one_does() -> None:
    template = RowTemplate("{{ a }}")
    parent = int(Path(f"/proc/{worker_of(template)}/stat").read_text().split()[3])
    os.kill(parent, signal.SIGKILL)
    assert template.render([{"a": 1}, {"a": 2}]) == ["1", "2"]
    others = [RowTemplate("{{ b }}") for _ in range(2)]
    assert [each.render([{"b": 3}]) for each in others] == [["3"], ["3"]]
    assert len({int(Path(f"/proc/{worker_of(each)}/stat").read_text().split()[3]) for each in others} - {parent}) == 1
