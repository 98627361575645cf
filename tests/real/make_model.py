"""Makes a tiny Llama with random weights and a tokenizer of its own: `python make_model.py FOLDER`, in vLLM's venv."""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CORPUS = ["prefill reads the prompt and decode writes the answer", "one token after the other", "a b c d e f g"]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}<assistant>"
START, END, PAD = "<s>", "</s>", "<pad>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text can be encoded, and every token is a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[START, END, PAD], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=END, pad_token=PAD)
    fast.chat_template = TEMPLATE
    return fast


def make_model(vocabulary: int) -> LlamaForCausalLM:
    """Two layers; weights spread widely, or greedy decoding would give one token for ever."""
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main(folder: str) -> None:
    """Write both into the folder."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model(len(tokenizer)).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
