"""A draft for another tokenizer: its layers stay, and each new token begins as it reads in the old one.

    python -m training.respelled_draft out/real/draft out/real/own.chosen.parquet out/real/shared.chosen.parquet \
        --output out/real/draft-words

counts the words of the rows' prompts and writes the draft for them, without any training. The sample draft is made in
this way too, and then trained (`python -m training.train_sample_models draft-words`).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from training.word_tokenizer import SPACE, train_word_tokenizer


def respell(draft: LlamaForCausalLM, old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A copy of `draft`, which reads `old`, for the tokens of `new`.

    The embedding of a new token, and its row of the head, are the means over the old tokens that its text has.
    """
    config = LlamaConfig.from_dict(
        draft.config.to_dict()
        | {
            "vocab_size": len(new),
            "bos_token_id": new.bos_token_id,
            "eos_token_id": new.eos_token_id,
            "pad_token_id": new.pad_token_id,
        }
    )
    model = LlamaForCausalLM(config)
    weights = draft.state_dict()
    texts = old_tokens(old, new)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # one and the same where they are tied
        rows = weights[name].float()
        weights[name] = torch.stack([rows[ids].mean(dim=0) for ids in texts]).to(weights[name].dtype)
    model.load_state_dict(weights)
    return model


def old_tokens(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> list[list[int]]:
    """For each token of `new` the tokens of `old` that say the same; all of them for one that says nothing."""
    special = {number: str(token) for number, token in zip(new.all_special_ids, new.all_special_tokens, strict=True)}
    known = old.get_vocab()
    found = []
    for number, piece in enumerate(new.convert_ids_to_tokens(list(range(len(new))))):
        if number in special:
            ids = [known[special[number]]] if special[number] in known else list(range(len(old)))
        elif piece.startswith("<0x"):
            ids = [old.convert_tokens_to_ids(_byte_letter(int(piece[3:5], 16)))]
        else:
            ids = old(piece.replace(SPACE, " "), add_special_tokens=False)["input_ids"]
        found.append(ids)
    return found


def _byte_letter(byte: int) -> str:
    """The letter that byte-level BPE writes a byte as: printable ones stand for themselves, the others follow 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [each for each in range(0x100) if each not in printable].index(byte))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path)
    parser.add_argument("rows", type=Path, nargs="+", help="Parquet files whose column `prompt` has the texts")
    parser.add_argument("--often", type=int, default=2, help="times that a word must be seen to be a piece")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(arguments)
    draft = LlamaForCausalLM.from_pretrained(args.draft, dtype="auto")
    texts = [text for path in args.rows for text in pq.read_table(path, columns=["prompt"])["prompt"].to_pylist()]
    new = train_word_tokenizer(texts, often=args.often, longest=draft.config.max_position_embeddings)
    respell(draft, AutoTokenizer.from_pretrained(args.draft), new).to(draft.dtype).save_pretrained(args.output)
    new.save_pretrained(args.output)
    print(f"{args.output}: {len(new):,} tokens")


if __name__ == "__main__":
    main()
