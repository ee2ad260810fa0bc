#include "edges.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>

namespace meshweave {
namespace {

// An access to one buffer slot that a later op may still conflict with.
struct Live {
  i64 op, access;
  i64 start[2], stop[2];  // of the first dims: most that do not overlap do not even here

  Live(i64 op_, i64 number, const Access& of) : op(op_), access(number), start{0, 0}, stop{1, 1} {
    for (size_t dim = 0; dim < 2 && static_cast<int>(dim) < of.dims; ++dim)
      start[dim] = of.selectors[dim].start, stop[dim] = of.selectors[dim].stop;
  }
  bool may_meet(const Live& other) const {
    return start[0] < other.stop[0] && other.start[0] < stop[0] && start[1] < other.stop[1] && other.start[1] < stop[1];
  }
};

// Reads do not conflict with reads, nor updates with updates: those commute.
bool both_alike(Mode a, Mode b) { return a == b && a != Mode::WRITE; }

// Live accesses of one mode to one buffer slot. Where there are many they are kept by where they begin along one dim, so
// that a view of a small part is compared with few of them.
class AccessIndex {
 public:
  void add(const Live& live) {
    list_of(live).push_back(live);
    if (++count_ == MANY) spread();
  }

  // Calls visit(Live) for those that may meet an access, and returns how many it was compared with.
  template <class Visit>
  size_t each(const Live& mine, Visit visit) const {
    for (const Live& live : wide_)
      if (live.may_meet(mine)) visit(live);
    size_t compared = wide_.size();
    if (lists_.empty()) return compared;
    for (size_t at = place(mine.start[dim_] - width_), last = place(mine.stop[dim_]); at <= last; ++at) {
      for (const Live& live : lists_[at])
        if (live.may_meet(mine)) visit(live);
      compared += lists_[at].size();
    }
    return compared;
  }

  // Removes those of them for which is_gone(Live) holds.
  template <class IsGone>
  void remove(const Live& mine, IsGone is_gone) {
    const auto goes = [&](const Live& live) { return live.may_meet(mine) && is_gone(live); };
    count_ -= std::erase_if(wide_, goes);
    if (lists_.empty()) return;
    for (size_t at = place(mine.start[dim_] - width_), last = place(mine.stop[dim_]); at <= last; ++at)
      count_ -= std::erase_if(lists_[at], goes);
  }

 private:
  static constexpr size_t MANY = 32, NUM_LISTS = 64;

  // Its list, by where it begins; monotone.
  size_t place(i64 start) const {
    return start <= 0 ? 0 : static_cast<size_t>(std::min<i64>(start / width_, static_cast<i64>(NUM_LISTS) - 1));
  }
  std::vector<Live>& list_of(const Live& live) {
    return lists_.empty() || live.stop[dim_] - live.start[dim_] > width_ ? wide_ : lists_[place(live.start[dim_])];
  }

  // Chooses the dim along which the accesses begin at most places.
  void spread() {
    if (!lists_.empty()) return;
    size_t most = 0;
    i64 end = 0;
    for (size_t dim = 0; dim < 2; ++dim) {
      std::vector<i64> starts;
      for (const Live& live : wide_) starts.push_back(live.start[dim]);
      std::sort(starts.begin(), starts.end());
      const auto places = static_cast<size_t>(std::unique(starts.begin(), starts.end()) - starts.begin());
      if (places > most) dim_ = dim, most = places;
    }
    for (const Live& live : wide_) end = std::max(end, live.stop[dim_]);
    width_ = end / static_cast<i64>(NUM_LISTS) + 1;
    lists_.resize(NUM_LISTS);
    std::vector<Live> all;
    all.swap(wide_);
    for (const Live& live : all) list_of(live).push_back(live);
  }

  std::vector<Live> wide_;                // all of them, or those longer than `width_`
  std::vector<std::vector<Live>> lists_;  // the others, by start / width
  size_t count_ = 0, dim_ = 0;
  i64 width_ = 1;
};

// The live accesses to one buffer slot, by mode: many reads of one view are not compared with each other.
using Memory = std::array<AccessIndex, 3>;

class Memories {
 public:
  Memory& of(const Access& access) {
    return live_[static_cast<u64>(access.buffer) << 32 | static_cast<u64>(access.slot)];
  }

 private:
  std::unordered_map<u64, Memory> live_;
};

}  // namespace

Edges local_edges(const Template& code, const Accesses& accesses, const std::vector<char>& exposed, ViewBudget& budget) {
  const auto num_ops = static_cast<i64>(accesses.row.size());
  // What nobody writes orders nothing; keeping its readers would make this quadratic.
  std::vector<char> written(code.buffers.size(), 0);
  for (const Access& access : accesses.all)
    if (access.mode != Mode::READ) written[static_cast<size_t>(access.buffer)] = 1;

  Memories memories;
  Edges edges;
  edges.start.reserve(static_cast<size_t>(num_ops) + 1);
  std::vector<i64> before;  // of one op
  std::vector<i64> touched;  // since the last fence
  i64 last_fence = -1;
  std::map<std::vector<i64>, std::vector<i64>> stashes;
  for (i64 op = 0; op < num_ops; ++op) {
    before.clear();
    const OpRow& row = code.ops[static_cast<size_t>(accesses.row[static_cast<size_t>(op)])];
    const i64 begin = accesses.start[static_cast<size_t>(op)], end = accesses.start[static_cast<size_t>(op) + 1];
    bool touches = false;
    for (i64 at = begin; at < end; ++at) {
      const Access& access = accesses.all[static_cast<size_t>(at)];
      touches |= access.rank >= 0 || exposed[static_cast<size_t>(access.buffer)];
      if (access.rank >= 0 || !written[static_cast<size_t>(access.buffer)]) continue;
      const Live mine(op, at, access);
      const Memory& memory = memories.of(access);
      for (const Mode mode : {Mode::READ, Mode::WRITE, Mode::UPDATE})
        if (!both_alike(access.mode, mode))
          budget.spend_pairs(memory[static_cast<size_t>(mode)].each(mine, [&](const Live& live) {
            if (overlap(access, accesses.all[static_cast<size_t>(live.access)], budget.blocks_left)) before.push_back(live.op);
          }));
    }
    for (i64 at = begin; at < end; ++at) {
      const Access& access = accesses.all[static_cast<size_t>(at)];
      if (access.rank >= 0 || !written[static_cast<size_t>(access.buffer)]) continue;
      Memory& memory = memories.of(access);
      const Live mine(op, at, access);
      if (access.mode == Mode::WRITE)
        for (AccessIndex& of_mode : memory)
          of_mode.remove(mine, [&](const Live& live) { return covers(access, accesses.all[static_cast<size_t>(live.access)]); });
      memory[static_cast<size_t>(access.mode)].add(mine);
    }
    if (row.kind == Kind::FENCE) {
      before.insert(before.end(), touched.begin(), touched.end());
      if (last_fence >= 0) before.push_back(last_fence);
      last_fence = op;
      touched.clear();
    } else if (touches) {
      if (last_fence >= 0) before.push_back(last_fence);
      touched.push_back(op);
    }
    if (const std::vector<i64>& name = accesses.stash[static_cast<size_t>(op)]; !name.empty()) {
      std::vector<i64>& users = stashes[name];
      if (row.part == 1) {  // the forward part
        before.insert(before.end(), users.begin(), users.end());
        users.assign(1, op);
      } else {
        if (!users.empty()) before.push_back(users.back());
        users.push_back(op);
      }
    }
    std::sort(before.begin(), before.end());
    before.erase(std::unique(before.begin(), before.end()), before.end());
    std::erase(before, op);
    budget.spend_edges(static_cast<i64>(before.size()) - ViewBudget::FREE_EDGES);
    edges.before.insert(edges.before.end(), before.begin(), before.end());
    edges.start.push_back(static_cast<i64>(edges.before.size()));
  }
  return edges;
}

}  // namespace meshweave
