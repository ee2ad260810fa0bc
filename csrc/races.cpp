#include "races.hpp"

#include <algorithm>
#include <array>
#include <map>

#include "blocks.hpp"

namespace meshweave {
namespace {

constexpr u64 MAX_MASKS = u64{1} << 27;        // words of all masks
constexpr i64 MAX_COMPARED = i64{1} << 28;     // pairs of accesses

struct Entry {
  i64 op;
  const Access* view;
  i64 ended_by;  // the op at whose end the access has surely ended; -1 if no op guarantees that
};

class Races {
 public:
  Races(const Expanded& program, const std::vector<std::vector<i64>>& order, const std::vector<i64>& rank_of)
      : program_(program), order_(order), rank_of_(rank_of) {
    list_entries();
    number_bits();
  }

  void check(i64& blocks_left) {
    fill_masks();
    i64 compared = 0;
    for (const auto& [memory, entries] : entries_)
      for (const Entry& one : entries) {
        if (one.view->rank < 0) continue;
        compared += static_cast<i64>(entries.size());
        trust(compared <= MAX_COMPARED);
        for (const Entry& other : entries) {
          if (&one == &other || (one.view->mode == other.view->mode && one.view->mode != Mode::WRITE)) continue;
          if (is_over_before(one.ended_by, other.op) || is_over_before(other.ended_by, one.op)) continue;
          trust(!overlap(*one.view, *other.view, blocks_left));
        }
      }
  }

 private:
  i64 index_of(i64 op) const { return op - program_.ranks[static_cast<size_t>(rank_of_[static_cast<size_t>(op)])].base; }
  const OpRow& row(i64 op) const { return program_.row(rank_of_[static_cast<size_t>(op)], index_of(op)); }

  // The accesses to memory that ops of other ranks reach, by (owner, buffer, slot).
  void list_entries() {
    std::vector<std::array<i64, 2>> reached;
    for (const Class& of : program_.classes)
      for (const Access& access : of.accesses.all)
        if (access.rank >= 0) reached.push_back({access.rank, access.buffer});
    std::sort(reached.begin(), reached.end());
    reached.erase(std::unique(reached.begin(), reached.end()), reached.end());
    for (i64 rank = 0; rank < program_.code.num_ranks(); ++rank) {
      const Class& of = program_.of(rank);
      const i64 base = program_.ranks[static_cast<size_t>(rank)].base;
      i64 fence = -1;
      for (size_t index = of.ops.size(); index-- > 0;) {
        const i64 op = base + static_cast<i64>(index);
        const OpRow& row = program_.row(rank, static_cast<i64>(index));
        if (row.kind == Kind::FENCE) fence = op;
        const auto begin = of.accesses.all.begin() + of.accesses.start[index], end = of.accesses.all.begin() + of.accesses.start[index + 1];
        const bool is_one_sided = std::any_of(begin, end, [](const Access& access) { return access.rank >= 0; });
        const i64 ended_by = is_one_sided && !(row.flags & TRACKED) ? fence : op;
        for (auto at = begin; at != end; ++at) {
          const i64 owner = at->rank < 0 ? rank : at->rank;
          if (std::binary_search(reached.begin(), reached.end(), std::array<i64, 2>{owner, at->buffer}))
            entries_[{owner, at->buffer, at->slot}].push_back({op, &*at, ended_by});
        }
      }
    }
  }

  // A bit for each op whose end matters.
  void number_bits() {
    bit_.assign(static_cast<size_t>(program_.num_ops), -1);
    i64 count = 0;
    for (const auto& [memory, entries] : entries_)
      for (const Entry& one : entries)
        if (one.ended_by >= 0 && bit_[static_cast<size_t>(one.ended_by)] < 0) bit_[static_cast<size_t>(one.ended_by)] = count++;
    words_ = static_cast<size_t>(count + 63) / 64;
    trust(2 * static_cast<u64>(words_) * static_cast<u64>(program_.num_ops) <= MAX_MASKS);
    start_.assign(words_ * static_cast<size_t>(program_.num_ops), 0);
    end_.assign(start_.size(), 0);
  }

  bool is_over_before(i64 first, i64 second) const {
    if (first < 0) return false;
    const auto bit = static_cast<size_t>(bit_[static_cast<size_t>(first)]);
    return start_[static_cast<size_t>(second) * words_ + bit / 64] >> (bit % 64) & 1;
  }

  void merge(std::vector<u64>& into, i64 to, const std::vector<u64>& from, i64 op) const {
    for (size_t word = 0; word < words_; ++word)
      into[static_cast<size_t>(to) * words_ + word] |= from[static_cast<size_t>(op) * words_ + word];
  }

  void set_bit(i64 op, i64 of) {
    const i64 bit = bit_[static_cast<size_t>(of)];
    if (bit >= 0) end_[static_cast<size_t>(op) * words_ + static_cast<size_t>(bit) / 64] |= u64{1} << (bit % 64);
  }

  // Sets for each op the ops that have ended before it can start, and those before it can end.
  void fill_masks() {
    std::vector<Tracked> tracked(program_.tracked.begin(), program_.tracked.end());
    std::sort(tracked.begin(), tracked.end(), [](const Tracked& a, const Tracked& b) { return a.to < b.to; });
    std::vector<i64> last(static_cast<size_t>(program_.code.num_ranks()) * program_.code.lanes.size(), -1);
    for (const std::vector<i64>& event : order_) {
      for (const i64 op : event) {
        const Class& of = program_.of(rank_of_[static_cast<size_t>(op)]);
        const auto index = static_cast<size_t>(index_of(op));
        for (i64 at = of.before_start[index]; at < of.before_start[index + 1]; ++at)
          merge(start_, op, end_, op - index_of(op) + of.before[static_cast<size_t>(at)]);
        const auto less = [](const Tracked& a, i64 to) { return a.to < to; };
        for (auto at = std::lower_bound(tracked.begin(), tracked.end(), op, less); at != tracked.end() && at->to == op; ++at)
          merge(start_, op, end_, at->from);
        const i64 before = last[lane_of(op)];
        const LaneRow& lane = program_.code.lanes[static_cast<size_t>(row(op).lane)];
        if (before >= 0 && !lane.ready && lane.width == 1) merge(start_, op, end_, before);
      }
      for (size_t place = 0; place < event.size(); ++place) {
        const i64 op = event[place];
        merge(end_, op, start_, op);
        set_bit(op, op);
        const bool is_fence = row(op).kind == Kind::FENCE;  // which ends everywhere at once
        for (size_t other = 0; other < event.size(); ++other) {
          if (must_have_started(event, place, other)) merge(end_, op, start_, event[other]);
          if (is_fence) set_bit(op, event[other]);
        }
        last[lane_of(op)] = op;
      }
    }
  }

  size_t lane_of(i64 op) const {
    return static_cast<size_t>(rank_of_[static_cast<size_t>(op)]) * program_.code.lanes.size() + static_cast<size_t>(row(op).lane);
  }

  // Whether the op of a member cannot end before another member has started.
  bool must_have_started(const std::vector<i64>& event, size_t place, size_t other) const {
    const i64 op = event[place], count = static_cast<i64>(event.size());
    const ClassOp& of = program_.op(rank_of_[static_cast<size_t>(op)], index_of(op));
    switch (row(op).kind) {
      case Kind::PERMUTE:
        return floor_mod(static_cast<i64>(place) - of.b, count) == static_cast<i64>(other) ||
               floor_mod(static_cast<i64>(place) + of.b, count) == static_cast<i64>(other);
      case Kind::BROADCAST: return of.b == static_cast<i64>(other);
      case Kind::REDUCE: return of.b == static_cast<i64>(place);
      default: return true;
    }
  }

  const Expanded& program_;
  const std::vector<std::vector<i64>>& order_;
  const std::vector<i64>& rank_of_;
  std::map<std::array<i64, 3>, std::vector<Entry>> entries_;
  std::vector<i64> bit_;
  size_t words_ = 0;
  std::vector<u64> start_, end_;  // masks by op
};

}  // namespace

void check_races(const Expanded& program, const std::vector<std::vector<i64>>& order, const std::vector<i64>& rank_of,
                 i64& blocks_left) {
  Races(program, order, rank_of).check(blocks_left);
}

}  // namespace meshweave
