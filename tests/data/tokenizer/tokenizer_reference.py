"""Trains small tokenizers on texts of the repository and writes, for each, its
file and what Python's libraries make of many lines.

usage: tokenizer_reference.py FOLDER ROOT

FOLDER gets lines.bin, NAME.json or NAME.model, and of each: NAME.ids, NAME.full
(with special tokens) and NAME.text (decoded). Such a file is a list of records,
each a uint32 count and then that many bytes (lines, text) or int32 (ids).
"""
import glob
import json
import random
import struct
import sys
import time
import unicodedata

import sentencepiece
from tokenizers import (
    AddedToken, Regex, Tokenizer, decoders, models, normalizers,
    pre_tokenizers, processors, trainers)

folder, root = sys.argv[1:]
paths = sorted(
    glob.glob(root + "/doc/*.md") + glob.glob(root + "/echelon/data/*.cpp"))
texts = [open(path, encoding="utf-8").read() for path in paths]

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
# Not one of those that have code of their own.
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+",
    r"\s+(?!\S)", r"\s+"])


def make_lines():
    rng = random.Random(7)
    lines = []
    for text in texts:
        lines += text.splitlines()
        # Several lines at once, with their breaks.
        lines += [text[i:i + 300] for i in range(0, len(text), 300)]
    rng.shuffle(lines)
    lines = lines[:9000]
    # Characters of Unicode 3.2, which is older than any library's tables: what
    # they say of later ones depends on the library's age.
    def is_old(c):
        return unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs", "Co")

    assigned = [chr(c) for c in range(0x110000) if is_old(chr(c))]
    spaces = list(" \t\n\r\v\f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000")
    emoji = list("😀👍🏽👩‍👩‍👧🇫🇷❤️🏳️‍🌈") + ["👩‍🚀", "\u200d", "\ufe0f"]
    words = [
        "It's", "they'LL", "we've", "I'M", "don't", "'ſ", "x'd", "Σίσυφος",
        "İstanbul", "straße", "ﬁne", "e\u0301", "ñ", "12345", "٣٤٥", "²½Ⅷ",
        "日本語", "한국어", "ภาษาไทย", "नमस्ते", "<|endoftext|>", "<s>", "</s>",
        "<mask>", "name", "namely", "▁", "▁▁x", "Ġ", "<0x41>", "__init__",
        "!?", "...", "a.b", "--", "'", "''s"]
    rng = random.Random(7)  # whatever the number of lines was
    for _ in range(6000):
        kinds = [words, words, spaces, emoji, assigned]
        line = ""
        for _ in range(rng.randrange(1, 25)):
            kind = rng.choice(kinds)
            line += "".join(
                rng.choice(kind) for _ in range(rng.choice([1, 1, 1, 2, 5])))
            if rng.random() < 0.5:
                line += " " * rng.choice([1, 1, 1, 2, 3, 8])
        lines.append(line)
    raw = [line.encode() for line in lines]
    known = set("".join(lines)) | {"\ufffd"}
    for _ in range(1500):
        line = bytearray(rng.choice(raw))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(line) + 1)
            if rng.random() < 0.5:
                line[at:at] = bytes(
                    rng.randrange(256) for _ in range(rng.randrange(1, 4)))
            else:
                del line[at:at + 1]
        if all(c in known or is_old(c) for c in line.decode(errors="replace")):
            raw.append(bytes(line))
    return raw + [b"", b" ", b"  ", b"\n", "é".encode()]


def write(name, records):
    with open(folder + "/" + name, "wb") as file:
        for record in records:
            if isinstance(record, bytes):
                file.write(struct.pack("<I", len(record)) + record)
            else:
                file.write(struct.pack(
                    "<%di" % (len(record) + 1), len(record), *record))


raw = make_lines()
lines = [line.decode("utf-8", errors="replace") for line in raw]
write("lines.bin", raw)


def train(model, pre_tokenizer, size=1500, normalizer=None, alphabet=(),
          special=("<|endoftext|>",)):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), show_progress=False,
        initial_alphabet=list(alphabet), limit_alphabet=300)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def done(name, tokenizer):
    tokenizer.save(folder + "/" + name + ".json")
    plain = [tokenizer.encode(line, add_special_tokens=False) for line in lines]
    write(name + ".ids", [one.ids for one in plain])
    write(name + ".full", [tokenizer.encode(line).ids for line in lines])
    write(name + ".text", [
        tokenizer.decode(one.ids, skip_special_tokens=False).encode()
        for one in plain])


def byte_level(split, **options):
    pre = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = train(
        models.BPE(**options), pre,
        alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


gpt2 = train(
    models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False),
    alphabet=pre_tokenizers.ByteLevel.alphabet())
gpt2.decoder = decoders.ByteLevel()
gpt2.post_processor = processors.ByteLevel(trim_offsets=False)
done("gpt2", gpt2)

llama3 = byte_level(LLAMA3, ignore_merges=True)
llama3.add_special_tokens(["<s>", "</s>"])
llama3.post_processor = processors.Sequence([
    processors.ByteLevel(trim_offsets=False),
    processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B",
        special_tokens=[
            (name, llama3.token_to_id(name)) for name in ("<s>", "</s>")])])
done("llama3", llama3)

qwen2 = byte_level(QWEN2)
qwen2.normalizer = normalizers.NFC()
done("qwen2", qwen2)

o200k = byte_level(O200K)
o200k.add_tokens([AddedToken("name", single_word=True, normalized=True)])
o200k.post_processor = processors.RobertaProcessing(
    ("name", o200k.token_to_id("name")), ("<|endoftext|>", 0))
done("o200k", o200k)

bytes_tokens = ["<0x%02X>" % byte for byte in range(256)]
llama2 = train(
    models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
    pre_tokenizers.Metaspace(), alphabet="▁",
    special=["<unk>", "<s>", "</s>"] + bytes_tokens)
# The trainer makes special tokens of them; in the files of models they are in
# the vocabulary alone.
description = json.loads(llama2.to_str())
description["added_tokens"] = [
    dict(one, normalized=False) for one in description["added_tokens"][:3]]
llama2 = Tokenizer.from_str(json.dumps(description))
llama2.decoder = decoders.Sequence([
    decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
    decoders.Strip(" ", 1, 0)])
llama2.pre_tokenizer = pre_tokenizers.Metaspace(
    prepend_scheme="first", split=False)
llama2.post_processor = processors.TemplateProcessing(
    single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
done("llama2_metaspace", llama2)
description = json.loads(llama2.to_str())
description["pre_tokenizer"] = None
description["normalizer"] = {"type": "Sequence", "normalizers": [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
# As older files have it.
description["model"]["merges"] = [
    " ".join(pair) for pair in description["model"]["merges"]]
done("llama2", Tokenizer.from_str(json.dumps(description)))

added = [
    AddedToken("<mask>", lstrip=True, rstrip=True, special=True),
    AddedToken("name", single_word=True, normalized=True),
    AddedToken("...", rstrip=True, normalized=False)]
mixed = train(
    models.BPE(unk_token="<unk>", fuse_unk=False),
    pre_tokenizers.Sequence([
        pre_tokenizers.Whitespace(),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Punctuation()]),
    normalizer=normalizers.Sequence([
        normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip(),
        normalizers.Replace(Regex(r"\s+"), " ")]),
    special=["<unk>", "<s>"])
mixed.add_special_tokens(added[:1])
mixed.add_tokens(added[1:])
done("mixed", mixed)

fused = train(
    models.BPE(unk_token="<unk>", fuse_unk=True),
    pre_tokenizers.Sequence([
        pre_tokenizers.Split("e", "merged_with_previous"),
        pre_tokenizers.Split(Regex(r"[a-c]+"), "merged_with_next"),
        pre_tokenizers.Split(Regex(r"\w+"), "removed", invert=True),
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.Digits(individual_digits=False)]),
    normalizer=normalizers.Sequence([normalizers.NFD()]),
    special=["<unk>"])
fused.add_special_tokens(added[:1])
done("fused", fused)

spaced = train(
    models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
    pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Metaspace(prepend_scheme="always", split=True)]),
    normalizer=normalizers.Sequence([normalizers.NFKD()]),
    special=["<unk>"])
spaced.decoder = decoders.Metaspace(prepend_scheme="always")
done("spaced", spaced)

prefixed = train(
    models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=True),
    alphabet=pre_tokenizers.ByteLevel.alphabet())
prefixed.decoder = decoders.ByteLevel()
done("prefixed", prefixed)

corpus = folder + "/corpus.txt"
open(corpus, "w", encoding="utf-8").write("\n".join(texts))
for kind in ("bpe", "unigram"):
    sentencepiece.SentencePieceTrainer.train(
        input=corpus, model_prefix=folder + "/sp_" + kind, vocab_size=1200,
        model_type=kind, byte_fallback=True, hard_vocab_limit=False,
        num_threads=1, minloglevel=2)
    processor = sentencepiece.SentencePieceProcessor(
        model_file=folder + "/sp_" + kind + ".model")
    ids = [processor.encode(line) for line in lines]
    write("sp_%s.ids" % kind, ids)
    write("sp_%s.full" % kind, [
        processor.encode(line, add_bos=True) for line in lines])
    write("sp_%s.text" % kind, [
        processor.decode(one).encode() for one in ids])

# The same work for the comparison of speed, the best of three runs.
write("speed.bin", [text.encode() for text in texts])
for name in ("gpt2", "llama3", "llama2"):
    tokenizer = Tokenizer.from_file(folder + "/" + name + ".json")
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for text in texts:
            tokenizer.encode(text, add_special_tokens=False)
        best = min(best, time.perf_counter() - begin)
    print("%s %.6f" % (name, best))
