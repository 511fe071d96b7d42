"""The settings of every command that opens rows and models: groups that all of them have, and those that some do."""

from __future__ import annotations

from typing import Literal

from prefillcli.errors import UsageError
from prefillcli.options.asking import (
    AskOptions,
    ChoiceOptions,
    LikelihoodOptions,
    PairOptions,
    RequestOptions,
)
from prefillcli.options.followup import ChosenOptions, WritingOptions
from prefillcli.options.groups import (
    EngineOptions,
    IdOptions,
    ImageOptions,
    InputOptions,
    LabelOptions,
    LayerOptions,
    LogOptions,
    MemoryOptions,
    ModelOptions,
    OutputOptions,
    PredictionOptions,
    PriceOptions,
    PromptOptions,
    QuietOptions,
    RunOptions,
    ThumbnailOptions,
    WorkerOptions,
)
from prefillcli.options.judging import (
    EstimateOptions,
    EvaluationOptions,
    GateOptions,
    ProbabilityOptions,
    ReviewOptions,
    TruthOptions,
)
from prefillcli.options.option import Settings, absent
from prefillcli.options.reading import (
    AdapterOptions,
    CompressionOptions,
    EarlierOptions,
    ExitOptions,
    FlipOptions,
    HeadOptions,
)


class ModelSettings(Settings):
    """The settings of a command that looks at a model."""

    lm: ModelOptions
    run: QuietOptions

    @property
    def computes_here(self) -> bool:
        """True if this process, or its workers, run the model with that many threads."""
        return True


class JobSettings(ModelSettings):
    """The settings of a command that opens rows and models."""

    input: InputOptions
    prompts: PromptOptions
    images: ImageOptions
    answers: LabelOptions
    lm: ModelOptions
    packs: MemoryOptions
    compression: CompressionOptions
    run: RunOptions
    layers: LayerOptions = absent(LayerOptions, weights="resident", hidden="device")
    engine: EngineOptions = absent(EngineOptions)
    adapters: AdapterOptions = absent(AdapterOptions)
    ids: IdOptions = absent(IdOptions)
    asking: AskOptions = absent(AskOptions)
    choices: ChoiceOptions = absent(ChoiceOptions)
    likelihood: LikelihoodOptions = absent(LikelihoodOptions)
    pairs: PairOptions = absent(PairOptions)
    requests: RequestOptions = absent(RequestOptions)
    rationales: WritingOptions = absent(WritingOptions)
    chosen: ChosenOptions = absent(ChosenOptions)
    exits: ExitOptions = absent(ExitOptions)
    flips: FlipOptions = absent(FlipOptions)
    heads: HeadOptions = absent(HeadOptions)
    earlier: EarlierOptions = absent(EarlierOptions)
    probabilities: ProbabilityOptions = absent(ProbabilityOptions)
    truth: TruthOptions = absent(TruthOptions)
    evaluation: EvaluationOptions = absent(EvaluationOptions)
    estimate: EstimateOptions = absent(EstimateOptions)
    gates: GateOptions = absent(GateOptions)
    review: ReviewOptions = absent(ReviewOptions)
    thumbnails: ThumbnailOptions = absent(ThumbnailOptions)
    files: OutputOptions = absent(OutputOptions)
    price: PriceOptions = absent(PriceOptions)
    prediction: PredictionOptions = absent(PredictionOptions)
    processes: WorkerOptions = absent(WorkerOptions)
    log: LogOptions = absent(LogOptions)

    @property
    def narrow_walk(self) -> Literal["int8", "fp8"] | None:
        """The low precision in which the model itself computes, because a head was fitted to it so."""
        return None if self.lm.head_file is None else self.exits.narrow

    @property
    def finishes(self) -> bool:
        """True if the run finishes an output of all rows: no shard, and no dry run."""
        return self.files.shard is None and not self.prediction.dry_run

    @property
    def is_random(self) -> bool:
        """True if anything is drawn at random."""
        return self.input.sample is not None or self.compression.draft == "random"

    @property
    def uses_draft(self) -> bool:
        """True if another model is the draft."""
        return self.compression.uses_draft

    @property
    def counts_votes(self) -> bool:
        """True if tokens are picked by votes: a draft's or the model's own."""
        return self.compression.counts_votes

    @property
    def picks_itself(self) -> bool:
        """True if any way to pick tokens asks the model's own first layers."""
        return self.compression.picks_itself

    @property
    def compresses(self) -> bool:
        """True if anything picks tokens."""
        return self.compression.compresses

    def check(self) -> None:
        super().check()
        texts = self.rationales
        if texts.speculates_by_draft and not self.uses_draft:
            raise UsageError(
                f"--speculation {texts.speculation} needs --draft: a small model with the same tokenizer, "
                "which guesses tokens\nname one, or give --speculation retrieval"
            )

    def take_encoder(self, model: object) -> None:
        """Accept that the model in this folder is an encoder. Raise UsageError where that has no meaning."""
        raise UsageError(f"{model}: an encoder is scored by prefill score alone\ntake a model that is not an encoder")
