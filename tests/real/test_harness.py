"""The model `prefill` of lm-evaluation-harness against the harness's own `hf` in float64."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefillcli.errors import UsageError
from tests.jobs.models import save_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the harness's own

WORDS = ["fox", "dog", "quick", "brown", "yes", "no", "sky", "blue", "paresseux", "où"]
CHOICES = """output_type: multiple_choice
doc_to_text: "Question: {{q}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: gold
num_fewshot: 3
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
YES_OR_NO = """output_type: multiple_choice
doc_to_text: "{{q}}?"
doc_to_choice: ["no", "yes"]
doc_to_target: gold
metric_list: [{metric: acc}]
"""
PERPLEXITY = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
TEXT = """output_type: generate_until
doc_to_text: "Once upon a time there was a {{q}}"
doc_to_target: a
generation_kwargs: {until: [".", "\\n\\n"], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files over JSON files of their own."""
    folder, drawn = tmp_path_factory.mktemp("tasks"), random.Random(0)

    def words(count: int) -> str:
        return " ".join(drawn.choice(WORDS) for _ in range(count))

    def write(name: str, task: str, rows: list[dict[str, Any]]) -> None:
        data = folder / f"{name}.json"
        data.write_text("\n".join(map(json.dumps, rows)))
        files = f"dataset_path: json\ndataset_kwargs: {{data_files: {{train: {data}, test: {data}}}}}\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{files}test_split: test\nfewshot_split: train\n{task}")

    lengths = (1, 2, 7)
    write("own_choices", CHOICES, [
        {"q": words(8), "choices": [words(drawn.choice(lengths)) for _ in range(4)], "gold": drawn.randrange(4)}
        for _ in range(8)
    ])  # fmt: skip
    write("own_yes_or_no", YES_OR_NO, [{"q": words(8), "gold": drawn.randrange(2)} for _ in range(8)])
    write("own_perplexity", PERPLEXITY, [{"text": words(count)} for count in (5, 40, 300, 2)])
    write("own_text", TEXT, [{"q": words(1), "a": words(3)} for _ in range(6)])
    return folder


Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def evaluate(tasks: Path) -> Evaluate:
    import lm_eval
    from lm_eval.tasks import TaskManager

    import prefillcli.lm_eval  # noqa: F401 - so that the harness knows the model

    names = [path.stem for path in sorted(tasks.glob("*.yaml"))]

    def run(model: str, args: str) -> dict[str, Any]:
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        found = lm_eval.simple_evaluate(
            model,
            model_args=args,
            tasks=names,
            task_manager=manager,
            device="cpu",
            bootstrap_iters=0,
            log_samples=True,
        )
        return dict(found or {})

    return run


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("random") / "model", chat_template="{{ messages[0]['content'] }}")


@pytest.mark.parametrize("which", ["random", "real"])
def test_every_request_is_answered_as_by_hf(
    which: str, evaluate: Evaluate, random_model: Path, request: pytest.FixtureRequest
) -> None:
    model = random_model if which == "random" else request.getfixturevalue("saved")
    ours = evaluate("prefill", f"pretrained={model},dtype=float32")
    theirs = evaluate("hf", f"pretrained={model},dtype=float64,attn_implementation=eager")
    greedy = set()
    for name, samples in theirs["samples"].items():
        for own, other in zip(ours["samples"][name], samples, strict=True):
            assert own["doc"] == other["doc"]
            for answer, wanted in zip(own["resps"], other["resps"], strict=True):
                if name == "own_text":
                    assert answer == wanted
                elif name == "own_perplexity":
                    assert answer[0] == pytest.approx(wanted[0], rel=2e-6, abs=1e-4)
                else:
                    assert float(answer[0][0]) == pytest.approx(float(wanted[0][0]), abs=1e-4)
                    assert answer[0][1] == wanted[0][1]
                    greedy.add(str(answer[0][1]))
        for metric, value in theirs["results"][name].items():
            assert ours["results"][name][metric] == (
                pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            )
    texts = [sample["resps"][0][0] for sample in ours["samples"]["own_text"]]
    assert len(set(texts)) > 1
    if which == "real":
        assert greedy == {"True", "False"}
        assert any(len(text) > 20 for text in texts)


def asked(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def test_contexts_that_are_empty_too_long_or_end_in_spaces_are_read_as_by_hf(random_model: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    from prefillcli.lm_eval import PrefillLM

    ours = PrefillLM(str(random_model), dtype="float32", max_length=40)
    theirs = HFLM(str(random_model), dtype="float64", max_length=40, device="cpu", batch_size=1)
    requests = [
        asked("", "yes no"), asked("<s>", "yes"), asked("a fox  ", "no"), asked("fox dog " * 60, "quick brown fox"),
        asked("the dog", " brown" * 30), asked("the dog", " brown" * 29), asked("the dog", " brown" * 29),
    ]  # fmt: skip
    for own, other in zip(ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True):
        assert own[0] == pytest.approx(other[0], abs=1e-4)
        assert own[1] == other[1]
    rolling = [asked("fox dog quick " * 50), asked("fox")]
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(theirs.loglikelihood_rolling(rolling), abs=1e-3)
    (free,) = ours.generate_until([asked("a fox", {"max_gen_toks": 30})])
    stop = next(letter for letter in free[8:] if letter.isalnum())
    texts = [
        asked("fox dog " * 60, {"max_gen_toks": 8, "top_p": 0.9}),
        asked("a fox", {"until": [stop], "max_gen_toks": 30}),
    ]
    assert ours.generate_until(texts) == theirs.generate_until(texts)
    assert ours._loaded.engine.decoded().tokens < 30 + 8 + 30  # no more is written once the text has ended
    chat = [{"role": "user", "content": "a fox"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat) == "a fox"


@pytest.mark.parametrize("processor", [True, False])
@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_a_bos_token_is_there_where_it_is_for_hf(processor: bool, add_bos_token: bool | None, tmp_path: Path) -> None:
    """Whether the tokenizer's files put it before a text or not."""
    from lm_eval.models.huggingface import HFLM

    from prefillcli.lm_eval import PrefillLM

    model = save_model(tmp_path / "model")
    if not processor:
        file = model / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    ours = PrefillLM(str(model), dtype="float32", add_bos_token=add_bos_token)
    theirs = HFLM(str(model), dtype="float64", add_bos_token=add_bos_token, device="cpu", batch_size=1)
    requests = [asked("a fox", " yes no"), asked("", "yes"), asked("<s>a fox", " yes"), asked("a fox ", "no")]
    for request in requests:
        assert ours.tok_encode(request.args[0]) == theirs.tok_encode(request.args[0])
    wanted = [logprob for logprob, _ in theirs.loglikelihood(requests)]
    assert [logprob for logprob, _ in ours.loglikelihood(requests)] == pytest.approx(wanted, abs=1e-4)
    text = [asked("fox dog quick")]
    assert ours.loglikelihood_rolling(text) == pytest.approx(theirs.loglikelihood_rolling(text), abs=1e-3)


def test_what_it_does_not_do_is_refused(random_model: Path) -> None:
    from prefillcli.lm_eval import PrefillLM

    with pytest.raises(UsageError, match="no argument 'dtpye'; did you mean 'dtype'"):
        PrefillLM(str(random_model), dtpye="float32")
    with pytest.raises(UsageError, match="no argument 'labels'"):
        PrefillLM(str(random_model), labels="Yes,No")
    model = PrefillLM(str(random_model), dtype="float32")
    for given, why in (
        ({"do_sample": True, "temperature": 0.7}, "greedily"),
        ({"num_beams": 4}, "'num_beams'"),
        ({"max_gen_toks": 1 << 30}, "max_gen_toks"),
    ):
        with pytest.raises(UsageError, match=why):
            model.generate_until([asked("a fox", given)])
    with pytest.raises(UsageError, match="continuation"):
        model._loglikelihood_tokens([(None, [5], [])])


def test_the_command_takes_the_arguments_of_lm_eval(tasks: Path, random_model: Path, tmp_path: Path) -> None:
    words = ["--model", "prefill", "--model_args", f"pretrained={random_model},dtype=float32", "--device", "cpu"]
    words += ["--tasks", "own_choices", "--include_path", str(tasks), "--limit", "4", "--num_fewshot", "2"]
    words += ["--apply_chat_template", "--output_path", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "prefillcli.lm_eval", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "own_choices" in done.stdout
    assert "acc_norm" in done.stdout
    (report,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(report.read_text())["n-samples"]["own_choices"] == {"original": 8, "effective": 4}
