"""The heads of a job: they answer its questions after their layers, and nothing above the deepest is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefillcli.core.roles import Judge, Reading
from prefillcli.errors import UsageError, did_you_mean, without_secrets
from prefillcli.models.open import dtype_name
from prefillcli.models.shape import VERIFIED
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.reading.heads.head import FittedHead, HeadFile, head_file_at
from prefillcli.rows.proof import hash_value
from prefillcli.runtime import log
from prefillcli.stats.labels import Measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefillcli.core.inputs import Inputs, OpenRows
    from prefillcli.models.open import Opened
    from prefillcli.options.settings import JobSettings
    from prefillcli.prompts.labels import Labels
    from prefillcli.rows.output.schema import OutputSchema

ANY_WORDING = "any_wording"
_FIT = "fit one for this job with prefill fit"


class Heads(Reading, Judge):
    """The heads of the file that `--head` names. Raises UsageError for a wrong file."""

    def __init__(self, settings: JobSettings, path: str, read_as: Sequence[Any] = ()) -> None:
        self._settings, self._read_as = settings, read_as
        self.shown = f"--head {without_secrets(path)}"
        self.file: HeadFile = head_file_at(path)
        self.answered: dict[int, FittedHead] = {}
        """By the prompt of a row (`Prompt.part`); other prompts are answered by the model."""

    def identity(self, values: dict[str, Any]) -> Mapping[str, str]:
        values.pop("head")
        return {"head": hash_value([[each.question, each.rule().digest] for each in self.file.heads])}

    def check(self, rows: OpenRows, labels: Labels, schema: OutputSchema) -> None:
        self._of_parts(labels)

    def _of_parts(self, labels: Labels) -> dict[int, FittedHead]:
        # The heads by the prompts that they answer. Raises UsageError where they are for other questions.
        heads, asked = self.file.by_question, [each.question for each in labels.asked]
        names = [each.name for each in asked]
        if labels.measure not in (Measure.SHARES,):
            raise UsageError(f"{self.shown}: it answers questions whose answers all rows share\n{_FIT}")
        found = {}
        for part, (name, question) in enumerate(zip(names, asked, strict=True)):
            own = heads.get(name)
            if own is None and len(names) == len(heads) == 1:  # one question needs no name
                own = next(iter(heads.values()))
            if own is None:
                continue
            if names.count(name) > 1:
                raise UsageError(
                    f"{self.shown}: the question {name} is asked in several orders or prompts, and a head knows one\n"
                    "ask it once"
                )
            if own.labels != question.names:
                raise UsageError(
                    f"{self.shown}: its answers are {', '.join(own.labels)}, not {', '.join(question.names)}\n"
                    f"name these answers in this order, or {_FIT}"
                )
            found[part] = own
        if not found:
            known = ", ".join(filter(None, heads)) or "one without a name"
            raise UsageError(
                f"{self.shown}: it is for other questions ({known}), not {', '.join(names) or 'this one'}"
                f"{did_you_mean(names[0], heads)}\n{_FIT}"
            )
        return found

    def take(self, opened: Opened, labels: Labels) -> Opened:
        """Let the heads answer the questions with these labels; return the model as far as they need it. Raises
        UsageError."""
        settings, files = self._settings, opened.files
        if files.head is not None or files.encoder:
            raise UsageError(
                f"{self.shown}: {files.origin} has a classification head of its own, and this one is for the hidden "
                "states of a causal language model\nread the model's own head, or take another model"
            )
        self.answered = self._of_parts(labels)
        audited = bool(settings.flips.audit)
        alone = len(self.answered) == len(labels.asked) and not audited
        deepest = max(each.layer for each in self.answered.values())
        for part, head in self.answered.items():
            own = labels.asked[part]
            if audited and own.question.readout is not None:
                raise UsageError(
                    f"--audit: in the model's own layout the question {own.question.name} asks for something else than "
                    "its answers, which a head does not\nleave it out"
                )
            rule = head.rule()
            own.head, own.audited = replace(rule, peek=alone and head.layer == deepest), audited
        left = [each.question.name for part, each in enumerate(labels.asked) if part not in self.answered]
        if left and not settings.run.quiet:
            log.info(f"{self.shown}: no head for {', '.join(left)}: answered by the model itself, through all layers")
        if not alone or deepest >= self.file.layers or files.family not in VERIFIED:
            return opened
        return replace(opened, files=replace(files, read_layers=deepest))

    def require_fitting(self, inputs: Inputs, digests: Mapping[str, str]) -> None:
        """Raise UsageError for heads of another model, by the `digests` of the job's fingerprint, another wording or
        number format."""
        file, opened = self.file, inputs.opened
        if file.model != model_of(digests, self._read_as):
            raise UsageError(
                f"{self.shown}: it was fitted to another model: the contents of {opened.files.origin} differ\n"
                f"give the model that it was fitted to, or {_FIT}"
            )
        if self._settings.heads.any_wording:
            return
        given = {
            "dtype": (file.dtype, dtype_name(opened.files), "--dtype"),
            "low precision": (file.compute, opened.narrow, "--compute"),
        }
        for what, (fitted, own, option) in given.items():
            if fitted != own:
                raise UsageError(
                    f"{self.shown}: it was fitted in {fitted or 'full precision'}, and this job computes in "
                    f"{own or 'full precision'} ({what})\n"
                    + (f"give {option} {fitted}" if fitted else f"leave {option} out")
                    + f", or --set {ANY_WORDING}=true to take it as it is"
                )
        for part, head in self.answered.items():
            if head.wording != wording_of(inputs.builder, inputs.labels, part):
                name = f" of the question {head.question}" if head.question else ""
                raise UsageError(
                    f"{self.shown}: the words around a row's text{name} are not those that it was fitted to\n"
                    f"ask with the same question, template and chat options, give --set {ANY_WORDING}=true to take it "
                    f"as it is, or {_FIT}"
                )


def wording_of(builder: PromptBuilder, labels: Labels, part: int) -> str:
    """Return the digest of all words around a row's own in one of its prompts."""
    own, _ = builder.of_part(part, labels)
    return hash_value(own.words())


def model_of(digests: Mapping[str, str], read_as: Sequence[Any]) -> str:
    """Return the digest of what makes hidden states of tokens, by the `digests` of a job's fingerprint: the model, and
    what `read_as` states of how prompts are read otherwise."""
    return hash_value([*(digests.get(name) for name in ("model", "tokenizer", "draft", "adapters")), *read_as])
