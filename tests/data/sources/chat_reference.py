"""Writes tokenizers of conversations, and what transformers makes of some.

usage: chat_reference.py FOLDER ROOT

FOLDER gets chat.jsonl, a conversation on each line, and of each template
NAME.json, a tokenizer with its tokens, and NAME.jsonl: the ids of each
conversation and which of them the assistant wrote.
"""
import glob
import json
import sys

from tokenizers import (
    Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers)
from transformers import PreTrainedTokenizerFast

folder, root = sys.argv[1:]

# Llama 3's, whose digits Qwen's takes one by one.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# As Qwen and Meta publish them; `generation` marks what is trained.
TEMPLATES = {
    "chatml": """
{%- for message in messages -%}
  {{- '<|im_start|>' + message['role'] + '\n' -}}
  {%- if message['role'] == 'assistant' -%}
    {%- generation -%}{{- message['content'] + '<|im_end|>' -}}
    {%- endgeneration -%}
  {%- else -%}
    {{- message['content'] + '<|im_end|>' -}}
  {%- endif -%}
  {{- '\n' -}}
{%- endfor -%}""",
    "llama3": """
{%- for message in messages -%}
  {%- set header = '<|start_header_id|>' + message['role'] +
      '<|end_header_id|>\n\n' -%}
  {{- bos_token + header if loop.index0 == 0 else header -}}
  {%- if message['role'] == 'assistant' -%}
    {%- generation -%}{{- message['content'] | trim + '<|eot_id|>' -}}
    {%- endgeneration -%}
  {%- else -%}
    {{- message['content'] | trim + '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}""",
}
SPECIALS = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": [
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
        "<|end_header_id|>", "<|eot_id|>"],
}

ANSWERS = [
    "Yes.", " It's 1234567 km, and back: 7 days!", "日本語で答えます。",
    "x = [1, 2]\n\nfor i in x:\n    print(i)\n", "naïve café 👩‍👩‍👧 ",
    "It ends with <|im_end|> or <|eot_id|>.", "",
    "\u3000\u00a0wide blanks\u2003\x85",
]
CHATS = []
for i, answer in enumerate(ANSWERS):
    other = ANSWERS[(i + 3) % len(ANSWERS)]
    chat = [("user", "How far is it?" + other), ("assistant", answer)]
    if i % 2:
        chat.insert(0, ("system", "Answer briefly. "))
    if i % 3 == 0:
        chat += [("tool", "{\"km\": 3}"), ("assistant", other)]
    CHATS.append([{"role": r, "content": c} for r, c in chat])

with open(folder + "/chat.jsonl", "w", encoding="utf-8") as file:
    for chat in CHATS:
        file.write(json.dumps({"messages": chat}) + "\n")

texts = [open(p, encoding="utf-8").read() for p in glob.glob(root + "/doc/*.md")]
for name, template in TEMPLATES.items():
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    words = WORDS if name == "llama3" else WORDS.replace("{1,3}", "")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=1500, special_tokens=SPECIALS[name], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    begin = SPECIALS[name][0]
    if name == "llama3":
        # A text begins with it; a template writes it itself.
        tokenizer.post_processor = processors.TemplateProcessing(
            single=begin + " $A", pair=begin + " $A $B",
            special_tokens=[(begin, 0)])
    tokenizer.save(folder + "/" + name + ".json")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin)
    with open(folder + "/" + name + ".jsonl", "w", encoding="utf-8") as file:
        for chat in CHATS:
            one = fast.apply_chat_template(
                chat, chat_template=template, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True)
            file.write(json.dumps({
                "tokens": one["input_ids"],
                "loss_mask": one["assistant_masks"]}) + "\n")
