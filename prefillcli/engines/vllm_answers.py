"""What is asked of vLLM to score a prompt, and the numbers of the labels in what it answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from prefillcli.engines.base import LabelTokens
from prefillcli.errors import PrefillError
from prefillcli.models.heads import ClassHead


class NextToken:
    """The log-probabilities of the label tokens, which come with one generated token of no interest."""

    arguments: dict[str, Any] = {}  # noqa: RUF012 - what vLLM is started with, besides

    def __init__(self) -> None:
        self._params: dict[LabelTokens, Any] = {}

    def asked(self, labels: LabelTokens) -> Any:
        """The parameters of a request."""
        from vllm import SamplingParams

        if labels not in self._params:
            ids = [token for label in labels for token in label]
            self._params[labels] = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=ids, detokenize=False)
        return self._params[labels]

    def numbers(self, output: Any, labels: LabelTokens) -> npt.NDArray[np.float64]:
        """Float64 [labels]; the tokens of a label are summed in probability. Raises PrefillError without an answer."""
        (completion,) = output.outputs
        if not completion.logprobs:
            raise PrefillError(f"vLLM did not answer a prompt of {len(output.prompt_token_ids)} tokens")
        found = completion.logprobs[0]
        return np.array([np.logaddexp.reduce([found[token].logprob for token in label]) for label in labels])


class WholeVocabulary:
    """The log-probabilities of the label tokens, among those of all tokens: while it speculates, vLLM gives those of
    chosen tokens for none."""

    arguments = {"max_logprobs": -1}  # noqa: RUF012

    def asked(self, labels: LabelTokens) -> Any:
        """The parameters of a request."""
        from vllm import SamplingParams

        return SamplingParams(max_tokens=1, temperature=0, logprobs=-1, flat_logprobs=True, detokenize=False)

    def numbers(self, output: Any, labels: LabelTokens) -> npt.NDArray[np.float64]:
        """As of `NextToken`."""
        (completion,) = output.outputs
        if not completion.logprobs:
            raise PrefillError(f"vLLM did not answer a prompt of {len(output.prompt_token_ids)} tokens")
        tokens = np.array(completion.logprobs.token_ids)
        logprobs = np.empty(tokens.max() + 1)
        logprobs[tokens] = completion.logprobs.logprobs
        return np.array([np.logaddexp.reduce(logprobs[list(label)]) for label in labels])


class HeadOutputs:
    """The outputs of a classification head, as they are."""

    arguments = {"runner": "pooling", "convert": "classify"}  # noqa: RUF012

    def __init__(self, head: ClassHead) -> None:
        self._head = head

    def asked(self, labels: LabelTokens) -> Any:
        """The parameters of a request."""
        from vllm import PoolingParams

        return PoolingParams(task="classify", use_activation=False)

    def numbers(self, output: Any, labels: LabelTokens) -> npt.NDArray[np.float64]:
        """Float64 [labels], made of the head's outputs as every engine makes them."""
        from prefillcli.engines.readout import label_numbers

        outputs = output.outputs.data.float().reshape(1, -1).cpu()
        if outputs.shape[1] != len(self._head.classes):
            raise PrefillError(f"vLLM gives {outputs.shape[1]} outputs for {len(self._head.classes)} classes")
        (found,) = label_numbers(outputs, [0], [labels], self._head.activation)
        numbers: npt.NDArray[np.float64] = found
        return numbers
