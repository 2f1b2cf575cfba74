// What a checkpoint consists of, in columns: what a `.metadata` file says of its tensors and
// objects, without a Python object for each of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "mutex.h"
#include "thread_annotations.h"

namespace pyckpt {

// The fields of DCP's TensorProperties.
struct Properties {
  std::string dtype;   // its name in torch: "float32"
  std::string layout;  // "torch.strided"
  bool requires_grad = false;
  uint8_t memory_format = 0;  // DCP's number: 0 contiguous, 1 channels last, 2 preserve
  bool pin_memory = false;

  bool operator==(const Properties& other) const;
};

// Where an item lies.
struct ItemPlace {
  uint32_t file = 0;  // its number among the files
  uint64_t offset = 0;
  uint64_t length = 0;
  // Of an item that pyckpt wrote, and whose plan told its true dtype and shape (docs/format.md).
  bool is_recorded = false;
  uint64_t payload_offset = 0;
  uint64_t payload_length = 0;
  uint32_t crc32 = 0;
};

// A part of a tensor that a stored chunk and a wanted one have in common.
struct Overlap {
  uint64_t item;                   // the stored chunk
  std::vector<int64_t> in_stored;  // where the part begins in it
  std::vector<int64_t> in_wanted;  // where it begins in the wanted one
  std::vector<int64_t> size;
};

// A table of keys. A key is an object, which is one item, or a tensor, which is one item for each
// of its chunks. The items of a key follow each other: a chunk's number is its place among them.
//
// It is made key by key, each with all of its chunks. Afterwards places may be set in any order, by
// one thread. What is const may be called from several threads.
class Columns {
 public:
  Columns() = default;
  Columns(const Columns&) = delete;
  Columns& operator=(const Columns&) = delete;

  static constexpr uint32_t kNone = UINT32_MAX;

  // --- making ---

  void reserve(size_t keys, size_t items, size_t name_bytes);
  // Return the number of the file, of the properties (the same for equal ones), of the key.
  uint32_t add_file(std::string_view name);
  uint32_t add_properties(const Properties& properties);
  uint32_t add_object(std::string_view name);
  uint32_t add_tensor(std::string_view name, uint32_t properties, const int64_t* size, size_t dims);
  // Of the tensor that was added last. `dims` numbers each. Returns the item.
  uint64_t add_chunk(const int64_t* offsets, const int64_t* sizes);

  void set_place(uint64_t item, const ItemPlace& place);
  // Of the payload, in elements, where that is not in row-major order; none where it is.
  void set_stride(uint64_t item, std::vector<int64_t> stride);
  void set_file_name(uint32_t file, std::string name);

  // --- looking ---

  size_t key_count() const { return keys_.size(); }
  uint64_t item_count() const { return offset_.size(); }
  size_t file_count() const { return files_.size(); }

  // kNone where there is no key of that name; the first of several of one name. The first call
  // makes an index.
  uint32_t find(std::string_view name) const;
  std::string_view name(uint32_t key) const;
  bool is_tensor(uint32_t key) const { return keys_[key].properties != kNone; }
  size_t dims(uint32_t key) const { return keys_[key].dims; }
  const int64_t* size(uint32_t key) const { return numbers_.data() + keys_[key].numbers; }
  uint32_t properties_of(uint32_t key) const { return keys_[key].properties; }
  const Properties& properties(uint32_t number) const { return properties_[number]; }
  size_t properties_count() const { return properties_.size(); }
  uint64_t first_item(uint32_t key) const { return keys_[key].first_item; }
  uint64_t items_of(uint32_t key) const { return keys_[key].items; }
  const int64_t* chunk_offsets(uint32_t key, uint64_t chunk) const;
  const int64_t* chunk_sizes(uint32_t key, uint64_t chunk) const;

  ItemPlace place(uint64_t item) const;
  const std::vector<int64_t>* stride(uint64_t item) const;  // nullptr: row-major
  const std::string& file_name(uint32_t file) const { return files_[file]; }
  // The least bytes that each file must have.
  std::vector<uint64_t> file_sizes() const;

  // The chunk that begins at these offsets; nothing where there is none. `hint` is looked at first.
  std::optional<uint64_t> find_chunk(uint32_t key, const int64_t* offsets,
                                     uint64_t hint = UINT64_MAX) const;
  // What stored chunks have of a box within the tensor, in the order of the chunks; parts of no
  // elements are left out. Takes time in proportion to what it returns and to the logarithm of the
  // number of chunks, where the chunks are cut along one dimension; else also to the number of
  // those that have a part of the box's stretch of the best dimension.
  std::vector<Overlap> overlaps(uint32_t key, const int64_t* offsets, const int64_t* sizes) const;

 private:
  struct Key {
    uint64_t name;  // where it begins in names_
    uint32_t name_size;
    uint32_t properties;  // kNone for an object
    uint32_t dims;
    uint64_t numbers;  // where its size begins in numbers_; each chunk's offsets and sizes follow
    uint64_t first_item;
    uint64_t items;
  };
  struct NamedKey {
    size_t hash;
    uint32_t key;
  };
  // The chunks of a key in the order of where they begin in one dimension.
  struct ChunkIndex {
    size_t dimension = 0;
    std::vector<uint32_t> chunks;
    std::vector<int64_t> ends;  // the furthest end of a chunk up to each
  };

  uint32_t add_key(std::string_view name, uint32_t properties, size_t dims);
  uint64_t add_item();
  const ChunkIndex& chunk_index(uint32_t key) const;

  std::vector<Key> keys_;
  std::string names_;
  std::vector<Properties> properties_;
  std::vector<int64_t> numbers_;
  std::vector<std::string> files_;
  // Of the items:
  std::vector<uint64_t> offset_;
  std::vector<uint64_t> length_;
  std::vector<uint64_t> payload_offset_;  // all ones: not recorded
  std::vector<uint64_t> payload_length_;
  std::vector<uint32_t> crc32_;
  std::vector<uint32_t> file_;
  std::unordered_map<uint64_t, std::vector<int64_t>> strides_;

  // Made when they are first asked for.
  mutable Mutex index_mutex_;
  // In the order of hashes, then of names: whoever chose the names, a look-up takes few steps.
  mutable std::vector<NamedKey> by_name_ GUARDED_BY(index_mutex_);
  // The entries stay where they are.
  mutable std::unordered_map<uint32_t, ChunkIndex> by_offset_ GUARDED_BY(index_mutex_);
};

}  // namespace pyckpt
