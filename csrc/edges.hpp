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
};

// Returns for each op the earlier ops that it waits for, ascending. `exposed` marks buffers that one-sided ops of
// other ranks access.
std::vector<std::vector<i64>> local_edges(const Template& code, const Accesses& accesses,
                                          const std::vector<char>& exposed, i64& blocks_left);

}  // namespace meshweave
