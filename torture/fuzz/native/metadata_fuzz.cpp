// `.metadata`: any bytes, and bytes that were made of columns and then damaged. What is decoded
// encodes to the same bytes, and all that can be asked of its columns has an answer.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "columns.h"
#include "fuzz.h"
#include "metadata_decoder.h"
#include "metadata_encoder.h"

namespace pyckpt {
namespace {

MetadataNames make_names() {
  const std::string dcp = "torch.distributed.checkpoint.metadata\n";
  MetadataNames names;
  names.metadata = dcp + "Metadata\n";
  names.storage_meta = dcp + "StorageMeta\n";
  names.tensor = dcp + "TensorStorageMetadata\n";
  names.bytes = dcp + "BytesStorageMetadata\n";
  names.chunk = dcp + "ChunkStorageMetadata\n";
  names.index = dcp + "MetadataIndex\n";
  names.properties = dcp + "TensorProperties\n";
  names.info = "torch.distributed.checkpoint.filesystem\n_StorageInfo\n";
  names.size = "torch\nSize\n";
  names.layout = "torch.serialization\n_get_layout\n";
  names.memory_format = dcp + "_MEM_FORMAT_ENCODING\n";
  names.dtypes = {{"float32", 4}, {"bfloat16", 2}, {"int64", 8}, {"int8", 1}};
  names.layouts = {"torch.strided", "torch.sparse_coo"};
  return names;
}

const MetadataNames& names() {
  static const MetadataNames made = make_names();
  return made;
}

std::string encode(const Columns& columns, const MetadataExtras& extras) {
  std::string bytes;
  encode_metadata(columns, names(), extras, [&](std::string_view piece) { bytes += piece; });
  return bytes;
}

// Small enough to look at each element's chunks.
constexpr uint64_t kElements = 4096;

void ask(const Columns& columns) {
  for (uint32_t key = 0; key < columns.key_count(); ++key) {
    REQUIRE(columns.find(columns.name(key)) != Columns::kNone);
    for (uint64_t chunk = 0; chunk < columns.items_of(key); ++chunk) {
      const uint64_t item = columns.first_item(key) + chunk;
      const ItemPlace place = columns.place(item);
      REQUIRE(place.file < columns.file_count());
      REQUIRE(place.offset + place.length <= static_cast<uint64_t>(INT64_MAX));
      REQUIRE(!place.is_recorded || place.payload_offset + place.payload_length <= place.length);
      columns.stride(item);
      if (columns.is_tensor(key)) {
        REQUIRE(columns.find_chunk(key, columns.chunk_offsets(key, chunk)).has_value());
      }
    }
    if (!columns.is_tensor(key)) continue;
    const size_t dims = columns.dims(key);
    const int64_t* const size = columns.size(key);
    std::vector<int64_t> from(dims), extent(size, size + dims);
    uint64_t elements = 1;
    bool is_small = true;
    for (const int64_t one : extent) {
      REQUIRE(one >= 0);
      if (one != 0 && elements > kElements / static_cast<uint64_t>(one)) is_small = false;
      elements *= static_cast<uint64_t>(one);
    }
    for (int round = 0; round < 2; ++round) {
      uint64_t covered = 0;
      for (const Overlap& part : columns.overlaps(key, from.data(), extent.data())) {
        uint64_t count = 1;
        for (const int64_t one : part.size) {
          REQUIRE(one > 0);
          count *= static_cast<uint64_t>(one);
        }
        covered += count;
      }
      // The chunks are the tensor: each element of the box comes from one, or from chunks that are
      // there twice.
      if (is_small && round == 0) REQUIRE(covered >= elements);
      for (size_t d = 0; d < dims; ++d) {
        from[d] = extent[d] / 3;
        extent[d] -= from[d];
      }
    }
  }
  columns.file_sizes();
}

void decode(std::string_view bytes) {
  const auto copy = fuzz::copied(bytes);
  const auto decoded = decode_metadata(copy.data(), copy.size(), names());
  if (!decoded) return;
  REQUIRE(encode(*decoded->columns, decoded->extras) == bytes);
  ask(*decoded->columns);
}

// Whole tensors, or tensors in slices along a dimension; and objects.
std::string make(fuzz::Input* input) {
  Columns columns;
  const uint32_t files = 1 + static_cast<uint32_t>(input->below(3));
  for (uint32_t i = 0; i < files; ++i) columns.add_file("__" + std::to_string(i) + "_0.distcp");
  const char* const dtypes[] = {"float32", "bfloat16", "int64", "int8"};
  uint64_t offset = 0;
  const uint64_t keys = input->below(12);
  for (uint64_t i = 0; i < keys; ++i) {
    std::string name = "k" + std::to_string(i);
    if (input->below(4) == 0) name += std::string(input->byte(), 'x');
    const auto put = [&](uint64_t item, uint64_t length) {
      ItemPlace place;
      place.file = static_cast<uint32_t>(input->below(files));
      place.offset = offset;
      place.length = length + 1000;
      place.is_recorded = input->below(2) != 0;
      if (place.is_recorded) {
        place.payload_offset = 700;
        place.payload_length = length;
        place.crc32 = input->byte() * 0x01010101U;
      }
      offset += place.length;
      columns.set_place(item, place);
    };
    if (input->below(4) == 0) {
      columns.add_object(name);
      put(columns.item_count() - 1, input->byte());
      continue;
    }
    Properties properties;
    const uint64_t dtype = input->below(4);
    properties.dtype = dtypes[dtype];
    properties.layout = "torch.strided";
    properties.requires_grad = input->below(2) != 0;
    const size_t dims = input->below(5);
    std::vector<int64_t> size(dims);
    for (int64_t& one : size) one = static_cast<int64_t>(input->below(6));
    columns.add_tensor(name, columns.add_properties(properties), size.data(), dims);
    const size_t along = dims == 0 ? 0 : input->below(dims);
    const int64_t step =
        dims == 0 || size[along] == 0 ? 1 : 1 + static_cast<int64_t>(input->below(6));
    std::vector<int64_t> from(dims), extent = size;
    int64_t at = 0;
    do {
      if (dims != 0) {
        from[along] = at;
        extent[along] = std::min(step, size[along] - at);
      }
      uint64_t elements = 1;
      for (const int64_t one : extent) elements *= static_cast<uint64_t>(one);
      put(columns.add_chunk(from.data(), extent.data()), elements * 8);
      at += step;
    } while (dims != 0 && at < size[along]);
  }
  MetadataExtras extras;
  extras.planner_data = input->below(2) ? "N" : "}";
  if (input->below(2)) extras.save_id = "save";
  if (input->below(2)) extras.version = "1";
  return encode(columns, extras);
}

}  // namespace
}  // namespace pyckpt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pyckpt;
  if (size != 0 && data[0] == 0x80) {  // what a pickle begins with
    decode({reinterpret_cast<const char*>(data), size});
    return 0;
  }
  fuzz::Input input(data, size);
  std::string bytes = make(&input);
  decode(bytes);
  const uint64_t changes = input.below(8);
  for (uint64_t i = 0; i < changes && !bytes.empty(); ++i) {
    const size_t at = (input.byte() | static_cast<size_t>(input.byte()) << 8) % bytes.size();
    switch (input.below(4)) {
      case 0:
        bytes[at] = static_cast<char>(input.byte());
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << input.below(8)));
        break;
      case 2:
        bytes.erase(at, 1 + input.below(16));
        break;
      default:
        bytes.insert(at, bytes.substr(input.byte() % bytes.size(), input.below(32)));
    }
  }
  decode(bytes);
  return 0;
}
