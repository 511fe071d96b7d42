"""What an input looks like and what scoring it will take: models for `*.dry-run.json` and `profile.json`."""

from __future__ import annotations

from pydantic import BaseModel, Field


class SurveyRows(BaseModel):
    """Rows of the input. `total` = `prompts` + `errors` + `skipped`."""

    total: int = 0
    prompts: int = 0  # that will be scored
    errors: int = 0
    skipped: int = 0  # over-long rows under --on-long skip
    errors_by_code: dict[str, int] = Field(default_factory=dict)
    too_long: int = 0  # longer than --max-length, whatever --on-long makes of them
    truncated: int = 0  # of these, shortened


class Bin(BaseModel):
    """Rows whose prompts have at least `low` and less than `high` tokens."""

    low: int
    high: int
    rows: int


class Lengths(BaseModel):
    """Lengths of the prompts in tokens, after --on-long."""

    least: int
    mean: float
    most: int
    percentiles: dict[str, int]  # keys are percent of the prompts, values the tokens that none of those exceeds
    histogram: list[Bin]  # edges grow by a constant factor


class Duplicates(BaseModel):
    """Rows whose prompt, token by token, is that of another row."""

    rows: int = 0
    prompts: int = 0  # different ones among these rows


class SharedLevel(BaseModel):
    """Prompt tokens in prefixes that at least `rows` rows of a window share."""

    rows: int
    tokens: int
    share: float  # of all prompt tokens


class SharedPrefix(BaseModel):
    """A prefix that rows of a window share."""

    rows: int
    tokens: int  # its length
    saved: int  # tokens that need not be computed because of its last part, the one behind a larger prefix
    first_row: int


class Sharing(BaseModel):
    """What prompts have in common at their start; windows of rows are looked at one by one, as they are scored."""

    windows: int = 0
    unique_tokens: int = 0  # of the windows' tries, without what the window before hands on
    levels: list[SharedLevel] = Field(default_factory=list)
    largest: list[SharedPrefix] = Field(default_factory=list)  # those that save most


class PlanCost(BaseModel):
    """What a schedule takes. Seconds and price are of the model alone, and null without a profile."""

    schedule: str
    prefix_kv: str
    chosen: bool = False  # what the settings ask for
    packs: int = 0
    computed_tokens: int = 0
    seconds: float | None = None
    price: float | None = None


class KeepCost(BaseModel):
    """What a keep rate leaves, under the chosen schedule. An estimate: no draft was asked."""

    keep: float
    chosen: bool = False
    compressed_rows: int = 0
    kept_tokens: int = 0
    computed_tokens: int = 0
    seconds: float | None = None  # of the model, not of the draft
    price: float | None = None


class PackLimits(BaseModel):
    """What follows from --memory."""

    pack_tokens: int
    max_tokens: int  # of a prompt
    chunk_tokens: int


class TextCost(BaseModel):
    """Whether K,V survive scoring where texts are written behind prompts, or wanted prompts are read again."""

    kv: str  # kept or again
    reason: str
    kept_tokens: int  # of a pack whose K,V of all layers can be kept
    bytes: int  # of these
    small_tokens: int = 0  # computed for all prompts in packs that can be kept
    large_tokens: int = 0  # in packs as large as without texts; what is wanted is read again


class SurveySeconds(BaseModel):
    """Seconds that the survey itself took: what a run will read, render and tokenise with."""

    read: float = 0.0
    render: float = 0.0
    tokenize: float = 0.0
    plan: float = 0.0


class Survey(BaseModel):
    """Rows, prompts, sharing and plans of an input."""

    rows: SurveyRows = Field(default_factory=SurveyRows)
    prompt_tokens: int = 0
    lengths: Lengths | None = None  # None without prompts
    duplicates: Duplicates = Field(default_factory=Duplicates)
    sharing: Sharing = Field(default_factory=Sharing)
    limits: PackLimits
    plans: list[PlanCost] = Field(default_factory=list)
    keeps: list[KeepCost] = Field(default_factory=list)  # with a draft
    texts: TextCost | None = None  # with --rationale
    seconds: SurveySeconds = Field(default_factory=SurveySeconds)

    @property
    def plan(self) -> PlanCost:
        """The plan that the settings ask for."""
        return next(plan for plan in self.plans if plan.chosen)
