#include "metadata_decoder.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "metadata_reader.h"
#include "tiling.h"

namespace pyckpt {
namespace {

// A tensor may be so many times larger than its items, and so much (pyckpt/format/checks.py).
constexpr uint64_t kPackedMax = 64;
constexpr uint64_t kPackedFree = 1 << 20;
// What an item mostly takes in the file: a guess.
constexpr size_t kItemBytes = 100;

// What a file's name must be at least to be inside of the checkpoint's directory, on any system.
// Names that are inside of it only on some, or only after a closer look, are left to Python.
bool is_surely_inside(std::string_view name) {
  if (name.find_first_of(std::string_view("\\:\0", 3)) != name.npos) return false;
  if (name.empty() || name.front() == '/') return false;
  bool has_part = false;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (part == "..") return false;
    has_part = has_part || (!part.empty() && part != ".");
    begin = end + 1;
  }
  return has_part;
}

class Decoder {
 public:
  Decoder(const std::byte* data, size_t size, const MetadataNames& names)
      : names_(names),
        in_(reinterpret_cast<const uint8_t*>(data), reinterpret_cast<const uint8_t*>(data) + size),
        columns_(std::make_shared<Columns>()) {
    columns_->reserve(0, size / kItemBytes, 0);
  }

  DecodedMetadata run() {
    DecodedMetadata decoded;
    in_.expect(piece::kProto);
    in_.expect(op::kFrame);
    const uint64_t planner_data_size = in_.little_endian(8);
    const uint8_t* const planner_data = in_.take(planner_data_size);
    require(is_plain_planner_data(planner_data, planner_data_size));
    decoded.extras.planner_data.assign(reinterpret_cast<const char*>(planner_data),
                                       planner_data_size);
    begin_frame();
    in_.expect(piece::kPutPlannerData);
    in_.expect(metadata_prelude(names_));
    while (in_.peek() == op::kMark) properties();
    while (in_.peek() == op::kText1 || in_.peek() == op::kText4) file();
    is_file_used_.resize(columns_->file_count());
    check_file_names();
    while (in_.accept(piece::kKey)) key();
    const std::array<std::string, 4> ending = metadata_ending(names_);
    in_.expect(ending[0]);
    decoded.extras.checkpoint_id = optional();
    in_.expect(ending[1]);
    decoded.extras.save_id = optional();
    in_.expect(ending[2]);
    decoded.extras.version = optional();
    in_.expect(ending[3]);
    require(in_.left() == 0 && in_.at() == frame_end_);
    require(std::find(is_file_used_.begin(), is_file_used_.end(), false) == is_file_used_.end());
    check_names();
    decoded.columns = std::move(columns_);
    return decoded;
  }

 private:
  static void require(bool is_so) { MetadataReader::require(is_so); }

  // --- frames ---

  void begin_frame() {
    in_.expect(op::kFrame);
    const uint64_t size = in_.little_endian(8);
    require(size <= in_.left());
    frame_begin_ = in_.at();
    frame_end_ = frame_begin_ + size;
  }

  // Where a frame may end.
  void cut() {
    if (in_.at() - frame_begin_ < static_cast<ptrdiff_t>(kFrameMin)) return;
    require(in_.at() == frame_end_);
    begin_frame();
  }

  // --- what comes before the keys ---

  void properties() {
    Properties made;
    in_.expect(op::kMark);
    in_.expect(piece::kDtype);
    while (in_.peek() != '\n') made.dtype += static_cast<char>(in_.byte());
    in_.byte();
    in_.expect(piece::kLayout);
    made.layout = in_.text();
    in_.expect(piece::kCall);
    made.requires_grad = in_.boolean();
    in_.expect(piece::kMemoryFormat);
    made.memory_format = in_.byte();
    in_.expect(piece::kCall);
    made.pin_memory = in_.boolean();
    in_.expect(op::kTuple);
    const auto item_size = names_.dtypes.find(made.dtype);
    require(item_size != names_.dtypes.end() && names_.layouts.count(made.layout) != 0);
    require(made.memory_format <= 2);
    item_sizes_.push_back(item_size->second);
    const uint32_t number = columns_->add_properties(made);
    require(number + 1 == item_sizes_.size());
    require(in_.put() == slot::variable(number));
    in_.expect(op::kPop);
  }

  void file() {
    const std::string_view name = in_.text();
    require(is_surely_inside(name));
    require(in_.put() == file_slot(columns_->add_file(name)));
    in_.expect(op::kPop);
    cut();
  }

  uint32_t file_slot(uint32_t number) const {
    return slot::variable(static_cast<uint32_t>(columns_->properties_count()) + number);
  }

  std::optional<std::string> optional() {
    if (in_.peek() != op::kNone) return std::string(in_.text());
    in_.byte();
    return std::nullopt;
  }

  // --- keys ---

  void key() {
    const std::string_view name = in_.text();
    if (in_.accept(piece::kObject)) {
      const uint32_t key = columns_->add_object(name);
      in_.expect(piece::kObjectIndex);
      place(columns_->first_item(key), nullptr);
      in_.expect(piece::kObjectEnd);
      cut();
    } else {
      in_.expect(piece::kTensor);
      tensor(name);
    }
  }

  void tensor(std::string_view name) {
    const uint32_t properties = slot::variable_of(in_.get());
    require(properties < item_sizes_.size());
    in_.expect(piece::kTensorSize);
    this->size(&size_);
    in_.expect(piece::kTensorEnd);
    const uint32_t key = columns_->add_tensor(name, properties, size_.data(), size_.size());
    cut();
    offsets_.clear();
    sizes_.clear();
    last_sizes_ = size_;
    stored_ = 0;
    numel_ = elements_of_tensor(item_sizes_[properties]);
    uint64_t count = 0;
    while (count % kChunkBatch == 0 && in_.accept(piece::kChunks)) {
      const uint64_t begin = count;
      const uint64_t first_item = columns_->item_count();
      while (in_.peek() != op::kAppends) {
        require(count - begin < kChunkBatch);
        chunk(slot::kChunkOffsets + static_cast<uint32_t>(count - begin));
        ++count;
      }
      require(count != begin);
      in_.expect(piece::kChunksEnd);
      in_.expect(piece::kPlaces);
      for (uint64_t i = begin; i < count; ++i) {
        in_.expect(piece::kIndex);
        require(in_.number() == i);
        in_.expect(piece::kIndexOffset);
        require(in_.byte() == slot::kChunkOffsets + (i - begin));
        in_.expect(piece::kIndexEnd);
        const uint64_t elements = elements_[i - begin];
        const uint64_t payload = elements * item_sizes_[properties];
        const uint64_t length = place(first_item + (i - begin), elements == 0 ? nullptr : &payload);
        if (elements != 0) stored_ = std::min(stored_, kManyBytes) + std::min(length, kManyBytes);
      }
      in_.expect(piece::kPlacesEnd);
      cut();
      elements_.clear();
    }
    check_tensor(key, count, item_sizes_[properties]);
  }

  void size(std::vector<int64_t>* numbers) {
    in_.expect(piece::kSize);
    in_.tuple(numbers);
    in_.expect(piece::kCall);
  }

  // Of the tensor whose size was read. Fails where it is larger than any memory; so nothing that is
  // within it is.
  uint64_t elements_of_tensor(uint64_t item_size) const {
    // Strides are made of the other sizes, also where one of them is 0.
    unsigned __int128 bytes = item_size;
    bool is_empty = false;
    for (const int64_t extent : size_) {
      is_empty = is_empty || extent == 0;
      bytes *= static_cast<uint64_t>(std::max<int64_t>(extent, 1));
      require(bytes <= INT64_MAX);
    }
    return is_empty ? 0 : static_cast<uint64_t>(bytes) / item_size;
  }

  void chunk(uint32_t offsets_slot) {
    in_.expect(piece::kChunk);
    size(&chunk_offsets_);
    require(in_.put() == offsets_slot);
    in_.expect(piece::kChunkSizes);
    if (!in_.accept(piece::kSameSizes)) {
      size(&chunk_sizes_);
      in_.expect(piece::kPutSizes);
      require(chunk_sizes_ != last_sizes_);
      last_sizes_.swap(chunk_sizes_);
    }
    in_.expect(piece::kChunkEnd);
    const size_t dims = size_.size();
    require(chunk_offsets_.size() == dims && last_sizes_.size() == dims);
    uint64_t elements = 1;
    for (size_t d = 0; d < dims; ++d) {
      require(last_sizes_[d] <= size_[d] && chunk_offsets_[d] <= size_[d] - last_sizes_[d]);
      elements *= static_cast<uint64_t>(last_sizes_[d]);
    }
    elements_.push_back(elements);
    offsets_.insert(offsets_.end(), chunk_offsets_.begin(), chunk_offsets_.end());
    sizes_.insert(sizes_.end(), last_sizes_.begin(), last_sizes_.end());
    columns_->add_chunk(chunk_offsets_.data(), last_sizes_.data());
  }

  // Returns the length. `payload`: the bytes of the tensor that it is of.
  uint64_t place(uint64_t item, const uint64_t* payload) {
    ItemPlace place;
    in_.expect(piece::kInfo);
    place.file = file_of(in_.get());
    is_file_used_[place.file] = true;
    in_.expect(piece::kOffset);
    place.offset = in_.number();
    in_.expect(piece::kLength);
    place.length = in_.number();
    require(place.length <= static_cast<uint64_t>(INT64_MAX) - place.offset);
    if (in_.accept(piece::kCrc)) {
      place.is_recorded = true;
      const uint64_t crc32 = in_.number();
      require(crc32 <= UINT32_MAX);
      place.crc32 = static_cast<uint32_t>(crc32);
      in_.expect(piece::kPayloadOffset);
      place.payload_offset = in_.number();
      in_.expect(piece::kPayloadLength);
      place.payload_length = in_.number();
      require(place.payload_length <= place.length &&
              place.payload_offset <= place.length - place.payload_length);
      require(payload == nullptr || place.payload_offset == 0 || place.payload_length == *payload);
      if (in_.accept(piece::kPayloadStride)) {
        std::vector<int64_t> stride;
        in_.tuple(&stride);
        const auto key = static_cast<uint32_t>(columns_->key_count() - 1);
        // Columns have none of a tensor without dimensions.
        require(columns_->is_tensor(key) && stride.size() == columns_->dims(key) &&
                !stride.empty());
        columns_->set_stride(item, std::move(stride));
      }
    }
    in_.expect(piece::kInfoEnd);
    columns_->set_place(item, place);
    return place.length;
  }

  uint32_t file_of(uint32_t at) const {
    const auto first = static_cast<uint32_t>(columns_->properties_count());
    const uint32_t number = slot::variable_of(at);
    require(number >= first && number - first < columns_->file_count());
    return number - first;
  }

  // --- checks of the whole ---

  void check_tensor(uint32_t key, uint64_t count, uint64_t item_size) {
    const size_t dims = size_.size();
    check_offsets(count, dims);
    if (numel_ == 0) return;
    require(count != 0);
    // In no dimension there is one element, and one chunk, since no two begin where it does.
    if (dims != 0 && (count != 1 || !std::equal(size_.begin(), size_.end(), sizes_.begin()))) {
      require(is_tiling(size_, offsets_, sizes_));
    }
    const Properties& properties = columns_->properties(columns_->properties_of(key));
    require(properties.layout != "torch.strided" ||
            static_cast<unsigned __int128>(numel_) * item_size <=
                static_cast<unsigned __int128>(stored_) * kPackedMax + kPackedFree);
  }

  // No two chunks begin at the same place: DCP tells them by that.
  void check_offsets(uint64_t count, size_t dims) const {
    const auto begin_of = [&](uint64_t i) { return offsets_.data() + i * dims; };
    const auto is_before = [&](uint64_t a, uint64_t b) {
      return std::lexicographical_compare(begin_of(a), begin_of(a) + dims, begin_of(b),
                                          begin_of(b) + dims);
    };
    bool is_sorted = true;
    for (uint64_t i = 1; i < count && is_sorted; ++i) is_sorted = is_before(i - 1, i);
    if (is_sorted) return;
    std::vector<uint64_t> order(count);
    for (uint64_t i = 0; i < count; ++i) order[i] = i;
    std::sort(order.begin(), order.end(), is_before);
    for (uint64_t i = 1; i < count; ++i) require(is_before(order[i - 1], order[i]));
  }

  // No file has two numbers, of which one would hide what the other says of its size.
  void check_file_names() const {
    std::vector<std::string_view> names;
    for (uint32_t file = 0; file < columns_->file_count(); ++file) {
      names.push_back(columns_->file_name(file));
    }
    std::sort(names.begin(), names.end());
    require(std::adjacent_find(names.begin(), names.end()) == names.end());
  }

  void check_names() const {
    for (uint32_t key = 0; key < columns_->key_count(); ++key) {
      require(columns_->find(columns_->name(key)) == key);  // and not an earlier one
    }
  }

  // Sums of lengths stop there; no tensor has as many bytes.
  static constexpr uint64_t kManyBytes = uint64_t{1} << 62;

  const MetadataNames& names_;
  MetadataReader in_;
  std::shared_ptr<Columns> columns_;
  const uint8_t* frame_begin_ = nullptr;
  const uint8_t* frame_end_ = nullptr;
  std::vector<uint32_t> item_sizes_;  // of properties
  std::vector<bool> is_file_used_;
  // Of the tensor that is being read.
  std::vector<int64_t> size_;
  std::vector<int64_t> offsets_, sizes_;  // of all chunks
  uint64_t numel_ = 0;
  uint64_t stored_ = 0;
  std::vector<uint64_t> elements_;  // of the chunks of a batch
  std::vector<int64_t> chunk_offsets_, chunk_sizes_;
  std::vector<int64_t> last_sizes_;  // what slot::kSizes holds
};

}  // namespace

std::optional<DecodedMetadata> decode_metadata(const std::byte* data, size_t size,
                                               const MetadataNames& names) {
  try {
    return Decoder(data, size, names).run();
  } catch (const NotCanonical&) {
    return std::nullopt;
  } catch (const std::invalid_argument&) {  // chunks that take too long to compare
    return std::nullopt;
  } catch (const std::length_error&) {  // more than columns have numbers for
    return std::nullopt;
  }
}

}  // namespace pyckpt
