"""Writes the same rows as Parquet and as text: parquet_reference.py FOLDER.

lines.jsonl and lines.parquet: texts with quotes, control characters, other scripts and an
empty one. chats.*: conversations, in lists of structs. tokens.*: ids with a mask. mixed.parquet:
texts and conversations, each null where the other is. table.csv and table.parquet: numbers of
several types. Row groups are small, and each file has another compression."""
import csv
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

folder = Path(sys.argv[1])

texts = ['plain', 'a "quote", a \\ and a comma', 'two\nlines\tand a \x01', 'größer, 日本語 🙂', '']
texts += [f"document {i} " * (i % 7) for i in range(5000)]
chats = [[{"role": "user", "content": f"{i} + {i}?"},
          {"role": "assistant", "content": f'"{2 * i}"'}] for i in range(40)]
ids = [list(range(i % 9)) for i in range(60)]


def write(name, columns, **options):
    table = pa.table(columns)
    pq.write_table(table, folder / f"{name}.parquet", **options)
    return table


def write_lines(name, rows):
    with open(folder / f"{name}.jsonl", "w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


write("lines", {"id": list(range(len(texts))), "text": texts,
                "other": [{"a": [1.5, 2]}] * len(texts)},
      row_group_size=700, compression="snappy")
write_lines("lines", [{"text": text} for text in texts])

write("coded", {"text": pa.array(texts).dictionary_encode()}, compression="gzip")
write("large", {"text": pa.array(texts, pa.large_string())}, compression="none")

write("chats", {"messages": chats}, row_group_size=7, compression="zstd")
write_lines("chats", [{"messages": chat} for chat in chats])

write("tokens", {"tokens": pa.array(ids, pa.list_(pa.int32())),
                 "loss_mask": pa.array([[i % 2 for i in one] for one in ids],
                                       pa.large_list(pa.uint8()))}, compression="lz4")
write_lines("tokens", [{"tokens": one, "loss_mask": [i % 2 for i in one]} for one in ids])

write("mixed", {"text": ["a text", None], "messages": [None, chats[0]]})
write_lines("mixed", [{"text": "a text"}, {"messages": chats[0]}])

rows = [(i / 7, i * i, i % 3 == 0, -i, i % 5) for i in range(3000)]
names = ["x", "y, squared", "flag", "short", "target"]
kinds = [pa.float64(), pa.int64(), pa.bool_(), pa.int8(), pa.uint32()]
rows = [(x, y, flag, short % 100, target) for x, y, flag, short, target in rows]
write("table", {name: pa.array(column, kind)
                for name, kind, column in zip(names, kinds, zip(*rows))}, row_group_size=999)
with open(folder / "table.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(names)
    writer.writerows([[repr(x), y, int(flag), short, target]
                      for x, y, flag, short, target in rows])

write("nulls", {"x": [1.0, None], "target": [0, 1]})
write("decimals", {"x": pa.array([1, 2], pa.decimal128(5, 2)), "target": [0, 1]})
write("lists", {"x": [[1.0], [2.0]], "target": [0, 1]})
