// The library that parquet.cpp loads. It reads a batch of rows after the other,
// so that a file of any size takes little memory, and writes each value of a
// row as its type says.
#include <arrow/api.h>
#include <arrow/io/file.h>
#include <parquet/arrow/reader.h>
#include <parquet/exception.h>
#include <parquet/file_reader.h>
#include <parquet/schema.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <utility>

#include "echelon/data/sources/parquet.h"

namespace {

using arrow::Array;
using echelon::ParquetRows;

constexpr int64_t kRowsOfBatch = 4096;

// What is wrong with a file; it does not leave the library.
struct Unreadable {
  std::string why;
};

void check(const arrow::Status& status) {
  if (!status.ok()) throw Unreadable{status.message()};
}

void put_json(std::string& line, std::string_view text) {
  line += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      line += '\\';
      line += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr char kDigits[] = "0123456789abcdef";
      line += "\\u00";
      line += kDigits[static_cast<unsigned char>(c) >> 4];
      line += kDigits[c & 15];
    } else {
      line += c;
    }
  }
  line += '"';
}

void put_csv(std::string& line, std::string_view text) {
  line += '"';
  for (const char c : text) {
    line += c;
    if (c == '"') line += c;
  }
  line += '"';
}

template <class Number>
void put_number(std::string& line, Number value) {
  if constexpr (std::is_floating_point_v<Number>) {
    if (!std::isfinite(value)) {
      line += "null";  // neither form has them
      return;
    }
  }
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  line.append(text, end);
}

/// Writes values as one form has them.
class Writer {
 public:
  explicit Writer(ParquetRows form) : json_(form == ParquetRows::json) {}

  void put(std::string& line, const Array& array, int64_t i) const;
  void text(std::string& line, std::string_view value) const {
    json_ ? put_json(line, value) : put_csv(line, value);
  }

 private:
  template <class List>
  void put_list(std::string& line, const Array& array, int64_t i) const {
    const auto& list = static_cast<const List&>(array);
    line += '[';
    const int64_t begin = list.value_offset(i);
    for (int64_t j = begin; j < begin + list.value_length(i); ++j) {
      if (j > begin) line += ',';
      put(line, *list.values(), j);
    }
    line += ']';
  }
  void put_struct(std::string& line, const Array& array, int64_t i) const {
    const auto& all = static_cast<const arrow::StructArray&>(array);
    line += '{';
    for (int f = 0; f < all.num_fields(); ++f) {
      if (f > 0) line += ',';
      put_json(line, all.struct_type()->field(f)->name());
      line += ':';
      put(line, *all.field(f), i);
    }
    line += '}';
  }

  bool json_;
};

template <class Typed>
auto value_of(const Array& array, int64_t i) {
  return static_cast<const Typed&>(array).GetView(i);
}

void Writer::put(std::string& line, const Array& array, int64_t i) const {
  using arrow::Type;
  if (array.IsNull(i)) {
    if (json_) line += "null";
    return;
  }
  switch (array.type_id()) {
    case Type::BOOL:
      line += static_cast<const arrow::BooleanArray&>(array).Value(i)
                  ? (json_ ? "true" : "1")
                  : (json_ ? "false" : "0");
      return;
    case Type::INT8:
      return put_number(line, int{value_of<arrow::Int8Array>(array, i)});
    case Type::INT16:
      return put_number(line, value_of<arrow::Int16Array>(array, i));
    case Type::INT32:
      return put_number(line, value_of<arrow::Int32Array>(array, i));
    case Type::INT64:
      return put_number(line, value_of<arrow::Int64Array>(array, i));
    case Type::UINT8:
      return put_number(line, int{value_of<arrow::UInt8Array>(array, i)});
    case Type::UINT16:
      return put_number(line, value_of<arrow::UInt16Array>(array, i));
    case Type::UINT32:
      return put_number(line, value_of<arrow::UInt32Array>(array, i));
    case Type::UINT64:
      return put_number(line, value_of<arrow::UInt64Array>(array, i));
    case Type::FLOAT:
      return put_number(line, value_of<arrow::FloatArray>(array, i));
    case Type::DOUBLE:
      return put_number(line, value_of<arrow::DoubleArray>(array, i));
    case Type::STRING:
      return text(line, value_of<arrow::StringArray>(array, i));
    case Type::LARGE_STRING:
      return text(line, value_of<arrow::LargeStringArray>(array, i));
    case Type::DICTIONARY: {
      const auto& coded = static_cast<const arrow::DictionaryArray&>(array);
      return put(line, *coded.dictionary(), coded.GetValueIndex(i));
    }
    case Type::LIST:
      if (json_) return put_list<arrow::ListArray>(line, array, i);
      break;
    case Type::LARGE_LIST:
      if (json_) return put_list<arrow::LargeListArray>(line, array, i);
      break;
    case Type::STRUCT:
      if (json_) return put_struct(line, array, i);
      break;
    default:
      break;
  }
  throw Unreadable{
      "values of the type " + array.type()->ToString() + " are not read"};
}

bool is_wanted(
    const std::string& name, const std::vector<std::string>& wanted) {
  return wanted.empty() || std::ranges::count(wanted, name) > 0;
}

// The file's columns of single values, of which a list or a struct has several,
// that belong to the wanted ones.
std::vector<int> leaves_of(
    const parquet::SchemaDescriptor& schema,
    const std::vector<std::string>& wanted) {
  std::vector<int> leaves;
  for (int i = 0; i < schema.num_columns(); ++i) {
    if (is_wanted(schema.Column(i)->path()->ToDotVector().front(), wanted)) {
      leaves.push_back(i);
    }
  }
  if (!leaves.empty()) return leaves;
  std::string names, all;
  for (const auto& name : wanted) {
    names += (names.empty() ? "\"" : ", \"") + name + '"';
  }
  for (int i = 0; i < schema.group_node()->field_count(); ++i) {
    all += (i == 0 ? "" : ", ") + schema.group_node()->field(i)->name();
  }
  throw Unreadable{"has no column " + names + "; there are " + all};
}

template <class T>
T checked(arrow::Result<T> result) {
  check(result.status());
  return std::move(result).ValueUnsafe();
}

void read(
    const std::string& path, ParquetRows form,
    const std::vector<std::string>& wanted,
    const std::function<void(std::string_view)>& row) {
  parquet::arrow::FileReaderBuilder builder;
  check(builder.Open(checked(arrow::io::ReadableFile::Open(path))));
  parquet::ArrowReaderProperties properties;
  properties.set_batch_size(kRowsOfBatch);
  builder.properties(properties);
  const auto reader = checked(builder.Build());
  std::vector<int> groups(static_cast<size_t>(reader->num_row_groups()));
  std::iota(groups.begin(), groups.end(), 0);
  const auto batches = checked(reader->GetRecordBatchReader(
      groups,
      leaves_of(*reader->parquet_reader()->metadata()->schema(), wanted)));

  const auto& names = batches->schema()->fields();
  const Writer writer(form);
  const bool json = form == ParquetRows::json;
  std::string line;
  if (!json) {
    for (const auto& field : names) {
      if (field != names.front()) line += ',';
      writer.text(line, field->name());
    }
    row(line);
  }
  while (const auto batch = checked(batches->Next())) {
    for (int64_t i = 0; i < batch->num_rows(); ++i) {
      line = json ? "{" : "";
      bool first = true;
      for (int column = 0; column < batch->num_columns(); ++column) {
        // An object lacks what is null.
        if (json && batch->column(column)->IsNull(i)) continue;
        if (!std::exchange(first, false)) line += ',';
        if (json) {
          put_json(line, names[static_cast<size_t>(column)]->name());
          line += ':';
        }
        try {
          writer.put(line, *batch->column(column), i);
        } catch (Unreadable& error) {
          error.why = "column \"" + names[static_cast<size_t>(column)]->name() +
                      "\": " + error.why;
          throw;
        }
      }
      if (json) line += '}';
      row(line);
    }
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) std::string
echelon_parquet_read(
    const std::string& path, ParquetRows form,
    const std::vector<std::string>& columns,
    const std::function<void(std::string_view)>& row) {
  try {
    read(path, form, columns, row);
  } catch (const Unreadable& error) {
    return error.why;
  } catch (const parquet::ParquetException& error) {
    return error.what();
  }
  return "";
}
