#include "plan_block.h"

#include <algorithm>
#include <stdexcept>

namespace pyckpt {
namespace {

// Of the byte that an entry of the table begins with.
constexpr uint8_t kKindMask = 3;
constexpr uint8_t kHasPath = 4;
// Of the number that an item begins with.
constexpr uint64_t kWhole = 1;
constexpr uint64_t kHasHint = 2;
constexpr unsigned kItemFlags = 2;

constexpr uint8_t kRequiresGrad = 1;
constexpr uint8_t kPinMemory = 2;

uint64_t zigzag(int64_t value) {
  return (static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63);
}

int64_t unzigzag(uint64_t value) {
  return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1);
}

// Bytes of a tensor, or 1 where it has none. Throws where they cannot be counted.
uint64_t weight_of(const std::vector<int64_t>& shape, uint64_t element_size) {
  int64_t elements = 1;
  for (const int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(elements, extent, &elements)) Unpacker::fail();
  }
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<uint64_t>(elements), element_size, &bytes)) {
    Unpacker::fail();
  }
  return std::max<uint64_t>(bytes, 1);
}

// Whether the parts, joined with dots, are the name, and its numbers are as Python writes them.
bool is_path_of(std::string_view name, const PathPart* parts, size_t count) {
  constexpr size_t kDigitsMax = 18;
  size_t at = 0;
  for (size_t i = 0; i < count; ++i) {
    if (i != 0 && (at >= name.size() || name[at++] != '.')) return false;
    if (parts[i].size > name.size() - at) return false;
    const std::string_view part = name.substr(at, parts[i].size);
    at += part.size();
    if (!parts[i].is_number) continue;
    const bool digits =
        std::all_of(part.begin(), part.end(), [](char c) { return '0' <= c && c <= '9'; });
    if (part.empty() || part.size() > kDigitsMax || !digits) return false;
    if (part.size() > 1 && part.front() == '0') return false;
  }
  return at == name.size();
}

}  // namespace

// --- taking apart
// ---------------------------------------------------------------------------------

KeyTable::KeyTable(std::string_view packed) {
  Unpacker from(packed);
  properties_.resize(from.count());
  for (PlanProperties& of : properties_) {
    of.properties.dtype = from.text();
    of.properties.layout = from.text();
    const uint8_t flags = from.byte();
    of.properties.requires_grad = (flags & kRequiresGrad) != 0;
    of.properties.pin_memory = (flags & kPinMemory) != 0;
    of.properties.memory_format = from.byte();
    of.element_size = from.number();
  }
  keys_.resize(from.count());
  std::string name;
  for (Key& key : keys_) {
    const uint8_t flags = from.byte();
    key.kind = static_cast<PlanKind>(flags & kKindMask);
    const uint64_t shared = from.number();
    if (shared > name.size()) Unpacker::fail();
    name.resize(shared);
    name += from.text();
    if (name.size() > UINT32_MAX) Unpacker::fail();
    key.name = names_.size();
    key.name_size = static_cast<uint32_t>(name.size());
    names_ += name;
    key.first_part = parts_.size();
    key.parts = (flags & kHasPath) != 0 ? static_cast<uint32_t>(from.count()) : 0;
    for (uint32_t i = 0; i < key.parts; ++i) {
      const uint64_t part = from.number();
      if (part >> 1 > name.size()) Unpacker::fail();
      parts_.push_back({static_cast<uint32_t>(part >> 1), (part & 1) != 0});
    }
    if (key.parts != 0 && !is_path_of(name, parts_.data() + key.first_part, key.parts)) {
      Unpacker::fail();
    }
    key.numbers = numbers_.size();
    key.weight = 1;
    key.properties = 0;
    key.dims = 0;
    if (key.kind < PlanKind::kTensor) continue;
    const uint64_t properties = from.number();
    if (properties >= properties_.size()) Unpacker::fail();
    key.properties = static_cast<uint32_t>(properties);
    const uint64_t dims = from.number();
    if (dims > kPlanDims) Unpacker::fail();
    key.dims = static_cast<uint32_t>(dims);
    std::vector<int64_t> shape(dims);
    for (int64_t& extent : shape) extent = from.signed_number();
    key.weight = weight_of(shape, properties_[key.properties].element_size);
    numbers_.insert(numbers_.end(), shape.begin(), shape.end());
  }
  from.end();
}

PlanBlock::PlanBlock(std::string_view sealed, Tables* tables) {
  Unpacker from(unseal(PackedKind::kPlan, sealed));
  const std::string_view table = from.text();
  std::shared_ptr<const KeyTable>& known = (*tables)[table];
  if (!known) known = std::make_shared<const KeyTable>(table);
  keys_ = known;
  items_.resize(from.count());
  uint64_t expected = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    const uint64_t first = from.number();
    const uint64_t key = expected + static_cast<uint64_t>(unzigzag(first >> kItemFlags));
    if (key >= keys_->size()) Unpacker::fail();
    expected = key + 1;
    items_[i] = {static_cast<uint32_t>(key), numbers_.size()};
    if ((first & kHasHint) != 0) hints_[i] = from.signed_number();
    const auto number = static_cast<uint32_t>(key);
    if (keys_->kind(number) == PlanKind::kPathOnly) Unpacker::fail();
    if (!keys_->is_tensor(number)) continue;
    const size_t dims = keys_->dims(number);
    const int64_t* const shape = keys_->shape(number);
    numbers_.insert(numbers_.end(), dims, 0);
    numbers_.insert(numbers_.end(), shape, shape + dims);
    if ((first & kWhole) != 0) continue;
    int64_t* const offsets = numbers_.data() + items_[i].numbers;
    const uint64_t parted = from.number();
    for (size_t d = 0; d < dims; ++d) {
      if ((parted >> d & 1) == 0) continue;
      offsets[d] = from.signed_number();
      offsets[dims + d] = from.signed_number();
    }
  }
  from.end();
}

std::optional<int64_t> PlanBlock::hint(size_t item) const {
  const auto found = hints_.find(item);
  return found == hints_.end() ? std::nullopt : std::optional(found->second);
}

// --- making
// ---------------------------------------------------------------------------------------

uint32_t PlanPacker::add_properties(const PlanProperties& properties) {
  properties_.push_back(properties);
  return static_cast<uint32_t>(properties_.size() - 1);
}

uint32_t PlanPacker::key_number(const std::string& name, const std::vector<PathPart>& path,
                                Key key) {
  std::vector<uint32_t>& same_name = by_name_[name];
  for (const uint32_t number : same_name) {
    const Key& known = keys_[number];
    if (known.kind == key.kind && known.properties == key.properties && known.shape == key.shape) {
      return number;
    }
  }
  // A path says where the key is, once.
  const bool has_path = !path.empty() && same_name.empty();
  if (has_path && !is_path_of(name, path.data(), path.size())) {
    throw std::invalid_argument("the key is not its path, joined");
  }
  packed_keys_.byte(
      static_cast<uint8_t>(static_cast<uint8_t>(key.kind) | (has_path ? kHasPath : 0)));
  const auto differs =
      std::mismatch(name.begin(), name.end(), last_name_.begin(), last_name_.end());
  const auto shared = static_cast<size_t>(differs.first - name.begin());
  packed_keys_.number(uint64_t{shared});
  packed_keys_.text(std::string_view(name).substr(shared));
  last_name_ = name;
  if (has_path) {
    packed_keys_.number(uint64_t{path.size()});
    for (const PathPart& part : path) {
      packed_keys_.number(uint64_t{part.size} << 1 | uint64_t{part.is_number});
    }
  }
  if (key.kind >= PlanKind::kTensor) {
    weight_of(key.shape, properties_.at(key.properties).element_size);
    packed_keys_.number(uint64_t{key.properties});
    packed_keys_.number(uint64_t{key.shape.size()});
    for (const int64_t extent : key.shape) packed_keys_.number(extent);
  }
  same_name.push_back(static_cast<uint32_t>(keys_.size()));
  keys_.push_back(std::move(key));
  return same_name.back();
}

void PlanPacker::begin_item(uint32_t key, bool is_whole, std::optional<int64_t> hint) {
  const uint64_t step = zigzag(int64_t{key} - int64_t{expected_});
  packed_items_.number(step << kItemFlags | (is_whole ? kWhole : 0) | (hint ? kHasHint : 0));
  if (hint) packed_items_.number(*hint);
  expected_ = key + 1;
  ++items_;
}

void PlanPacker::add_object(const std::string& name, const std::vector<PathPart>& path,
                            std::optional<int64_t> hint) {
  if (by_name_.count(name) != 0) throw std::invalid_argument("the key is planned twice");
  begin_item(key_number(name, path, {PlanKind::kObject, 0, {}}), true, hint);
}

void PlanPacker::add_tensor(const std::string& name, const std::vector<PathPart>& path,
                            bool is_shard, uint32_t properties, const std::vector<int64_t>& shape,
                            const std::vector<int64_t>& offsets, const std::vector<int64_t>& sizes,
                            std::optional<int64_t> hint) {
  const size_t dims = shape.size();
  if (dims > kPlanDims || offsets.size() != dims || sizes.size() != dims) {
    throw std::invalid_argument("a part must have the dimensions of its tensor");
  }
  const auto before = by_name_.find(name);
  const bool is_first = before == by_name_.end();
  const bool is_another_shard =
      !is_first && is_shard && keys_[before->second.front()].kind == PlanKind::kShard;
  if ((!is_first && !is_another_shard) || (is_shard && !shards_.emplace(name, offsets).second)) {
    throw std::invalid_argument("the key is planned twice");
  }
  uint64_t parted = 0;
  for (size_t d = 0; d < dims; ++d) {
    if (offsets[d] != 0 || sizes[d] != shape[d]) parted |= uint64_t{1} << d;
  }
  const PlanKind kind = is_shard ? PlanKind::kShard : PlanKind::kTensor;
  begin_item(key_number(name, path, {kind, properties, shape}), parted == 0, hint);
  if (parted == 0) return;
  packed_items_.number(parted);
  for (size_t d = 0; d < dims; ++d) {
    if ((parted >> d & 1) == 0) continue;
    packed_items_.number(offsets[d]);
    packed_items_.number(sizes[d]);
  }
}

void PlanPacker::add_path(const std::string& name, const std::vector<PathPart>& path) {
  if (by_name_.count(name) == 0) key_number(name, path, {PlanKind::kPathOnly, 0, {}});
}

std::string PlanPacker::finish() const {
  Packer table;
  table.number(uint64_t{properties_.size()});
  for (const PlanProperties& of : properties_) {
    table.text(of.properties.dtype);
    table.text(of.properties.layout);
    table.byte(static_cast<uint8_t>((of.properties.requires_grad ? kRequiresGrad : 0) |
                                    (of.properties.pin_memory ? kPinMemory : 0)));
    table.byte(of.properties.memory_format);
    table.number(of.element_size);
  }
  table.number(uint64_t{keys_.size()});
  table.raw(packed_keys_.bytes());
  Packer body;
  body.text(table.bytes());
  body.number(uint64_t{items_});
  body.raw(packed_items_.bytes());
  return seal(PackedKind::kPlan, body.bytes());
}

}  // namespace pyckpt
