// The pickle of `.metadata`, from columns and back; and bytes that are none, which must be
// survived.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "crc32.h"
#include "metadata_decoder.h"
#include "metadata_encoder.h"
#include "metadata_reader.h"
#include "support.h"

namespace pyckpt {
namespace {

using namespace test;
using namespace std::string_literals;

uint64_t below(Random& random, uint64_t end) { return draw(random, 0, end - 1); }

MetadataNames make_names() {
  MetadataNames names;
  names.metadata = "dcp\nMetadata\n";
  names.storage_meta = "dcp\nStorageMeta\n";
  names.tensor = "dcp\nTensorStorageMetadata\n";
  names.bytes = "dcp\nBytesStorageMetadata\n";
  names.chunk = "dcp\nChunkStorageMetadata\n";
  names.index = "dcp\nMetadataIndex\n";
  names.properties = "dcp\nTensorProperties\n";
  names.info = "fs\n_StorageInfo\n";
  names.size = "torch\nSize\n";
  names.layout = "torch.serialization\n_get_layout\n";
  names.memory_format = "dcp\n_MEM_FORMAT_ENCODING\n";
  names.dtypes = {{"float32", 4}, {"int8", 1}};
  names.layouts = {"torch.strided", "torch.sparse_coo"};
  return names;
}

const MetadataNames& names() {
  static const MetadataNames made = make_names();
  return made;
}

std::string encode(const Columns& columns, const MetadataExtras& extras) {
  std::string bytes;
  const MetadataSum sum =
      encode_metadata(columns, names(), extras, [&](std::string_view piece) { bytes += piece; });
  EXPECT_EQ(sum.bytes, bytes.size());
  EXPECT_EQ(sum.crc32, crc32(0, bytes.data(), bytes.size()));
  return bytes;
}

std::optional<DecodedMetadata> decode(const std::string& bytes) {
  // On the heap and no longer than it is, so that a sanitizer sees a read beyond.
  const std::vector<std::byte> copy(
      reinterpret_cast<const std::byte*>(bytes.data()),
      reinterpret_cast<const std::byte*>(bytes.data()) + bytes.size());
  return decode_metadata(copy.data(), copy.size(), names());
}

// All that columns say. Files stand by their names.
std::string text(const Columns& columns) {
  std::ostringstream out;
  for (uint32_t key = 0; key < columns.key_count(); ++key) {
    out << columns.name(key) << ":";
    const size_t dims = columns.dims(key);
    const auto numbers = [&](const int64_t* from) {
      for (size_t d = 0; d < dims; ++d) out << " " << from[d];
    };
    if (columns.is_tensor(key)) {
      const Properties& of = columns.properties(columns.properties_of(key));
      out << of.dtype << of.layout << of.requires_grad << int{of.memory_format} << of.pin_memory;
      numbers(columns.size(key));
    }
    for (uint64_t chunk = 0; chunk < columns.items_of(key); ++chunk) {
      if (columns.is_tensor(key)) {
        out << " at";
        numbers(columns.chunk_offsets(key, chunk));
        out << " of";
        numbers(columns.chunk_sizes(key, chunk));
      }
      const uint64_t item = columns.first_item(key) + chunk;
      const ItemPlace place = columns.place(item);
      out << " in " << columns.file_name(place.file) << "," << place.offset << "," << place.length;
      if (place.is_recorded) {
        out << "," << place.payload_offset << "," << place.payload_length << "," << place.crc32;
        if (columns.stride(item) != nullptr) {
          for (const int64_t stride : *columns.stride(item)) out << "/" << stride;
        }
      }
    }
    out << "\n";
  }
  return out.str();
}

std::string text(const MetadataExtras& extras) {
  return extras.planner_data + "|" + extras.checkpoint_id.value_or("-") + "|" +
         extras.save_id.value_or("-") + "|" + extras.version.value_or("-");
}

// {"w": ("w", 3, "w")}, as Python pickles it
const std::string kPaths = "}q\0X\1\0\0\0wq\1(h\1K\3h\1tq\2s"s;

MetadataExtras extras() { return {"N", "a/b", "x", "1.0.0"}; }

void set_place(Columns* columns, uint64_t item, uint32_t file, uint64_t payload) {
  columns->set_place(item, {file, 4096 * item, payload + 1000, true, 512, payload, 0xfedcba98});
}

// A tensor of rows that are cut into `parts`.
void add_rows(Columns* columns, const std::string& name, int64_t parts, uint32_t files) {
  const uint32_t properties = columns->add_properties({"float32", "torch.strided"});
  const int64_t size[] = {3 * parts, 5}, sizes[] = {3, 5};
  columns->add_tensor(name, properties, size, 2);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t offsets[] = {3 * part, 0};
    const uint64_t item = columns->add_chunk(offsets, sizes);
    set_place(columns, item, static_cast<uint32_t>(part) % files, 60);
  }
}

void fill_small(Columns* columns) {
  columns->add_file("__0_x.distcp");
  columns->add_file("nobody's");
  columns->add_file("d/__1_x.distcp");
  add_rows(columns, "w", 1, 1);
  columns->set_stride(columns->item_count() - 1, {1, 3});
  const int64_t size[] = {2, 7, 1, 1}, half[] = {2, 4, 1, 1}, rest[] = {2, 3, 1, 1};
  const int64_t zeros[] = {0, 0, 0, 0}, middle[] = {0, 4, 0, 0}, end[] = {0, 7, 0, 0};
  const int64_t nothing[] = {2, 0, 1, 1};
  columns->add_tensor("uneven", columns->add_properties({"int8", "torch.strided", true, 2, true}),
                      size, 4);
  set_place(columns, columns->add_chunk(middle, rest), 2, 6);
  set_place(columns, columns->add_chunk(zeros, half), 0, 8);
  set_place(columns, columns->add_chunk(end, nothing), 2, 0);
  const uint32_t object = columns->add_object("an object, \xc3\xa4");
  columns->set_place(columns->first_item(object), {2, uint64_t{5} << 40, 3000000000u});
  columns->add_tensor("scalar", 0, nullptr, 0);
  columns->set_place(columns->add_chunk(nullptr, nullptr), {2, 70000, 300});
  const int64_t none[] = {0, 4};
  columns->add_tensor("without chunks", 0, none, 2);
}

TEST(MetadataCodec, RoundTrip) {
  Columns columns;
  fill_small(&columns);
  MetadataExtras said = extras();
  said.planner_data = kPaths;
  said.save_id.reset();
  const std::string bytes = encode(columns, said);
  const auto decoded = decode(bytes);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(text(*decoded->columns), text(columns));
  EXPECT_EQ(text(decoded->extras), text(said));
  EXPECT_EQ(decoded->columns->file_count(), 2u);  // the file that nothing is in is left out
  EXPECT_EQ(encode(*decoded->columns, decoded->extras), bytes);
}

TEST(MetadataCodec, ManyChunksFilesAndFrames) {
  Columns columns;
  for (int file = 0; file < 300; ++file) columns.add_file("__" + std::to_string(file) + "_x");
  for (const int64_t parts : {1, 127, 128, 129, 256, 1000}) {
    add_rows(&columns, "in " + std::to_string(parts), parts, 300);
  }
  const std::string bytes = encode(columns, extras());
  EXPECT_LT(bytes.size(), 110 * columns.item_count());
  EXPECT_GT(bytes.size(), 2 * kFrameMin);
  const auto decoded = decode(bytes);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(text(*decoded->columns), text(columns));
}

TEST(MetadataCodec, Numbers) {
  for (const uint64_t number :
       {uint64_t{0}, uint64_t{255}, uint64_t{256}, uint64_t{65535}, uint64_t{65536},
        uint64_t{INT32_MAX}, uint64_t{1} << 31, uint64_t{UINT32_MAX}, (uint64_t{1} << 39) - 1,
        uint64_t{1} << 39, (uint64_t{1} << 55) - 1, uint64_t{1} << 55, uint64_t{INT64_MAX}}) {
    Columns columns;
    columns.add_file("f");
    columns.add_object("o");
    columns.set_place(0, {0, number, 0});
    const auto decoded = decode(encode(columns, extras()));
    ASSERT_TRUE(decoded) << number;
    EXPECT_EQ(decoded->columns->place(0).offset, number);
    columns.set_place(0, {0, number, uint64_t{INT64_MAX} - number + 1});
    EXPECT_FALSE(decode(encode(columns, extras()))) << number;
  }
}

TEST(MetadataCodec, WithoutPlacesThereIsNothingToWrite) {
  Columns columns;
  columns.add_object("o");
  EXPECT_THROW(encode(columns, extras()), std::invalid_argument);
  Columns other;
  other.add_file("f");
  other.add_tensor("t", other.add_properties({"float33", "torch.strided"}), nullptr, 0);
  EXPECT_THROW(encode(other, extras()), std::invalid_argument);
}

// --- what is not canonical -----------------------------------------------------------------------

void expect_survived(const std::string& bytes, size_t* accepted) {
  const auto decoded = decode(bytes);
  if (!decoded) return;
  ++*accepted;
  // What is accepted is what the encoder would have written, so it means that and nothing else.
  EXPECT_EQ(encode(*decoded->columns, decoded->extras), bytes);
}

TEST(MetadataCodec, EveryTruncation) {
  Columns columns;
  fill_small(&columns);
  MetadataExtras said = extras();
  said.planner_data = kPaths;
  const std::string bytes = encode(columns, said);
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(decode(bytes.substr(0, size)));
  EXPECT_FALSE(decode(bytes + "."));
}

TEST(MetadataCodec, EveryByte) {
  Columns columns;
  fill_small(&columns);
  MetadataExtras said = extras();
  said.planner_data = kPaths;
  const std::string bytes = encode(columns, said);
  size_t accepted = 0;
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      if (static_cast<char>(value) == bytes[at]) continue;
      std::string changed = bytes;
      changed[at] = static_cast<char>(value);
      expect_survived(changed, &accepted);
    }
  }
  EXPECT_GT(accepted, 1000u);  // other names, offsets, checksums
}

TEST(MetadataCodec, BytesTakenOutPutInAndRepeated) {
  Columns columns;
  fill_small(&columns);
  const std::string bytes = encode(columns, extras());
  // The frame's length is made right again, or else nothing would be looked at.
  const size_t frame = 2 + 9 + 1;
  const auto mend = [&](std::string changed) {
    const uint64_t size = changed.size() - frame - 9;
    std::memcpy(&changed[frame + 1], &size, 8);
    return changed;
  };
  ASSERT_EQ(mend(bytes), bytes);
  Random random(11);
  size_t accepted = 0;
  for (int round = 0; round < 30000; ++round) {
    std::string changed = bytes;
    for (uint64_t i = 0; i <= below(random, 3); ++i) {
      const size_t begin = frame + 9 + below(random, changed.size() - frame - 9);
      const size_t size = std::min<size_t>(below(random, 60), changed.size() - begin);
      const std::string piece = changed.substr(begin, size);
      switch (below(random, 3)) {
        case 0:
          changed.erase(begin, size);
          break;
        case 1:
          changed.insert(begin, piece);
          break;
        default:
          changed.insert(frame + 9 + below(random, changed.size() - frame - 9), piece);
      }
    }
    expect_survived(mend(changed), &accepted);
  }
  EXPECT_GT(accepted, 0u);
}

bool is_refused(const Columns& columns) { return !decode(encode(columns, extras())); }

// One tensor, of bytes.
struct One {
  Columns columns;
  uint32_t file = columns.add_file("f");
  explicit One(const std::vector<int64_t>& size, const char* layout = "torch.strided") {
    columns.add_tensor("t", columns.add_properties({"int8", layout}), size.data(), size.size());
  }
  One& chunk(const std::vector<int64_t>& offsets, const std::vector<int64_t>& sizes,
             const ItemPlace& place) {
    columns.set_place(columns.add_chunk(offsets.data(), sizes.data()), place);
    return *this;
  }
};

TEST(MetadataCodec, WhatCannotBeLoadedFrom) {
  const ItemPlace big{0, 0, 1 << 20};
  EXPECT_FALSE(is_refused(One({8}).chunk({0}, {4}, big).chunk({4}, {4}, big).columns));
  EXPECT_TRUE(is_refused(One({8}).chunk({0}, {4}, big).chunk({3}, {4}, big).columns));
  EXPECT_TRUE(is_refused(One({8}).chunk({0}, {4}, big).columns));
  EXPECT_TRUE(is_refused(One({8}).columns));
  EXPECT_TRUE(is_refused(One({}).columns));
  EXPECT_TRUE(is_refused(One({8}).chunk({1}, {8}, big).columns));
  EXPECT_TRUE(is_refused(One({8}).chunk({-1}, {8}, big).columns));
  // The same place twice: DCP has one item there.
  EXPECT_TRUE(is_refused(One({8}).chunk({0}, {8}, big).chunk({0}, {8}, big).columns));
  EXPECT_TRUE(is_refused(One({8}).chunk({0}, {8}, big).chunk({0}, {0}, big).columns));
  EXPECT_TRUE(is_refused(One({}).chunk({}, {}, big).chunk({}, {}, big).columns));
  EXPECT_FALSE(is_refused(One({8}).chunk({8}, {0}, big).chunk({0}, {8}, big).columns));
  // Numbers of other tensors.
  EXPECT_TRUE(is_refused(One({8}).chunk({0}, {8}, {0, 0, 600, true, 500, 7, 0}).columns));
  EXPECT_FALSE(is_refused(One({8}).chunk({0}, {8}, {0, 0, 600, true, 500, 8, 0}).columns));
  EXPECT_FALSE(is_refused(One({8}).chunk({0}, {8}, {0, 0, 600, true, 0, 600, 0}).columns));
  EXPECT_TRUE(is_refused(One({8}).chunk({0}, {8}, {0, 0, 600, true, 593, 8, 0}).columns));
  EXPECT_TRUE(
      is_refused(One({8}).chunk({0}, {8}, {0, 0, 600, true, UINT64_MAX - 1, 8, 0}).columns));
  One strides({8});
  strides.chunk({0}, {8}, {0, 0, 600, true, 500, 8, 0});
  strides.columns.set_stride(0, {1});
  EXPECT_FALSE(is_refused(strides.columns));
  strides.columns.set_stride(0, {1, 1});
  EXPECT_TRUE(is_refused(strides.columns));
  // More than is stored of it, and more than there is memory for.
  const int64_t large = (1 << 20) + 64 * 100;
  EXPECT_FALSE(is_refused(One({large}).chunk({0}, {large}, {0, 0, 100}).columns));
  EXPECT_TRUE(is_refused(One({large + 1}).chunk({0}, {large + 1}, {0, 0, 100}).columns));
  const int64_t huge = int64_t{1} << 62;
  EXPECT_TRUE(is_refused(One({huge, 2}, "torch.sparse_coo").chunk({0, 0}, {huge, 2}, big).columns));
  EXPECT_FALSE(
      is_refused(One({huge, 1}, "torch.sparse_coo").chunk({0, 0}, {huge, 1}, big).columns));
  EXPECT_TRUE(is_refused(One({huge, huge, huge, 0}, "torch.strided").columns));
}

TEST(MetadataCodec, KeysThatAreThereTwice) {
  Columns columns;
  columns.add_file("f");
  for (const char* name : {"a", "b", "a"}) columns.add_object(name);
  EXPECT_TRUE(is_refused(columns));
}

TEST(MetadataCodec, FilesOutside) {
  const auto refused = [](const std::string& name) {
    Columns columns;
    columns.add_file(name);
    columns.add_object("o");
    return is_refused(columns);
  };
  for (const char* name : {"f", "d/f", "./f", "d//f", "..f", "f..", "d/.../f", "\xc3\xa4"}) {
    EXPECT_FALSE(refused(name)) << name;
  }
  for (const std::string& name :
       {""s, "."s, "/"s, "/f"s, ".."s, "../f"s, "d/.."s, "d/../f"s, "./"s, "C:f"s, "d\\f"s, "f\0g"s,
        "\xff"s, "\xed\xa0\x80"s, "\xc0\xaf"s, "\xe2\x82"s, "\xf4\x90\x80\x80"s}) {
    EXPECT_TRUE(refused(name)) << name;
  }
}

TEST(MetadataCodec, ChunksThatTakeTooLongToCompare) {
  // Each overlaps all others in the first dimension, and none in the last.
  One many({1 << 20, 1 << 20, 1 << 20}, "torch.sparse_coo");
  const ItemPlace place{0, 0, 1};
  Random random(5);
  for (int i = 0; i < 20000; ++i) {
    const auto x = static_cast<int64_t>(below(random, 1 << 19));
    const auto y = static_cast<int64_t>(below(random, 1 << 19));
    many.chunk({x, y, i}, {1 << 19, 1 << 19, 1}, place);
  }
  EXPECT_TRUE(is_refused(many.columns));
}

TEST(MetadataCodec, PlannerData) {
  const auto is_plain = [](const std::string& data) {
    const std::vector<uint8_t> copy(data.begin(), data.end());
    return is_plain_planner_data(copy.data(), copy.size());
  };
  EXPECT_TRUE(is_plain("N"));
  EXPECT_TRUE(is_plain("}q\0"s));
  EXPECT_TRUE(is_plain(kPaths));
  EXPECT_TRUE(is_plain("}q\0(X\1\0\0\0aq\1h\1\x85q\2X\1\0\0\0bq\3h\2u"s));
  EXPECT_TRUE(is_plain("}q\0X\0\0\0\0q\1)s"s));
  EXPECT_FALSE(is_plain(""));
  EXPECT_FALSE(is_plain("NN"));
  EXPECT_FALSE(is_plain("N("));
  EXPECT_FALSE(is_plain("N0"));
  EXPECT_FALSE(is_plain("}q\1"s));
  EXPECT_FALSE(is_plain("}q\0h\0)s"s));
  EXPECT_FALSE(is_plain("}q\0h\5)s"s));
  EXPECT_FALSE(is_plain("}q\0X\1\0\0\0aq\1h\1s"s));
  EXPECT_FALSE(is_plain("}q\0X\1\0\0\0aq\1K\1s"s));
  EXPECT_FALSE(is_plain("}q\0X\1\0\0\0aq\1J\xff\xff\xff\xff\x85q\2s"s));
  EXPECT_FALSE(is_plain("}q\0X\1\0\0\0aq\1cos\nsystem\n\x85q\2s"s));
  for (size_t size = 0; size < kPaths.size(); ++size) {
    EXPECT_EQ(is_plain(kPaths.substr(0, size)), size == 3) << size;
  }
  Random random(3);
  const std::string opcodes = "}(us)t\x85\x86\x87NqhXKMJ\x8a\0\0\0\1\2\3a"s;
  size_t accepted = 0;
  for (int round = 0; round < 100000; ++round) {
    std::string data = "}q\0"s;
    for (uint64_t i = below(random, 12); i > 0; --i) {
      static const std::string words[] = {
          "X\1\0\0\0aq\1"s, "h\1", "h\2", "K\1", "\x85q\2"s, ")", "s", "(", "u", "tq\2"};
      data += below(random, 4) == 0 ? std::string(1, opcodes[below(random, opcodes.size())])
                                    : words[below(random, 10)];
    }
    accepted += is_plain(data);
  }
  EXPECT_GT(accepted, 100u);
}

}  // namespace
}  // namespace pyckpt
