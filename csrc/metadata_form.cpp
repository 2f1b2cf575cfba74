#include "metadata_form.h"

#include <string_view>
#include <utility>

namespace pyckpt {
namespace {

void append(std::string* to, std::initializer_list<uint8_t> opcodes) {
  for (const uint8_t opcode : opcodes) *to += static_cast<char>(opcode);
}

void append_name(std::string* to, std::string_view name) {
  append(to, {op::kText1, static_cast<uint8_t>(name.size())});
  *to += name;
}

void append_global(std::string* to, const std::string& name) {
  append(to, {op::kGlobal});
  *to += name;
}

// A bare instance, and the beginning of its state.
void append_instance(std::string* to, const std::string& name) {
  append_global(to, name);
  append(to, {op::kTuple0, op::kNew, op::kDict, op::kMark});
}

}  // namespace

std::string metadata_prelude(const MetadataNames& names) {
  std::string prelude;
  const auto put = [&prelude](uint8_t number) { append(&prelude, {op::kPut1, number, op::kPop}); };
  for (const uint8_t number : {slot::kKeys, slot::kPlaces}) {
    append(&prelude, {op::kDict});
    put(number);
  }
  const std::pair<uint8_t, const std::string*> globals[] = {
      {slot::kTensor, &names.tensor},
      {slot::kBytes, &names.bytes},
      {slot::kChunk, &names.chunk},
      {slot::kIndex, &names.index},
      {slot::kProperties, &names.properties},
      {slot::kInfo, &names.info},
      {slot::kSize, &names.size},
      {slot::kLayout, &names.layout},
      {slot::kMemoryFormat, &names.memory_format}};
  for (const auto& [number, name] : globals) {
    append_global(&prelude, *name);
    put(number);
  }
  const std::pair<uint8_t, std::string_view> attributes[] = {
      {slot::kPropertiesName, "properties"},
      {slot::kSizeName, "size"},
      {slot::kChunksName, "chunks"},
      {slot::kOffsetsName, "offsets"},
      {slot::kSizesName, "sizes"},
      {slot::kFqnName, "fqn"},
      {slot::kIndexName, "index"},
      {slot::kOffsetName, "offset"},
      {slot::kPathName, "relative_path"},
      {slot::kLengthName, "length"},
      {slot::kCrcName, "crc32"},
      {slot::kPayloadOffsetName, "payload_offset"},
      {slot::kPayloadLengthName, "payload_length"},
      {slot::kPayloadStrideName, "payload_stride"}};
  for (const auto& [number, name] : attributes) {
    append_name(&prelude, name);
    put(number);
  }
  return prelude;
}

std::array<std::string, 4> metadata_ending(const MetadataNames& names) {
  std::array<std::string, 4> ending;
  append_instance(&ending[0], names.metadata);
  const std::pair<uint8_t, std::string_view> parts[] = {{slot::kKeys, "state_dict_metadata"},
                                                        {slot::kPlannerData, "planner_data"},
                                                        {slot::kPlaces, "storage_data"}};
  for (const auto& [number, name] : parts) {
    append_name(&ending[0], name);
    append(&ending[0], {op::kGet1, number});
  }
  append_name(&ending[0], "storage_meta");
  append_instance(&ending[0], names.storage_meta);
  append_name(&ending[0], "checkpoint_id");
  append_name(&ending[1], "save_id");
  append_name(&ending[2], "load_id");
  append(&ending[2], {op::kNone});
  append_name(&ending[2], "modules");
  append(&ending[2], {op::kList, op::kSetItems, op::kBuild});
  append_name(&ending[2], "version");
  append(&ending[3], {op::kSetItems, op::kBuild, op::kStop});
  return ending;
}

}  // namespace pyckpt
