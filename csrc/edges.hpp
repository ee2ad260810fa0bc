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

// How much work the views of a program may make, and how many edges it may have beyond those that grow with its ops.
// ProgramFault is raised when that is used up.
struct ViewBudget {
  static constexpr i64 FREE_EDGES = 16;  // of an op

  i64 blocks_left = MAX_BLOCKS;
  i64 pairs_left = i64{1} << 32;  // of views that are compared: some seconds
  i64 edges_left = i64{1} << 25;  // some hundred megabytes

  void spend_pairs(size_t pairs) {
    pairs_left -= static_cast<i64>(pairs);
    if (pairs_left < 0) throw ProgramFault("too many ops access the same memory");
  }
  void spend_edges(i64 edges) {
    edges_left -= edges;
    if (edges_left < 0) throw ProgramFault("too many ops wait for each other");
  }
};

// Returns the edges of one rank. `exposed` marks buffers that one-sided ops of other ranks access. Throws ProgramFault
// where the budget is used up.
Edges local_edges(const Template& code, const Accesses& accesses, const std::vector<char>& exposed, ViewBudget& budget);

}  // namespace meshweave
