"""Small tokenizers with the components of published tokenizers."""

from functools import cache

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the user says hello to the assistant, who says hello",
    "  def f(x):\n    return x + 12345\n\n",
    "naïve 東京",
] * 9
# Published patterns of pre-tokenizers.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special(*contents: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(content, special=True, normalized=False, **flags) for content in contents]


def ordinary(*contents: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(content, **{"special": False, "normalized": False, **flags}) for content in contents]


CHATML = special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
OVERLAPPING = special("<a>", "<a><b>", "b><", "<|im", "<|im_start|>", "|>", "\n\n", "\n\n\n", " x ", "é", "東")


def train_backend(pre_tokenizer, added, *, normalizer=None, **options) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(**options))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(added)
    return backend


def byte_level(*patterns: str, prefix: bool = False) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not patterns)
    return pre_tokenizers.Sequence([*splits, last])


def sentencepiece(added, *, normalizer=None, pre_tokenizer=None, dropout=None) -> tokenizers.Tokenizer:
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l"), ("▁", "▁"), ("\n", "\n"), ("1", "2")]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁\nabcdefghijklmnopqrstuvwxyz<>|12345é"]
    vocab = {piece: index for index, piece in enumerate([*pieces, *("".join(merge) for merge in merges)])}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True, dropout=dropout)
    backend = tokenizers.Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.add_tokens(added)
    return backend


def legacy_llama() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def smollm() -> tokenizers.Tokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return train_backend(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]), CHATML)


def qwen() -> tokenizers.Tokenizer:
    added = [*CHATML, *ordinary("<tool_call>", "</tool_call>", "<think>", "</think>", "<|fim_prefix|>")]
    return train_backend(byte_level(QWEN), added, normalizer=normalizers.NFC())


def llama_3() -> tokenizers.Tokenizer:
    reserved = [f"<|reserved_special_token_{index}|>" for index in range(12)]
    backend = train_backend(
        byte_level(LLAMA), special("<|begin_of_text|>", "<|eot_id|>", *reserved), ignore_merges=True
    )
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        special_tokens=[("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))],
    )
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def deepseek() -> tokenizers.Tokenizer:
    added = [
        *special("<｜begin▁of▁sentence｜>", *(f"<｜place▁holder▁no▁{index}｜>" for index in range(12))),
        *ordinary("<｜User｜>", "<｜fim▁hole｜>", "<think>", "</think>", normalized=True),
    ]
    patterns = (r"\p{N}{1,3}", r"[一-龥\u3040-ゟ\u30a0-ヿ]+", DEEPSEEK)
    return train_backend(byte_level(*patterns), added, normalizer=normalizers.Sequence([]))


def minimax() -> tokenizers.Tokenizer:
    added = special("]~!b[", "]~b]", "[e~[", "]!d~[", "<minimax:tool_call>", "<think>")
    return train_backend(byte_level(LLAMA), added)


def gemma() -> tokenizers.Tokenizer:
    runs = ["\n" * length for length in range(2, 9)] + ["▁" * length for length in range(2, 9)]
    added = [*special("<bos>", "<start_of_turn>", "<end_of_turn>"), *ordinary(*runs, "<table>", "</table>")]
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    return sentencepiece(added, normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=split)


def normalized_tokens() -> tokenizers.Tokenizer:
    added = [
        *CHATML,
        *ordinary("HeLLo", "user", normalized=True),
        *ordinary("<mask>", normalized=True, lstrip=True, rstrip=True),
        *ordinary("ab", normalized=True, single_word=True),
        *ordinary("x<|im", "a>", normalized=True),
    ]
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return train_backend(byte_level(), added, normalizer=normalizer)


def metaspace(scheme: str, *, split: bool = True) -> tokenizers.Tokenizer:
    return sentencepiece(CHATML, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split))


BY_SEGMENT = {
    "SmolLM2": smollm,
    "Qwen": qwen,
    "Llama 3": llama_3,
    "DeepSeek": deepseek,
    "MiniMax": minimax,
    "Gemma": gemma,
    "GPT-2": lambda: train_backend(byte_level(), CHATML),
    "prefix space": lambda: train_backend(byte_level(prefix=True), CHATML),
    "Llama 2, legacy": lambda: sentencepiece(special("<s>", "</s>"), normalizer=legacy_llama()),
    "Metaspace always": lambda: metaspace("always"),
    "Metaspace always, unsplit": lambda: metaspace("always", split=False),
    "Metaspace never": lambda: metaspace("never"),
    "overlapping tokens": lambda: train_backend(byte_level(QWEN), OVERLAPPING, normalizer=normalizers.NFC()),
    "normalized tokens": normalized_tokens,
}
AS_A_WHOLE = {
    "Metaspace first": lambda: metaspace("first"),
    "Metaspace first, unsplit": lambda: metaspace("first", split=False),
    "lstrip": lambda: train_backend(byte_level(), [*CHATML, *special("<mask>", lstrip=True)]),
    "rstrip": lambda: sentencepiece([*special("<s>"), *special("<|user|>", rstrip=True)], normalizer=legacy_llama()),
    "single word": lambda: train_backend(byte_level(), [*CHATML, *ordinary("yes", single_word=True)]),
    "no added tokens": lambda: train_backend(byte_level(), []),
    "only normalized tokens": lambda: train_backend(byte_level(), ordinary("<a>", normalized=True)),
    "dropout": lambda: sentencepiece(CHATML, dropout=0.1),
    "unigram": lambda: backend_with_tokens(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    "unknown normalizer": lambda: train_backend(byte_level(), CHATML, normalizer=normalizers.Strip()),
    "unknown pre-tokenizer": lambda: train_backend(pre_tokenizers.UnicodeScripts(), CHATML),
    "written in Python": lambda: train_backend(pre_tokenizers.PreTokenizer.custom(PythonPreTokenizer()), CHATML),
}


class PythonPreTokenizer:
    def pre_tokenize(self, text):
        text.split(lambda _, piece: [piece])


def backend_with_tokens(model: models.Model) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.add_tokens(CHATML)
    return backend


@cache
def backend_of(name: str) -> tokenizers.Tokenizer:
    return {**BY_SEGMENT, **AS_A_WHOLE}[name]()
