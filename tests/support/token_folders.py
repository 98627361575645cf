"""Folders of small models, made here: tokenizers of every kind of decoder, and a chat template."""

import functools
import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "pack my box with five dozen liquor jugs; how vexingly quick daft zebras jump!",
    "hello world, hello tokens: naïve café, straße, 世界 你好 こんにちは, 😀 👩‍👩‍👧 🇫🇷",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
SPECIAL = ["<s>", "</s>", "<pad>"]


def byte_level():
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it; puts `<s>` before a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def byte_fallback(*, strip=True):
    """SentencePiece BPE with single bytes for what it lacks, as Llama 2 has it."""
    vocabulary = {token: at for at, token in enumerate(["<unk>", *SPECIAL])}
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    for text in ["▁", *"abcdefghijklmnopqrstuvwxyzé,!:", "th", "the", "▁the", "▁h", "he", "ll", "▁w", "世"]:
        vocabulary.setdefault(text, len(vocabulary))
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "h"), ("h", "e"), ("l", "l"), ("▁", "w")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    made.add_special_tokens(SPECIAL)
    return made


def word_piece():
    """WordPiece, as BERT has it: words are joined by spaces, `##` continues one."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


def metaspace():
    """Unigram with Metaspace, as T5 has it."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def words():
    """Whole words and no decoder at all: they are joined by spaces."""
    names = ["<unk>", *SPECIAL, *sorted({word for text in CORPUS for word in text.split()})]
    made = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(SPECIAL)
    return made


def odd():
    """Bytes of characters under a decoder that nobody knows: put together by the library alone."""
    made = byte_fallback()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("#", 1, 0)]
    )
    return made


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "gemma": functools.partial(byte_fallback, strip=False),
    "word_piece": word_piece,
    "metaspace": metaspace,
    "words": words,
    "odd": odd,
}


@functools.cache
def library(kind):
    """The tokenizers library's own object."""
    return KINDS[kind]()


def write_folder(folder, kind="byte_level", *, template=TEMPLATE, eos=None, config=None):
    """A model's folder; `</s>` ends an answer, and whatever else `eos` names by id."""
    folder.mkdir(parents=True, exist_ok=True)
    library(kind).save(str(folder / "tokenizer.json"))
    told = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(told | (config or {})))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder
