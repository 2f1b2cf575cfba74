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

std::string PlanConflicts::describe(const Thing& thing) {
  switch (thing.kind) {
    case Kind::kObject:
      return "an object";
    case Kind::kList:
      return "a list";
    case Kind::kDict:
      return "a dict";
    case Kind::kTensor:
      break;
  }
  std::string shape;
  for (const int64_t extent : thing.shape) {
    if (!shape.empty()) shape += ", ";
    shape += std::to_string(extent);
  }
  if (thing.shape.size() == 1) shape += ",";  // as Python writes it
  return "a tensor of shape (" + shape + ")";
}

void PlanConflicts::conflict(const std::string& path, const std::string& line) {
  const std::string name = shown(path);
  if (named_.insert(name).second) found_.push_back(name + line);
}

void PlanConflicts::add(const KeyTable& keys, size_t rank) {
  std::unordered_map<std::string, Thing> own;
  std::vector<std::string> order;
  const auto note = [&](const std::string& path, Thing thing) -> Thing& {
    const auto [at, is_new] = own.try_emplace(path, std::move(thing));
    if (is_new) order.push_back(path);
    return at->second;
  };
  std::string path;
  for (uint32_t key = 0; key < keys.size(); ++key) {
    if (keys.kind(key) == PlanKind::kPathOnly) continue;
    const std::string_view name = keys.name(key);
    const size_t count = keys.part_count(key);
    path.clear();
    size_t at = 0;
    for (size_t i = 0; i < count; ++i) {
      const PathPart& part = keys.parts(key)[i];
      const std::string_view text = name.substr(at, part.size);
      at += part.size + 1;
      if (i != 0) {
        Thing& container = note(path, {part.is_number ? Kind::kList : Kind::kDict, {}, rank, 0});
        if (part.is_number) {
          const uint64_t length = std::strtoull(std::string(text).c_str(), nullptr, 10) + 1;
          container.length = std::max(container.length, length);
        }
      }
      append(text, part.is_number, &path);
    }
    if (count == 0) append(name, false, &path);
    Thing thing{Kind::kObject, {}, rank, 0};
    if (keys.is_tensor(key)) {
      thing.kind = Kind::kTensor;
      thing.shape.assign(keys.shape(key), keys.shape(key) + keys.dims(key));
    }
    note(path, std::move(thing));
  }
  const std::string here = std::to_string(rank);
  const auto known = [&](const std::string& of) -> std::pair<const Thing*, bool> {
    const auto [at, is_new] = things_.try_emplace(of, own.at(of));
    return {&at->second, !is_new};
  };
  std::vector<std::pair<const std::string*, const Thing*>> lists;
  for (const std::string& of : order) {
    const auto [before, is_known] = known(of);
    if (!is_known) continue;
    const Thing& mine = own.at(of);
    if (before->kind != mine.kind || before->shape != mine.shape) {
      conflict(of, " is " + describe(*before) + " on rank " + std::to_string(before->rank) +
                       " and " + describe(mine) + " on " + here);
    }
    if (mine.length != 0) lists.emplace_back(&of, before);
  }
  for (const auto& [of, before] : lists) {
    const uint64_t length = own.at(*of).length;
    if (before->length != 0 && before->length != length) {
      conflict(*of, " has " + std::to_string(before->length) + " entries on rank " +
                        std::to_string(before->rank) + " and " + std::to_string(length) + " on " +
                        here);
    }
  }
}

}  // namespace pyckpt
