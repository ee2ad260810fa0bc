// The earlier ops of its rank that an op must wait for, from overlapping views (`ir.analysis.edges`).
#pragma once

#include "columns.hpp"
#include "views.hpp"

namespace meshweave {

// The accesses of the ops of one rank, op after op, and the stashes that also order them.
struct Accesses {
  std::vector<Access> all;
  std::vector<i64> start{0};          // op i has [start[i], start[i + 1])
  std::vector<i64> row;               // in the template's ops
  std::vector<std::vector<i64>> stash;  // name and arguments of what a call stashes; empty for none

  // Forgets the ops, and keeps the memory that they took for those of another rank.
  void clear() {
    all.clear(), row.clear(), stash.clear();
    start.assign(1, 0);
  }
};

// For op i, the earlier ops that it waits for are [start[i], start[i + 1]) of `before`, ascending.
struct Edges {
  std::vector<i64> start{0}, before;
};

// Returns the edges of one rank. `exposed` marks buffers that one-sided ops of other ranks access.
Edges local_edges(const Template& code, const Accesses& accesses, const std::vector<char>& exposed, i64& blocks_left);

}  // namespace meshweave
