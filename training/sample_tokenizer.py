"""The byte-level BPE tokenizer that both sample models share."""

from collections.abc import Iterator
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.needles import TOPICS
from benchmarks.sample_text import CASES, CREDITORS, SUBJECTS, ask_fairly

BOS, EOS = "<s>", "</s>"
VOCABULARY = 2048
LONGEST = 8192
ANSWERS = (" Yes", " No")


def sample_texts(seed: int, cases: int) -> Iterator[str]:
    """The generated texts that the tokenizers of the sample models are trained on."""
    rng = Random(f"tokenizer {seed}")
    for number in range(cases):
        for domain, make in CASES.items():
            case = make(rng, rng.randint(1, 3) if domain == "labeling" else 40)
            asked = "".join(f"{q.text} {q.answer}\n" for q in ask_fairly(rng, case, 24))
            yield f"{case.prefix}{asked}" if number % 2 else case.prefix
            # equal counts for the asked words: each must become one token
            words = [*TOPICS, *CREDITORS, *SUBJECTS]
            yield "".join(f" {word}" for word in rng.sample(words, len(words)))


def answer_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of `ANSWERS`. Raises ValueError if one of them is not a single token."""
    (yes, no) = (tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in ANSWERS)
    if len(yes) != 1 or len(no) != 1:
        raise ValueError(f"not single tokens: {ANSWERS}")
    return [yes[0], no[0]]


def train_tokenizer(seed: int = 0, cases: int = 200) -> PreTrainedTokenizerFast:
    """Train on generated text: all 256 bytes, digits one by one, BOS put first by the post-processor.

    Raises:
        ValueError: an asked word or an answer is not a single token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_texts(seed, cases), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    asked = [f" {word}" for word in (*TOPICS, *CREDITORS, *SUBJECTS)]
    split = [w for w in (*asked, *ANSWERS) if len(tokenizer.encode(w, add_special_tokens=False).ids) != 1]
    if split:
        raise ValueError(f"not single tokens with {VOCABULARY} entries: {split}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=LONGEST,
        clean_up_tokenization_spaces=False,
    )
