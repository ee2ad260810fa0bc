#include "edges.hpp"

#include <algorithm>
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

class Memories {
 public:
  std::vector<Live>& of(const Access& access) {
    const u64 key = static_cast<u64>(access.buffer) << 32 | static_cast<u64>(access.slot);
    return live_[key];
  }

 private:
  std::unordered_map<u64, std::vector<Live>> live_;
};

}  // namespace

std::vector<std::vector<i64>> local_edges(const Template& code, const Accesses& accesses,
                                          const std::vector<char>& exposed, i64& blocks_left) {
  const auto num_ops = static_cast<i64>(accesses.row.size());
  // What nobody writes orders nothing; keeping its readers would make this quadratic.
  std::vector<char> written(code.buffers.size(), 0);
  for (const Access& access : accesses.all)
    if (access.mode != Mode::READ) written[static_cast<size_t>(access.buffer)] = 1;

  Memories memories;
  std::vector<std::vector<i64>> edges(static_cast<size_t>(num_ops));
  std::vector<i64> touched;  // since the last fence
  i64 last_fence = -1;
  std::map<std::vector<i64>, std::vector<i64>> stashes;
  for (i64 op = 0; op < num_ops; ++op) {
    std::vector<i64>& before = edges[static_cast<size_t>(op)];
    const OpRow& row = code.ops[static_cast<size_t>(accesses.row[static_cast<size_t>(op)])];
    const i64 begin = accesses.start[static_cast<size_t>(op)], end = accesses.start[static_cast<size_t>(op) + 1];
    bool touches = false;
    for (i64 at = begin; at < end; ++at) {
      const Access& access = accesses.all[static_cast<size_t>(at)];
      touches |= access.rank >= 0 || exposed[static_cast<size_t>(access.buffer)];
      if (access.rank >= 0 || !written[static_cast<size_t>(access.buffer)]) continue;
      const Live mine(op, at, access);
      for (const Live& live : memories.of(access)) {
        if (!live.may_meet(mine)) continue;
        const Access& other = accesses.all[static_cast<size_t>(live.access)];
        if (!both_alike(access.mode, other.mode) && overlap(access, other, blocks_left)) before.push_back(live.op);
      }
    }
    for (i64 at = begin; at < end; ++at) {
      const Access& access = accesses.all[static_cast<size_t>(at)];
      if (access.rank >= 0 || !written[static_cast<size_t>(access.buffer)]) continue;
      std::vector<Live>& live = memories.of(access);
      const Live mine(op, at, access);
      if (access.mode == Mode::WRITE)
        std::erase_if(live, [&](const Live& one) {
          return one.may_meet(mine) && covers(access, accesses.all[static_cast<size_t>(one.access)]);
        });
      live.push_back(mine);
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
  }
  return edges;
}

}  // namespace meshweave
