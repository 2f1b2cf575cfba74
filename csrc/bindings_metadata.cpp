// The pickle of `.metadata`, for Python.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.h"
#include "metadata_decoder.h"
#include "metadata_encoder.h"

namespace pyckpt {
namespace {

// Bytes that Python is given at a time.
constexpr size_t kBlock = 1 << 20;

using Name = std::pair<std::string, std::string>;

std::shared_ptr<MetadataNames> make_names(const Name& metadata, const Name& storage_meta,
                                          const Name& tensor, const Name& bytes, const Name& chunk,
                                          const Name& index, const Name& properties,
                                          const Name& info, const Name& size, const Name& layout,
                                          const Name& memory_format,
                                          std::unordered_map<std::string, uint32_t> dtypes,
                                          const std::vector<std::string>& layouts) {
  const auto line = [](const Name& name) { return name.first + "\n" + name.second + "\n"; };
  auto names = std::make_shared<MetadataNames>();
  names->metadata = line(metadata);
  names->storage_meta = line(storage_meta);
  names->tensor = line(tensor);
  names->bytes = line(bytes);
  names->chunk = line(chunk);
  names->index = line(index);
  names->properties = line(properties);
  names->info = line(info);
  names->size = line(size);
  names->layout = line(layout);
  names->memory_format = line(memory_format);
  names->dtypes = std::move(dtypes);
  names->layouts.insert(layouts.begin(), layouts.end());
  return names;
}

std::optional<std::string> to_string(const std::optional<py::bytes>& value) {
  if (!value) return std::nullopt;
  return std::string(*value);
}

std::optional<py::bytes> to_bytes(const std::optional<std::string>& value) {
  if (!value) return std::nullopt;
  return py::bytes(*value);
}

std::pair<uint64_t, uint32_t> encode(const Columns& columns, const MetadataNames& names,
                                     const py::function& write, const py::bytes& planner_data,
                                     const std::optional<py::bytes>& checkpoint_id,
                                     const std::optional<py::bytes>& save_id,
                                     const std::optional<py::bytes>& version) {
  const MetadataExtras extras{planner_data, to_string(checkpoint_id), to_string(save_id),
                              to_string(version)};
  std::string block;
  const auto give = [&] {
    py::gil_scoped_acquire acquire;
    write(py::bytes(block));
    block.clear();
  };
  MetadataSum sum;
  {
    GilRelease release;
    block.reserve(kBlock);
    sum = encode_metadata(columns, names, extras, [&](std::string_view piece) {
      if (!block.empty() && block.size() + piece.size() > kBlock) give();
      block += piece;
    });
    give();
  }
  return {sum.bytes, sum.crc32};
}

py::object decode(const py::object& buffer, const MetadataNames& names) {
  const ContiguousBuffer view(buffer);
  std::optional<DecodedMetadata> decoded;
  {
    GilRelease release;
    decoded = decode_metadata(view.data(), view.size(), names);
  }
  if (!decoded) return py::none();
  const MetadataExtras& extras = decoded->extras;
  return py::make_tuple(decoded->columns, py::bytes(extras.planner_data),
                        to_bytes(extras.checkpoint_id), to_bytes(extras.save_id),
                        to_bytes(extras.version));
}

}  // namespace

void register_metadata(py::module_& module) {
  py::class_<MetadataNames, std::shared_ptr<MetadataNames>>(module, "MetadataNames")
      .def(py::init(&make_names), py::kw_only(), py::arg("metadata"), py::arg("storage_meta"),
           py::arg("tensor"), py::arg("bytes"), py::arg("chunk"), py::arg("index"),
           py::arg("properties"), py::arg("info"), py::arg("size"), py::arg("layout"),
           py::arg("memory_format"), py::arg("dtypes"), py::arg("layouts"));
  module.def("encode_metadata", &encode, py::arg("columns"), py::arg("names"), py::arg("write"),
             py::kw_only(), py::arg("planner_data"), py::arg("checkpoint_id"), py::arg("save_id"),
             py::arg("version"));
  module.def("decode_metadata", &decode, py::arg("buffer"), py::arg("names"));
}

}  // namespace pyckpt
