// Ranks that run alike although their views differ: equal sizes, and the same order between the ops of each.
#pragma once

#include "columns.hpp"

namespace meshweave {

// Returns which of `others` have the ops of `leader` with the same sizes, and views that meet and cover each other
// wherever those of `leader` do. They need not be the same elements: in a ring each member passes on another part.
//
// The leader can be expanded, and none of the ranks reaches the memory of others. All of them are in the same sets, and in
// groups of the same sizes. Where the answer takes too much memory, it is that there are none.
std::vector<i64> ranks_alike(const Template& code, i64 leader, const std::vector<i64>& others);

}  // namespace meshweave
