"""Types of option values. Each is read the same way from a flag, an environment variable and a recipe."""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field

from prefillcli.errors import UsageError, brief
from prefillcli.options import requirements
from prefillcli.options.engines import ENGINES
from prefillcli.options.option import (
    ANSWERS,
    INPUT,
    MEMORY,
    MODEL,
    OUTPUT,
    PROMPTS,
    RUN,
    WORKERS,
    Options,
    argument,
    option,
)
from prefillcli.options.requirements import Requirement
from prefillcli.prompts.lists import non_empty, split_list
from prefillcli.rows.output import FILE_ENDINGS, Shard
from prefillcli.runtime.extras import require_extra
from prefillcli.runtime.memory import parse_size

QUOTED = "Quote a name that has a comma: 'a,\"b, c\"'."  # of lists of names, as `split_list` reads them


def split_names(value: object) -> tuple[str, ...]:
    """Return the names in a text: see `split_list`. A list has one name in each item. Raises ValueError."""
    if isinstance(value, list | tuple):
        return tuple(non_empty(_as_texts(value)))
    return tuple(split_list(str(value))) if str(value) else ()


def split_repeated(value: object) -> tuple[str, ...]:
    """Return the names of an option that may be given several times, each with one name or more. Raises ValueError."""
    parts = value if isinstance(value, list | tuple) else [value]
    return tuple(name for part in parts for name in split_names(str(part)))


def _as_texts(value: object) -> tuple[str, ...]:
    # One text, or several. A whole number in a recipe is written as it is; of 1.10 the last 0 would be lost.
    texts = value if isinstance(value, list | tuple) else [value]
    for text in texts:
        if not isinstance(text, str) and type(text) is not int:
            raise ValueError(f"{as_yaml(text)} must be text: put it in quotes")
    return tuple(map(str, texts))


def as_yaml(value: object) -> str:
    """Return a value as it is written in YAML, for a message."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _labels_as_text(value: object) -> object:
    # The labels 1 and 0 are numbers in a recipe.
    return non_empty(_as_texts(value)) if isinstance(value, list | tuple) else value


def _as_numbers(value: object) -> object:
    # `1,2,3` is a list of three numbers.
    numbers: Any = split_names(value) if isinstance(value, str) else value
    try:
        return tuple(map(float, numbers))
    except (TypeError, ValueError):
        raise ValueError("must be numbers, as in 1,2,3,4,5") from None


def _check_size(text: str) -> str:
    parse_size(text)
    return text


def count_or_auto(value: object) -> object:
    """Return a count, or auto. Numbers are text in the environment and on the command line."""
    if value == "auto":
        return value
    try:
        return int(str(value))
    except ValueError:
        raise ValueError("must be a whole number, or auto") from None


def _check_engine(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"not an engine: use {', '.join(ENGINES)}")
    return name


def _check_shard(text: str) -> str:
    return str(Shard.parse(text))


def _check_rows(value: object) -> object:
    # A number of rows, or a range of them; a number in a recipe is not text.
    text = str(value).replace(" ", "")
    found = re.fullmatch(r"(\d*)(-?)(\d*)", text)
    if type(value) is bool or found is None or not (found[1] or found[3]):
        raise ValueError("must be a number of rows, or a range like 900-1100, 900- or -1100")
    if found[1] and found[3] and int(found[1]) > int(found[3]):
        raise ValueError("is not a range: its first number is above its last one")
    return text


def read_mapping(value: object) -> Any:
    """Read a mapping from texts like `key=value`, or as a recipe has it. The values are YAML."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return _parsed(value)
    pairs = [str(text).partition("=") for text in (value if isinstance(value, list | tuple) else [value])]
    if not all(key.strip() and equals for key, equals, _ in pairs):
        raise ValueError("must be KEY=VALUE, block_size=32 for example")
    found = {key.strip(): _parsed(own) for key, _, own in pairs}
    if len(found) < len(pairs):
        raise ValueError("has a key twice")
    return found


def _parsed(text: str) -> object:
    from prefillcli.options.plain_yaml import parse_yaml  # YAML takes a while to import

    try:
        return parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"its value is not valid YAML: {brief(error)}") from None


def _check_chat_options(options: dict[str, Any]) -> dict[str, Any]:
    if "date" in options:
        try:
            date.fromisoformat(options["date"])
        except (TypeError, ValueError):
            raise ValueError("date must be a day, like 2026-01-31") from None
    return options


def _check_resources(value: object) -> object:
    # Amounts by name; memory may be a size.
    if not isinstance(value, dict):
        return value
    found: dict[str, float] = {}
    for name, amount in value.items():
        if name.lower() in ("cpu", "cpus", "num_cpu", "gpu", "gpus", "num_gpu"):
            raise ValueError(f"{name} is not a resource: use num_cpus or num_gpus")
        try:
            found[name] = float(parse_size(str(amount)) if name == "memory" else amount)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be a number") from None
        if not 0 <= found[name] < float("inf"):
            raise ValueError(f"{name} must be 0 or more")
    return found


def _check_device(name: str) -> str:
    if not re.fullmatch(r"auto|(cpu|cuda|mps)(:(0|[1-9][0-9]?))?", name):
        raise ValueError("no such device; use auto, cpu, cuda, cuda:N or mps")
    return name


def _check_separator(text: str) -> str:
    text = {"\t": "tab", "\\t": "tab"}.get(text, text)
    if text not in ("auto", "tab", "none") and (len(text) != 1 or not text.isascii() or text in '"\r\n\0'):
        raise ValueError("must be a character of ASCII, or tab, none (one column) or auto")
    return text


ByteSize = Annotated[str, AfterValidator(_check_size)]
TextList = Annotated[tuple[str, ...], BeforeValidator(_as_texts)]
NameList = Annotated[tuple[str, ...], BeforeValidator(split_names)]
WordList = Annotated[tuple[str, ...], BeforeValidator(split_repeated)]
ThreadCount = Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], BeforeValidator(count_or_auto)]
DeviceName = Annotated[str, AfterValidator(_check_device)]
EngineName = Annotated[str, AfterValidator(_check_engine)]
RowRange = Annotated[str, BeforeValidator(_check_rows)]
SeparatorName = Annotated[str, AfterValidator(_check_separator)]
ShardName = Annotated[str, AfterValidator(_check_shard)]
KeyValues = Annotated[dict[str, Any], BeforeValidator(read_mapping)]
ChatVariables = Annotated[dict[str, Any], AfterValidator(_check_chat_options), BeforeValidator(read_mapping)]
Resources = Annotated[dict[str, float], BeforeValidator(_check_resources), BeforeValidator(read_mapping)]
LabelTexts = Annotated[str | tuple[str, ...], BeforeValidator(_labels_as_text)]
LabelValues = Annotated[tuple[float, ...], BeforeValidator(_as_numbers)]


SELF = "self"  # as `--draft`: the model's own first layers
CONTROLS = ("random", "bm25")  # as `--draft`: ways to pick tokens that a draft is compared with, without a model
DEFAULT_TEMPLATE = "{{ label }} because"  # the beginning of a text after a prompt


class InputOptions(Options):
    """The rows that are read."""

    inputs: tuple[str, ...] = argument(
        ..., "Parquet, JSONL or CSV: files, directories, globs or URLs.", changes="scores", path="rows", min_length=1
    )
    limit: int | None = option(
        None, "Take the first N rows only.", INPUT, level="first", changes="rows", metavar="N", ge=1
    )
    sample: int | None = option(None, "Take N rows drawn at random.", INPUT, changes="rows", metavar="N", ge=1)
    seed: int = option(0, "Seed for --sample.", INPUT, changes="rows", metavar="N", requires=requirements.RANDOM)
    csv_separator: SeparatorName = option(
        "auto",
        "What separates CSV fields: a character, tab, or none for a single column. auto: the one of , ; | and tab "
        "on which the header and the first rows agree.",
        INPUT, changes="rows", metavar="CHAR|tab|none|auto",
    )  # fmt: skip
    csv_quoting: Literal["auto", "quotes", "none"] = option(
        "auto",
        "quotes: CSV fields may be in quotes, and then hold separators and line breaks. none: a quote is a "
        "character like any other. auto: none between tabs, unless the header has quotes; else quotes.",
        INPUT, changes="rows",
    )  # fmt: skip

    @property
    def csv(self) -> dict[str, Any]:
        """The options of `Source.open` for CSV files."""
        return {"csv_separator": self.csv_separator, "csv_quoting": self.csv_quoting}


_MODEL_HEADS = ("auto", "vocabulary", "probability", "value")


def _check_head(name: str) -> str:
    if name not in _MODEL_HEADS and not any(mark in name for mark in "./"):
        raise ValueError(f"must be one of {', '.join(_MODEL_HEADS)}, or a file of prefill fit")
    return name


HeadName = Annotated[str, AfterValidator(_check_head)]


class ModelOptions(Options):
    """The model, and the place where it runs."""

    model: str | None = option(
        None,
        "A model directory, a GGUF file or a hub name. (default: the shipped sample model)",
        MODEL, level="first", changes="scores", short="-m", metavar="MODEL", path="model",
    )  # fmt: skip
    revision: str | None = option(
        None, "Revision of a hub model.", MODEL, changes="scores", metavar="NAME", requires=requirements.HUB_MODEL
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.", MODEL, changes="scores")
    device: DeviceName = option(
        "auto", "cpu, cuda, cuda:1, mps, ... or auto.", MODEL, changes="speed", metavar="DEVICE"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Number format of weights and activations. auto: as the model is saved, or float32 where this device is slow "
        "at that and memory allows.",
        MODEL, changes="scores",
    )  # fmt: skip
    head: HeadName = option(
        "auto",
        "What to read from the model: the next token (vocabulary), the probabilities or raw values of its "
        "classification or reward head, or a head of your own: a file of prefill fit. auto: as config.json says.",
        MODEL, changes="scores", metavar="auto|vocabulary|probability|value|FILE", path="file",
    )  # fmt: skip
    layout: Literal["auto", "generic"] = option(
        "auto",
        "How a model trained for typed decisions is asked. auto: in its own layout, or not at all, and with the "
        "temperatures of its files; generic: like any other model, for answers that it was not trained to give.",
        MODEL, changes="scores",
    )  # fmt: skip
    threads: ThreadCount = option(
        "auto",
        "CPU threads; auto: one for each usable core, fewer while other programs are busy.",
        MODEL, changes="speed", metavar="N|auto", needs="threads",
    )  # fmt: skip
    gguf_cache: ByteSize = option(
        "20GiB",
        "Most disk space in the user's cache for files made from GGUF models. The least recently used go first, "
        "and any not used for 30 days; never one in use.",
        MODEL, level="rare", changes="speed", metavar="SIZE",
    )  # fmt: skip

    @property
    def head_file(self) -> str | None:
        """The file of prefill fit whose heads answer; None where the model does."""
        return None if self.head in _MODEL_HEADS else self.head

    @property
    def model_head(self) -> Literal["auto", "vocabulary", "probability", "value"]:
        """What is read from the model's own files."""
        return "auto" if self.head_file is not None else cast("Any", self.head)


class PromptOptions(Options):
    """The way from a row to a prompt."""

    prompt_column: str = option(
        "prompt",
        "Column with the text, the chat messages or the token ids.",
        PROMPTS, level="first", changes="scores", metavar="NAME", requires=requirements.NO_TEMPLATE,
    )  # fmt: skip
    template: str | None = option(
        None,
        "To write the whole prompt yourself: a Jinja template of the row's columns, or a file with one.",
        PROMPTS, level="first", changes="scores", metavar="JINJA", path="template", text=True,
    )  # fmt: skip
    chat: bool | None = option(
        None, "Apply the tokenizer's chat template. (default: if it has one)", PROMPTS, level="first", changes="scores"
    )
    system: str | None = option(
        None, "System message to begin each chat with.", PROMPTS, changes="scores", metavar="TEXT", text=True
    )
    thinking: Literal["auto", "off", "on"] = option(
        "auto",
        "What to do where a chat template lets the model think first. auto: end the prompt where the answer "
        "begins. off: the same, with an empty thought even if the template does not mention thoughts, or refuse. "
        "on: end the prompt as the template does, with thinking switched on.",
        PROMPTS, changes="scores",
    )  # fmt: skip
    chat_option: ChatVariables = option(
        {},
        "Variable of the chat template, e.g. reasoning_effort=low; date=2026-01-31 sets the day that it prints. "
        "Repeatable; a mapping in a recipe.",
        PROMPTS, changes="scores", metavar="KEY=VALUE", repeatable=True,
    )  # fmt: skip
    answer_prefix: str | None = option(
        None,
        "Text that begins the assistant's turn, before the answer; may have control tokens.",
        PROMPTS, changes="scores", metavar="TEXT", text=True,
    )  # fmt: skip
    max_length: int | None = option(
        None,
        "Longest prompt in tokens. (default: the model's limit)",
        PROMPTS,
        changes="scores",
        metavar="N",
        ge=1,
    )
    on_long: Literal["error", "truncate-left", "truncate-middle", "truncate-right", "skip"] = option(
        "error",
        "What to do with longer prompts. truncate-* cuts the row's texts, not the template.",
        PROMPTS,
        changes="scores",
    )
    empty_text: Literal["skip", "error"] = option(
        "skip",
        "What to do with a row whose text is null or blank. skip: it gets no answer and does not count as an "
        "error. error: it is an error row.",
        PROMPTS,
        changes="scores",
    )

    literal: bool = option(
        True,
        "Treat control tokens in the data as plain text: only templates and the tokenizer may add real ones. "
        "(default: --literal)",
        PROMPTS, changes="scores", negative="allow-special",
    )  # fmt: skip
    max_row_bytes: ByteSize | None = option(
        None,
        "Longer rows become error rows before they are tokenised, e.g. 32MiB. (default: room for --max-length "
        "tokens, from 8MiB to 64MiB; 64MiB with --on-long truncate-*)",
        PROMPTS, changes="scores", metavar="SIZE",
    )  # fmt: skip


MAX_IMAGE_PIXELS = 50_000_000  # a photo of 48 megapixels, a page of A4 at 600 dpi; some 400 MB while it is decoded


class ImageOptions(Options):
    """The images that rows bring."""

    image_column: WordList = option(
        (),
        "Column with images that stand before the row's text: files, paths, data URLs, the images of a dataset, or "
        "lists of these. Repeatable.",
        PROMPTS, changes="scores", metavar="NAME", repeatable=True, needs="images",
    )  # fmt: skip
    image_root: str | None = option(
        None,
        "Folder or URL that paths of images start from and may not leave. (default: the folder of the first INPUT)",
        PROMPTS, changes="scores", metavar="FOLDER", path="images", needs="images",
    )  # fmt: skip
    allow_urls: bool = option(
        False,
        "Fetch images from http and https URLs in the rows, but none of this machine or a private network.",
        PROMPTS, changes="scores", needs="images",
    )  # fmt: skip
    max_image_pixels: int = option(
        MAX_IMAGE_PIXELS,
        "An image with more pixels is an error: it would be decoded whole, in some 8 bytes of memory per pixel.",
        PROMPTS, level="rare", changes="scores", metavar="N", ge=1,
    )  # fmt: skip
    max_pixels: int | None = option(
        None,
        "Pixels to which the model's processor makes larger images smaller. (default: as its files say)",
        PROMPTS, level="rare", changes="scores", metavar="N", ge=1, needs="images",
    )  # fmt: skip
    min_pixels: int | None = option(
        None,
        "Pixels to which the model's processor makes smaller images larger. (default: as its files say)",
        PROMPTS, level="rare", changes="scores", metavar="N", ge=1, needs="images",
    )  # fmt: skip

    def check(self) -> None:
        """Raise UsageError for bounds that no image meets, and where the package that reads images is missing."""
        if self.max_pixels is not None and self.min_pixels is not None and self.min_pixels > self.max_pixels:
            raise UsageError(f"--set min_pixels={self.min_pixels}: must not be above max_pixels={self.max_pixels}")
        if self.image_column:
            require_extra("images", "--image-column")


class ThumbnailOptions(Options):
    """Small copies of images in pages."""

    no_thumbnails: bool = option(
        False, "Show no small copies of the rows' images in HTML pages.", OUTPUT, changes="report"
    )


class LabelOptions(Options):
    """The labels, and their probabilities."""

    labels: LabelTexts = option(
        "Yes,No",
        "Possible answers, the positive one first; 'Yes= Yes|yes|YES' sums spellings. For a classification head, its "
        "classes. " + QUOTED,
        ANSWERS, level="first", changes="scores", metavar="LABELS", text=True,
    )  # fmt: skip
    label_norm: Literal["none", "tokens", "bytes"] = option(
        "none",
        "Divide each label's log-probability by its length in tokens or bytes before labels are compared.",
        ANSWERS, changes="scores", metavar="none|tokens|bytes",
    )  # fmt: skip
    label_end: str | None = option(
        None,
        "Text after every label, or eos for the model's end token; needed if one label begins another.",
        ANSWERS, changes="scores", metavar="TEXT|eos", text=True,
    )  # fmt: skip
    temperature: float = option(
        1.0,
        "Divide the label logits by this number.",
        ANSWERS,
        changes="scores",
        metavar="T",
        gt=0,
        allow_inf_nan=False,
    )

    @property
    def labels_given(self) -> bool:
        """True if the user has asked for these labels."""
        return self.is_given("labels")


class BudgetOptions(Options):
    """The memory that may be taken."""

    memory: ByteSize | None = option(
        None,
        "Memory for activations and K,V, e.g. 8GiB. (default: what is free)",
        MEMORY, level="first", changes="speed", metavar="SIZE", needs="memory",
    )  # fmt: skip


class MemoryOptions(BudgetOptions):
    """The amount that is computed at a time, and the order."""

    pack_tokens: int | None = option(
        None,
        "Most tokens in one pass through the model. (default: from --memory)",
        MEMORY, changes="speed", metavar="N", needs="packs", ge=1,
    )  # fmt: skip
    chunk_tokens: int | None = option(
        None,
        "Tokens that go through a layer at a time. (default: from the model)",
        MEMORY, level="rare", changes="speed", metavar="N", needs="packs", ge=1,
    )  # fmt: skip
    prefix_kv: Literal["auto", "discard", "keep", "offload"] = option(
        "auto",
        "What to do with K,V of prefixes that later packs need: discard them and compute again, keep them on the "
        "device, or offload them to host memory.",
        MEMORY, level="rare", changes="speed", needs="packs",
    )  # fmt: skip


STREAMABLE = Requirement(
    lambda s: s.layers.weights != "resident",
    "has no effect with --weights resident",
    "give --weights stream or auto",
)


class LayerOptions(Options):
    """The way through the layers: the place of weights and of the residual stream, and the kernels."""

    hidden: Literal["auto", "device", "host"] = option(
        "auto",
        "Where the residual stream of a pack is: on the device, or in host memory, for longer prompts. auto: in "
        "host memory if CUDA streams the weights.",
        MEMORY, level="rare", changes="speed", needs="streaming",
    )  # fmt: skip
    compile: bool = option(
        False,
        "Compile the layers with torch.compile: takes minutes at the start, and saves kernels on CUDA.",
        MEMORY, changes="speed", needs="compilation",
    )  # fmt: skip
    weights: Literal["auto", "resident", "stream"] = option(
        "auto",
        "Where the layers' weights are: resident in memory, or streamed from the files during the run. auto: "
        "streamed if they do not fit, and on CPUs if the files have them packed.",
        MEMORY, changes="speed", needs="streaming",
    )  # fmt: skip
    weights_memory: ByteSize | None = option(
        None,
        "Most memory for weights, e.g. 12GiB; the others are streamed. (default: what is free, a quarter of it "
        "for streamed weights, 512MiB for packed ones)",
        MEMORY, changes="speed", metavar="SIZE", needs="streaming", requires=STREAMABLE,
    )  # fmt: skip
    deterministic: bool = option(
        False,
        "Make each row's score the same bit for bit, whatever its neighbours, their order, packs, threads and "
        "workers.",
        RUN, changes="scores", needs="determinism",
    )  # fmt: skip


class QuietOptions(Options):
    """What a command says on stderr."""

    quiet: bool = option(False, "Warnings and errors only.", RUN, changes="report", short="-q")
    debug: bool = option(False, "Show tracebacks.", RUN, changes="report")


class RunOptions(QuietOptions):
    """Messages and progress during a run."""

    progress_interval: float = option(
        30.0,
        "Seconds between progress lines when not on a terminal; each line has the local time and its UTC offset.",
        RUN, changes="report", metavar="SECONDS", requires=requirements.PROGRESS, gt=0,
    )  # fmt: skip


class LogOptions(Options):
    """The marks by which a run is found among others."""

    log_format: Literal["text", "json"] = option(
        "text",
        "Lines on stderr: text for people, or one JSON object per line, with time, level, run_id, event and message.",
        RUN, changes="report",
    )  # fmt: skip
    run_id: str | None = option(
        None,
        "Name of this run in run.json, on stdout and in JSON lines, e.g. Airflow's. (default: a random one)",
        RUN, changes="report", metavar="TEXT", min_length=1, max_length=200,
    )  # fmt: skip


class MeasuringOptions(RunOptions):
    """Messages and progress of commands in which one measurement can take long."""

    progress_interval: float = option(
        10.0,
        "Seconds between lines that name what is being measured.",
        RUN, changes="report", metavar="SECONDS", requires=requirements.PROGRESS, gt=0,
    )  # fmt: skip


class PriceOptions(Options):
    """The price of a machine."""

    price_per_hour: float | None = option(
        None,
        "Price of an hour on this machine, to predict costs.",
        RUN, changes="report", metavar="PRICE", needs="forecast", ge=0, allow_inf_nan=False,
    )  # fmt: skip


class PredictionOptions(Options):
    """Predictions, and the run that only predicts."""

    dry_run: bool = option(
        False,
        "Only read, tokenise and plan: lengths, sharing, packs, predicted time. Loads no weights.",
        RUN, level="first", changes="report", needs="forecast",
    )  # fmt: skip
    profile: str | None = option(
        None,
        "Profile written by prefill profile, to predict times. (default: profile.json, if it exists and fits)",
        RUN, changes="speed", metavar="PATH", path="file", needs="forecast",
    )  # fmt: skip


class EngineOptions(Options):
    """What runs the model."""

    engine: EngineName = option(
        "torch",
        "What runs the model: the layer walk, a plain transformers loop, or vLLM.",
        MODEL, changes="scores", metavar="|".join(ENGINES),
    )  # fmt: skip
    engine_options: KeyValues = option(
        {},
        "Option passed to the engine unchanged; repeatable; a mapping in a recipe.",
        MODEL, changes="scores", metavar="KEY=VALUE", repeatable=True, needs="options",
    )  # fmt: skip


class IdOptions(Options):
    """The names of rows."""

    id_column: str | None = option(
        None,
        "Column that names a row. (default: the row number)",
        INPUT, level="first", changes="columns", metavar="NAME",
    )  # fmt: skip


class WorkerOptions(Options):
    """The number of processes that compute, and where they run."""

    workers: int = option(
        1,
        "Worker processes, each with a CUDA device or a share of the cores for itself.",
        WORKERS, changes="speed", metavar="N", ge=1,
    )  # fmt: skip
    runner: Literal["local", "ray"] = option(
        "local", "Where the workers run: as processes on this machine, or as actors on Ray.", WORKERS, changes="speed"
    )
    ray_address: str | None = option(
        None,
        "Ray cluster to use, e.g. auto or head:6379. (default: RAY_ADDRESS, else a private Ray on this machine)",
        WORKERS, changes="speed", metavar="ADDRESS", requires=requirements.RAY,
    )  # fmt: skip
    worker_resources: Resources = option(
        {},
        "Resources that Ray reserves for each worker: num_cpus, num_gpus, memory or your own; repeatable; a "
        "mapping in a recipe. (default: a GPU if there are any, and an even share of the CPUs)",
        WORKERS, changes="speed", metavar="NAME=NUMBER", repeatable=True, requires=requirements.RAY, off={},
    )  # fmt: skip
    ray_timeout: float = option(
        300.0,
        "Seconds to wait until Ray has room for a worker.",
        WORKERS, level="rare", changes="speed", metavar="SECONDS", requires=requirements.RAY, gt=0,
    )  # fmt: skip

    @property
    def uses_workers(self) -> bool:
        """True if other processes than this one compute."""
        return self.workers > 1 or self.runner != "local"


class EndingOptions(Options):
    """The files that are written at the end of a job, and its judgement."""

    overwrite: bool = option(
        False,
        "Replace an existing output, and any other file at the paths of the report, metrics, rejects and review.",
        OUTPUT, level="first", changes="files",
    )  # fmt: skip
    report: str | None = option(
        None,
        "Where run.json goes; its page goes beside it, as .html. (default: OUTPUT.run.json beside the output)",
        OUTPUT, changes="files", metavar="PATH", path="report",
    )  # fmt: skip
    metrics_file: str | None = option(
        None,
        "Also write metrics for the Prometheus textfile collector to this file, e.g. prefill.prom.",
        OUTPUT, changes="files", metavar="PATH", path="metrics",
    )  # fmt: skip
    max_error_rate: float = option(
        0.0,
        "Share of error rows above which the exit code is 3.",
        RUN,
        level="first",
        changes="report",
        metavar="RATE",
        ge=0,
        le=1,
    )
    skip_empty: bool = option(False, "Exit 99 if the input has no rows.", RUN, changes="report")


PIPE = "-"  # stdin as INPUT, stdout as output


class OutputOptions(EndingOptions):
    """The output, what it has besides the answers, and how it is begun or continued."""

    output: str | None = option(
        None,
        f"Where the scores go: {', '.join(FILE_ENDINGS)}, a folder (ending in /), or - for stdout. "
        "(default: INPUT.scores.parquet; of stdin, stdout)",
        OUTPUT, level="first", changes="files", short="-o", metavar="PATH", path="output",
    )  # fmt: skip
    keep_columns: NameList = option(
        (),
        "Input columns to copy to the output, comma-separated. * stands for all. " + QUOTED,
        OUTPUT,
        level="first",
        changes="columns",
        metavar="NAMES",
    )
    partition: bool = option(
        False, "Write the scores into folders named as in the input, e.g. day=2026-01-01/.", OUTPUT, changes="columns"
    )
    shard: ShardName | None = option(
        None,
        "Score only the I-th of N shares of the rows, e.g. one on each machine; prefill merge joins them.",
        OUTPUT, changes="files", metavar="I/N",
    )  # fmt: skip
    resume: bool = option(False, "Continue this job where it stopped.", OUTPUT, level="first", changes="files")
    rejects: str | None = option(
        None,
        "Also write the error rows, with all columns of the input, to this file, e.g. rejects.jsonl.",
        OUTPUT, changes="files", metavar="PATH", path="rejects",
    )  # fmt: skip

    @property
    def shard_of(self) -> Shard | None:
        """The share of the rows that this run scores; None for all."""
        return None if self.shard is None else Shard.parse(self.shard)


class MergedOptions(EndingOptions):
    """The output whose shards are joined."""

    output: str = argument(
        ...,
        "The --output that the shards were given: their folders lie beside it.",
        changes="files",
        path="output",
        min_length=1,
    )
