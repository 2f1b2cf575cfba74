#include "columns.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>

namespace pyckpt {
namespace {

constexpr uint64_t kNotRecorded = UINT64_MAX;
// Where a key has no more chunks than this, looking at each is as quick as an index.
constexpr uint64_t kFewChunks = 8;

// Numbers have 32 bits, and the last of them says "none".
uint32_t number_of(size_t value) {
  if (value >= Columns::kNone) throw std::length_error("too many entries for a checkpoint");
  return static_cast<uint32_t>(value);
}

}  // namespace

bool Properties::operator==(const Properties& other) const {
  return dtype == other.dtype && layout == other.layout && requires_grad == other.requires_grad &&
         memory_format == other.memory_format && pin_memory == other.pin_memory;
}

// --- making
// ---------------------------------------------------------------------------------------

void Columns::reserve(size_t keys, size_t items, size_t name_bytes) {
  keys_.reserve(keys);
  names_.reserve(name_bytes);
  offset_.reserve(items);
  length_.reserve(items);
  payload_offset_.reserve(items);
  payload_length_.reserve(items);
  crc32_.reserve(items);
  file_.reserve(items);
}

uint32_t Columns::add_file(std::string_view name) {
  files_.emplace_back(name);
  return number_of(files_.size() - 1);
}

uint32_t Columns::add_properties(const Properties& properties) {
  const auto found = std::find(properties_.begin(), properties_.end(), properties);
  if (found != properties_.end()) return static_cast<uint32_t>(found - properties_.begin());
  properties_.push_back(properties);
  return number_of(properties_.size() - 1);
}

uint32_t Columns::add_key(std::string_view name, uint32_t properties, size_t dims) {
  {
    const Lock lock(index_mutex_);
    by_name_.clear();  // of keys that are not all
    by_offset_.clear();
  }
  Key key{};
  key.name = names_.size();
  key.name_size = number_of(name.size());
  key.properties = properties;
  key.dims = number_of(dims);
  key.numbers = numbers_.size();
  key.first_item = item_count();
  const uint32_t number = number_of(keys_.size());
  names_ += name;
  keys_.push_back(key);
  return number;
}

uint32_t Columns::add_object(std::string_view name) {
  const uint32_t key = add_key(name, kNone, 0);
  add_item();
  return key;
}

uint32_t Columns::add_tensor(std::string_view name, uint32_t properties, const int64_t* size,
                             size_t dims) {
  if (properties >= properties_.size()) throw std::out_of_range("no such properties");
  const uint32_t key = add_key(name, properties, dims);
  numbers_.insert(numbers_.end(), size, size + dims);
  return key;
}

uint64_t Columns::add_chunk(const int64_t* offsets, const int64_t* sizes) {
  if (keys_.empty() || keys_.back().properties == kNone) {
    throw std::logic_error("a chunk is one of the tensor that was added last");
  }
  const size_t dims = keys_.back().dims;
  numbers_.insert(numbers_.end(), offsets, offsets + dims);
  numbers_.insert(numbers_.end(), sizes, sizes + dims);
  return add_item();
}

uint64_t Columns::add_item() {
  const uint64_t item = item_count();
  offset_.push_back(0);
  length_.push_back(0);
  payload_offset_.push_back(kNotRecorded);
  payload_length_.push_back(0);
  crc32_.push_back(0);
  file_.push_back(0);
  ++keys_.back().items;
  return item;
}

void Columns::set_place(uint64_t item, const ItemPlace& place) {
  if (item >= item_count()) throw std::out_of_range("no such item");
  if (place.file >= files_.size()) throw std::out_of_range("no such file");
  file_[item] = place.file;
  offset_[item] = place.offset;
  length_[item] = place.length;
  payload_offset_[item] = place.is_recorded ? place.payload_offset : kNotRecorded;
  payload_length_[item] = place.is_recorded ? place.payload_length : 0;
  crc32_[item] = place.is_recorded ? place.crc32 : 0;
}

void Columns::set_stride(uint64_t item, std::vector<int64_t> stride) {
  if (item >= item_count()) throw std::out_of_range("no such item");
  if (stride.empty()) {
    strides_.erase(item);
  } else {
    strides_[item] = std::move(stride);
  }
}

void Columns::set_file_name(uint32_t file, std::string name) { files_.at(file) = std::move(name); }

// --- looking
// --------------------------------------------------------------------------------------

std::string_view Columns::name(uint32_t key) const {
  return std::string_view(names_).substr(keys_[key].name, keys_[key].name_size);
}

uint32_t Columns::find(std::string_view name) const {
  const std::hash<std::string_view> hash;
  const Lock lock(index_mutex_);
  if (by_name_.empty() && !keys_.empty()) {
    by_name_.reserve(keys_.size());
    for (uint32_t key = 0; key < keys_.size(); ++key) {
      by_name_.push_back({hash(this->name(key)), key});
    }
    std::sort(by_name_.begin(), by_name_.end(), [&](const NamedKey& a, const NamedKey& b) {
      if (a.hash != b.hash) return a.hash < b.hash;
      const int order = this->name(a.key).compare(this->name(b.key));
      return order != 0 ? order < 0 : a.key < b.key;
    });
  }
  const size_t wanted = hash(name);
  const auto found = std::lower_bound(
      by_name_.begin(), by_name_.end(), name, [&](const NamedKey& a, std::string_view b) {
        return a.hash != wanted ? a.hash < wanted : this->name(a.key) < b;
      });
  return found == by_name_.end() || this->name(found->key) != name ? kNone : found->key;
}

const int64_t* Columns::chunk_offsets(uint32_t key, uint64_t chunk) const {
  const Key& of = keys_[key];
  return numbers_.data() + of.numbers + of.dims + 2 * of.dims * chunk;
}

const int64_t* Columns::chunk_sizes(uint32_t key, uint64_t chunk) const {
  return chunk_offsets(key, chunk) + keys_[key].dims;
}

ItemPlace Columns::place(uint64_t item) const {
  ItemPlace place;
  place.file = file_[item];
  place.offset = offset_[item];
  place.length = length_[item];
  place.is_recorded = payload_offset_[item] != kNotRecorded;
  if (place.is_recorded) {
    place.payload_offset = payload_offset_[item];
    place.payload_length = payload_length_[item];
    place.crc32 = crc32_[item];
  }
  return place;
}

const std::vector<int64_t>* Columns::stride(uint64_t item) const {
  const auto found = strides_.find(item);
  return found == strides_.end() ? nullptr : &found->second;
}

std::vector<uint64_t> Columns::file_sizes() const {
  std::vector<uint64_t> sizes(files_.size());
  if (sizes.empty()) return sizes;
  for (uint64_t item = 0; item < item_count(); ++item) {
    uint64_t& size = sizes[file_[item]];
    size = std::max(size, offset_[item] + length_[item]);
  }
  return sizes;
}

std::optional<uint64_t> Columns::find_chunk(uint32_t key, const int64_t* offsets,
                                            uint64_t hint) const {
  const uint64_t count = keys_[key].items;
  const size_t dims = keys_[key].dims;
  const auto is_at = [&](uint64_t chunk) {
    return std::equal(offsets, offsets + dims, chunk_offsets(key, chunk));
  };
  if (hint < count && is_at(hint)) return hint;
  if (count <= kFewChunks || dims == 0) {
    for (uint64_t chunk = 0; chunk < count; ++chunk) {
      if (is_at(chunk)) return chunk;
    }
    return std::nullopt;
  }
  const ChunkIndex& index = chunk_index(key);
  const int64_t wanted = offsets[index.dimension];
  auto at = std::lower_bound(index.chunks.begin(), index.chunks.end(), wanted,
                             [&](uint32_t chunk, int64_t begin) {
                               return chunk_offsets(key, chunk)[index.dimension] < begin;
                             });
  for (; at != index.chunks.end(); ++at) {
    if (chunk_offsets(key, *at)[index.dimension] != wanted) break;
    if (is_at(*at)) return *at;
  }
  return std::nullopt;
}

std::vector<Overlap> Columns::overlaps(uint32_t key, const int64_t* offsets,
                                       const int64_t* sizes) const {
  const Key& of = keys_[key];
  const size_t dims = of.dims;
  std::vector<Overlap> found;
  if (std::find(sizes, sizes + dims, 0) != sizes + dims) return found;
  const auto add = [&](uint64_t chunk) {
    const int64_t* const from = chunk_offsets(key, chunk);
    const int64_t* const extent = chunk_sizes(key, chunk);
    for (size_t d = 0; d < dims; ++d) {
      if (std::min(from[d] + extent[d], offsets[d] + sizes[d]) <= std::max(from[d], offsets[d])) {
        return;
      }
    }
    Overlap& overlap = found.emplace_back();
    overlap.item = of.first_item + chunk;
    for (size_t d = 0; d < dims; ++d) {
      const int64_t begin = std::max(from[d], offsets[d]);
      const int64_t end = std::min(from[d] + extent[d], offsets[d] + sizes[d]);
      overlap.in_stored.push_back(begin - from[d]);
      overlap.in_wanted.push_back(begin - offsets[d]);
      overlap.size.push_back(end - begin);
    }
  };
  if (of.items <= kFewChunks || dims == 0) {
    for (uint64_t chunk = 0; chunk < of.items; ++chunk) add(chunk);
    return found;
  }
  const ChunkIndex& index = chunk_index(key);
  const size_t d = index.dimension;
  // Those that begin before the box ends, from the first on up to which one ends after it begins.
  const auto last = std::lower_bound(
      index.chunks.begin(), index.chunks.end(), offsets[d] + sizes[d],
      [&](uint32_t chunk, int64_t end) { return chunk_offsets(key, chunk)[d] < end; });
  const auto first = std::upper_bound(index.ends.begin(), index.ends.end(), offsets[d]);
  for (auto at = index.chunks.begin() + (first - index.ends.begin()); at < last; ++at) add(*at);
  std::sort(found.begin(), found.end(),
            [](const Overlap& a, const Overlap& b) { return a.item < b.item; });
  return found;
}

// Made when a key of many chunks is first looked into.
const Columns::ChunkIndex& Columns::chunk_index(uint32_t key) const {
  const Lock lock(index_mutex_);
  const auto [entry, is_new] = by_offset_.try_emplace(key);
  ChunkIndex& index = entry->second;
  if (!is_new) return index;
  const uint64_t count = keys_[key].items;
  const size_t dims = keys_[key].dims;
  // The dimension that is cut at most places sets chunks apart best.
  std::vector<int64_t> begins(count);
  size_t most = 0;
  for (size_t d = 0; d < dims; ++d) {
    for (uint64_t chunk = 0; chunk < count; ++chunk) begins[chunk] = chunk_offsets(key, chunk)[d];
    std::sort(begins.begin(), begins.end());
    const auto places =
        static_cast<size_t>(std::unique(begins.begin(), begins.end()) - begins.begin());
    begins.resize(count);
    if (places > most) {
      most = places;
      index.dimension = d;
    }
  }
  const size_t d = index.dimension;
  index.chunks.resize(count);
  for (uint64_t chunk = 0; chunk < count; ++chunk) index.chunks[chunk] = number_of(chunk);
  std::sort(index.chunks.begin(), index.chunks.end(), [&](uint32_t a, uint32_t b) {
    const int64_t begin_a = chunk_offsets(key, a)[d], begin_b = chunk_offsets(key, b)[d];
    return begin_a != begin_b ? begin_a < begin_b : a < b;
  });
  index.ends.resize(count);
  int64_t furthest = INT64_MIN;
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t chunk = index.chunks[i];
    furthest = std::max(furthest, chunk_offsets(key, chunk)[d] + chunk_sizes(key, chunk)[d]);
    index.ends[i] = furthest;
  }
  return index;
}

}  // namespace pyckpt
