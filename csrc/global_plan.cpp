#include "global_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "plan_chunks.h"
#include "plan_conflicts.h"

namespace pyckpt {
namespace {

constexpr uint32_t kNone = UINT32_MAX;
constexpr size_t kErrorsMax = 100;  // more are not read
// About what Columns take for an item, besides its chunk, and for a key.
constexpr size_t kColumnsBytes = 4 * sizeof(uint64_t) + 2 * sizeof(uint32_t);
constexpr size_t kKeyBytes = 64;

uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15U;
  return hash ^ (hash >> 29);
}

}  // namespace

// The items of all ranks, with a number each: those of a rank follow those of the rank before.
class GlobalPlan::Merge {
 public:
  Merge(GlobalPlan* plan, const std::vector<Rank>& ranks) : plan_(*plan), ranks_(ranks) {
    unpack();
    number_names();
  }

  // The rank that writes each item that several have: for each item, where the first of them has
  // it.
  void choose_writers();
  void make_columns();

 private:
  // Where an item is.
  struct Place {
    size_t rank;
    const PlanBlock& block;
    size_t index;
    uint32_t key;
  };

  void unpack();
  void number_names();
  void find_holders();
  uint64_t hash(const Place& at) const;
  bool is_same(const Place& a, const Place& b) const;
  Place place(uint32_t item) const {
    const size_t rank = rank_of_[item];
    const PlanBlock& block = blocks_[rank];
    const size_t index = item - plan_.first_[rank];
    return {rank, block, index, block.key(index)};
  }
  uint32_t name(const Place& at) const { return (*names_of_rank_[at.rank])[at.key]; }
  bool wrote(const Place& at) const { return (*ranks_[at.rank].wrote)[at.index] != 0; }
  void refuse(const Place& at, const std::string& why) {
    if (plan_.errors_.size() >= kErrorsMax) return;
    plan_.errors_.push_back("key:" + std::string(at.block.keys()->name(at.key)) + " " + why);
  }

  GlobalPlan& plan_;
  const std::vector<Rank>& ranks_;
  PlanBlock::Tables tables_;
  std::vector<PlanBlock> blocks_;
  // Names have numbers that are the same on all ranks.
  size_t name_count_ = 0;
  std::unordered_map<const KeyTable*, std::vector<uint32_t>> names_;
  std::vector<const std::vector<uint32_t>*> names_of_rank_;

  std::vector<uint32_t> rank_of_;  // of each item
  // Of the items that are the same part of the same thing: the numbers of the first and the last,
  // and of each the next.
  struct Holders {
    uint32_t first;
    uint32_t last;
    uint32_t writer = 0;  // the rank
  };
  std::vector<Holders> holders_;
  std::vector<uint32_t> next_;
  std::vector<uint32_t> holders_of_;  // of each item
};

void GlobalPlan::Merge::unpack() {
  blocks_.reserve(ranks_.size());
  plan_.first_.push_back(0);
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const auto refuse = [rank](const std::string& why) {
      throw std::invalid_argument("the plan of rank " + std::to_string(rank) + " " + why);
    };
    try {
      blocks_.emplace_back(ranks_[rank].block, &tables_);
    } catch (const std::invalid_argument& error) {
      refuse(error.what());
    }
    const size_t items = blocks_.back().size();
    if (ranks_[rank].wrote && ranks_[rank].wrote->size() != items) {
      refuse("is not the one that it wrote by");
    }
    if (items >= kNone - plan_.first_.back()) refuse("has too many items");
    plan_.first_.push_back(plan_.first_.back() + items);
    rank_of_.insert(rank_of_.end(), items, static_cast<uint32_t>(rank));
  }
}

void GlobalPlan::Merge::number_names() {
  std::unordered_map<std::string_view, uint32_t> numbers;
  PlanConflicts conflicts;
  std::unordered_map<const KeyTable*, size_t> known;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const std::shared_ptr<const KeyTable>& keys = blocks_[rank].keys();
    const auto [at, is_new] = known.emplace(keys.get(), plan_.tables_.size());
    std::vector<uint32_t>& names = names_[keys.get()];
    names_of_rank_.push_back(&names);
    if (!is_new) {
      plan_.tables_[at->second].last_rank = rank;
      continue;
    }
    plan_.tables_.push_back({keys, rank, rank});
    conflicts.add(*keys, rank);
    names.reserve(keys->size());
    for (uint32_t key = 0; key < keys->size(); ++key) {
      const auto number = static_cast<uint32_t>(numbers.size());
      names.push_back(numbers.emplace(keys->name(key), number).first->second);
    }
  }
  name_count_ = numbers.size();
  plan_.conflicts_ = conflicts.found();
}

uint64_t GlobalPlan::Merge::hash(const Place& at) const {
  uint64_t hash = mixed(0, name(at));
  const size_t dims = at.block.keys()->dims(at.key);
  for (size_t d = 0; d < dims; ++d) {
    hash = mixed(hash, static_cast<uint64_t>(at.block.offsets(at.index)[d]));
  }
  return hash;
}

bool GlobalPlan::Merge::is_same(const Place& a, const Place& b) const {
  if (name(a) != name(b)) return false;
  const KeyTable &of_a = *a.block.keys(), &of_b = *b.block.keys();
  const size_t dims = of_a.dims(a.key);
  const int64_t* const offsets = a.block.offsets(a.index);
  return of_a.is_tensor(a.key) == of_b.is_tensor(b.key) && dims == of_b.dims(b.key) &&
         std::equal(offsets, offsets + dims, b.block.offsets(b.index));
}

void GlobalPlan::Merge::find_holders() {
  const auto items = static_cast<uint32_t>(rank_of_.size());
  size_t slot_count = 16;
  while (slot_count < size_t{items} * 2) slot_count *= 2;
  std::vector<uint32_t> slots(slot_count, kNone);
  next_.assign(items, kNone);
  holders_of_.resize(items);
  for (uint32_t item = 0; item < items; ++item) {
    const Place at = place(item);
    size_t slot = hash(at) & (slot_count - 1);
    while (slots[slot] != kNone && !is_same(at, place(holders_[slots[slot]].first))) {
      slot = (slot + 1) & (slot_count - 1);
    }
    uint32_t& number = slots[slot];
    if (number == kNone) {
      number = static_cast<uint32_t>(holders_.size());
      holders_.push_back({item, item});
    } else {
      Holders& holders = holders_[number];
      if (rank_of_[holders.last] == at.rank) {
        refuse(at, "is planned twice by rank " + std::to_string(at.rank));
      }
      next_[holders.last] = item;
      holders.last = item;
    }
    holders_of_[item] = number;
  }
}

void GlobalPlan::Merge::choose_writers() {
  find_holders();
  std::vector<uint64_t> loads(ranks_.size());
  for (Holders& holders : holders_) {
    // The better reason to write counts first, then the smaller load, then the smaller rank.
    enum { kNever = -1, kHas, kMayHave, kWrote };
    int best = kNever;
    for (uint32_t item = holders.first; item != kNone; item = next_[item]) {
      const Place at = place(item);
      const bool is_known = ranks_[at.rank].wrote.has_value();
      const int reason = !is_known ? kMayHave : wrote(at) ? kWrote : kHas;
      if (reason > best || (reason == best && loads[at.rank] < loads[holders.writer])) {
        best = reason;
        holders.writer = static_cast<uint32_t>(at.rank);
      }
    }
    const Place last = place(holders.last);
    uint64_t& load = loads[holders.writer];
    if (__builtin_add_overflow(load, last.block.keys()->weight(last.key), &load)) {
      load = UINT64_MAX;
    }
  }
}

void GlobalPlan::Merge::make_columns() {
  struct Key {
    uint32_t first;  // the item
    uint32_t items = 0;
    uint64_t first_in_columns = 0;
  };
  std::vector<Key> keys;
  std::vector<uint32_t> key_of_name(name_count_, kNone);
  const auto items = static_cast<uint32_t>(rank_of_.size());
  plan_.answers_.assign(items, kNotWritten);
  size_t written = 0, name_bytes = 0;
  for (uint32_t item = 0; item < items; ++item) {
    if (holders_[holders_of_[item]].writer != rank_of_[item]) continue;
    const Place at = place(item);
    uint32_t& number = key_of_name[name(at)];
    const KeyTable& table = *at.block.keys();
    if (number == kNone) {
      number = static_cast<uint32_t>(keys.size());
      keys.push_back({item});
      name_bytes += table.name(at.key).size();
    } else {
      const Place first = place(keys[number].first);
      const KeyTable& of_first = *first.block.keys();
      if (table.kind(at.key) != PlanKind::kShard || !of_first.is_tensor(first.key) ||
          of_first.dims(first.key) != table.dims(at.key)) {
        refuse(at, "is planned by ranks " + std::to_string(first.rank) + " and " +
                       std::to_string(at.rank) + ", and not as shards of one tensor");
      }
    }
    plan_.answers_[item] = ++keys[number].items;
    ++written;
  }
  if (!plan_.errors_.empty()) return;
  // The items in the order of the columns: those of a key follow each other.
  uint64_t next = 0;
  for (Key& key : keys) {
    key.first_in_columns = next;
    next += key.items;
  }
  std::vector<uint32_t> in_order(written);
  plan_.written_.reserve(written);
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    plan_.first_written_.push_back(plan_.written_.size());
    for (size_t item = plan_.first_[rank]; item < plan_.first_[rank + 1]; ++item) {
      if (plan_.answers_[item] == kNotWritten) continue;
      const Key& key = keys[key_of_name[name(place(static_cast<uint32_t>(item)))]];
      const uint64_t column = key.first_in_columns + plan_.answers_[item] - 1;
      in_order[column] = static_cast<uint32_t>(item);
      plan_.written_.push_back(column);
    }
  }
  plan_.first_written_.push_back(plan_.written_.size());

  plan_.columns_ = std::make_shared<Columns>();
  Columns& columns = *plan_.columns_;
  columns.reserve(keys.size(), written, name_bytes);
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    plan_.files_.push_back(plan_.written(rank) == 0 ? kNone : columns.add_file(""));
  }
  for (const Key& key : keys) {
    const Place first = place(key.first);
    const KeyTable& table = *first.block.keys();
    if (!table.is_tensor(first.key)) {
      columns.add_object(table.name(first.key));
      continue;
    }
    const uint32_t properties = columns.add_properties(table.properties(first.key).properties);
    columns.add_tensor(table.name(first.key), properties, table.shape(first.key),
                       table.dims(first.key));
    for (uint64_t i = key.first_in_columns; i < key.first_in_columns + key.items; ++i) {
      const Place at = place(in_order[i]);
      columns.add_chunk(at.block.offsets(at.index), at.block.sizes(at.index));
    }
  }
}

GlobalPlan::GlobalPlan(const std::vector<Rank>& ranks) {
  Merge merge(this, ranks);
  if (!conflicts_.empty()) return;
  merge.choose_writers();
  merge.make_columns();
  if (!errors_.empty()) return;
  for (uint32_t key = 0; key < columns_->key_count() && errors_.size() < kErrorsMax; ++key) {
    if (columns_->is_tensor(key)) check_chunks(*columns_, key, ranks.size() > 1, &errors_);
  }
}

// --- answers
// --------------------------------------------------------------------------------------

std::string GlobalPlan::answer(size_t rank) const {
  Packer packed;
  const size_t end = first_.at(rank + 1);
  for (size_t item = first_[rank]; item < end;) {
    const size_t begin = item;
    while (item < end && answers_[item] == answers_[begin]) ++item;
    packed.number(uint64_t{answers_[begin]});
    packed.number(uint64_t{item - begin});
  }
  return packed.bytes();
}

std::vector<uint32_t> unpack_answer(std::string_view packed, size_t items) {
  std::vector<uint32_t> answers;
  answers.reserve(items);
  for (Unpacker from(packed); !from.is_at_end();) {
    const uint64_t answer = from.number(), count = from.number();
    if (answer > kNone || count > items - answers.size()) Unpacker::fail();
    answers.insert(answers.end(), count, static_cast<uint32_t>(answer));
  }
  if (answers.size() != items) Unpacker::fail();
  return answers;
}

std::string GlobalPlan::wrote(size_t rank) const {
  std::string mask;
  for (size_t item = first_.at(rank); item < first_.at(rank + 1); ++item) {
    mask += static_cast<char>(answers_[item] != kNotWritten);
  }
  return mask;
}

std::vector<std::pair<const KeyTable*, uint32_t>> GlobalPlan::paths() const {
  // What stands for a name is what the first rank says, and its place is that of the last.
  std::unordered_map<std::string_view, std::pair<const KeyTable*, uint32_t>> said;
  for (const Table& table : tables_) {
    for (uint32_t key = 0; key < table.keys->size(); ++key) {
      if (table.keys->part_count(key) == 0) continue;
      said.try_emplace(table.keys->name(key), table.keys.get(), key);
    }
  }
  std::vector<const Table*> later_first;
  for (const Table& table : tables_) later_first.push_back(&table);
  std::sort(later_first.begin(), later_first.end(),
            [](const Table* a, const Table* b) { return a->last_rank > b->last_rank; });
  std::vector<std::pair<const KeyTable*, uint32_t>> paths;
  paths.reserve(said.size());
  for (const Table* table : later_first) {
    for (uint32_t key = 0; key < table->keys->size(); ++key) {
      if (table->keys->part_count(key) == 0) continue;
      const auto found = said.find(table->keys->name(key));
      if (found == said.end()) continue;
      paths.push_back(found->second);
      said.erase(found);
    }
  }
  return paths;
}

size_t GlobalPlan::memory_bytes() const {
  size_t bytes = first_.capacity() * sizeof(first_[0]) + answers_.capacity() * sizeof(answers_[0]) +
                 first_written_.capacity() * sizeof(first_written_[0]) +
                 written_.capacity() * sizeof(written_[0]) + files_.capacity() * sizeof(files_[0]);
  for (const Table& table : tables_) bytes += table.keys->memory_bytes();
  if (columns_ == nullptr) return bytes;
  bytes += columns_->item_count() * kColumnsBytes;
  for (uint32_t key = 0; key < columns_->key_count(); ++key) {
    const size_t boxes = 1 + 2 * columns_->items_of(key);
    bytes += kKeyBytes + columns_->name(key).size() +
             (columns_->is_tensor(key) ? boxes * columns_->dims(key) * sizeof(int64_t) : 0);
  }
  return bytes;
}

// --- results
// --------------------------------------------------------------------------------------

void GlobalPlan::expect_items(size_t rank, size_t found) const {
  if (found == written(rank)) return;
  throw std::invalid_argument("are of " + std::to_string(found) + " items, where its plan has " +
                              std::to_string(written(rank)));
}

void GlobalPlan::place(size_t rank, const std::string& file, std::string_view places) {
  std::vector<PlacedItem> items = unpack_places(places);
  expect_items(rank, items.size());
  if (items.empty()) return;
  columns_->set_file_name(files_[rank], file);
  for (size_t i = 0; i < items.size(); ++i) {
    items[i].place.file = files_[rank];
    columns_->set_place(item(rank, i), items[i].place);
    columns_->set_stride(item(rank, i), std::move(items[i].stride));
  }
}

void GlobalPlan::check(size_t rank, const std::string& file, std::string_view checksums) {
  const std::vector<uint32_t> found = unpack_checksums(checksums);
  expect_items(rank, found.size());
  if (found.empty()) return;
  columns_->set_file_name(files_[rank], file);
  for (size_t i = 0; i < found.size(); ++i) {
    ItemPlace place = columns_->place(item(rank, i));
    place.crc32 = found[i];
    columns_->set_place(item(rank, i), place);
  }
}

}  // namespace pyckpt
