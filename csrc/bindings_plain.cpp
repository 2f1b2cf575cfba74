// The reads of a load that need no Python for each item: tensors that were saved whole and are
// wanted whole, and objects that are a number, a string, a bool or None. What this takes for plain
// is little, and common: a checkpoint may have thousands of each. Anything else is Python's to
// load.
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_read.h"
#include "columns.h"
#include "crc32.h"
#include "envelope.h"

namespace pyckpt {
namespace {

// A larger object takes longer to build than Python takes to load it.
constexpr uint64_t kObjectMax = 1 << 16;

uint64_t little_endian(const uint8_t* bytes, int count) {
  uint64_t value = 0;
  for (int i = count; i-- > 0;) value = value << 8 | bytes[i];
  return value;
}

// The value that a pickle, as protocol 2 writes it, begins with; null where it is not one of a
// number, a string, a bool or None. `size` becomes that of the pickle.
py::object decode_atom(const uint8_t* bytes, size_t available, size_t* size) {
  constexpr size_t kHead = 3;  // the protocol, and what the value is
  if (available <= kHead || bytes[0] != 0x80 || bytes[1] != 2) return {};
  const uint8_t* const at = bytes + kHead;
  const size_t left = available - kHead;
  const auto ends = [&](size_t length) {
    *size = kHead + length + 1;
    return left > length && at[length] == '.';
  };
  switch (bytes[2]) {
    case 'N':
      return ends(0) ? py::object(py::none()) : py::object();
    case 0x88:
    case 0x89:
      return ends(0) ? py::object(py::bool_(bytes[2] == 0x88)) : py::object();
    case 'K':
      return ends(1) ? py::object(py::int_(little_endian(at, 1))) : py::object();
    case 'M':
      return ends(2) ? py::object(py::int_(little_endian(at, 2))) : py::object();
    case 'J':
      return ends(4) ? py::object(py::int_(static_cast<int32_t>(little_endian(at, 4))))
                     : py::object();
    case 'G': {
      if (!ends(8)) return {};
      uint64_t bits = 0;
      for (int i = 0; i < 8; ++i) bits = bits << 8 | at[i];
      double value = 0;
      std::memcpy(&value, &bits, sizeof value);
      return py::float_(value);
    }
    case 'X': {
      if (left < 4) return {};
      const size_t length = little_endian(at, 4);
      // Behind a string comes that it is the first thing to remember.
      if (length > left || !ends(4 + length + 2) || at[4 + length] != 'q' || at[5 + length] != 0) {
        return {};
      }
      PyObject* const text = PyUnicode_DecodeUTF8(reinterpret_cast<const char*>(at + 4),
                                                  static_cast<Py_ssize_t>(length), "surrogatepass");
      if (text == nullptr) PyErr_Clear();
      return py::reinterpret_steal<py::object>(text);
    }
    default:
      return {};
  }
}

class PlainReads {
 public:
  // Reads of what the columns are of; objects of `object_bytes` at most, all together.
  PlainReads(std::shared_ptr<const Columns> columns, uint64_t object_bytes)
      : columns_(std::move(columns)),
        object_bytes_max_(object_bytes),
        dtypes_(columns_->properties_count(), nullptr) {}

  // Takes, of a state's values by key, those that are plain. Returns the keys of the others, and
  // of those that are not in the columns, in their order.
  py::list take(const py::dict& values) {
    if (!reads_.empty()) throw std::runtime_error("there are reads already");
    std::vector<std::pair<PyObject*, size_t>> order;  // a key, and its read or kNoRead
    std::unordered_set<const void*> elsewhere;        // storages that others are read into
    order.reserve(values.size());
    reads_.reserve(values.size());
    // Of a copy: a look at a tensor's attributes may run Python, which may change the dict.
    const auto copy = py::reinterpret_steal<py::dict>(PyDict_Copy(values.ptr()));
    if (!copy) throw py::error_already_set();
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(copy.ptr(), &at, &name, &value) != 0;) {
      const bool is_taken = add(name, value);
      if (!is_taken) note_storage(value, &elsewhere);
      order.emplace_back(name, is_taken ? reads_.size() - 1 : kNoRead);
    }
    leave_tied(elsewhere);
    py::list others;
    std::vector<Read> kept;
    kept.reserve(reads_.size());
    for (const auto& [key, read] : order) {
      if (read == kNoRead || reads_[read].is_tied) {
        others.append(py::handle(key));
      } else {
        kept.push_back(std::move(reads_[read]));
      }
    }
    reads_ = std::move(kept);
    arrange();
    return others;
  }

  size_t size() const { return reads_.size(); }

  // What there is of tensors in memory.
  uint64_t tensor_bytes() const {
    return std::accumulate(
        reads_.begin(), reads_.end(), uint64_t{0},
        [](uint64_t sum, const Read& read) { return sum + (read.is_tensor ? read.size : 0); });
  }

  py::list names() const {
    py::list made;
    for (const Read& read : reads_) made.append(read.name);
    return made;
  }

  // The files that are read, in the order of their names.
  py::list files() const {
    py::list made;
    for (const uint32_t file : files_) made.append(columns_->file_name(file));
    return made;
  }

  // Has a job read what is in files `begin` to `end`, of those above, which are all the job has.
  void give(PyReadJob& job, size_t begin, size_t end) {
    given_.clear();
    if (objects_ == nullptr) {
      objects_ = std::shared_ptr<std::byte>(new std::byte[object_bytes_]{},
                                            std::default_delete<std::byte[]>());
    }
    for (const Read& read : reads_) {
      if (read.file < begin || read.file >= end) continue;
      const size_t file = read.file - begin;
      int64_t range = -1;
      if (read.is_tensor) {
        // The program may have run since it was taken.
        if (is_still(read)) {
          range = job.add_tensor(file, read.offset, read.tensor, std::nullopt).value_or(-1);
        }
      } else {
        range = job.add_memory(file, read.offset, objects_.get() + read.at, read.size, objects_);
      }
      if (range < 0) {
        throw std::invalid_argument("the dtype or shape of " + read.name.cast<std::string>() +
                                    " has changed since the load was planned");
      }
      given_.emplace_back(&read, static_cast<size_t>(range));
    }
  }

  // Of what was given to the last job: where checksums are not those that were saved, as tuples of
  // key, file, offset in it, the checksum saved, the one found, and whether it is a tensor.
  py::list check(const std::vector<uint32_t>& found) {
    py::list wrong;
    for (const auto& [read, range] : std::exchange(given_, {})) {
      if (range >= found.size()) throw std::invalid_argument("these are another job's checksums");
      if (found[range] == read->crc32) continue;
      wrong.append(py::make_tuple(read->name, columns_->file_name(files_[read->file]), read->offset,
                                  read->crc32, found[range], read->is_tensor));
    }
    return wrong;
  }

  // The objects that were read: the keys and values of those that are plain, and pairs of keys and
  // bytes of the others. `envelope_of` returns the envelope of a pickle of a size.
  py::tuple objects(const py::function& envelope_of) {
    if (objects_ == nullptr && object_bytes_ != 0) throw std::runtime_error("nothing was read yet");
    py::list names;
    py::list values;
    py::list others;
    std::unordered_map<size_t, std::shared_ptr<Envelope>> envelopes;
    for (const Read& read : reads_) {
      if (read.is_tensor) continue;
      const auto* const bytes = reinterpret_cast<const uint8_t*>(objects_.get() + read.at);
      py::object value = decode(bytes, read.size, envelope_of, &envelopes);
      if (value) {
        names.append(read.name);
        values.append(std::move(value));
      } else {
        others.append(py::make_tuple(read.name, py::bytes(reinterpret_cast<const char*>(bytes),
                                                          static_cast<size_t>(read.size))));
      }
    }
    objects_ = nullptr;
    return py::make_tuple(names, values, others);
  }

 private:
  static constexpr size_t kNoRead = SIZE_MAX;

  struct Read {
    py::object name;
    at::Tensor tensor;
    at::ScalarType dtype = at::ScalarType::Undefined;
    size_t file = 0;      // of the columns; of files_ once they are arranged
    uint64_t offset = 0;  // of the payload, in the file
    uint64_t size = 0;
    uint64_t at = 0;  // of an object, in objects_
    uint32_t crc32 = 0;
    bool is_tensor = false;
    bool is_tied = false;
  };

  bool add(PyObject* name, PyObject* value) {
    if (PyUnicode_CheckExact(name) == 0) return false;
    Py_ssize_t length = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(name, &length);
    if (text == nullptr) {  // it has half of a surrogate pair
      PyErr_Clear();
      return false;
    }
    const uint32_t key = columns_->find({text, static_cast<size_t>(length)});
    if (key == Columns::kNone) return false;
    const uint64_t item = columns_->first_item(key);
    if (columns_->items_of(key) != 1) return false;
    const ItemPlace place = columns_->place(item);
    if (!place.is_recorded) return false;
    Read read;
    read.file = place.file;
    read.crc32 = place.crc32;
    read.size = place.payload_length;
    if (columns_->is_tensor(key)) {
      if (!is_wanted_whole(key, item, place, value)) return false;
      read.is_tensor = true;
      read.tensor = THPVariable_Unpack(value);
    } else {
      // A tensor in the state gives way to the object, and so does what `is_wanted_whole` is not
      // asked of: the planner puts it there.
      if (place.payload_offset != 0 || place.payload_length != place.length ||
          place.length > std::min(kObjectMax, object_bytes_max_ - object_bytes_)) {
        return false;
      }
      read.at = object_bytes_;
      object_bytes_ += place.length;
    }
    if (__builtin_add_overflow(place.offset, place.payload_offset, &read.offset)) return false;
    if (read.is_tensor) read.dtype = read.tensor.scalar_type();
    read.name = py::reinterpret_borrow<py::object>(name);
    reads_.push_back(std::move(read));
    return true;
  }

  // Whether one item is all of a tensor, in row-major order, and a state's value is memory like it.
  bool is_wanted_whole(uint32_t key, uint64_t item, const ItemPlace& place, PyObject* value) {
    if (!THPVariable_CheckExact(value)) return false;
    for (const py::object& name : tells_of_parts_) {
      if (PyObject_HasAttr(value, name.ptr()) != 0) return false;
    }
    const at::Tensor& tensor = THPVariable_Unpack(value);
    const size_t dims = columns_->dims(key);
    const int64_t* const size = columns_->size(key);
    if (static_cast<size_t>(tensor.dim()) != dims || !tensor.sizes().equals({size, dims})) {
      return false;
    }
    const int64_t* const chunk = columns_->chunk_sizes(key, 0);
    const int64_t* const begin = columns_->chunk_offsets(key, 0);
    if (!std::equal(size, size + dims, chunk) ||
        std::any_of(begin, begin + dims, [](int64_t offset) { return offset != 0; })) {
      return false;
    }
    if (!is_of_dtype(tensor, columns_->properties_of(key))) return false;
    if (place.payload_offset == 0 || columns_->stride(item) != nullptr ||
        place.payload_offset > place.length ||
        place.payload_length > place.length - place.payload_offset) {
      return false;
    }
    try {
      return is_plain(tensor) && tensor.is_contiguous() && tensor.numel() != 0 &&
             tensor.nbytes() == place.payload_length;
    } catch (const std::invalid_argument&) {  // its memory was freed
      return false;
    }
  }

  static bool is_still(const Read& read) {
    return read.tensor.scalar_type() == read.dtype && read.tensor.is_contiguous() &&
           read.tensor.nbytes() == read.size;
  }

  bool is_of_dtype(const at::Tensor& tensor, uint32_t properties) {
    const THPDtype* const dtype = torch::getTHPDtype(tensor.scalar_type());
    if (dtypes_[properties] != dtype) {
      const Properties& saved = columns_->properties(properties);
      if (saved.dtype != dtype->name || saved.layout != "torch.strided") return false;
      dtypes_[properties] = dtype;
    }
    return true;
  }

  // Notes the storage of a value that is left to the caller; of a DTensor, that of its local part.
  static void note_storage(PyObject* value, std::unordered_set<const void*>* storages) {
    if (!THPVariable_Check(value)) return;
    const py::object local =
        py::getattr(value, "_local_tensor", py::reinterpret_borrow<py::object>(value));
    if (!THPVariable_Check(local.ptr())) return;
    const at::Tensor& tensor = THPVariable_Unpack(local.ptr());
    if (tensor.has_storage()) storages->insert(tensor.storage().unsafeGetStorageImpl());
  }

  // Leaves out tensors that share memory with another: of two keys, which are read in their order,
  // the later one is to stay.
  void leave_tied(const std::unordered_set<const void*>& elsewhere) {
    std::vector<std::pair<uintptr_t, size_t>> begins;
    for (size_t i = 0; i < reads_.size(); ++i) {
      if (!reads_[i].is_tensor) continue;
      if (elsewhere.count(reads_[i].tensor.storage().unsafeGetStorageImpl()) != 0) {
        reads_[i].is_tied = true;
      }
      begins.emplace_back(reinterpret_cast<uintptr_t>(reads_[i].tensor.const_data_ptr()), i);
    }
    std::sort(begins.begin(), begins.end());
    uintptr_t end = 0;
    size_t last = kNoRead;  // the one that reaches to the end
    for (const auto& [begin, i] : begins) {
      if (begin < end) reads_[i].is_tied = reads_[last].is_tied = true;
      if (begin + reads_[i].size > end) {
        end = begin + reads_[i].size;
        last = i;
      }
    }
  }

  // Numbers the files in the order of their names, and sorts the reads by where they are.
  void arrange() {
    std::vector<size_t> number(columns_->file_count(), 0);
    for (const Read& read : reads_) number[read.file] = 1;
    for (uint32_t file = 0; file < number.size(); ++file) {
      if (number[file] != 0) files_.push_back(file);
    }
    std::sort(files_.begin(), files_.end(), [this](uint32_t a, uint32_t b) {
      return columns_->file_name(a) < columns_->file_name(b);
    });
    for (size_t i = 0; i < files_.size(); ++i) number[files_[i]] = i;
    for (Read& read : reads_) read.file = number[read.file];
    std::sort(reads_.begin(), reads_.end(), [](const Read& a, const Read& b) {
      return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
    });
  }

  // Null where the item is not what an envelope and a plain pickle make, byte for byte.
  static py::object decode(const uint8_t* bytes, size_t size, const py::function& envelope_of,
                           std::unordered_map<size_t, std::shared_ptr<Envelope>>* envelopes) {
    const auto known = [&](size_t length) -> const Envelope* {
      const auto [found, is_new] = envelopes->try_emplace(length);
      if (is_new) found->second = envelope_of(length).cast<std::shared_ptr<Envelope>>();
      return found->second.get();
    };
    const Envelope* envelope = known(1);  // what comes before the pickle is the same for all
    if (envelope == nullptr) return {};
    const size_t begin = envelope->prefix.size();
    if (size <= begin || std::memcmp(bytes, envelope->prefix.data(), begin) != 0) return {};
    size_t length = 0;
    py::object value = decode_atom(bytes + begin, size - begin, &length);
    if (!value || (envelope = known(length)) == nullptr) return {};
    const uint8_t* const rest = bytes + begin + length;
    std::string suffix = envelope->suffix;
    if (envelope->prefix.size() != begin || size - begin - length != suffix.size()) return {};
    envelope->stamp(pyckpt::crc32(0, bytes + begin, length), suffix.data());
    if (std::memcmp(rest, suffix.data(), suffix.size()) != 0) return {};
    return value;
  }

  static py::object interned(const char* text) {
    return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text));
  }

  const std::shared_ptr<const Columns> columns_;
  const uint64_t object_bytes_max_;
  // By these, a plain tensor says that it is a part of another (pyckpt/dcp/leaves.py).
  const std::array<py::object, 2> tells_of_parts_{interned("__create_chunk_list__"),
                                                  interned("global_offsets")};
  std::vector<const THPDtype*> dtypes_;  // of the columns' properties, where they are known
  std::vector<Read> reads_;
  std::vector<uint32_t> files_;
  uint64_t object_bytes_ = 0;
  std::shared_ptr<std::byte> objects_;
  std::vector<std::pair<const Read*, size_t>> given_;  // with the numbers of their ranges
};

}  // namespace

void register_plain_reads(py::module_& module) {
  py::class_<PlainReads>(module, "PlainReads")
      .def(py::init<std::shared_ptr<Columns>, uint64_t>(), py::arg("columns").none(false),
           py::kw_only(), py::arg("object_bytes"))
      .def("__len__", &PlainReads::size)
      .def_property_readonly("tensor_bytes", &PlainReads::tensor_bytes)
      .def("take", &PlainReads::take, py::arg("values"))
      .def("names", &PlainReads::names)
      .def("files", &PlainReads::files)
      .def("give", &PlainReads::give, py::arg("job"), py::arg("begin"), py::arg("end"))
      .def("check", &PlainReads::check, py::arg("checksums"))
      .def("objects", &PlainReads::objects, py::arg("envelope_of"));
}

}  // namespace pyckpt
