// The canonical form of `.metadata`: what its encoder and its decoder must agree on, opcode by
// opcode. docs/format.md says what it looks like as a whole.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace pyckpt {

// How the installed torch names what a pickle of metadata speaks of: a module and a name in it,
// each with a newline behind it.
struct MetadataNames {
  std::string metadata, storage_meta, tensor, bytes, chunk, index, properties, info;
  std::string size;           // torch.Size
  std::string layout;         // what makes a layout of its name
  std::string memory_format;  // DCP's enum

  std::unordered_map<std::string, uint32_t> dtypes;  // bytes of an element, by the dtype's name
  std::unordered_set<std::string> layouts;
};

// What metadata says besides its columns.
struct MetadataExtras {
  // planner_data: the opcodes that leave it on the stack, as Python's pickler writes them with
  // protocol 3, between PROTO and STOP. They may use the memo from 0 on.
  std::string planner_data;
  // UTF-8; nothing is None.
  std::optional<std::string> checkpoint_id, save_id, version;
};

// The numbers by which the pickle remembers values. Those below 256 take two bytes to recall, and
// are used again where what they stand for was recalled for the last time. A number must not be
// larger than that of the opcodes before it (pickle_scan.h).
namespace slot {
enum : uint8_t {
  kPlannerData,
  kKeys,    // the dict state_dict_metadata
  kPlaces,  // the dict storage_data
  kKey,     // the name of the key that is described
  kSizes,   // the torch.Size that was written last: of the tensor, or of a chunk
  kChunks,  // the list of chunks of the tensor that is described
  // Classes.
  kTensor,
  kBytes,
  kChunk,
  kIndex,
  kProperties,
  kInfo,
  kSize,
  kLayout,
  kMemoryFormat,
  // Names of attributes.
  kPropertiesName,
  kSizeName,
  kChunksName,
  kOffsetsName,
  kSizesName,
  kFqnName,
  kIndexName,
  kOffsetName,
  kPathName,
  kLengthName,
  kCrcName,
  kPayloadOffsetName,
  kPayloadLengthName,
  kPayloadStrideName,
  kEnd,
};
constexpr uint32_t kVariable = 32;       // properties, then files; as many as there is room for,
constexpr uint32_t kChunkOffsets = 128;  // up to where chunks begin, of one batch of them;
constexpr uint32_t kMore = 256;          // and from here on the others
static_assert(kEnd <= kVariable);

// Of properties or a file, by its place among all of them.
constexpr uint32_t variable(uint32_t number) {
  constexpr uint32_t low = kChunkOffsets - kVariable;
  return number < low ? kVariable + number : kMore + (number - low);
}

// The inverse; all ones where the slot is for something else.
constexpr uint32_t variable_of(uint32_t slot) {
  constexpr uint32_t low = kChunkOffsets - kVariable;
  if (slot >= kMore) return low + (slot - kMore);
  return slot >= kVariable && slot < kChunkOffsets ? slot - kVariable : UINT32_MAX;
}
}  // namespace slot

// So many chunks are described, and after them their places.
constexpr uint64_t kChunkBatch = slot::kMore - slot::kChunkOffsets;
// A frame ends where so many bytes of it are written, and the description of a file, a key or a
// batch ends.
constexpr size_t kFrameMin = 64 << 10;

// Opcodes, as pickletools.py of Python has them.
namespace op {
enum : uint8_t {
  kProto = 0x80,
  kFrame = 0x95,
  kStop = '.',
  kMark = '(',
  kPop = '0',
  kNone = 'N',
  kTrue = 0x88,
  kFalse = 0x89,
  kInt1 = 'K',
  kInt2 = 'M',
  kInt4 = 'J',
  kLong1 = 0x8a,
  kText1 = 0x8c,  // a string whose length takes one byte
  kText4 = 'X',
  kTuple0 = ')',
  kTuple1 = 0x85,
  kTuple3 = 0x87,
  kTuple = 't',
  kList = ']',
  kAppends = 'e',
  kDict = '}',
  kSetItem = 's',
  kSetItems = 'u',
  kGet1 = 'h',
  kGet4 = 'j',
  kPut1 = 'q',
  kPut4 = 'r',
  kGlobal = 'c',
  kReduce = 'R',
  kNew = 0x81,
  kBuild = 'b',
};
}  // namespace op

// Runs of opcodes that are always the same.
namespace piece {
template <typename... Bytes>
constexpr std::array<uint8_t, sizeof...(Bytes)> make(Bytes... bytes) {
  return {{static_cast<uint8_t>(bytes)...}};
}

constexpr auto kProto = make(op::kProto, 4);
constexpr auto kPutPlannerData = make(op::kPut1, slot::kPlannerData, op::kPop);

// Of properties: the dtype's name with a newline follows the first, the layout's name the second.
constexpr auto kDtype = make(op::kGlobal, 't', 'o', 'r', 'c', 'h', '\n');
constexpr auto kLayout = make(op::kGet1, slot::kLayout);
constexpr auto kCall = make(op::kTuple1, op::kReduce);
constexpr auto kMemoryFormat = make(op::kGet1, slot::kMemoryFormat, op::kInt1);

// A key: its name follows.
constexpr auto kKey = make(op::kGet1, slot::kKeys);
constexpr auto kObject = make(op::kPut1, slot::kKey, op::kGet1, slot::kBytes, op::kTuple0, op::kNew,
                              op::kSetItem, op::kPop);
constexpr auto kObjectIndex =
    make(op::kGet1, slot::kPlaces, op::kGet1, slot::kIndex, op::kTuple0, op::kNew, op::kDict,
         op::kMark, op::kGet1, slot::kFqnName, op::kGet1, slot::kKey, op::kGet1, slot::kIndexName,
         op::kNone, op::kSetItems, op::kBuild);
constexpr auto kObjectEnd = make(op::kSetItem, op::kPop);

constexpr auto kTensor =
    make(op::kPut1, slot::kKey, op::kGet1, slot::kTensor, op::kTuple0, op::kNew, op::kDict,
         op::kMark, op::kGet1, slot::kPropertiesName, op::kGet1, slot::kProperties, op::kTuple0,
         op::kNew);  // the number of the properties follows
constexpr auto kTensorSize = make(op::kBuild, op::kGet1, slot::kSizeName);
constexpr auto kTensorEnd =
    make(op::kPut1, slot::kSizes, op::kGet1, slot::kChunksName, op::kList, op::kPut1, slot::kChunks,
         op::kSetItems, op::kBuild, op::kSetItem, op::kPop);

// A torch.Size: its numbers, as a tuple, follow; kCall ends it.
constexpr auto kSize = make(op::kGet1, slot::kSize);

// A batch of chunks.
constexpr auto kChunks = make(op::kGet1, slot::kChunks, op::kMark);
constexpr auto kChunk =
    make(op::kGet1, slot::kChunk, op::kTuple0, op::kNew, op::kDict, op::kMark, op::kGet1,
         slot::kOffsetsName);  // the offsets, a PUT, then:
constexpr auto kChunkSizes = make(op::kGet1, slot::kSizesName);
constexpr auto kSameSizes = make(op::kGet1, slot::kSizes);
constexpr auto kPutSizes = make(op::kPut1, slot::kSizes);
constexpr auto kChunkEnd = make(op::kSetItems, op::kBuild);
constexpr auto kChunksEnd = make(op::kAppends, op::kPop);

// Where the chunks of a batch are.
constexpr auto kPlaces = make(op::kGet1, slot::kPlaces, op::kMark);
constexpr auto kIndex = make(op::kGet1, slot::kIndex, op::kTuple0, op::kNew, op::kDict, op::kMark,
                             op::kGet1, slot::kFqnName, op::kGet1, slot::kKey, op::kGet1,
                             slot::kIndexName);  // the chunk's number follows
constexpr auto kIndexOffset =
    make(op::kGet1, slot::kOffsetName, op::kGet1);  // and its offsets' slot
constexpr auto kIndexEnd = make(op::kSetItems, op::kBuild);
constexpr auto kPlacesEnd = make(op::kSetItems, op::kPop);

// A place: the file follows.
constexpr auto kInfo = make(op::kGet1, slot::kInfo, op::kTuple0, op::kNew, op::kDict, op::kMark,
                            op::kGet1, slot::kPathName);
constexpr auto kOffset = make(op::kGet1, slot::kOffsetName);
constexpr auto kLength = make(op::kGet1, slot::kLengthName);
constexpr auto kCrc = make(op::kGet1, slot::kCrcName);
constexpr auto kPayloadOffset = make(op::kGet1, slot::kPayloadOffsetName);
constexpr auto kPayloadLength = make(op::kGet1, slot::kPayloadLengthName);
constexpr auto kPayloadStride = make(op::kGet1, slot::kPayloadStrideName);
constexpr auto kInfoEnd = make(op::kSetItems, op::kBuild);

}  // namespace piece

// What stands between planner_data and the first properties: everything whose number does not
// change is remembered.
std::string metadata_prelude(const MetadataNames& names);

// The end, in four parts; between them stand checkpoint_id, save_id and version.
std::array<std::string, 4> metadata_ending(const MetadataNames& names);

}  // namespace pyckpt
