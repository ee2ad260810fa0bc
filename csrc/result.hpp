// The result of a simulation.
#pragma once

#include <vector>

#include "error.hpp"

namespace meshweave {

// Picoseconds of one rank by activity, summed over its ops whether they overlap or not.
struct Parts {
  i64 compute = 0, copy = 0, launch = 0, sync = 0, transfer = 0, wait = 0;
};

struct Result {
  std::vector<i64> issued_ps, ended_ps;  // by op, numbered over all ranks
  std::vector<i64> cause;  // the op whose end let this one be issued, -1 at the start
  std::vector<i64> last_partner;  // the last partner to be issued, -1 if none was issued after the op
  std::vector<Parts> parts;
  std::vector<u64> carried;  // by resource: memories, engines, links
  i64 num_events = 0;
};

}  // namespace meshweave
