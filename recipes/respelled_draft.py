"""The sample draft, taught another tokenizer: its layers stay, and a new token begins as it reads in the old one."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from recipes.word_tokenizer import SPACE


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
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.stack([weights[name][ids].mean(dim=0) for ids in texts])
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
