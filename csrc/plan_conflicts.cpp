#include "plan_conflicts.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace pyckpt {
namespace {

// A path is encoded as its parts, each behind what kind it is and how long: the name alone does not
// tell "a.b" from "a" and "b", nor an element of a list from a key of digits.
void append(std::string_view part, bool is_number, std::string* path) {
  path->push_back(is_number ? 'n' : 's');
  const auto size = static_cast<uint32_t>(part.size());
  path->append(reinterpret_cast<const char*>(&size), sizeof(size));
  path->append(part);
}

std::string shown(const std::string& path) {
  std::string name;
  for (size_t at = 0; at < path.size();) {
    uint32_t size = 0;
    path.copy(reinterpret_cast<char*>(&size), sizeof(size), at + 1);
    at += 1 + sizeof(size);
    if (!name.empty() || at > 1 + sizeof(size)) name += '.';
    name += path.substr(at, size);
    at += size;
  }
  return name;
}

}  // namespace

std::string PlanConflicts::describe(Kind kind, const std::vector<int64_t>& shape) {
  switch (kind) {
    case Kind::kObject:
      return "an object";
    case Kind::kList:
      return "a list";
    case Kind::kDict:
      return "a dict";
    case Kind::kTensor:
      break;
  }
  std::string text;
  for (const int64_t extent : shape) {
    if (!text.empty()) text += ", ";
    text += std::to_string(extent);
  }
  if (shape.size() == 1) text += ",";  // as Python writes it
  return "a tensor of shape (" + text + ")";
}

void PlanConflicts::conflict(const std::string& path, const std::string& line) {
  const std::string name = shown(path);
  if (named_.insert(name).second) found_.push_back(name + line);
}

PlanConflicts::Things::value_type* PlanConflicts::note(const std::string& path, Kind kind,
                                                       const std::vector<int64_t>& shape,
                                                       size_t rank) {
  const auto [at, is_new] = things_.try_emplace(path, Thing{kind, shape, rank, 0, rank, 0});
  Thing& thing = at->second;
  if (!is_new && thing.last_rank != rank) {
    thing.last_rank = rank;
    thing.last_length = 0;
    if (thing.kind != kind || thing.shape != shape) {
      conflict(path, " is " + describe(thing.kind, thing.shape) + " on rank " +
                         std::to_string(thing.rank) + " and " + describe(kind, shape) + " on " +
                         std::to_string(rank));
    }
  }
  return &*at;
}

void PlanConflicts::add(const KeyTable& keys, size_t rank) {
  // The containers of the key before, and where the encoded path of each ends: the next key is in
  // the same ones, most often.
  std::vector<std::pair<Things::value_type*, size_t>> containers;
  std::string path, last_path;
  std::vector<Things::value_type*> lists;
  std::vector<int64_t> shape;
  for (uint32_t key = 0; key < keys.size(); ++key) {
    if (keys.kind(key) == PlanKind::kPathOnly) continue;
    const std::string_view name = keys.name(key);
    const size_t count = keys.part_count(key);
    path.swap(last_path);
    path.clear();
    size_t at = 0, shared = 0;
    for (size_t i = 0; i < count; ++i) {
      const PathPart& part = keys.parts(key)[i];
      const std::string_view text = name.substr(at, part.size);
      at += part.size + 1;
      if (i != 0) {
        const bool is_known = shared == i - 1 && shared < containers.size() &&
                              containers[shared].second == path.size() &&
                              last_path.compare(0, path.size(), path) == 0;
        if (!is_known) {
          containers.resize(i - 1);
          containers.emplace_back(note(path, part.is_number ? Kind::kList : Kind::kDict, {}, rank),
                                  path.size());
        }
        shared = i;
        if (part.is_number) {
          Thing& list = containers[i - 1].first->second;
          if (list.last_length == 0) lists.push_back(containers[i - 1].first);
          const uint64_t length = std::strtoull(std::string(text).c_str(), nullptr, 10) + 1;
          list.last_length = std::max(list.last_length, length);
        }
      }
      append(text, part.is_number, &path);
    }
    containers.resize(std::min(containers.size(), count == 0 ? 0 : count - 1));
    if (count == 0) append(name, false, &path);
    const Kind kind = keys.is_tensor(key) ? Kind::kTensor : Kind::kObject;
    shape.assign(keys.shape(key), keys.shape(key) + keys.dims(key));
    note(path, kind, shape, rank);
  }
  for (Things::value_type* list : lists) {
    Thing& thing = list->second;
    if (thing.length == 0) thing.length = thing.last_length;
    if (thing.length == thing.last_length) continue;
    conflict(list->first, " has " + std::to_string(thing.length) + " entries on rank " +
                              std::to_string(thing.rank) + " and " +
                              std::to_string(thing.last_length) + " on " + std::to_string(rank));
  }
}

}  // namespace pyckpt
