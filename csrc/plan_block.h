// What one rank wants to write, as it sends it to the coordinator: DCP's WriteItems in a block of
// bytes.
//
// The block begins with a table of keys: names, shapes, properties, and the paths by which a key is
// found in the state dict. It is the same, byte for byte, on ranks that hold parts of the same
// tensors, and is looked into only once then. The items follow, each a key and what part of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "columns.h"
#include "packed.h"

namespace pyckpt {

enum class PlanKind : uint8_t {
  kPathOnly,  // a key that the rank has nothing of
  kObject,    // DCP's BYTE_IO
  kTensor,    // a tensor that one rank writes whole
  kShard,
};

struct PlanProperties {
  Properties properties;
  uint64_t element_size = 0;  // bytes, as DCP counts them
};

// One entry of the path to a key. The entries joined with dots are the key's name.
struct PathPart {
  uint32_t size;   // bytes of the name
  bool is_number;  // of an element of a list
};

// The most dimensions of a tensor that can be packed; torch has no more.
constexpr size_t kPlanDims = 64;

class KeyTable {
 public:
  // Throws std::invalid_argument for bytes that are no table.
  explicit KeyTable(std::string_view packed);

  size_t size() const { return keys_.size(); }
  std::string_view name(uint32_t key) const {
    return std::string_view(names_).substr(keys_[key].name, keys_[key].name_size);
  }
  PlanKind kind(uint32_t key) const { return keys_[key].kind; }
  bool is_tensor(uint32_t key) const { return kind(key) >= PlanKind::kTensor; }
  // No parts: the name is all of the path, and nothing says so.
  size_t part_count(uint32_t key) const { return keys_[key].parts; }
  const PathPart* parts(uint32_t key) const { return parts_.data() + keys_[key].first_part; }
  size_t dims(uint32_t key) const { return keys_[key].dims; }
  const int64_t* shape(uint32_t key) const { return numbers_.data() + keys_[key].numbers; }
  const PlanProperties& properties(uint32_t key) const {
    return properties_[keys_[key].properties];
  }
  // Bytes of the tensor as a whole, by which ranks' loads are balanced; 1 where it has none.
  uint64_t weight(uint32_t key) const { return keys_[key].weight; }
  // About what it takes.
  size_t memory_bytes() const {
    return keys_.capacity() * sizeof(Key) + names_.capacity() +
           parts_.capacity() * sizeof(PathPart) + numbers_.capacity() * sizeof(int64_t);
  }

 private:
  struct Key {
    uint64_t name;
    uint64_t first_part;
    uint64_t numbers;
    uint64_t weight;
    uint32_t name_size;
    uint32_t parts;
    uint32_t properties;
    uint32_t dims;
    PlanKind kind;
  };

  std::vector<PlanProperties> properties_;
  std::vector<Key> keys_;
  std::string names_;
  std::vector<PathPart> parts_;
  std::vector<int64_t> numbers_;
};

class PlanBlock {
 public:
  // Tables that were looked into, by their bytes, which must outlive this.
  using Tables = std::unordered_map<std::string_view, std::shared_ptr<const KeyTable>>;

  // Throws std::invalid_argument for bytes that are no block; see `kind_of`.
  PlanBlock(std::string_view sealed, Tables* tables);

  const std::shared_ptr<const KeyTable>& keys() const { return keys_; }
  size_t size() const { return items_.size(); }
  uint32_t key(size_t item) const { return items_[item].key; }
  const int64_t* offsets(size_t item) const { return numbers_.data() + items_[item].numbers; }
  const int64_t* sizes(size_t item) const { return offsets(item) + keys_->dims(key(item)); }
  // The index of DCP's MetadataIndex.
  std::optional<int64_t> hint(size_t item) const;

 private:
  struct Item {
    uint32_t key;
    uint64_t numbers;  // where offsets and sizes are
  };

  std::shared_ptr<const KeyTable> keys_;
  std::vector<Item> items_;
  std::vector<int64_t> numbers_;
  std::unordered_map<size_t, int64_t> hints_;
};

// Makes a block. Throws std::invalid_argument for what cannot be in one; it is of no use then.
class PlanPacker {
 public:
  uint32_t add_properties(const PlanProperties& properties);
  void add_object(const std::string& name, const std::vector<PathPart>& path,
                  std::optional<int64_t> hint);
  void add_tensor(const std::string& name, const std::vector<PathPart>& path, bool is_shard,
                  uint32_t properties, const std::vector<int64_t>& shape,
                  const std::vector<int64_t>& offsets, const std::vector<int64_t>& sizes,
                  std::optional<int64_t> hint);
  // Of a key that may have no item. Does nothing for one that has.
  void add_path(const std::string& name, const std::vector<PathPart>& path);
  std::string finish() const;

 private:
  struct Key {
    PlanKind kind;
    uint32_t properties;
    std::vector<int64_t> shape;
  };

  uint32_t key_number(const std::string& name, const std::vector<PathPart>& path, Key key);
  void begin_item(uint32_t key, bool is_whole, std::optional<int64_t> hint);

  std::vector<PlanProperties> properties_;
  Packer packed_keys_;
  std::vector<Key> keys_;
  std::string last_name_;
  std::unordered_map<std::string, std::vector<uint32_t>> by_name_;
  Packer packed_items_;
  size_t items_ = 0;
  uint32_t expected_ = 0;  // the key of the next item, most likely
  std::set<std::pair<std::string, std::vector<int64_t>>> shards_;
};

}  // namespace pyckpt
