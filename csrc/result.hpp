// What a run found.
#pragma once

#include <vector>

#include "error.hpp"

namespace meshweave {

// Of each rank, summed over its ops whether they overlap or not, in ps.
struct Parts {
  i64 compute = 0, copy = 0, launch = 0, sync = 0, transfer = 0, wait = 0;
};

struct Result {
  std::vector<i64> issued_ps, ended_ps;  // by op, numbered over all ranks
  std::vector<i64> cause;  // the op whose end let this one be issued, -1 at the start
  std::vector<i64> last_partner;  // the partner that it waited for: who came last, -1 where nobody came later
  std::vector<Parts> parts;
  std::vector<u64> carried;  // by resource: memories, engines, links
  i64 num_events = 0;
};

}  // namespace meshweave
